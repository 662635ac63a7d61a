"""Rows: every case of a run with its figures, and what it opens to."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, RATE, columns, formatted, label
from pytest_llmperf.records.metrics import cell as metric_cell
from pytest_llmperf.records.results_document import TEST, Figure
from pytest_llmperf.report.page.page_model import Case, Cell, Chart, Details, Table
from pytest_llmperf.run.run_page.case_charts import (
    detectable_words,
    interval_words,
    memory_parts,
    memory_table,
    step_chart,
    urgency,
)
from pytest_llmperf.run.run_page.case_name import CaseName
from pytest_llmperf.run.run_page.run_document import Result, RunDocument
from pytest_llmperf.run.run_page.stored_figures import StoredFigures
from pytest_llmperf.run.run_page.trace_charts import trace_tables
from pytest_llmperf.support import formats

# Cells: the columns of the table of cases, of which those are shown that any case has a figure for. Pure.


#: The heading of the column that is there where several runs are.
RUN = "run"


def headings(documents: Sequence[RunDocument]) -> tuple[str, ...]:
    """After case and verdict."""
    results = [result for document in documents for result in document.results]
    absent = (formats.ABSENT, "0")
    told = [name for name, cell in _all_cells().items() if any(cell(one).text not in absent for one in results)]
    return (*((RUN,) if len(documents) > 1 else ()), *told)


def cells(document: RunDocument, result: Result, names: Sequence[str]) -> tuple[Cell, ...]:
    """Of one case, in the columns of these ``names``."""
    known = _all_cells()
    return tuple(
        Cell(text=document.source or document.machine) if name == RUN else known[name](result) for name in names
    )


def _value(metric: str, beside: str = "") -> Callable[[Result], Cell]:
    def value(result: Result) -> Cell:
        if beside and result.figure(beside).value is None:
            return _cell(formats.ABSENT, None)
        figure = result.figure(metric)
        return _cell(metric_cell(metric, figure.value, figure.unit or "1"), figure.value)

    return value


def _change(metric: str) -> Callable[[Result], Cell]:
    def change(result: Result) -> Cell:
        moved = result.figure(metric).change
        return _cell(formats.percent(moved), moved)

    return change


def _detectable(result: Result) -> Cell:
    figure = result.figure(RATE)
    return _cell(detectable_words(figure), None if figure.times_slower else figure.detectable)


def _case_cells_launches(result: Result) -> Cell:
    return _cell(str(result.num_launches), float(result.num_launches))


def _cell(text: str, order: float | None) -> Cell:
    """What is absent comes first upwards and last downwards, apart from all figures."""
    return Cell(text=text, order=-math.inf if order is None else order)


def _all_cells() -> dict[str, Callable[[Result], Cell]]:
    found: dict[str, Callable[[Result], Cell]] = {}
    for name, column in columns("page").items():
        found[column.on_page or column.heading] = _value(name, column.beside)
        if METRICS[name].of:
            found["change" if name == RATE else f"{column.heading} change"] = _change(name)
        if name == RATE:
            found["detectable"] = _detectable
    return {**found, "launches": _case_cells_launches}


#: The columns that a phone has room for.
MAIN = ("tokens/s/GPU", "change", "peak memory")

_EXACT = {"flops_per_step", *(name for name, row in METRICS.items() if row.rule == "count")}

# More cases than these show their figures, and no picture of their steps.
_MOST_CHARTS = 40
# More are no page.
MOST_CASES = 2500
_LONGEST_LINE, _LONGEST_NAME = 600, 240
_MOST_LINES = 40


def rows(documents: Sequence[RunDocument], stored: StoredFigures) -> tuple[Case, ...]:
    """Every case, those first that somebody has to look at, and in the order in which they ran among equals."""
    names = headings(documents)
    all_of_them = [(document, result) for document in documents for result in document.results]
    ordered = sorted(all_of_them, key=lambda each: urgency(each[1]))
    return tuple(
        _case(f"case-{number}", document, result, stored, names=names, drawn=number <= _MOST_CHARTS)
        for number, (document, result) in enumerate(ordered[:MOST_CASES], 1)
    )


def _case(  # noqa: PLR0913 - a row's facts
    anchor: str, document: RunDocument, result: Result, stored: StoredFigures, *, names: Sequence[str], drawn: bool
) -> Case:
    steps = step_chart(result, stored) if drawn else None
    return Case(
        anchor=anchor,
        name=clipped(result.id, _LONGEST_NAME),
        verdict=result.verdict if result.verdict.isalpha() else "unknown",
        reason=clipped(_reason(result)),
        cells=cells(document, result, names),
        commands=commands(document, result),
        short=_short(result),
        details=_details(result, stored, [steps] if steps else []),
    )


def _reason(result: Result) -> str:
    """What is lost, what traces point to, and that a case which was new is so no more."""
    recorded = "recorded by this run" if result.told.updated else ""
    return "; ".join(filter(None, [result.told.reason, result.told.diagnosis, recorded]))


def clipped(text: str, most: int = _LONGEST_LINE) -> str:
    """``text`` as far as a row has room for it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def commands(document: RunDocument, result: Result) -> tuple[tuple[str, str], ...]:
    """What runs its test again, and what accepts its figures where they are not the baseline's."""
    again = command(document, result)
    if not again:
        return ()
    if result.verdict == "new":
        record = " --update-baselines=new"
    elif result.verdict in ("regressed", "improved", "changed") or (result.verdict == "pass" and result.told.changed):
        record = " --update-baselines" + ("" if result.verdict == "improved" else ' --perf-reason "why"')
    else:
        return (("Run it again", clipped(again)),)
    return (("Run it again", clipped(again)), ("Accept it", clipped(f"{again}{record}")))


def command(document: RunDocument, result: Result) -> str:
    """What runs its test again; of a document that does not say how it was run, by what its id tells."""
    nodeid = result.told.nodeid
    if not nodeid:
        return ""
    words = document.told.rerun
    if any(TEST in word for word in words):
        return shlex.join(word.replace(TEST, nodeid) for word in words)
    gpus = (CaseName.of(result.id).gpus or len(document.gpus)) if document.is_on_gpus else 0
    return shlex.join(["pytest", nodeid, "--gpus", str(gpus)])


def _short(result: Result) -> str:
    medians = [formats.seconds(launch.median_step_seconds) for launch in result.launches[:_MOST_SHORT]]
    told = f"median steps: {', '.join(medians)}" if medians else "no launch"
    return f"{told}; what else is known of it is in the --perf-json file."


_MOST_SHORT = 6


def _details(result: Result, stored: StoredFigures, charts: Sequence[Chart]) -> Details:
    parts = memory_parts(result, stored)
    memory = memory_table(result, parts)
    counts = _counts(result)
    tables = [
        *((("Exact counts", counts),) if counts.rows else ()),
        *((("Figures", _figures(result)),) if result.figures else ()),
        *((("Launches", _launches(result)),) if result.launches else ()),
        *((("Memory", memory),) if memory and parts else ()),
        *trace_tables(result, stored),
    ]
    notes = list(result.told.notes)
    if result.num_unread:
        notes.append(f"{result.num_unread} launches have records that this version cannot read")
    told = [
        ("Why", tuple(filter(None, [result.told.reason, result.told.diagnosis]))),
        ("Changed since the baseline, and exact", result.told.changed),
        ("Different from the baseline's environment", result.told.differences),
        ("Notes", tuple(notes)),
        ("Recorded", tuple(_written(result))),
    ]
    shown = tuple((title, _some(each)) for title, each in told if each)
    return Details(tables=tuple(tables), lists=shown, charts=tuple(charts))


def _written(result: Result) -> list[str]:
    return [line.strip() for line in result.told.updated.splitlines() if line.strip()]


def _some(told: Sequence[str]) -> tuple[str, ...]:
    more = (f"and {len(told) - _MOST_LINES} more",) if len(told) > _MOST_LINES else ()
    return (*(clipped(line) for line in told[:_MOST_LINES]), *more)


def _counts(result: Result) -> Table:
    """What has no noise: one more than its limit is told by one launch."""
    found = {name: figure for name, figure in result.figures.items() if name in _EXACT}
    return Table(
        headings=("exact count", "was", "now", "limit"),
        rows=tuple(
            (
                label(name),
                *(formatted(name, value, one.unit) for value in (one.baseline, one.value, one.limit)),
            )
            for name, one in found.items()
        ),
    )


def _figures(result: Result) -> Table:
    return Table(
        headings=("metric", "value", "baseline", "limit", "change", "nine times in ten", "detectable"),
        rows=tuple(_figure(*each) for each in result.figures.items()),
    )


def _figure(metric: str, figure: Figure) -> tuple[str, ...]:
    values = (figure.value, figure.baseline, figure.limit)
    name = clipped(label(metric), _LONGEST_NAME)
    return (
        f"{name} ({clipped(figure.detail)})" if figure.detail else name,
        *(formatted(metric, value, figure.unit or "1") for value in values),
        formats.percent(figure.change),
        interval_words(figure),
        detectable_words(figure),
    )


def _launches(result: Result) -> Table:
    sides = [("", result.launches), *([("before: ", result.launches_before)] if result.launches_before else [])]
    return Table(
        headings=("launch", "host", "device", "median step", "tokens/s/GPU", "reserved", "wall", "clock", "power"),
        rows=tuple(_launch(f"{side}{launch.started_at}", launch) for side, launches in sides for launch in launches),
        num_words=3,
    )


def _launch(name: str, launch: Launch) -> tuple[str, ...]:
    ranks, health = launch.ranks, launch.health
    hosts = ", ".join(sorted({rank.host for rank in ranks}))
    device = ranks[0].device if len(ranks) == 1 else f"{len(ranks)} ranks"
    return (
        clipped(name, _LONGEST_NAME),
        clipped(hosts, _LONGEST_NAME),
        clipped(device, _LONGEST_NAME),
        formats.seconds(launch.median_step_seconds),
        formats.tokens_per_second(launch.tokens_per_second_per_gpu),
        formats.memory(launch.peak_reserved_bytes),
        formats.seconds(launch.wall_seconds),
        f"{health.sm_clock_mhz:.0f} MHz" if health.sm_clock_mhz else formats.ABSENT,
        f"{health.power_watts:.0f} W" if health.power_watts else formats.ABSENT,
    )
