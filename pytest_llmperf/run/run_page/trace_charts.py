"""Traced steps by category: of what a step consists, and what changed in it since the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from pytest_llmperf.analysis.likely_causes import CATEGORIES
from pytest_llmperf.analysis.step_difference import DATA, HOST, NameChange, StepDifference, parts_of, step_difference
from pytest_llmperf.judge.case_histories import CaseHistory, Segment
from pytest_llmperf.records.past_result import PastResult
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.report.page.page_model import Line, LineChart, Section, Stack, StackChart, Table
from pytest_llmperf.report.step_words import milliseconds, short_kernel
from pytest_llmperf.run.run_page.run_document import Result
from pytest_llmperf.run.run_page.stored_figures import StoredFigures
from pytest_llmperf.support import formats

_ORDER = (*CATEGORIES, HOST, DATA)
_MOST_CASES, _MOST_NAMES = 12, 12
_NEGLIGIBLE = 0.001


def trace_now(result: Result) -> Trace | None:
    """Of its newest launch that has one."""
    return next((launch.trace for launch in reversed(result.launches) if launch.trace), None)


def trace_before(result: Result, stored: StoredFigures) -> Trace | None:
    """Of the other side, where two took turns; else the baseline's."""
    turns = [launch.trace for launch in result.launches_before if launch.trace]
    if turns:
        return turns[-1]
    baseline = stored.of(result.machine, result.told.digest)
    return baseline.trace.trace if baseline is not None and baseline.trace is not None else None


def trace_tables(result: Result, stored: StoredFigures) -> list[tuple[str, Table]]:
    """Of one case: a step by category, and the names whose counts moved."""
    now, before = trace_now(result), trace_before(result, stored)
    if now is None:
        return []
    if before is None:
        parts = parts_of(now)
        rows = [(name, _ms(parts[name]), formats.share(_share(parts[name], now))) for name in _named(parts)]
        return [("A traced step", Table(headings=("part", "ms", "share"), rows=tuple(rows)))]
    difference = step_difference(before, now)
    found = [("A traced step, then and now", _beside(difference))]
    moved = _moved(difference)
    return [*found, ("What a step does more or less often", moved)] if moved.rows else found


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


def _named(parts: dict[str, float]) -> list[str]:
    return [name for name in _ORDER if parts.get(name)]


def _share(seconds: float, trace: Trace) -> float | None:
    return seconds / trace.step_seconds if trace.step_seconds else None


def _beside(difference: StepDifference) -> Table:
    rows = [
        (part.name, _ms(part.before), _ms(part.after), milliseconds(part.change))
        for part in difference.parts
        if part.before or part.after
    ]
    rows.append(("the step", _ms(difference.before), _ms(difference.after), milliseconds(difference.change)))
    return Table(headings=("part", "baseline, ms", "now, ms", "change"), rows=tuple(rows))


def _moved(difference: StepDifference) -> Table:
    named = [(part.name, change) for part in difference.parts for change in part.names]
    named += [("the host waits", change) for change in difference.waits]
    rows = [(name, short_kernel(change.name), _count(change), milliseconds(change.seconds)) for name, change in named]
    return Table(headings=("part", "name", "calls", "time"), rows=tuple(rows[:_MOST_NAMES]), num_words=2)


def _count(change: NameChange) -> str:
    told = " (new)" if change.is_new else " (gone)" if change.is_gone else ""
    return f"{change.count:+g}{told}"


def trace_section(results: Sequence[Result], stored: StoredFigures) -> Section | None:
    """A traced step of every case that has one; ``None`` where there is none."""
    traced = [(result, trace) for result in results if (trace := trace_now(result)) is not None]
    if not traced:
        return None
    shown = traced[:_MOST_CASES]
    left = f"{len(traced) - len(shown)} more: each case below opens to its own." if len(traced) > len(shown) else ""
    divided = [(result, trace, parts_of(trace)) for result, trace in shown]
    names = [name for name in _ORDER if any(parts.get(name) for _, _, parts in divided)]
    on_host = any(trace.is_on_host for _, trace, _ in divided)
    chart = StackChart(
        title="A traced step by category",
        says=f"Of what a traced step of {len(shown)} cases consists, in milliseconds.",
        note=" ".join(filter(None, [left, "On the CPU operators stand for kernels." if on_host else ""])),
        axis="ms a step",
        stacks=tuple(
            Stack(
                result.id,
                f"{trace.step_seconds * 1000:.4g} ms",
                tuple(
                    (name, parts[name] * 1000)
                    for name in names
                    if parts.get(name, 0.0) > _NEGLIGIBLE * trace.step_seconds
                ),
            )
            for result, trace, parts in divided
        ),
        table=Table(
            headings=("case", *names, "step, ms"),
            rows=tuple(
                (result.id, *(_ms(parts.get(name, 0.0)) for name in names), _ms(trace.step_seconds))
                for result, trace, parts in divided
            ),
        ),
    )
    differ = _differences(shown, stored)
    return Section(anchor="traces", title="Inside a step", charts=(chart, *([differ] if differ else [])))


def _differences(traced: Sequence[tuple[Result, Trace]], stored: StoredFigures) -> StackChart | None:
    """What moved, of the cases that do not hold: what is gained and what is lost would hide each other in one bar."""
    told: list[tuple[Result, StepDifference, list[tuple[str, float, float]]]] = []
    for result, now in traced:
        before = trace_before(result, stored)
        if result.verdict not in ("regressed", "improved", "changed") or before is None or now.is_on_host:
            continue
        difference = step_difference(before, now)
        side = [part for part in difference.parts if (part.change > 0) == (difference.change > 0)]
        parts = [(part.name, part.before, part.after) for part in side]
        if (difference.unexplained > 0) == (difference.change > 0):
            parts.append(("unexplained", 0.0, difference.unexplained))
        parts = [part for part in parts if abs(part[2] - part[1]) > _NEGLIGIBLE * before.step_seconds]
        told += [(result, difference, parts)] if parts else []
    if not told:
        return None
    return StackChart(
        title="What takes longer where a case is slower, or less where it is faster",
        says=f"By category, where the time of {len(told)} cases moved that do not hold or have changed.",
        axis="ms a step",
        stacks=tuple(
            Stack(
                result.id,
                f"{difference.change * 1000:+.3g} ms",
                tuple((name, abs(after - before) * 1000) for name, before, after in parts),
            )
            for result, difference, parts in told
        ),
        table=Table(
            headings=("case", "part", "baseline, ms", "now, ms", "change"),
            rows=tuple(
                (result.id, name, _ms(before), _ms(after), milliseconds(after - before))
                for result, _, parts in told
                for name, before, after in parts
            ),
            num_words=2,
        ),
    )


# What cases took run by run: where that changed, and what else was different there.


_HISTORY_CHARTS_MOST_CASES, _MOST_POINTS = 8, 400


def history_section(histories: Sequence[CaseHistory]) -> Section | None:
    """Those that changed, the worst first; ``None`` where there are none."""
    several = [one for one in histories if one.segments]
    if not several:
        return None
    changed = sorted((one for one in several if one.latest_change), key=_latest)
    runs = {result.run for one in several for result in one.results}
    first = min(one.results[0].began for one in several)[:10]
    cases = f"{len(several)} case{'s' * (len(several) != 1)} over {len(runs)} runs since {first}"
    left = len(changed) - _HISTORY_CHARTS_MOST_CASES
    return Section(
        anchor="history",
        title="History",
        lines=(
            f"{cases}: {len(changed) or 'none'} with a change point."
            + (f" {left} of them are not drawn here; llmperf history lists them." if left > 0 else ""),
        ),
        charts=tuple(_chart(one) for one in changed[:_HISTORY_CHARTS_MOST_CASES]),
    )


def _latest(one: CaseHistory) -> float:
    latest = one.latest_change
    return latest.change.rate if latest and latest.change else 0.0


def _chart(one: CaseHistory) -> LineChart:
    latest = one.segments[-1]
    first = one.results[0].began[:10]
    change = latest.change
    told = (
        f"{formats.percent(change.rate)} since {latest.results[0].began[:10]}"
        if change
        else f"counts changed on {latest.results[0].began[:10]}"
    )
    if change and change.shared is not None:
        told += f", {formats.percent(change.shared)} of all cases that ran with it"
    different = "; ".join(latest.different) or "nothing else that is recorded"
    return LineChart(
        title=one.id,
        says=f"Tokens/s per GPU of {len(one.results)} runs: {told}.",
        note=f"{told}. What else changed: {different}.",
        x_axis=f"days since {first}",
        y_axis="tokens/s/GPU",
        lines=(
            *(Line("level", "baseline", _level(segment, first)) for segment in one.segments),
            Line("run", "now", _runs(one, first)),
        ),
        from_zero=False,
        table=Table(
            headings=("from", "to", "what changed", "versions", "runs", "tokens/s/GPU", "95 of 100 in", "change"),
            rows=tuple(_row(segment) for segment in one.segments),
            num_words=4,
        ),
    )


def _runs(one: CaseHistory, first: str) -> tuple[tuple[float, float], ...]:
    counted = [result for segment in one.segments for result in segment.results]
    every = -(-len(counted) // _MOST_POINTS)
    return tuple((_day(result, first), _rate(result)) for result in counted[::every])


def _level(segment: Segment, first: str) -> tuple[tuple[float, float], ...]:
    rate = segment.rate(segment.step_seconds) or 1 / segment.step_seconds
    return tuple((_day(result, first), round(rate, 3)) for result in (segment.results[0], segment.results[-1]))


def _rate(result: PastResult) -> float:
    return round(result.tokens_per_second_per_gpu or 1 / result.step_seconds, 3)


def _day(result: PastResult, first: str) -> float:
    try:
        return float((date.fromisoformat(result.began[:10]) - date.fromisoformat(first)).days)
    except ValueError:  # a time that is none, in a file that somebody wrote
        return 0.0


def _row(segment: Segment) -> tuple[str, ...]:
    newest = segment.results[-1]
    interval = " to ".join(formats.tokens_per_second(segment.rate(each)) for each in (segment.high, segment.low))
    versions = ", ".join(f"{name} {version}" for name, version in list(newest.versions.items())[:4])
    return (
        segment.results[0].began[:10],
        newest.began[:10],
        "; ".join(segment.different) or formats.ABSENT,
        "; ".join(filter(None, (f"revision {newest.revision}" if newest.revision else "", versions))) or formats.ABSENT,
        str(len(segment.results)),
        formats.tokens_per_second(segment.rate(segment.step_seconds)),
        interval,
        formats.percent(segment.change.rate if segment.change else None),
    )
