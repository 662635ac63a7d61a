"""A page of runs: their documents and what is stored in, the page as data out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_llmperf.judge.baseline import ANY_MACHINE
from pytest_llmperf.judge.case_histories import CaseHistory
from pytest_llmperf.records.metrics import RATE
from pytest_llmperf.report.page.page_model import Page, Section
from pytest_llmperf.report.results_json import Result, RunDocument
from pytest_llmperf.report.summary_table import no_gate_of_speed, without_name
from pytest_llmperf.run.run_page.case_charts import change_section, memory_section, time_section, urgency
from pytest_llmperf.run.run_page.case_rows import MAIN, MOST_CASES, clipped, headings, rows
from pytest_llmperf.run.run_page.ladder_charts import ladder_section, notes_of, scaling_section
from pytest_llmperf.run.run_page.stored_figures import StoredFigures
from pytest_llmperf.run.run_page.trace_charts import history_section, trace_section
from pytest_llmperf.support import formats

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
    machines = dict.fromkeys(document.machine for document in documents)
    where = ", ".join("no machine, by --perf-static" if kind == ANY_MACHINE else kind for kind in machines)
    gate = no_gate_of_speed(result.figure(RATE).times_slower for result in results)
    left = len(results) - MOST_CASES
    cut = [f"{left} of {len(results)} cases are left out here, those first that pass; --perf-json has all"] * (left > 0)
    troubles = [
        f"{document.source}: {line}" if document.source else line
        for document in documents
        for line in _troubles(document)
    ]
    skipped = [
        (clipped(each.id), clipped(without_name(each.id, each.reason)))
        for document in documents
        for each in document.record.skipped
    ]
    return Page(
        title=f"pytest-llmperf on {where}" if documents else "pytest-llmperf",
        runs=tuple(map(_facts, documents)),
        warnings=tuple(map(clipped, (*left_out, *troubles, *cut, *stored.broken))),
        remarks=(gate,) if gate else (),
        columns=headings(documents),
        main=MAIN,
        cases=rows(documents, stored),
        sections=tuple(filter(None, _sections(documents, results, stored, histories))),
        skipped=tuple(skipped[:_MOST_SKIPPED]),
        made_by=made_by,
        notes=notes_of(results),
    )


def _sections(
    documents: Sequence[RunDocument],
    results: Sequence[Result],
    stored: StoredFigures,
    histories: Sequence[CaseHistory],
) -> Iterator[Section | None]:
    """In the order of the page."""
    # One of each case on each machine kind, of two runs the last that was named. What somebody has to look at comes
    # first, then the ladder: a chart has no room for all.
    newest = {(result.machine, result.id): result for result in results}
    charted = sorted(newest.values(), key=lambda result: (urgency(result), not result.record.rung))
    yield ladder_section(charted, stored)
    yield scaling_section(charted, stored)
    yield change_section(charted)
    yield history_section(histories)
    yield memory_section(charted, stored)
    yield trace_section(charted, stored)
    yield time_section(documents)


def _facts(document: RunDocument) -> tuple[tuple[str, str], ...]:
    record, launches = document.record, [launch for result in document.results for launch in result.launches]
    began = min((launch.started_at for launch in launches), default="")
    spent, number = sum(document.spent.values()), document.num_launches
    versions = launches[0].environment.versions if launches else record.versions
    hosts = sorted({rank.host for launch in launches for rank in launch.ranks})
    more = f" and {len(hosts) - _MOST_HOSTS} more" * (len(hosts) > _MOST_HOSTS)
    hardware = f"{len(document.gpus)} × {document.gpus[0]}" if document.gpus else "CPU"
    # With what was changed in the tree.
    revision = record.revision
    changed = f" + {revision.changed} changed" if revision and revision.changed else ""
    facts = {
        "run": document.source,
        "project": record.project.rpartition("/")[2],
        "commit": revision.commit + changed if revision else "",
        "host": ", ".join(hosts[:_MOST_HOSTS]) + more,
        "command": record.command,
        "machine": f"{document.machine}, " + ("nothing was launched" if document.machine == ANY_MACHINE else hardware),
        "began": f"{began.replace('T', ' ').removesuffix('Z')} UTC" if began else "",
        "launches": f"{number} in {formats.seconds(spent)}" if spent else str(number or ""),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions),
        "exit code": "" if record.exit_code is None else str(record.exit_code),
    }
    return tuple((name, clipped(value)) for name, value in facts.items() if value)


def _troubles(document: RunDocument) -> Iterator[str]:
    record = document.record
    if record.unfinished:
        yield f"the run ended before its end ({record.unfinished}): what is missing here was not judged"
    yield from record.troubles
    for test in record.tests:
        if test.has_failed:
            yield ": ".join(filter(None, vars(test).values()))
    yield from filter(None, [*(common.told for common in record.common.values()), record.unjudged])
    if document.schema != 1:
        yield f"schema {document.schema}, of an older version: what it does not say is not shown"
    if unread := sum(result.num_unread for result in document.results):
        what = "1 launch cannot be read and is" if unread == 1 else f"{unread} launches cannot be read and are"
        yield f"{what} not shown, as of another version or damaged; the cases' figures are"
