"""What a page shows of a case (its steps, a soak, traced steps), and of cases side by side (ladders, histories)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date

from pytest_llmperf.analysis.step_difference import ORDER, milliseconds, short_kernel, step_difference
from pytest_llmperf.analysis.step_difference import parts_of as parts_by_name
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.case_histories import CaseHistory
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.records.results_document import Figure
from pytest_llmperf.report.page import Chart, Line, Section, Table
from pytest_llmperf.report.results_json import Result
from pytest_llmperf.report.text import Column
from pytest_llmperf.run.history import level_columns
from pytest_llmperf.support import formats

_MOST_LAUNCHES, _MOST_POINTS, _MOST_NAMES, _MOST_HISTORIES = 6, 400, 12, 8

Baselines = Mapping[tuple[str, str], Baseline]
"""What is stored, by machine kind and digest."""


def interval_words(figure: Figure) -> str:
    """``-7.0 % to -5.4 %``."""
    return formats.ABSENT if figure.interval is None else " to ".join(map(formats.percent, figure.interval))


def step_chart(result: Result, stored: Baselines) -> Chart | None:
    """Every step of its launches over those of the newest it was held against; ``None`` without any."""
    if not (now := result.launches[:_MOST_LAUNCHES]):
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
        limit = figure.limit / figure.baseline - 1 if figure.limit is not None and figure.baseline else None
        told += f", limit {formats.percent(limit)}"
    side = "the other side" if result.launches_before else "baseline's launches"
    return Chart(
        title="Step times",
        says=f"Median step: {told}.",
        note=f"Median step: {told}. Without each launch's first step, which is a metric of its own.",
        x_axis="step",
        y_axis="ms",
        lines=(
            *(Line(side, "baseline", _points(one)) for one in before),
            *(Line("this run", "now", _points(one)) for one in now),
        ),
    )


# Of a soak, over its minutes: a chart's title, its axis, how much of a figure one unit of that is, and its lines.
_SOAKED: tuple[tuple[str, str, float, dict[str, str]], ...] = (
    ("Step time", "ms", 1e-3, {"step_seconds": "median", "slowest_step_seconds": "slowest"}),
    ("Memory", "GiB", 2.0**30, {"allocated_bytes": "tensors", "host_bytes": "the process"}),
    ("Open files and threads", "", 1.0, {"open_files": "open files", "threads": "threads"}),
    ("Clock and power", "MHz, W", 1.0, {"clock_mhz": "lowest clock", "watts": "power"}),
)


def soak_charts(result: Result) -> list[Chart]:
    """Rank 0's, and its GPUs'; none where it was no soak."""
    series, charts = result.record.soak.series if result.record.soak else {}, []
    for title, axis, unit, names in _SOAKED:
        lines, rows = list[Line](), list[tuple[str, ...]]()
        for (name, words), role in zip(names.items(), ("now", "baseline"), strict=True):
            told = zip(series.get("minutes", ()), series.get(name, ()), strict=False)
            if points := [(minute, value / unit) for minute, value in told if minute is not None and value is not None]:
                values = [value for _, value in points]
                lines.append(Line(words, role, tuple(points)))
                rows.append((words, *(f"{each:.4g}" for each in (values[0], min(values), max(values), values[-1]))))
        if lines:
            words, first, _, _, last = rows[0]
            says = f"{title} over the soak's minutes: {words} {first} at the begin, {last} at the end."
            table = Table(("", "first", "least", "most", "last"), tuple(rows))
            charts.append(Chart(title=title, says=says, x_axis="minutes", y_axis=axis, lines=tuple(lines), table=table))
    return charts


def _points(launch: Launch) -> tuple[tuple[float, float], ...]:
    steps = [(float(number), round(seconds * 1000, 3)) for number, seconds in enumerate(launch.step_seconds, 1)]
    every = -(-len(steps) // _MOST_POINTS)
    return tuple(steps[1::every])


# Traced steps by category, and what changed in them.
def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


def trace_tables(result: Result, stored: Baselines) -> list[tuple[str, Table]]:
    """Tables of one case: a step by category, and the names whose counts moved."""
    # Of the newest launch that has one; before it the other side's, where two took turns, else the baseline's.
    now, before = (
        next((launch.trace for launch in reversed(side) if launch.trace), None)
        for side in (result.launches, result.launches_before)
    )
    baseline = stored.get((result.machine, result.record.digest))
    if before is None and baseline is not None and baseline.trace is not None:
        before = baseline.trace.trace
    if now is None:
        return []
    if before is None:
        parts, whole = parts_by_name(now), now.step_seconds
        told = ((name, parts[name]) for name in ORDER if parts.get(name))
        shares = tuple((name, _ms(part), formats.share(part / whole if whole else None)) for name, part in told)
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


# Cases side by side: the rungs of a ladder, and one case run by run.

# Every id begins with its model and goes on with its precision (``settings/train_spec.py``).
_NAME = re.compile(r"(?s)(?:(?P<model>.+?)-(?=(?:fp32|tf32|bf16|fp16)\b))?(?P<settings>.*?)(?:-gpus(?P<gpus>\d{1,6}))?")


def parts_of_name(case: str) -> tuple[str, str, int]:
    """Model, settings and GPUs of an id, of which documents have no more; an empty text or 0 where it does not say."""
    found = _NAME.fullmatch(case)  # which every text is
    model, settings, gpus = found.groups() if found else ("", case, None)
    return model or "", settings, int(gpus or 0)


def ladder_section(results: Sequence[Result]) -> Section | None:
    """The ladder of every model, and each that has a name (``LoRA: 2``), of two rungs or more."""
    is_one_machine = len({result.machine for result in results}) == 1
    found: dict[str, list[tuple[str, Result]]] = {}
    for result in sorted((one for one in results if one.record.rung), key=_rung_order):
        own, _, number = map(str.strip, result.record.rung.rpartition(":"))
        model, settings, gpus = parts_of_name(result.id)
        title = (own or model or "cases") + ("" if is_one_machine else f" on {result.machine}")
        name = f"{number} {settings} {gpus} GPUs" if gpus > 1 else f"{number} {settings}"
        found.setdefault(title, []).append((name, result))
    tables = tuple((title, _ladder(rungs)) for title, rungs in found.items() if len(rungs) > 1)
    return Section(anchor="ladder", title="The ladder", tables=tables) if tables else None


def _rung_order(result: Result) -> tuple[list[int], str]:
    return [int(part[:9]) for part in re.findall(r"\d+", result.record.rung.rpartition(":")[2])], result.id


def _ladder(rungs: Sequence[tuple[str, Result]]) -> Table:
    rates = [max(0.0, result.figure(RATE).value or 0.0) for _, result in rungs]
    rows = []
    for name, result in rungs:
        rate, memory, reference = result.figure(RATE), result.figure(MEMORY), result.record.reference
        told = [formats.tokens_per_second(each) for each in (rate.value, rate.baseline)]
        if rate.value is None and result.verdict != "pass":
            told[0] = result.verdict
        told += [formats.memory(each) for each in (memory.value, memory.baseline)]
        published = [formats.ABSENT] * 2
        if reference:
            speed = reference.tokens_per_second_per_gpu
            published = ["OOM" if speed is None else formats.tokens_per_second(speed)]
            published.append(formats.memory(reference.peak_reserved_bytes))
        rows.append((name, *told[:2], published[0], *told[2:], published[1]))
    headings = ("rung", "tokens/s/GPU", "baseline", "published", "peak memory", "baseline", "published")
    return Table(headings, tuple(rows), bars=tuple(rate / (max(rates) or 1.0) for rate in rates))


# What cases took run by run: where that changed, and what else was different there.
def history_section(histories: Sequence[CaseHistory]) -> Section | None:
    """Those that changed, the worst first; ``None`` where there are none."""
    if not (several := [one for one in histories if one.segments]):
        return None
    changed = sorted((one for one in several if one.latest_change), key=lambda one: one.latest_rate)
    runs = {result.run for one in several for result in one.results}
    first = min(one.results[0].began for one in several)[:10]
    told = f"{formats.counted(len(several), 'case')} over {len(runs)} runs since {first}: "
    told += f"{len(changed) or 'none'} with a change point."
    left = len(changed) - _MOST_HISTORIES
    told += f" {left} of them are not drawn here; llmperf history lists them." if left > 0 else ""
    charts = tuple(map(_history, changed[:_MOST_HISTORIES]))
    return Section(anchor="history", title="History", lines=(told,), charts=charts)


def _history(one: CaseHistory) -> Chart:
    latest = one.segments[-1]
    since, change = latest.results[0].began[:10], latest.change
    told = f"{formats.percent(change.rate)} since {since}" if change else f"counts changed on {since}"
    if change and change.shared is not None:
        told += f", {formats.percent(change.shared)} of all cases that ran with it"
    counted = [result for segment in one.segments for result in segment.results]
    axis, places = _places([result.began for result in counted])
    rates = [round(each.tokens_per_second_per_gpu or 1 / each.step_seconds, 3) for each in counted]
    runs, levels, at = [*zip(places, rates, strict=True)][:: -(-len(counted) // _MOST_POINTS)], list[Line](), 0
    for segment in one.segments:
        rate = round(segment.rate(segment.step_seconds) or 1 / segment.step_seconds, 3)
        first, at = places[at], at + len(segment.results)
        levels.append(Line("level", "baseline", ((first, rate), (places[at - 1], rate))))
    columns, changed = level_columns(one.segments), ["; ".join(each.different) for each in one.segments]
    columns.insert(2, Column("what changed", [words or formats.ABSENT for words in changed], right=False))
    headings, rows = [column.heading for column in columns], zip(*(column.cells for column in columns), strict=True)
    return Chart(
        title=one.id,
        says=f"Tokens/s per GPU of {len(one.results)} runs: {told}.",
        note=f"{told}. What else changed: {'; '.join(latest.different) or 'nothing else that is recorded'}.",
        x_axis=axis,
        y_axis="tokens/s/GPU",
        lines=(*levels, Line("run", "now", tuple(runs))),
        table=Table(tuple(headings), tuple(rows), 3),
    )


def _places(began: Sequence[str]) -> tuple[str, list[float]]:
    """What the axis of runs that ``began`` so is called, and where on it each is: runs of one day, by their order."""
    try:
        days = [float(date.fromisoformat(each[:10]).toordinal()) for each in began]
    except ValueError:  # a time that is none, in a file that somebody wrote
        days = []
    if min(days, default=0) == max(days, default=0):
        return "run", [float(number) for number, _ in enumerate(began, 1)]
    return f"days since {began[0][:10]}", [day - days[0] for day in days]
