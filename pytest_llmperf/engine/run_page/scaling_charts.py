"""Scaling: one training on more and more GPUs beside the ideal line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.engine.run_page.case_name import CaseName
from pytest_llmperf.engine.run_page.run_document import Result
from pytest_llmperf.engine.run_page.stored_figures import RATE, StoredFigures, stored_figure
from pytest_llmperf.insight import chapter15
from pytest_llmperf.insight.ladder import Width
from pytest_llmperf.report.page.page_model import Line, LineChart, Section, Table
from pytest_llmperf.support import formats

# The chapter's rates of a training at several numbers of GPUs, by what its ids have in common.
_PUBLISHED = {
    CaseName.of(rungs[0].spec.id).training: {rung.spec.gpus: rung.published_rate for rung in rungs}
    for rungs in chapter15.SCALINGS
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
