"""What a case changed by: beside its limit, with the interval that decided, and step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_llmperf.analysis.formulas import PARTS
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.records.phases import total
from pytest_llmperf.records.results_document import Figure
from pytest_llmperf.report.page.page_model import (
    FOR_A_PERSON,
    Interval,
    IntervalChart,
    Line,
    LineChart,
    Section,
    Stack,
    StackChart,
    Table,
)
from pytest_llmperf.report.time_spent import parts_of_a_run
from pytest_llmperf.run.run_page.run_document import Result, RunDocument
from pytest_llmperf.run.run_page.stored_figures import StoredFigures
from pytest_llmperf.support import formats

_MOST_CASES, _MOST_LAUNCHES = 16, 6
_MOST_STEPS = 400


def urgency(result: Result) -> int:
    """Those first that somebody has to look at."""
    return FOR_A_PERSON.index(result.verdict) if result.verdict in FOR_A_PERSON else len(FOR_A_PERSON)


def change_section(results: Sequence[Result]) -> Section | None:
    """How the throughput of every case changed; ``None`` where none is held against anything."""
    told = [(result, change) for result in results if (change := result.figure(RATE).change) is not None]
    if not told:
        return None
    # What is furthest from its limit's side first, among equals of urgency.
    shown = sorted(told, key=lambda each: (urgency(each[0]), each[1]))[:_MOST_CASES]
    left = f"{len(told) - len(shown)} more: in the table of cases." if len(told) > len(shown) else ""
    chart = IntervalChart(
        title="Change of throughput since the baseline",
        says=f"How tokens/s per GPU changed in {len(shown)} cases, within what nine times in ten, beside each limit.",
        note=left,
        intervals=tuple(_interval(result, change) for result, change in shown),
        table=Table(
            headings=(
                "case",
                "verdict",
                "baseline, step",
                "now, step",
                "change",
                "nine times in ten",
                "limit",
                "detectable",
            ),
            rows=tuple(_row(result, change) for result, change in shown),
            num_words=2,
        ),
    )
    return Section(anchor="changes", title="What changed, and how surely", charts=(chart,))


def _interval(result: Result, change: float) -> Interval:
    figure = result.figure(RATE)
    low, high = figure.interval or (None, None)
    # A case that lost memory has lost no speed. What has no limit gates nothing.
    verdict = figure.verdict or (result.verdict if figure.limit is not None else "pass")
    return Interval(result.id, verdict, formats.percent(change), change, low, high, limit_change(figure))


def _row(result: Result, change: float) -> tuple[str, ...]:
    figure, step = result.figure(RATE), result.figure("step_seconds")
    return (
        result.id,
        result.verdict,
        formats.seconds(step.baseline),
        formats.seconds(step.value),
        formats.percent(change),
        interval_words(figure),
        formats.percent(limit_change(figure)),
        detectable_words(figure),
    )


def interval_words(figure: Figure) -> str:
    """``-7.0 % to -5.4 %``."""
    if figure.interval is None:
        return formats.ABSENT
    return " to ".join(map(formats.percent, figure.interval))


def detectable_words(figure: Figure) -> str:
    """What this gate would have seen; nothing where it is none to speak of."""
    return formats.ABSENT if figure.times_slower else formats.share(figure.detectable)


def limit_change(figure: Figure) -> float | None:
    """The limit as a change."""
    return None if figure.limit is None or not figure.baseline else figure.limit / figure.baseline - 1


def stored_launches(result: Result, baseline: Baseline | None) -> tuple[Launch, ...]:
    """What it was held against: the other side's launches, or what is stored without what this run has recorded."""
    if result.launches_before:
        return result.launches_before
    # A baseline rounds figures: these it keeps as they were.
    own = {(launch.site, launch.started_at) for launch in result.launches}
    stored = baseline.launches if baseline is not None else ()
    return tuple(launch for launch in stored if (launch.site, launch.started_at) not in own)


def step_chart(result: Result, stored: StoredFigures) -> LineChart | None:
    """Every step of its launches over those of the newest it was held against; ``None`` without any."""
    before = stored_launches(result, stored.of(result.machine, result.told.digest))[-_MOST_LAUNCHES:]
    now = result.launches[:_MOST_LAUNCHES]
    if not now:
        return None
    figure, step = result.figure(RATE), result.figure("step_seconds")
    held = f"{formats.seconds(step.baseline)} then, " if step.baseline is not None else ""
    told = f"{held}{formats.seconds(step.value)} now"
    if figure.change is not None:
        told += f"; throughput {formats.percent(figure.change)}"
        told += f" ({interval_words(figure)})" if figure.interval else ""
        told += f", limit {formats.percent(limit_change(figure))}"
    rows = [(f"then {number}", *_summary(launch)) for number, launch in enumerate(before, 1)]
    rows += [(f"now {number}", *_summary(launch)) for number, launch in enumerate(now, 1)]
    return LineChart(
        title="Step times",
        says=f"Median step: {told}.",
        note=f"Median step: {told}. Without each launch's first step, which is a metric of its own.",
        x_axis="step",
        y_axis="ms",
        lines=(
            *(
                Line(
                    "baseline's launches" if not result.launches_before else "the other side", "baseline", _points(one)
                )
                for one in before
            ),
            *(Line("this run", "now", _points(one)) for one in now),
        ),
        from_zero=False,
        table=Table(headings=("launch", "median step", "first step", "steps", "warm-up"), rows=tuple(rows)),
    )


def _points(launch: Launch) -> tuple[tuple[float, float], ...]:
    steps = [(float(number), round(seconds * 1000, 3)) for number, seconds in enumerate(launch.step_seconds, 1)]
    every = -(-len(steps) // _MOST_STEPS)
    return tuple(steps[1::every])


def _summary(launch: Launch) -> tuple[str, ...]:
    return (
        formats.seconds(launch.median_step_seconds),
        formats.seconds(launch.first_step_seconds),
        str(len(launch.step_seconds)),
        str(launch.steady.start),
    )


# Where the run's time went: all launches by phase, and the longest of them.


_TIME_CHARTS_MOST_LAUNCHES = 10


def time_section(documents: Sequence[RunDocument]) -> Section | None:
    """``None`` where nobody told."""
    charts = [chart for chart in (_runs(documents), _longest(documents)) if chart is not None]
    return Section(anchor="time", title="Where the time went", charts=tuple(charts)) if charts else None


def _runs(documents: Sequence[RunDocument]) -> StackChart | None:
    told = [(document, parts_of_a_run(document.spent)) for document in documents if document.spent]
    if not told:
        return None
    rows = [
        (_name(document), name, formats.seconds(seconds), formats.share(seconds / (sum(parts.values()) or 1.0)))
        for document, parts in told
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1])
    ]
    return StackChart(
        title="All launches",
        says="Seconds of all launches together, by what they went to: "
        + "; ".join(f"{name} {seconds}" for _, name, seconds, _ in rows[:4]),
        axis="seconds",
        stacks=tuple(
            Stack(
                f"{_name(document)}: {document.num_launches} launch{'es' * (document.num_launches != 1)}",
                formats.seconds(sum(parts.values())),
                tuple(parts.items()),
            )
            for document, parts in told
        ),
        table=Table(headings=("run", "phase", "time", "share"), rows=tuple(rows), num_words=2),
    )


def _name(document: RunDocument) -> str:
    return document.source or document.machine


def _longest(documents: Sequence[RunDocument]) -> StackChart | None:
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
    longest = sorted(launches, key=lambda named: -total(named[1]))[:_TIME_CHARTS_MOST_LAUNCHES]
    names = list(dict.fromkeys(name for _, phases in longest for name in phases))
    return StackChart(
        title=f"The longest {len(longest)} of {len(launches)} launches"
        if len(longest) < len(launches)
        else f"Each of the {len(launches)} launches",
        says=f"Phases of the longest launches; {longest[0][0]} took {formats.seconds(total(longest[0][1]))}.",
        axis="seconds",
        stacks=tuple(
            Stack(name, formats.seconds(total(phases)), tuple(_worded(phases).items())) for name, phases in longest
        ),
        table=Table(
            headings=("case", *(name.replace("_", " ") for name in names)),
            rows=tuple((name, *(formats.seconds(phases.get(phase)) for phase in names)) for name, phases in longest),
        ),
    )


def _worded(phases: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("_", " "): seconds for name, seconds in phases.items() if seconds > 0}


# Memory by part: predicted from fake tensors, as stored, beside what launches took.


_ALLOCATED = "peak_allocated_bytes"
_PREDICTED = "predicted_peak_bytes"
_MEASURED, _RESERVED = "measured: allocated", "measured: reserved"
# More are no picture.
_MEMORY_CHARTS_MOST_CASES = 12
_NEGLIGIBLE = 0.001


def memory_parts(result: Result, stored: StoredFigures) -> Mapping[str, int]:
    """Bytes at the predicted peak, by part; nothing where none are stored of this case."""
    baseline = stored.of(result.machine, result.told.digest)
    if baseline is None or baseline.static is None or is_on_cpu(result):
        return {}
    parts = baseline.static.step.memory
    return {name: parts[name] for name in (*PARTS, *sorted({*parts} - {*PARTS})) if parts.get(name)}


def is_on_cpu(result: Result) -> bool:
    """Whether it was launched beside no GPU: what is predicted is a GPU's memory, and no CPU's."""
    return result.machine.startswith("cpu-")


def memory_table(result: Result, parts: Mapping[str, int]) -> Table | None:
    """Of one case; ``None`` where it has no figure of memory."""
    allocated, reserved = result.figure(_ALLOCATED).value, result.figure(MEMORY).value
    rows = [
        (f"{name}: {PARTS[name]}" if name in PARTS else name, formats.memory(size, 2)) for name, size in parts.items()
    ]
    total = result.figure(_PREDICTED).value or (float(sum(parts.values())) or None)
    told = (("predicted peak", total), ("measured peak, allocated", allocated), ("measured peak, reserved", reserved))
    rows += [(name, formats.memory(size, 2)) for name, size in told if size is not None]
    if total and allocated and result.told.launches:
        rows.append(("prediction off by", formats.percent(total / allocated - 1)))
    return Table(headings=("part", "size"), rows=tuple(rows)) if rows else None


def memory_section(results: Sequence[Result], stored: StoredFigures) -> Section | None:
    """Of every case of which parts are stored; ``None`` where there is none."""
    told = [(result, parts) for result in results if (parts := memory_parts(result, stored))]
    if not told:
        return None
    shown = told[:_MEMORY_CHARTS_MOST_CASES]
    left = f"{len(told) - len(shown)} more: each case below opens to its own." if len(told) > len(shown) else ""
    names = [name for name in PARTS if any(parts.get(name) for _, parts in shown)]
    size, unit = formats.unit_of_memory(max(sum(parts.values()) for _, parts in shown))
    chart = StackChart(
        title="Predicted by part, and measured",
        says=f"Memory of {len(shown)} cases at the predicted peak, by part, beside what launches took.",
        axis=unit,
        note=left,
        stacks=tuple(_stack(result, parts, size) for result, parts in shown),
        table=Table(
            headings=("case", *names, "predicted", "allocated", "reserved"),
            rows=tuple(
                (
                    result.id,
                    *(formats.memory(parts.get(name)) for name in names),
                    formats.memory(sum(parts.values())),
                    formats.memory(result.figure(_ALLOCATED).value),
                    formats.memory(result.figure(MEMORY).value),
                )
                for result, parts in shown
            ),
        ),
    )
    return Section(anchor="memory", title="Memory", charts=(chart,))


def _stack(result: Result, parts: Mapping[str, int], unit: float) -> Stack:
    total = sum(parts.values())
    marks = ((_MEASURED, result.figure(_ALLOCATED).value), (_RESERVED, result.figure(MEMORY).value))
    return Stack(
        label=result.id,
        told=formats.memory(total),
        parts=tuple((name, size / unit) for name, size in parts.items() if size > _NEGLIGIBLE * total),
        marks=tuple((name, size / unit) for name, size in marks if size is not None),
    )
