"""Rows: every case of a run with its figures, and what it opens to. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, formatted, label, rate_of
from pytest_llmperf.records.results_document import TEST
from pytest_llmperf.report.page.page_model import Case, Cell, Details, Table
from pytest_llmperf.report.results_json import Result, RunDocument
from pytest_llmperf.report.text import FigureCell, detectable_words, figure_cells
from pytest_llmperf.run.run_page.case_charts import (
    interval_words,
    memory_parts,
    memory_table,
    step_chart,
    urgency,
)
from pytest_llmperf.run.run_page.ladder_charts import CaseName
from pytest_llmperf.run.run_page.stored_figures import StoredFigures
from pytest_llmperf.run.run_page.trace_charts import trace_tables
from pytest_llmperf.support import formats

#: The heading of the column that is there where several runs are.
RUN = "run"
#: The columns that a phone has room for.
MAIN = ("tokens/s/GPU", "change", "peak memory")

# What has no noise: one more than its limit is told by one launch.
_EXACT = {"flops_per_step", *(name for name, row in METRICS.items() if row.rule == "count")}

# More cases than these show their figures, and no picture of their steps.
_MOST_CHARTS = 40
# More are no page.
MOST_CASES = 2500
_LONGEST_LINE, _LONGEST_NAME = 600, 240
_MOST_LINES, _MOST_SHORT = 40, 6


def clipped(text: str, most: int = _LONGEST_LINE) -> str:
    """``text`` as far as a row has room for it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def headings(documents: Sequence[RunDocument]) -> tuple[str, ...]:
    """The columns after case and verdict for which any case has a figure."""
    told: dict[str, bool] = {}
    for result in (result for document in documents for result in document.results):
        for name, cell in _cells(result).items():
            told[name] = told.get(name, False) or cell.text not in (formats.ABSENT, "0")
    return (*((RUN,) if len(documents) > 1 else ()), *(name for name, is_told in told.items() if is_told))


def _cells(result: Result) -> dict[str, Cell]:
    number = len(result.record.launches)
    cells = [*figure_cells("page", result.record.metrics.get), FigureCell("launches", str(number), float(number))]
    # What is absent comes first upwards and last downwards, apart from all figures.
    return {cell.heading: Cell(cell.text, -math.inf if cell.value is None else cell.value) for cell in cells}


def rows(documents: Sequence[RunDocument], stored: StoredFigures) -> tuple[Case, ...]:
    """Every case, those first that somebody has to look at, and in the order in which they ran among equals."""
    names = headings(documents)
    all_of_them = [(document, result) for document in documents for result in document.results]
    found = list[Case]()
    for document, result in sorted(all_of_them, key=lambda each: urgency(each[1]))[:MOST_CASES]:
        record, cells = result.record, {RUN: Cell(document.name), **_cells(result)}
        medians = [formats.seconds(launch.median_step_seconds) for launch in result.launches[:_MOST_SHORT]]
        short = f"median steps: {', '.join(medians)}" if medians else "no launch"
        # What is lost, what traces point to, and that a case which was new is so no more.
        reasons = (record.reason, record.diagnosis, "recorded by this run" if record.updated else "")
        found.append(
            Case(
                anchor=f"case-{len(found) + 1}",
                name=clipped(result.id, _LONGEST_NAME),
                verdict=result.verdict if result.verdict.isalpha() else "unknown",
                reason=clipped("; ".join(filter(None, reasons))),
                cells=tuple(cells[name] for name in names),
                commands=_commands(document, result),
                short=f"{short}; what else is known of it is in the --perf-json file.",
                details=_details(result, stored, drawn=len(found) < _MOST_CHARTS),
            )
        )
    return tuple(found)


def _commands(document: RunDocument, result: Result) -> tuple[tuple[str, str], ...]:
    """The commands that run its test again, and accept its figures where they are not the baseline's."""
    nodeid, words = result.record.nodeid, document.record.rerun
    if not nodeid:
        return ()
    if not any(TEST in word for word in words):
        # A document that does not say how it was run: its id tells as much.
        gpus = (CaseName.parse(result.id).gpus or len(document.gpus)) if document.gpus else 0
        words = ("pytest", TEST, "--gpus", str(gpus))
    again = shlex.join(word.replace(TEST, nodeid) for word in words)
    if result.verdict == "new":
        record = " --update-baselines=new"
    elif result.verdict in ("regressed", "improved", "changed") or (result.verdict == "pass" and result.record.changed):
        record = " --update-baselines" + ("" if result.verdict == "improved" else ' --perf-reason "why"')
    else:
        return (("Run it again", clipped(again)),)
    return (("Run it again", clipped(again)), ("Accept it", clipped(f"{again}{record}")))


def _details(result: Result, stored: StoredFigures, *, drawn: bool) -> Details:
    record, parts = result.record, memory_parts(result, stored)
    tables = [
        ("Exact counts", _counts(result)),
        ("Figures", _figures(result)),
        ("Launches", _launches(result)),
        *([("Memory", memory_table(result, parts))] if parts else []),
        *trace_tables(result, stored),
    ]
    notes = list(record.notes)
    if result.num_unread:
        notes.append(f"{result.num_unread} launches have records that this version cannot read")
    lists: list[tuple[str, Sequence[str]]] = [
        ("Why", list(filter(None, [record.reason, record.diagnosis]))),
        ("Changed since the baseline, and exact", record.changed),
        ("Different from the baseline's environment", record.differences),
        ("Notes", notes),
        ("Recorded", [line.strip() for line in record.updated.splitlines() if line.strip()]),
    ]
    shown = []
    for title, lines in lists:
        more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        shown.append((title, (*map(clipped, lines[:_MOST_LINES]), *more)))
    steps = step_chart(result, stored) if drawn else None
    return Details(
        tables=tuple((title, table) for title, table in tables if table.rows),
        lists=tuple((title, lines) for title, lines in shown if lines),
        charts=(steps,) if steps else (),
    )


def _counts(result: Result) -> Table:
    found = [(name, figure) for name, figure in result.record.metrics.items() if name in _EXACT]
    values = ((name, (one.baseline, one.value, one.limit), one.unit) for name, one in found)
    rows = tuple((label(name), *(formatted(name, each, unit) for each in three)) for name, three, unit in values)
    return Table(("exact count", "was", "now", "limit"), rows)


def _figures(result: Result) -> Table:
    found = []
    for metric, figure in result.record.metrics.items():
        name = clipped(label(metric), _LONGEST_NAME)
        values = (figure.value, figure.baseline, figure.limit)
        found.append(
            (
                f"{name} ({clipped(figure.detail)})" if figure.detail else name,
                *(formatted(metric, value, figure.unit or "1") for value in values),
                formats.percent(figure.change),
                interval_words(figure),
                detectable_words(figure),
            )
        )
    return Table(("metric", "value", "baseline", "limit", "change", "nine times in ten", "detectable"), tuple(found))


def _launches(result: Result) -> Table:
    return Table(
        ("launch", "host", "device", "median step", "tokens/s/GPU", "reserved", "wall", "clock", "power"),
        tuple(
            _launch(f"{side}{launch.started_at}", launch)
            for side, launches in (("", result.launches), ("before: ", result.launches_before))
            for launch in launches
        ),
        3,
    )


def _launch(name: str, launch: Launch) -> tuple[str, ...]:
    ranks, health, rate = launch.ranks, launch.health, rate_of([launch])
    hosts = ", ".join(sorted({rank.host for rank in ranks}))
    device = ranks[0].device if len(ranks) == 1 else f"{len(ranks)} ranks"
    return (
        *(clipped(text, _LONGEST_NAME) for text in (name, hosts, device)),
        formats.seconds(launch.median_step_seconds),
        formatted(rate, launch.tokens_per_second_per_gpu, METRICS[rate].unit),
        formats.memory(launch.peak_reserved_bytes),
        formats.seconds(launch.wall_seconds),
        f"{health.sm_clock_mhz:.0f} MHz" if health.sm_clock_mhz else formats.ABSENT,
        f"{health.power_watts:.0f} W" if health.power_watts else formats.ABSENT,
    )
