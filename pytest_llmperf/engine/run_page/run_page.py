"""A page of runs: their documents and what is stored in, the page as data out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from pytest_llmperf.engine.run_page.case_cells import headings
from pytest_llmperf.engine.run_page.case_rows import MOST_CASES, clipped, rows
from pytest_llmperf.engine.run_page.change_charts import change_section, urgency
from pytest_llmperf.engine.run_page.history_charts import history_section
from pytest_llmperf.engine.run_page.ladder_charts import ladder_section
from pytest_llmperf.engine.run_page.memory_charts import memory_section
from pytest_llmperf.engine.run_page.run_document import Result, RunDocument, items, lines, mapping, number, text
from pytest_llmperf.engine.run_page.scaling_charts import scaling_section
from pytest_llmperf.engine.run_page.stored_figures import RATE, StoredFigures
from pytest_llmperf.engine.run_page.time_charts import time_section
from pytest_llmperf.engine.run_page.trace_charts import trace_section
from pytest_llmperf.insight import chapter15
from pytest_llmperf.judge.history.case_history import CaseHistory
from pytest_llmperf.judge.static.stored_step import ANY_MACHINE
from pytest_llmperf.report.page.page_model import Page, Section
from pytest_llmperf.report.speed_gate import no_gate_of_speed
from pytest_llmperf.support import formats

_MOST_SKIPPED = 200


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
    return sorted(found.values(), key=lambda result: (urgency(result), not result.text("rung")))


def _facts(document: RunDocument) -> tuple[tuple[str, str], ...]:
    launches = document.num_launches
    began = [launch.started_at for result in document.results for launch in result.launches]
    spent = sum(document.spent.values())
    first = next((launch for result in document.results for launch in result.launches), None)
    versions = first.environment.versions if first else {}
    told = {
        "run": document.source,
        "machine": f"{document.machine}, {_hardware(document)}",
        "began": f"{min(began).replace('T', ' ').removesuffix('Z')} UTC" if began else "",
        "launches": f"{launches} in {formats.seconds(spent)}" if spent else str(launches or ""),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions),
        "exit code": str(document.values["exit_code"]) if number(document.values.get("exit_code")) is not None else "",
    }
    return tuple((name, clipped(value)) for name, value in told.items() if value)


def _hardware(document: RunDocument) -> str:
    if document.machine == ANY_MACHINE:
        return "nothing was launched"
    return f"{len(document.gpus)} × {document.gpus[0]}" if document.gpus else "CPU"


def _warnings(document: RunDocument) -> list[str]:
    source = f"{document.source}: " if document.source else ""
    found = []
    unfinished = text(document.values.get("unfinished"))
    if unfinished:
        found.append(f"{source}the run ended before its end ({unfinished}): what is missing here was not judged")
    found += [f"{source}{line}" for line in lines(document.values.get("troubles"))]
    tests = (mapping(test) for test in items(document.values.get("tests")))
    for test in (each for each in tests if text(each.get("outcome")) in ("failed", "error")):
        told = ("nodeid", "outcome", "phase", "reason")
        found.append(f"{source}{': '.join(filter(None, (text(test.get(name)) for name in told)))}")
    common = mapping(document.values.get("all_cases"))
    if text(common.get("told")):
        found.append(f"{source}{text(common.get('told'))}")
    if text(document.values.get("unjudged")):
        found.append(f"{source}{text(document.values.get('unjudged'))}")
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
    sources = dict.fromkeys(text(mapping(result.values.get("reference")).get("source")) for result in results)
    published = [f"published: {'; '.join(filter(None, sources))}"] if any(sources) else []
    return (*published, *(chapter15.NOTES if published else ()))
