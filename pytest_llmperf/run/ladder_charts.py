"""Charts of cases side by side: the rungs of a ladder, and one case run by run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

from pytest_llmperf.analysis.ladder import LADDERS, NOTES, Rung
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.case_histories import CaseHistory
from pytest_llmperf.records.metrics import MEMORY, METRICS, RATE
from pytest_llmperf.records.result import PastResult
from pytest_llmperf.report.page import NOW, STORED, Chart, Line, LineChart, Row, RowChart, Section, Table
from pytest_llmperf.report.results_json import Result
from pytest_llmperf.report.text import Column
from pytest_llmperf.run.history import level_columns
from pytest_llmperf.support import formats

_MARKS = ("baseline", "published")
_MOST_RUNGS, _MOST_CHARTS, _MOST_HISTORIES, _MOST_POINTS = 24, 18, 8, 400

# Every id begins with its model and goes on with its precision (``settings/train_spec.py``).
_NAME = re.compile(r"(?s)(?:(?P<model>.+?)-(?=(?:fp32|tf32|bf16|fp16)\b))?(?P<settings>.*?)(?:-gpus(?P<gpus>\d{1,6}))?")


@dataclass(frozen=True)
class CaseName:
    """The parts of an id, where the case's spec is not at hand: documents have ids alone."""

    model: str
    settings: str
    """Without the number of GPUs."""
    gpus: int | None

    @classmethod
    def parse(cls, name: str) -> CaseName:
        found = _NAME.fullmatch(name)  # which every text is
        model, settings, gpus = found.groups() if found else ("", name, None)
        return cls(model or "", settings, int(gpus) if gpus else None)

    @property
    def rung(self) -> str:
        """Its name among the others of a ladder: its settings, and its GPUs where these are several."""
        return f"{self.settings} {self.gpus} GPUs" if (self.gpus or 0) > 1 else self.settings


Baselines = Mapping[tuple[str, str], Baseline]
"""What is stored, by machine kind and digest."""


class _Figures(NamedTuple):
    """Tokens/s per GPU and reserved bytes."""

    rate: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class _Step:
    """A rung with what is known of it."""

    name: tuple[str, str]
    """Its number, and its settings."""
    ran_out_of_memory: bool
    """As published: a trial that shows the limit, and no step."""
    now: _Figures
    """Of this run; of a rung that it did not measure the baseline's."""
    baseline: _Figures
    published: _Figures
    is_stored: bool = False
    verdict: str = ""
    """Of this run, where it says more than that there is no figure."""

    @property
    def label(self) -> str:
        return " ".join(self.name)


def notes_of(results: Iterable[Result]) -> tuple[str, ...]:
    """Where published figures come from, and how they differ from ours."""
    sources = dict.fromkeys(result.record.reference.source for result in results if result.record.reference)
    return (f"published: {'; '.join(filter(None, sources))}", *NOTES) if any(sources) else ()


def ladder_section(results: Sequence[Result], stored: Baselines) -> Section | None:
    """The ladder of every model, and each that has a name, with two rungs or more; ``None`` where there is none."""
    charts: list[Chart] = []
    machines = dict.fromkeys(result.machine for result in results)
    for machine in machines:
        for model, steps in _ladders([one for one in results if one.machine == machine], machine, stored).items():
            if sum(step.now.rate is not None for step in steps) > 1:
                charts += _charts(f"{model} on {machine}" if len(machines) > 1 else model, steps[:_MOST_RUNGS])
    return Section(anchor="ladder", title="The ladder", charts=tuple(charts[:_MOST_CHARTS])) if charts else None


def _ladders(results: Iterable[Result], machine: str, stored: Baselines) -> Mapping[str, list[_Step]]:
    marked = [result for result in results if result.record.rung]
    measured = {result.record.digest: result for result in marked if not ladder_of(result)}
    found: dict[str, list[_Step]] = {}
    of_the_chapter = {rung.spec.digest for rungs in LADDERS for rung in rungs}
    for rungs in LADDERS:
        if any(rung.spec.digest in measured for rung in rungs):
            found[rungs[0].spec.model] = [
                _step(rung, measured.get(rung.spec.digest), stored.get((machine, rung.spec.digest))) for rung in rungs
            ]
    others = [result for result in marked if ladder_of(result) or result.record.digest not in of_the_chapter]
    for result in sorted(others, key=lambda one: (_order(one.record.rung), one.id)):
        name = ladder_of(result) or CaseName.parse(result.id).model or "cases"
        found.setdefault(name, []).append(_step(None, result, None))
    return found


def ladder_of(result: Result) -> str:
    """The name of a user's own ladder, before its rung: ``LoRA: 2``; empty: it has none."""
    return result.record.rung.rpartition(":")[0].strip()


def _order(number: str) -> tuple[int, ...]:
    number = number.rpartition(":")[2].strip()
    return tuple(int(part) for part in number.split(".") if part.isdigit() and len(part) < 7)  # noqa: PLR2004


def _step(rung: Rung | None, result: Result | None, baseline: Baseline | None) -> _Step:
    both = METRICS[RATE], METRICS[MEMORY]
    stored = _Figures(*(metric.read(baseline.launches) for metric in both)) if baseline else _Figures()
    references = [of.reference for of in (result and result.record, rung) if of and of.reference]
    published = _Figures(
        next(filter(None, (each.tokens_per_second_per_gpu for each in references)), None),
        next(filter(None, (each.peak_reserved_bytes for each in references)), None),
    )
    case, number = (rung.spec.id, rung.number) if rung else (result.id, "") if result else ("", "")
    name = (result.record.rung.rpartition(":")[2].strip() if result else number, CaseName.parse(case).rung)
    ran_out = rung is not None and rung.ran_out_of_memory
    if result is None:
        return _Step(name, ran_out, stored, _Figures(), published, is_stored=baseline is not None)
    rate, memory = result.figure(RATE), result.figure(MEMORY)
    # An invalid case is held against nothing; what it was is known all the same.
    held = stored if rung and rate.value is None else _Figures(rate.baseline, memory.baseline)
    # An old file may have lost the rate of a case that passed.
    verdict = "" if result.verdict == "pass" else result.verdict
    return _Step(name, ran_out, _Figures(rate.value, memory.value), held, published, verdict=verdict)


def _charts(where: str, steps: Sequence[_Step]) -> Iterator[Chart]:
    known = [step for step in steps if step.now.rate is not None]
    best = max(known, key=lambda step: step.now.rate or 0.0)
    fastest = f"{best.label} with {formats.tokens_per_second(best.now.rate)} tokens/s per GPU"
    speeds = f"Throughput of {len(known)} rungs of {where}; the fastest is {fastest}."
    yield _compared(where, steps, 0, "throughput", says=speeds, axis="tokens/s/GPU")
    size, unit = formats.unit_of_memory(max((step.now.memory or 0.0 for step in steps), default=0.0))
    says = f"Peak memory of each rung of {where}, reserved by the worst rank."
    yield _compared(where, steps, 1, "peak memory", says=says, axis=f"{unit} reserved", size=size)


def _compared(  # noqa: PLR0913 - what is said of a figure
    where: str, steps: Sequence[_Step], index: int, what: str, *, says: str, axis: str, size: float = 1.0
) -> RowChart:
    """One of the figures of every step, beside the baseline's and the published one, in the axis' unit of ``size``."""
    words, heading = (formats.memory, what) if index else (formats.tokens_per_second, axis)
    rows, cells = [], []
    for step in steps:
        now, held, published = (figures[index] for figures in (step.now, step.baseline, step.published))
        told = step.verdict if now is None and step.verdict and index == 0 else words(now)
        parts = () if now is None else ((STORED if step.is_stored else NOW, now / size),)
        marks = zip(_MARKS, (held, published), strict=True)
        rows.append(Row(step.label, told, parts, tuple((name, at / size) for name, at in marks if at is not None)))
        cells.append((*step.name, told, words(held), "OOM" if step.ran_out_of_memory else words(published)))
    table = Table(("rung", "settings", heading, "baseline", "published"), tuple(cells), 2)
    return RowChart(title=f"{where}: {what}", says=says, axis=axis, rows=tuple(rows), marks=_MARKS, table=table)


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
    columns, changed = level_columns(one.segments), ["; ".join(each.different) for each in one.segments]
    columns.insert(2, Column("what changed", [words or formats.ABSENT for words in changed], right=False))
    headings, rows = [column.heading for column in columns], zip(*(column.cells for column in columns), strict=True)
    return LineChart(
        title=one.id,
        says=f"Tokens/s per GPU of {len(one.results)} runs: {told}.",
        note=f"{told}. What else changed: {'; '.join(latest.different) or 'nothing else that is recorded'}.",
        x_axis=f"days since {first}",
        y_axis="tokens/s/GPU",
        lines=(*levels, Line("run", "now", tuple(runs))),
        table=Table(tuple(headings), tuple(rows), 3),
    )


def _day(result: PastResult, first: str) -> float:
    try:
        return float((date.fromisoformat(result.began[:10]) - date.fromisoformat(first)).days)
    except ValueError:  # a time that is none, in a file that somebody wrote
        return 0.0
