"""Charts of traced steps by category, and what changed in them; and what cases took run by run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date

from pytest_llmperf.analysis.likely_causes import CATEGORIES
from pytest_llmperf.analysis.step_difference import DATA, HOST, milliseconds, short_kernel, step_difference
from pytest_llmperf.analysis.step_difference import parts_of as parts_by_name
from pytest_llmperf.judge.case_histories import CaseHistory, Segment
from pytest_llmperf.records.result import PastResult
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.report.page import Line, LineChart, Row, RowChart, Section, Table
from pytest_llmperf.report.results_json import Result
from pytest_llmperf.run.ladder_charts import Baselines
from pytest_llmperf.support import formats

_ORDER = (*CATEGORIES, HOST, DATA)
# More are no picture.
_MOST_CASES, _MOST_NAMES, _MOST_HISTORIES, _MOST_POINTS = 12, 12, 8, 400
_NEGLIGIBLE = 0.001


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
    return {name: parts[name] for name in _ORDER if parts.get(name)}


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


def trace_section(results: Sequence[Result], stored: Baselines) -> Section | None:
    """A traced step of every case that has one; ``None`` where there is none."""
    traced = [(result, trace) for result in results if (trace := _now(result)) is not None]
    if not traced:
        return None
    shown = [(result, trace, _parts(trace)) for result, trace in traced[:_MOST_CASES]]
    notes = [f"{len(traced) - len(shown)} more: each case below opens to its own."] if len(traced) > len(shown) else []
    notes += ["On the CPU operators stand for kernels."] if any(trace.is_on_host for _, trace, _ in shown) else []
    names = [name for name in _ORDER if any(name in parts for _, _, parts in shown)]
    stacks, rows = [], []
    for result, trace, parts in shown:
        whole = trace.step_seconds
        bars = tuple((name, part * 1000) for name, part in parts.items() if part > _NEGLIGIBLE * whole)
        stacks.append(Row(result.id, f"{whole * 1000:.4g} ms", bars))
        rows.append((result.id, *(_ms(parts.get(name, 0.0)) for name in names), _ms(whole)))
    chart = RowChart(
        title="A traced step by category",
        says=f"Of what a traced step of {len(shown)} cases consists, in milliseconds.",
        note=" ".join(notes),
        axis="ms a step",
        rows=tuple(stacks),
        table=Table(("case", *names, "step, ms"), tuple(rows)),
    )
    differ = _differences(traced[:_MOST_CASES], stored)
    return Section(anchor="traces", title="Inside a step", charts=(chart, *([differ] if differ else [])))


def _differences(traced: Sequence[tuple[Result, Trace]], stored: Baselines) -> RowChart | None:
    """Parts that moved, in cases that do not hold: what is gained and what is lost would hide each other in one bar."""
    stacks, rows = [], []
    for result, now in traced:
        before = _before(result, stored)
        if result.verdict not in ("regressed", "improved", "changed") or before is None or now.is_on_host:
            continue
        difference = step_difference(before, now)
        parts = [(part.name, part.before, part.after) for part in difference.parts]
        parts.append(("unexplained", 0.0, difference.unexplained))
        parts = [
            (name, then, after)
            for name, then, after in parts
            if (after > then) == (difference.change > 0) and abs(after - then) > _NEGLIGIBLE * before.step_seconds
        ]
        if parts:
            bars = tuple((name, abs(after - then) * 1000) for name, then, after in parts)
            stacks.append(Row(result.id, f"{difference.change * 1000:+.3g} ms", bars))
        rows += [(result.id, name, _ms(then), _ms(after), milliseconds(after - then)) for name, then, after in parts]
    if not stacks:
        return None
    return RowChart(
        title="What takes longer where a case is slower, or less where it is faster",
        says=f"By category, where the time of {len(stacks)} cases moved that do not hold or have changed.",
        axis="ms a step",
        rows=tuple(stacks),
        table=Table(("case", "part", "baseline, ms", "now, ms", "change"), tuple(rows), 2),
    )


# What cases took run by run: where that changed, and what else was different there.


def history_section(histories: Sequence[CaseHistory]) -> Section | None:
    """Those that changed, the worst first; ``None`` where there are none."""
    several = [one for one in histories if one.segments]
    if not several:
        return None
    changed = sorted((one for one in several if one.latest_change), key=_latest)
    runs = {result.run for one in several for result in one.results}
    first = min(one.results[0].began for one in several)[:10]
    told = f"{formats.counted(len(several), 'case')} over {len(runs)} runs since {first}: "
    told += f"{len(changed) or 'none'} with a change point."
    left = len(changed) - _MOST_HISTORIES
    told += f" {left} of them are not drawn here; llmperf history lists them." if left > 0 else ""
    charts = tuple(map(_history, changed[:_MOST_HISTORIES]))
    return Section(anchor="history", title="History", lines=(told,), charts=charts)


def _latest(one: CaseHistory) -> float:
    latest = one.latest_change
    return latest.change.rate if latest and latest.change else 0.0


def _history(one: CaseHistory) -> LineChart:
    latest, first = one.segments[-1], one.results[0].began[:10]
    since, change = latest.results[0].began[:10], latest.change
    told = f"{formats.percent(change.rate)} since {since}" if change else f"counts changed on {since}"
    if change and change.shared is not None:
        told += f", {formats.percent(change.shared)} of all cases that ran with it"
    counted = [result for segment in one.segments for result in segment.results]
    every = -(-len(counted) // _MOST_POINTS)
    runs = [
        (_day(result, first), round(result.tokens_per_second_per_gpu or 1 / result.step_seconds, 3))
        for result in counted[::every]
    ]
    levels = []
    for segment in one.segments:
        rate = round(segment.rate(segment.step_seconds) or 1 / segment.step_seconds, 3)
        levels.append(Line("level", "baseline", tuple((_day(segment.results[at], first), rate) for at in (0, -1))))
    headings = ("from", "to", "what changed", "versions", "runs", "tokens/s/GPU", "95 of 100 in", "change")
    return LineChart(
        title=one.id,
        says=f"Tokens/s per GPU of {len(one.results)} runs: {told}.",
        note=f"{told}. What else changed: {'; '.join(latest.different) or 'nothing else that is recorded'}.",
        x_axis=f"days since {first}",
        y_axis="tokens/s/GPU",
        lines=(*levels, Line("run", "now", tuple(runs))),
        table=Table(headings, tuple(map(_segment, one.segments)), 4),
    )


def _day(result: PastResult, first: str) -> float:
    try:
        return float((date.fromisoformat(result.began[:10]) - date.fromisoformat(first)).days)
    except ValueError:  # a time that is none, in a file that somebody wrote
        return 0.0


def _segment(segment: Segment) -> tuple[str, ...]:
    newest = segment.results[-1]
    interval = " to ".join(formats.tokens_per_second(segment.rate(each)) for each in (segment.high, segment.low))
    versions = ", ".join(f"{name} {version}" for name, version in list(newest.versions.items())[:4])
    told = filter(None, (f"revision {newest.revision}" if newest.revision else "", versions))
    return (
        segment.results[0].began[:10],
        newest.began[:10],
        "; ".join(segment.different) or formats.ABSENT,
        "; ".join(told) or formats.ABSENT,
        str(len(segment.results)),
        formats.tokens_per_second(segment.rate(segment.step_seconds)),
        interval,
        formats.percent(segment.change.rate if segment.change else None),
    )
