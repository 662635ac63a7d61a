"""The ladder: each rung as a bar beside its baseline and what was published, and its gain over the one before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.analysis import ladder
from pytest_llmperf.analysis import ladder as chapter15
from pytest_llmperf.analysis.ladder import Gain, Rung, Width, gains
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.report.page.page_model import Bar, BarChart, Chart, Line, LineChart, Section, Table
from pytest_llmperf.run.run_page.case_name import CaseName
from pytest_llmperf.run.run_page.run_document import Result
from pytest_llmperf.run.run_page.stored_figures import StoredFigures, stored_figure
from pytest_llmperf.support import formats

# More are no picture.
_MOST_RUNGS, _MOST_CHARTS = 24, 18

_CHAPTER = {rung.spec.digest: rung for ladder in chapter15.LADDERS for rung in ladder}


@dataclass(frozen=True)
class _Step:
    """A rung with what is known of it."""

    number: str
    settings: str
    rate: float | None = None
    memory: float | None = None
    baseline_rate: float | None = None
    baseline_memory: float | None = None
    published_rate: float | None = None
    published_memory: float | None = None
    is_stored: bool = False
    out_of_memory: bool = False
    """As published: a trial that shows the limit, and no step."""
    verdict: str = ""
    """Of this run; empty where it has none."""

    @property
    def label(self) -> str:
        return f"{self.number} {self.settings}"


def ladder_section(results: Sequence[Result], stored: StoredFigures) -> Section | None:
    """Of every model with two rungs or more; ``None`` where there is none."""
    charts: list[Chart] = []
    machines = dict.fromkeys(result.machine for result in results)
    for machine in machines:
        for model, steps in _ladders([one for one in results if one.machine == machine], machine, stored).items():
            if sum(step.rate is not None for step in steps) > 1:
                where = f"{model} on {machine}" if len(machines) > 1 else model
                charts += _charts(where, steps[:_MOST_RUNGS])
    return Section(anchor="ladder", title="The ladder", charts=tuple(charts[:_MOST_CHARTS])) if charts else None


def _ladders(results: Iterable[Result], machine: str, stored: StoredFigures) -> Mapping[str, list[_Step]]:
    measured = {result.told.digest: result for result in results if result.told.rung}
    found: dict[str, list[_Step]] = {}
    for rungs in chapter15.LADDERS:
        if any(rung.spec.digest in measured for rung in rungs):
            found[rungs[0].spec.model] = [
                _step_of(rung, measured.get(rung.spec.digest), machine, stored) for rung in rungs
            ]
    others = [result for digest, result in measured.items() if digest not in _CHAPTER]
    for result in sorted(others, key=lambda one: (_order(one.told.rung), one.id)):
        name = CaseName.of(result.id)
        found.setdefault(name.model or "cases", []).append(_measured(result, name.rung))
    return found


def _order(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split(".") if part.isdigit() and len(part) < 7)  # noqa: PLR2004


def _step_of(rung: Rung, result: Result | None, machine: str, stored: StoredFigures) -> _Step:
    settings = CaseName.of(rung.spec.id).rung
    baseline = stored.of(machine, rung.spec.digest)
    if result is not None:
        step = _measured(result, settings, rung)
        if step.rate is not None:
            return step
        # An invalid case is held against nothing; what it was is known all the same.
        then = stored_figure(baseline, RATE), stored_figure(baseline, MEMORY)
        return replace(step, baseline_rate=then[0], baseline_memory=then[1])
    reference = rung.reference
    return _Step(
        rung.number,
        settings,
        rate=stored_figure(baseline, RATE),
        memory=stored_figure(baseline, MEMORY),
        published_rate=rung.published_rate,
        published_memory=reference.peak_reserved_bytes if reference else None,
        is_stored=baseline is not None,
        out_of_memory=rung.ran_out_of_memory,
    )


def _measured(result: Result, settings: str, rung: Rung | None = None) -> _Step:
    rate, memory = result.figure(RATE), result.figure(MEMORY)
    reference = rung.reference if rung else None
    return _Step(
        result.told.rung,
        settings,
        rate=rate.value,
        memory=memory.value,
        baseline_rate=rate.baseline,
        baseline_memory=memory.baseline,
        published_rate=result.published_rate or (rung.published_rate if rung else None),
        published_memory=result.published_bytes or (reference.peak_reserved_bytes if reference else None),
        out_of_memory=rung is not None and rung.ran_out_of_memory,
        verdict=result.verdict,
    )


def _charts(where: str, steps: Sequence[_Step]) -> list[Chart]:
    ours, published = _gains(steps, [step.rate for step in steps]), _gains(steps, [one.published_rate for one in steps])
    speeds = BarChart(
        title=f"{where}: throughput",
        says=_says(where, steps),
        axis="tokens/s/GPU",
        bars=tuple(
            Bar(step.label, step.rate, _rate(step), step.baseline_rate, step.published_rate, step.is_stored)
            for step in steps
        ),
        table=Table(
            headings=("rung", "settings", "tokens/s/GPU", "baseline", "published"),
            rows=tuple(
                (
                    step.number,
                    step.settings,
                    _rate(step),
                    formats.tokens_per_second(step.baseline_rate),
                    "OOM" if step.out_of_memory else formats.tokens_per_second(step.published_rate),
                )
                for step in steps
            ),
            num_words=2,
        ),
    )
    size, unit = formats.unit_of_memory(max((step.memory or 0.0 for step in steps), default=0.0))
    memory = BarChart(
        title=f"{where}: peak memory",
        says=f"Peak memory of each rung of {where}, reserved by the worst rank.",
        axis=f"{unit} reserved",
        bars=tuple(
            Bar(
                step.label,
                _of(step.memory, size),
                formats.memory(step.memory),
                _of(step.baseline_memory, size),
                _of(step.published_memory, size),
                step.is_stored,
            )
            for step in steps
        ),
        table=Table(
            headings=("rung", "settings", "peak memory", "baseline", "published"),
            rows=tuple(
                (
                    step.number,
                    step.settings,
                    *map(formats.memory, (step.memory, step.baseline_memory)),
                    "OOM" if step.out_of_memory else formats.memory(step.published_memory),
                )
                for step in steps
            ),
            num_words=2,
        ),
    )
    return [speeds, memory, _speed_ups(where, steps, ours, published)]


def _speed_ups(where: str, steps: Sequence[_Step], ours: Sequence[Gain], published: Sequence[Gain]) -> BarChart:
    first = steps[0].number
    rows = list(zip(steps, ours, published, strict=True))
    return BarChart(
        title=f"{where}: speed-up per rung",
        says=f"How many times as fast as the step before it each rung of {where} is.",
        axis="times the step before",
        bars=tuple(
            Bar(step.label, mine.over_previous, _times(mine.over_previous), None, theirs.over_previous, step.is_stored)
            for step, mine, theirs in rows
            if mine.over_previous is not None or theirs.over_previous is not None
        ),
        table=Table(
            headings=("rung", "settings", "over the step before", "published", f"over {first}", "published "),
            rows=tuple(
                (
                    step.number,
                    step.settings,
                    *map(_times, (mine.over_previous, theirs.over_previous, mine.over_first, theirs.over_first)),
                )
                for step, mine, theirs in rows
            ),
            num_words=2,
        ),
    )


def _gains(steps: Sequence[_Step], rates: Sequence[float | None]) -> list[Gain]:
    """As the chapter's tables have them: a trial that ran out of memory is nothing to climb from."""
    return gains([_OOM if step.out_of_memory else _STEP for step in steps], rates)


# All that a gain asks of a rung is whether its publication ran out of memory.
_STEP = next(rung for rung in chapter15.LLAMA if not rung.ran_out_of_memory)
_OOM = next(rung for rung in chapter15.LLAMA if rung.ran_out_of_memory)


def _says(where: str, steps: Sequence[_Step]) -> str:
    known = [step for step in steps if step.rate is not None]
    best = max(known, key=lambda step: step.rate or 0.0)
    return (
        f"Throughput of {len(known)} rungs of {where}; the fastest is {best.label} with {_rate(best)} tokens/s per GPU."
    )


def _rate(step: _Step) -> str:
    # An old file may have lost the rate of a case that passed.
    why = step.verdict if step.rate is None and step.verdict != "pass" else ""
    return why or formats.tokens_per_second(step.rate)


def _of(num_bytes: float | None, size: float) -> float | None:
    return None if num_bytes is None else num_bytes / size


def _times(ratio: float | None) -> str:
    return formats.ABSENT if ratio is None else f"{ratio:.2f}"


# Scaling: one training on more and more GPUs beside the ideal line.


# The chapter's rates of a training at several numbers of GPUs, by what its ids have in common.
_PUBLISHED = {
    CaseName.of(rungs[0].spec.id).training: {rung.spec.gpus: rung.published_rate for rung in rungs}
    for rungs in ladder.SCALINGS
}


# More are no picture.
_MOST_SERIES = 6


@dataclass(frozen=True)
class _Series:
    """One training on one machine kind: tokens/s per GPU by number of GPUs."""

    name: str
    now: Mapping[int, float]
    stored: Mapping[int, float]

    @property
    def rates(self) -> Mapping[int, float]:
        """What this run measured, and for the other widths what is stored."""
        return dict(sorted({**self.stored, **self.now}.items()))

    @property
    def published(self) -> Mapping[int, float]:
        found = _PUBLISHED.get(self.name.partition(" on ")[0], {})
        return {gpus: rate for gpus, rate in found.items() if rate is not None}


def scaling_section(results: Sequence[Result], stored: StoredFigures) -> Section | None:
    """``None`` where nothing was measured on several GPUs."""
    found = [series for series in _all_series(results, stored) if len(series.rates) > 1 and max(series.rates) > 1]
    if not found:
        return None
    left = len(found) - _MOST_SERIES
    notes = (
        (f"Left out here: {left} more training{'s' * (left > 1)}; their cases are in the table.",) if left > 0 else ()
    )
    # Of most widths first, and of those the chapter's.
    found = sorted(found, key=lambda one: (-len(one.rates), not one.published))[:_MOST_SERIES]
    return Section(anchor="scaling", title="Scaling", charts=tuple(map(_speed, found)), lines=notes)


def _all_series(results: Sequence[Result], stored: StoredFigures) -> list[_Series]:
    now: dict[tuple[str, str], dict[int, float]] = {}
    for result in results:
        name, rate = CaseName.of(result.id), result.figure(RATE).value
        if name.gpus and rate and rate > 0:
            now.setdefault((result.machine, name.training), {})[name.gpus] = rate
    machines = {machine for machine, _ in now}
    before: dict[tuple[str, str], dict[int, float]] = {}
    for machine in machines:
        for case_id, baseline in stored.by_id(machine).items():
            name, rate = CaseName.of(case_id), stored_figure(baseline, RATE)
            if name.gpus and rate and (machine, name.training) in now:
                before.setdefault((machine, name.training), {})[name.gpus] = rate
    return [
        _Series(
            training if len(machines) == 1 else f"{training} on {machine}", widths, before.get((machine, training), {})
        )
        for (machine, training), widths in now.items()
    ]


def _widths(rates: Mapping[int, float]) -> list[Width]:
    return [Width(gpus, rate, rates.get(1)) for gpus, rate in sorted(rates.items())]


def _total(rates: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    return tuple((float(width.gpus), width.tokens_per_second or 0.0) for width in _widths(rates))


def _lines_of(series: _Series) -> list[Line]:
    lines = [Line("this run, or else the baseline", "now", _total(series.rates))]
    if len(series.published) > 1:
        lines.append(Line("published", "published", _total(series.published)))
    return lines


def _speed(series: _Series) -> LineChart:
    rates = series.rates
    narrowest = min(rates)
    ideal = tuple((float(gpus), rates[narrowest] * gpus) for gpus in sorted({*rates, *series.published}))
    rows = _table_rows(series)
    return LineChart(
        title=f"{series.name}: throughput by GPUs",
        says=f"Tokens/s of all GPUs together on {', '.join(map(str, rates))} GPUs, beside the ideal line through "
        f"{narrowest}.",
        x_axis="GPUs",
        y_axis="tokens/s",
        lines=(*_lines_of(series), Line("ideal", "ideal", ideal)),
        doubles=True,
        table=Table(
            headings=("GPUs", "tokens/s/GPU", "tokens/s", "ideal", "speed-up", "efficiency", "published efficiency"),
            rows=rows,
        ),
    )


def _table_rows(series: _Series) -> tuple[tuple[str, ...], ...]:
    rates, published = series.rates, {width.gpus: width for width in _widths(series.published)}
    of_narrowest = rates[min(rates)]
    rows = []
    for width in _widths(rates):
        theirs = published.get(width.gpus)
        rows.append(
            (
                f"{width.gpus}" + ("" if width.gpus in series.now else " (baseline)"),
                formats.tokens_per_second(width.rate),
                formats.tokens_per_second(width.tokens_per_second),
                formats.tokens_per_second(of_narrowest * width.gpus),
                formats.ABSENT if width.speed_up is None else f"{width.speed_up:.2f}",
                formats.share(width.efficiency),
                formats.share(theirs.efficiency if theirs else None),
            )
        )
    return tuple(rows)
