"""Charts of cases: what changed beside its limit, every step, memory by part, and where a run's time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_llmperf.analysis.formulas import PARTS
from pytest_llmperf.records.failure import total
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.records.results_document import Figure
from pytest_llmperf.report.page import (
    FOR_A_PERSON,
    Interval,
    IntervalChart,
    Line,
    LineChart,
    Row,
    RowChart,
    Section,
    Table,
)
from pytest_llmperf.report.results_json import Result, RunDocument
from pytest_llmperf.report.summary_table import parts_of_a_run
from pytest_llmperf.report.text import detectable_words
from pytest_llmperf.run.ladder_charts import Baselines
from pytest_llmperf.support import formats

# More are no picture.
_MOST_CASES, _MOST_LAUNCHES, _MOST_LONGEST, _MOST_DIVIDED = 16, 6, 10, 12
_MOST_STEPS = 400

_ALLOCATED, _PREDICTED = "peak_allocated_bytes", "predicted_peak_bytes"
_MARKS = ("measured: allocated", "measured: reserved")
_NEGLIGIBLE = 0.001


def urgency(result: Result) -> int:
    """Those first that somebody has to look at."""
    return FOR_A_PERSON.index(result.verdict) if result.verdict in FOR_A_PERSON else len(FOR_A_PERSON)


def interval_words(figure: Figure) -> str:
    """``-7.0 % to -5.4 %``."""
    return formats.ABSENT if figure.interval is None else " to ".join(map(formats.percent, figure.interval))


def _limit_change(figure: Figure) -> float | None:
    return None if figure.limit is None or not figure.baseline else figure.limit / figure.baseline - 1


def change_section(results: Sequence[Result]) -> Section | None:
    """How the throughput of every case changed; ``None`` where none is held against anything."""
    told = [(result, change) for result in results if (change := result.figure(RATE).change) is not None]
    if not told:
        return None
    # What is furthest from its limit's side first, among equals of urgency.
    shown = sorted(told, key=lambda each: (urgency(each[0]), each[1]))[:_MOST_CASES]
    intervals, rows = [], []
    for result, change in shown:
        figure, step = result.figure(RATE), result.figure("step_seconds")
        low, high = figure.interval or (None, None)
        limit, words = _limit_change(figure), formats.percent(change)
        # A case that lost memory has lost no speed. What has no limit gates nothing.
        verdict = figure.verdict or (result.verdict if figure.limit is not None else "pass")
        intervals.append(Interval(result.id, verdict, words, change, low, high, limit))
        times = (formats.seconds(step.baseline), formats.seconds(step.value))
        beside = (interval_words(figure), formats.percent(limit), detectable_words(figure))
        rows.append((result.id, result.verdict, *times, words, *beside))
    headings = ("case", "verdict", "baseline, step", "now, step", "change", "nine times in ten", "limit", "detectable")
    chart = IntervalChart(
        title="Change of throughput since the baseline",
        says=f"How tokens/s per GPU changed in {len(shown)} cases, within what nine times in ten, beside each limit.",
        note=f"{len(told) - len(shown)} more: in the table of cases." if len(told) > len(shown) else "",
        intervals=tuple(intervals),
        table=Table(headings, tuple(rows), 2),
    )
    return Section(anchor="changes", title="What changed, and how surely", charts=(chart,))


def step_chart(result: Result, stored: Baselines) -> LineChart | None:
    """Every step of its launches over those of the newest it was held against; ``None`` without any."""
    now = result.launches[:_MOST_LAUNCHES]
    if not now:
        return None
    before: Sequence[Launch] = result.launches_before
    if not before and (baseline := stored.get((result.machine, result.record.digest))):
        # A baseline rounds figures, these it keeps as they were; what this run has recorded is not its own baseline.
        own = {(launch.site, launch.started_at) for launch in result.launches}
        before = [launch for launch in baseline.launches if (launch.site, launch.started_at) not in own]
    before = before[-_MOST_LAUNCHES:]
    figure, step = result.figure(RATE), result.figure("step_seconds")
    held = f"{formats.seconds(step.baseline)} then, " if step.baseline is not None else ""
    told = f"{held}{formats.seconds(step.value)} now"
    if figure.change is not None:
        told += f"; throughput {formats.percent(figure.change)}"
        told += f" ({interval_words(figure)})" if figure.interval else ""
        told += f", limit {formats.percent(_limit_change(figure))}"
    side = "the other side" if result.launches_before else "baseline's launches"
    rows = tuple(
        (
            f"{when} {number}",
            formats.seconds(launch.median_step_seconds),
            formats.seconds(launch.first_step_seconds),
            str(len(launch.step_seconds)),
            str(launch.steady.start),
        )
        for when, launches in (("then", before), ("now", now))
        for number, launch in enumerate(launches, 1)
    )
    return LineChart(
        title="Step times",
        says=f"Median step: {told}.",
        note=f"Median step: {told}. Without each launch's first step, which is a metric of its own.",
        x_axis="step",
        y_axis="ms",
        lines=(
            *(Line(side, "baseline", _points(one)) for one in before),
            *(Line("this run", "now", _points(one)) for one in now),
        ),
        table=Table(("launch", "median step", "first step", "steps", "warm-up"), rows),
    )


def _points(launch: Launch) -> tuple[tuple[float, float], ...]:
    steps = [(float(number), round(seconds * 1000, 3)) for number, seconds in enumerate(launch.step_seconds, 1)]
    every = -(-len(steps) // _MOST_STEPS)
    return tuple(steps[1::every])


def time_section(documents: Sequence[RunDocument]) -> Section | None:
    """All launches by phase, and the longest of them; ``None`` where nobody told."""
    charts = tuple(filter(None, (_all_launches(documents), _longest(documents))))
    return Section(anchor="time", title="Where the time went", charts=charts) if charts else None


def _all_launches(documents: Sequence[RunDocument]) -> RowChart | None:
    stacks, rows = [], []
    for document in documents:
        if parts := parts_of_a_run(document.spent):
            whole, number = sum(parts.values()), document.num_launches
            label = f"{document.name}: {number} launch{'es' * (number != 1)}"
            stacks.append(Row(label, formats.seconds(whole), tuple(parts.items())))
            rows += [
                (document.name, name, formats.seconds(seconds), formats.share(seconds / (whole or 1.0)))
                for name, seconds in sorted(parts.items(), key=lambda part: -part[1])
            ]
    if not stacks:
        return None
    largest = "; ".join(f"{name} {seconds}" for _, name, seconds, _ in rows[:4])
    return RowChart(
        title="All launches",
        says=f"Seconds of all launches together, by what they went to: {largest}",
        axis="seconds",
        rows=tuple(stacks),
        table=Table(("run", "phase", "time", "share"), tuple(rows), 2),
    )


def _longest(documents: Sequence[RunDocument]) -> RowChart | None:
    launches = [
        (result.id, launch.phases)
        for document in documents
        for result in document.results
        for launch in (*result.launches_before, *result.launches)
        if launch.phases
    ]
    # Of one launch the chart of all launches says the same.
    if len(launches) < 2:  # noqa: PLR2004
        return None
    longest = sorted(launches, key=lambda named: -total(named[1]))[:_MOST_LONGEST]
    names = {phase: phase.replace("_", " ") for _, phases in longest for phase in phases}
    stacks, rows = [], []
    for case, phases in longest:
        parts = tuple((names[phase], seconds) for phase, seconds in phases.items() if seconds > 0)
        stacks.append(Row(case, formats.seconds(total(phases)), parts))
        rows.append((case, *(formats.seconds(phases.get(phase)) for phase in names)))
    which = "Each of the" if len(longest) == len(launches) else f"The longest {len(longest)} of"
    return RowChart(
        title=f"{which} {len(launches)} launches",
        says=f"Phases of the longest launches; {stacks[0].label} took {stacks[0].words}.",
        axis="seconds",
        rows=tuple(stacks),
        table=Table(("case", *names.values()), tuple(rows)),
    )


def memory_parts(result: Result, stored: Baselines) -> Mapping[str, int]:
    """Bytes at the predicted peak, by part, from fake tensors; nothing where none are stored of this case."""
    baseline = stored.get((result.machine, result.record.digest))
    # What is predicted is a GPU's memory, and no CPU's.
    if baseline is None or baseline.static is None or result.machine.startswith("cpu-"):
        return {}
    parts = baseline.static.step.memory
    return {name: parts[name] for name in (*PARTS, *sorted({*parts} - {*PARTS})) if parts.get(name)}


def memory_table(result: Result, parts: Mapping[str, int]) -> Table:
    """The memory of one case, predicted and measured."""
    allocated = result.figure(_ALLOCATED).value
    predicted = result.figure(_PREDICTED).value or (float(sum(parts.values())) or None)
    sizes = {
        **{f"{name}: {PARTS[name]}" if name in PARTS else name: size for name, size in parts.items()},
        "predicted peak": predicted,
        "measured peak, allocated": allocated,
        "measured peak, reserved": result.figure(MEMORY).value,
    }
    rows = [(name, formats.memory(size, 2)) for name, size in sizes.items() if size is not None]
    if predicted and allocated and result.record.launches:
        rows.append(("prediction off by", formats.percent(predicted / allocated - 1)))
    return Table(("part", "size"), tuple(rows))


def memory_section(results: Sequence[Result], stored: Baselines) -> Section | None:
    """The memory of every case of which parts are stored; ``None`` where there is none."""
    told = [(result, parts) for result in results if (parts := memory_parts(result, stored))]
    if not told:
        return None
    shown = told[:_MOST_DIVIDED]
    names = [name for name in PARTS if any(parts.get(name) for _, parts in shown)]
    unit, axis = formats.unit_of_memory(max(sum(parts.values()) for _, parts in shown))
    stacks, rows = [], []
    for result, parts in shown:
        whole = sum(parts.values())
        measured = (result.figure(_ALLOCATED).value, result.figure(MEMORY).value)
        told_parts = tuple((name, size / unit) for name, size in parts.items() if size > _NEGLIGIBLE * whole)
        marks = tuple((name, size / unit) for name, size in zip(_MARKS, measured, strict=True) if size is not None)
        stacks.append(Row(result.id, formats.memory(whole), told_parts, marks))
        rows.append((result.id, *map(formats.memory, (*map(parts.get, names), whole, *measured))))
    chart = RowChart(
        title="Predicted by part, and measured",
        says=f"Memory of {len(shown)} cases at the predicted peak, by part, beside what launches took.",
        axis=axis,
        note=f"{len(told) - len(shown)} more: each case below opens to its own." if len(told) > len(shown) else "",
        rows=tuple(stacks),
        marks=_MARKS,
        table=Table(("case", *names, "predicted", "allocated", "reserved"), tuple(rows)),
    )
    return Section(anchor="memory", title="Memory", charts=(chart,))
