"""What a case changed by: beside its limit, with the interval that decided, and step by step."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmperf.engine.run_page.run_document import Figure, Result
from pytest_llmperf.engine.run_page.stored_figures import RATE, StoredFigures
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.report.page.page_model import FOR_A_PERSON, Interval, IntervalChart, Line, LineChart, Section, Table
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
    before = stored_launches(result, stored.of(result.machine, result.text("digest")))[-_MOST_LAUNCHES:]
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
