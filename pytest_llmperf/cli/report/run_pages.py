"""``llmperf report RESULTS… --html FILE``: runs that are over, as the page that ``--perf-report`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_llmperf import __version__
from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.engine.run_page.page_file import write_page
from pytest_llmperf.engine.run_page.run_document import RunDocument, refused
from pytest_llmperf.report.page.installed import missing
from pytest_llmperf.support.lenient_json import read_lenient

#: On the page.
MADE_BY = f"pytest-llmperf {__version__}"


def written(path: Path, results: Sequence[Path], baselines: Path, history: Path | None = None) -> Answer:
    """What was written to ``path``, and a line for each of ``results`` that is not in it."""
    if why := missing():
        return Answer([], [f"--html {path}: {why}"])
    found, troubles = list[tuple[str, Any]](), list[str]()
    for file in results:
        try:
            found.append((file.name, _read(file)))
        except (OSError, ValueError) as error:
            told = error.strerror if isinstance(error, OSError) and error.strerror else error
            troubles.append(f"{file}: {told}; it is not on the page")
    if not found:
        return Answer([], [*troubles, f"{path}: no page was written, there is nothing to show"])
    names = _told_apart([name for name, _ in found]) if len(found) > 1 else [""]
    runs = [RunDocument(document, name) for (_, document), name in zip(found, names, strict=True)]
    page = write_page(path, runs, baselines, troubles, made_by=MADE_BY, history=history)
    if page.why_none:
        return Answer([], [*troubles, page.why_none])
    troubles += page.without
    cases = sum(len(run.results) for run in runs)
    return Answer([f"{path}: {cases} case{'s' * (cases != 1)} of {_runs(len(runs))}"], troubles)


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _read(path: Path) -> Any:
    """The document in ``path``; what is no finite number, as old files have it, is absent.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such document, in a line.
    """
    values = read_lenient(path)
    if why := refused(values):
        raise ValueError(why)
    return values


def _told_apart(names: Sequence[str]) -> list[str]:
    """``names``, numbered where one comes twice."""
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]
