"""The page of runs as a file: what is read and written around ``run_page.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.judge import store
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.report.page import html
from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.report.text import one_line
from pytest_llmperf.run.history import RunHistories
from pytest_llmperf.run.run_page import StoredFigures, page_of
from pytest_llmperf.support.files import write_text


@dataclass(frozen=True)
class WrittenPage:
    """A page that was written, or why there is none."""

    why_none: str = ""
    """A line, where there is no page; else nothing."""
    without: Sequence[str] = ()
    """A line for each thing of its history that is not on it."""


def write_page(  # noqa: PLR0913 - what it is made of
    path: Path,
    runs: Sequence[RunDocument],
    baselines: Path,
    left_out: Sequence[str] = (),
    *,
    made_by: str,
    history: Path | None = None,
) -> WrittenPage:
    """Write the page of ``runs`` beside what is stored in ``baselines``.

    ``left_out`` has a line for each run that could not be read; ``history`` is the store of runs before these. A run
    that is over has been judged and told whatever becomes of its page, so that nothing is raised here.
    """
    try:
        stored = stored_figures(baselines, [run.machine for run in runs])
        told = RunHistories.read(runs, history, baselines)
        write_text(path, html(page_of(runs, stored, [*left_out, *told.troubles], made_by, told.cases)))
    except OSError as error:
        return WrittenPage(f"{path}: no page was written ({error.strerror or error})")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the page's and not the run's
        why = one_line(f"{type(error).__name__}: {error}")
        return WrittenPage(f"{path}: no page was written ({why}); llmperf report RESULTS --html FILE tries again")
    return WrittenPage(without=told.troubles)


def stored_figures(root: Path, machines: Iterable[str]) -> StoredFigures:
    """Read what is stored of these machine kinds under ``root``; nothing where there is no such folder."""
    found, broken = dict[tuple[str, str], Baseline](), list[str]()
    for machine in sorted(set(machines)):
        if not machine or Path(machine).name != machine:
            continue  # a name that leads elsewhere is nobody's folder
        for path in sorted((root / machine).glob("*/*.json")):
            try:
                baseline = store.read(path, Baseline)
            except (store.BaselineError, OSError) as error:
                broken.append(str(error).splitlines()[0])
                continue
            if baseline is not None:
                found[machine, baseline.digest] = baseline
    return StoredFigures(found, tuple(broken))
