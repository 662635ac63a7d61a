"""A page of runs: their documents and what is stored in, the page as data out. Pure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pytest_llmperf.analysis import ladder
from pytest_llmperf.judge.case_histories import CaseHistory
from pytest_llmperf.judge.stored_step import ANY_MACHINE
from pytest_llmperf.records.metrics import RATE
from pytest_llmperf.report.page import vega_drawing
from pytest_llmperf.report.page.charts import slim, specification
from pytest_llmperf.report.page.html_page import html
from pytest_llmperf.report.page.page_model import Chart, Page, Section
from pytest_llmperf.report.summary_table import no_gate_of_speed
from pytest_llmperf.report.text import one_line
from pytest_llmperf.run.history.run_histories import RunHistories
from pytest_llmperf.run.run_page.case_charts import change_section, memory_section, time_section, urgency
from pytest_llmperf.run.run_page.case_rows import MAIN, MOST_CASES, clipped, headings, rows
from pytest_llmperf.run.run_page.ladder_charts import ladder_section, scaling_section
from pytest_llmperf.run.run_page.run_document import Result, RunDocument
from pytest_llmperf.run.run_page.stored_figures import StoredFigures
from pytest_llmperf.run.run_page.trace_charts import history_section, trace_section
from pytest_llmperf.support import formats
from pytest_llmperf.support.files import write_text

_MOST_SKIPPED = 200
_MOST_HOSTS = 4


def page_of(
    documents: Sequence[RunDocument],
    stored: StoredFigures,
    left_out: Sequence[str] = (),
    made_by: str = "",
    histories: Sequence[CaseHistory] = (),
) -> Page:
    """The page of ``documents``, beside what is ``stored`` of their machine kinds.

    ``left_out``: a line for each file that is not in it. ``made_by``: the name and version of what makes it.
    ``histories``: of cases that ran before.
    """
    results = [result for document in documents for result in document.results]
    skipped = [each for document in documents for each in document.skipped]
    machines = list(dict.fromkeys(document.machine for document in documents))
    return Page(
        title=_title(machines),
        runs=tuple(map(_facts, documents)),
        warnings=tuple(
            clipped(line)
            for line in (*left_out, *chain.from_iterable(map(_warnings, documents)), *_cut(results), *stored.broken)
        ),
        remarks=_remarks(results),
        columns=headings(documents),
        main=MAIN,
        cases=rows(documents, stored),
        sections=tuple(_sections(documents, _newest(results), stored, histories)),
        skipped=tuple((clipped(name), clipped(why)) for name, why in skipped[:_MOST_SKIPPED]),
        made_by=made_by,
        notes=_notes(results),
    )


def _title(machines: Sequence[str]) -> str:
    told = ["no machine, by --perf-static" if machine == ANY_MACHINE else machine for machine in machines]
    return f"pytest-llmperf on {', '.join(told)}" if told else "pytest-llmperf"


def _sections(
    documents: Sequence[RunDocument],
    results: Sequence[Result],
    stored: StoredFigures,
    histories: Sequence[CaseHistory],
) -> Iterable[Section]:
    """In the order of the page; one that has nothing to show is not there."""
    found = [
        ladder_section(results, stored),
        scaling_section(results, stored),
        change_section(results),
        history_section(histories),
        memory_section(results, stored),
        trace_section(results, stored),
        time_section(documents),
    ]
    return filter(None, found)


def _newest(results: Sequence[Result]) -> list[Result]:
    """One of each case on each machine kind, in the order of charts; of two runs the last that was named."""
    found = {(result.machine, result.id): result for result in results}
    # What somebody has to look at, then the ladder: a chart has no room for all.
    return sorted(found.values(), key=lambda result: (urgency(result), not result.told.rung))


def _facts(document: RunDocument) -> tuple[tuple[str, str], ...]:
    launches = document.num_launches
    began = [launch.started_at for result in document.results for launch in result.launches]
    spent = sum(document.spent.values())
    first = next((launch for result in document.results for launch in result.launches), None)
    versions = first.environment.versions if first else document.told.versions
    hosts = sorted({rank.host for result in document.results for one in result.launches for rank in one.ranks})
    told = {
        "run": document.source,
        "project": document.told.project.rpartition("/")[2],
        "commit": document.commit,
        "host": ", ".join(hosts[:_MOST_HOSTS]) + (f" and {len(hosts) - _MOST_HOSTS} more" * (len(hosts) > _MOST_HOSTS)),
        "command": document.told.command,
        "machine": f"{document.machine}, {_hardware(document)}",
        "began": f"{min(began).replace('T', ' ').removesuffix('Z')} UTC" if began else "",
        "launches": f"{launches} in {formats.seconds(spent)}" if spent else str(launches or ""),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions),
        "exit code": "" if document.told.exit_code is None else str(document.told.exit_code),
    }
    return tuple((name, clipped(value)) for name, value in told.items() if value)


def _hardware(document: RunDocument) -> str:
    if document.machine == ANY_MACHINE:
        return "nothing was launched"
    return f"{len(document.gpus)} × {document.gpus[0]}" if document.gpus else "CPU"


def _warnings(document: RunDocument) -> list[str]:
    source = f"{document.source}: " if document.source else ""
    found = []
    unfinished = document.told.unfinished
    if unfinished:
        found.append(f"{source}the run ended before its end ({unfinished}): what is missing here was not judged")
    found += [f"{source}{line}" for line in document.told.troubles]
    for test in document.told.tests:
        if test.has_failed:
            found.append(f"{source}{': '.join(filter(None, vars(test).values()))}")
    found += [f"{source}{common.told}" for common in document.told.common.values() if common.told]
    found += [f"{source}{document.told.unjudged}"] if document.told.unjudged else []
    if document.schema != 1:
        found.append(f"{source}schema {document.schema}, of an older version: what it does not say is not shown")
    unread = sum(result.num_unread for result in document.results)
    if unread:
        what = "1 launch cannot be read and is" if unread == 1 else f"{unread} launches cannot be read and are"
        found.append(f"{source}{what} not shown, as of another version or damaged; the cases' figures are")
    return found


def _remarks(results: Sequence[Result]) -> tuple[str, ...]:
    told = no_gate_of_speed(result.figure(RATE).times_slower for result in results)
    return (told,) if told else ()


def _cut(results: Sequence[Result]) -> list[str]:
    left = len(results) - MOST_CASES
    told = f"{left} of {len(results)} cases are left out here, those first that pass; --perf-json has all"
    return [told] if left > 0 else []


def _notes(results: Sequence[Result]) -> tuple[str, ...]:
    sources = dict.fromkeys(result.told.reference.source for result in results if result.told.reference)
    published = [f"published: {'; '.join(filter(None, sources))}"] if any(sources) else []
    return (*published, *(ladder.NOTES if published else ()))


# Pictures of charts, drawn by a process of its own; a chart without one is told by its table.


# Three seconds for eighty charts on two cores.
_SECONDS = 120.0


def charts_of(page: Page) -> list[Chart]:
    """All that are on it, each once."""
    found = [chart for section in page.sections for chart in section.charts]
    found += [chart for case in page.cases for chart in case.details.charts]
    return list(dict.fromkeys(found))


def drawn(charts: Sequence[Chart]) -> Mapping[Chart, str]:
    """SVG of each chart; those that could not be drawn are not among them, and no trouble is raised."""
    pictures = _drawn([specification(chart) for chart in charts])
    if len(pictures) != len(charts):
        # One of them has ended the process: by itself each of the others has its picture all the same.
        pictures = [next(iter(_drawn([specification(chart)])), "") for chart in charts[:_MOST_SINGLY]]
    return {chart: slim(picture) for chart, picture in zip(charts, pictures, strict=False) if picture}


# A process each, of half a second.
_MOST_SINGLY = 40


def _drawn(specifications: Iterable[object]) -> list[str]:
    told = json.dumps(list(specifications))
    if told == "[]":
        return []
    # By its path: where this package is imported from is not always where a fresh interpreter looks.
    command = [sys.executable, str(Path(vega_drawing.__file__))]
    try:
        done = subprocess.run(command, input=told, capture_output=True, encoding="utf-8", timeout=_SECONDS, check=True)
        return [str(picture) for picture in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


# The page of runs as a file: what is read and written around ``run_page.py``.


@dataclass(frozen=True)
class WrittenPage:
    """What became of it."""

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
        stored = StoredFigures.read(baselines, [run.machine for run in runs])
        told = RunHistories.read(runs, history, baselines)
        page = page_of(runs, stored, [*left_out, *told.troubles], made_by, told.cases)
        write_text(path, html(page, drawn(charts_of(page))))
    except OSError as error:
        return WrittenPage(f"{path}: no page was written ({error.strerror or error})")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the page's and not the run's
        why = one_line(f"{type(error).__name__}: {error}")
        return WrittenPage(f"{path}: no page was written ({why}); llmperf report RESULTS --html FILE tries again")
    return WrittenPage(without=told.troubles)
