"""What a page shows of a case: steps, a soak's minutes, memory by part, traced steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_llmperf.analysis.formulas import PARTS
from pytest_llmperf.analysis.step_difference import ORDER, milliseconds, short_kernel, step_difference
from pytest_llmperf.analysis.step_difference import parts_of as parts_by_name
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.records.results_document import Figure
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.report.page import (
    FOR_A_PERSON,
    Line,
    LineChart,
    Table,
)
from pytest_llmperf.report.results_json import Result
from pytest_llmperf.run.ladder_charts import Baselines
from pytest_llmperf.support import formats

_MOST_LAUNCHES = 6
_MOST_POINTS, _MOST_NAMES = 400, 12

_ALLOCATED, _PREDICTED = "peak_allocated_bytes", "predicted_peak_bytes"


def urgency(result: Result) -> int:
    """Those first that somebody has to look at."""
    return FOR_A_PERSON.index(result.verdict) if result.verdict in FOR_A_PERSON else len(FOR_A_PERSON)


def interval_words(figure: Figure) -> str:
    """``-7.0 % to -5.4 %``."""
    return formats.ABSENT if figure.interval is None else " to ".join(map(formats.percent, figure.interval))


def _limit_change(figure: Figure) -> float | None:
    return None if figure.limit is None or not figure.baseline else figure.limit / figure.baseline - 1


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


# Of a soak, over its minutes: a chart's title, its axis, how much of a figure one unit of that is, and its lines.
_SOAKED: tuple[tuple[str, str, float, dict[str, str]], ...] = (
    ("Step time", "ms", 1e-3, {"step_seconds": "median", "slowest_step_seconds": "slowest"}),
    ("Memory", "GiB", 2.0**30, {"allocated_bytes": "tensors", "host_bytes": "the process"}),
    ("Open files and threads", "", 1.0, {"open_files": "open files", "threads": "threads"}),
    ("Clock and power", "MHz, W", 1.0, {"clock_mhz": "lowest clock", "watts": "power"}),
)


def soak_charts(result: Result) -> list[LineChart]:
    """Rank 0's, and its GPUs'; none where it was no soak."""
    series, charts = result.record.soak.series if result.record.soak else {}, []
    for title, axis, unit, names in _SOAKED:
        lines, rows = list[Line](), list[tuple[str, ...]]()
        for (name, words), role in zip(names.items(), ("now", "baseline"), strict=True):
            told = zip(series.get("minutes", ()), series.get(name, ()), strict=False)
            points = [(minute, value / unit) for minute, value in told if minute is not None and value is not None]
            if points:
                values = [value for _, value in points]
                lines.append(Line(words, role, tuple(points)))
                rows.append((words, *(f"{each:.4g}" for each in (values[0], min(values), max(values), values[-1]))))
        if lines:
            words, first, _, _, last = rows[0]
            says = f"{title} over the soak's minutes: {words} {first} at the begin, {last} at the end."
            table = Table(("", "first", "least", "most", "last"), tuple(rows))
            charts.append(
                LineChart(title=title, says=says, x_axis="minutes", y_axis=axis, lines=tuple(lines), table=table)
            )
    return charts


def _points(launch: Launch) -> tuple[tuple[float, float], ...]:
    steps = [(float(number), round(seconds * 1000, 3)) for number, seconds in enumerate(launch.step_seconds, 1)]
    every = -(-len(steps) // _MOST_POINTS)
    return tuple(steps[1::every])


def memory_parts(result: Result, stored: Baselines) -> Mapping[str, int]:
    """Bytes at the predicted peak, by part, from fake tensors; nothing where none are stored of this case."""
    baseline = stored.get((result.machine, result.record.digest))
    # What is predicted is a GPU's memory, and no CPU's.
    if baseline is None or baseline.static is None or result.machine.startswith("cpu-"):
        return {}
    parts = baseline.static.step.memory
    return {name: parts[name] for name in (*PARTS, *sorted({*parts} - {*PARTS})) if parts.get(name)}


def memory_table(result: Result, parts: Mapping[str, int]) -> Table:
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


# Traced steps by category, and what changed in them.
def _now(result: Result) -> Trace | None:
    """The trace of its newest launch that has one."""
    return next((launch.trace for launch in reversed(result.launches) if launch.trace), None)


def _before(result: Result, stored: Baselines) -> Trace | None:
    """The other side's trace, where two took turns; else the baseline's."""
    turns = [launch.trace for launch in result.launches_before if launch.trace]
    if turns:
        return turns[-1]
    baseline = stored.get((result.machine, result.record.digest))
    return baseline.trace.trace if baseline is not None and baseline.trace is not None else None


def _parts(trace: Trace) -> Mapping[str, float]:
    """Seconds of a step, in the order of a page."""
    parts = parts_by_name(trace)
    return {name: parts[name] for name in ORDER if parts.get(name)}


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


def trace_tables(result: Result, stored: Baselines) -> list[tuple[str, Table]]:
    """Tables of one case: a step by category, and the names whose counts moved."""
    now, before = _now(result), _before(result, stored)
    if now is None:
        return []
    if before is None:
        whole, parts = now.step_seconds, _parts(now).items()
        shares = tuple((name, _ms(part), formats.share(part / whole if whole else None)) for name, part in parts)
        return [("A traced step", Table(("part", "ms", "share"), shares))]
    difference = step_difference(before, now)
    beside = [(part.name, part.before, part.after) for part in difference.parts if part.before or part.after]
    rows = [
        (name, _ms(then), _ms(after), milliseconds(after - then))
        for name, then, after in (*beside, ("the step", difference.before, difference.after))
    ]
    found = [("A traced step, then and now", Table(("part", "baseline, ms", "now, ms", "change"), tuple(rows)))]
    named = [(part.name, change) for part in difference.parts for change in part.names]
    named += [("the host waits", change) for change in difference.waits]
    moved = []
    for name, change in named[:_MOST_NAMES]:
        calls = f"{change.count:+g}" + (" (new)" if change.is_new else " (gone)" if change.is_gone else "")
        moved.append((name, short_kernel(change.name), calls, milliseconds(change.seconds)))
    if moved:
        found.append(("What a step does more or less often", Table(("part", "name", "calls", "time"), tuple(moved), 2)))
    return found
