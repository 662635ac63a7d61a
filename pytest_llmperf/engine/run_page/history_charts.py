"""What cases took run by run: where that changed, and what else was different there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from pytest_llmperf.judge.history.case_history import CaseHistory, Segment
from pytest_llmperf.records.past_result import PastResult
from pytest_llmperf.report.page.page_model import Line, LineChart, Section, Table
from pytest_llmperf.support import formats

_MOST_CASES, _MOST_POINTS = 8, 400


def history_section(histories: Sequence[CaseHistory]) -> Section | None:
    """Those that changed, the worst first; ``None`` where there are none."""
    several = [one for one in histories if one.segments]
    if not several:
        return None
    changed = sorted((one for one in several if one.latest_change), key=_latest)
    runs = {result.run for one in several for result in one.results}
    first = min(one.results[0].began for one in several)[:10]
    cases = f"{len(several)} case{'s' * (len(several) != 1)} over {len(runs)} runs since {first}"
    left = len(changed) - _MOST_CASES
    return Section(
        anchor="history",
        title="History",
        lines=(
            f"{cases}: {len(changed) or 'none'} with a change point."
            + (f" {left} of them are not drawn here; llmperf history lists them." if left > 0 else ""),
        ),
        charts=tuple(_chart(one) for one in changed[:_MOST_CASES]),
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
