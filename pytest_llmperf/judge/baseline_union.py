"""Union: what two branches made of one baseline, as one baseline again. Pure.

A history only grows, and launches follow it: so each side tells by itself what it added, and what it replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, TypeVar

from pytest_llmperf.judge.acceptance import MAX_LAUNCHES
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import Accepted, BaselineError
from pytest_llmperf.judge.batch_size_baseline import METRIC, CapacityBaseline
from pytest_llmperf.judge.evidence.exact_changes import changes
from pytest_llmperf.judge.policy import METRICS, Policy
from pytest_llmperf.judge.static.step_union import united_step
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support.formats import in_sentence
from pytest_llmperf.support.quantities import is_positive

_WHAT_TO_DO = "take one side (git checkout --ours or --theirs) and record the case anew where both changes are in"

_RATE, _MEMORY = "tokens_per_second_per_gpu", "peak_reserved_bytes"


class _Kept(Protocol):
    """What the files of both kinds have."""

    @property
    def id(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def machine(self) -> str: ...
    @property
    def history(self) -> tuple[Accepted, ...]: ...


_Figures = TypeVar("_Figures", Baseline, CapacityBaseline)


def united(base: Baseline | None, ours: Baseline, theirs: Baseline) -> Baseline:
    """Both sides' launches and acceptances, of which the newest is what counts from now on.

    Launches of another speed took the place of what there was on the side that accepted them: they do here too.
    ``base`` is none where both sides recorded the case for the first time, or where nobody knows it.

    Raises:
        BaselineError: the sides are of different settings or machines, one took back what had been accepted, or what
            they accepted does not agree and the newest cannot stand for both: figures, or what is exact.
    """
    history, gates = _history(base, ours, theirs), _gates(ours, theirs)
    _refuse_apart(history, ours, theirs, gates)
    _refuse_changed(ours, theirs)
    launches = _launches(history, ours, theirs, gates[_RATE])
    newest = _newest(history, ours, theirs)
    return replace(
        newest,
        launches=launches,
        anchor=history[0],
        history=history,
        # Of launches that were replaced a trace says nothing.
        trace=next(
            (
                side.trace
                for side in (newest, ours, theirs)
                if side.trace and any(one in launches for one in side.newest)
            ),
            None,
        ),
        static=united_step(ours.id, base.static if base else None, ours.static, theirs.static),
    )


def _refuse_changed(ours: Baseline, theirs: Baseline) -> None:
    """Launches of both sides would stand for one another from now on: so what is exact has to be the same in them."""
    shared = len(_shared(ours, theirs))
    if len(ours.history) > shared and len(theirs.history) > shared:
        changed = changes(ours.newest, theirs.newest)
        if changed:
            raise BaselineError(f"{ours.id}: not the same in theirs and ours ({changed[0]}); {_WHAT_TO_DO}")


def united_capacity(
    base: CapacityBaseline | None, ours: CapacityBaseline, theirs: CapacityBaseline
) -> CapacityBaseline:
    """The same of a largest micro-batch, which is exact.

    Raises:
        BaselineError: as ``united``.
    """
    history = _history(base, ours, theirs)
    _refuse_apart(history, ours, theirs, {METRIC: _Gate("1", 0.0)})
    return replace(_newest(history, ours, theirs), anchor=history[0], history=history)


def _history(base: _Kept | None, ours: _Kept, theirs: _Kept) -> tuple[Accepted, ...]:
    """Every acceptance once: what both began with, then what either side has, in order of time."""
    for name in ("digest", "machine"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise BaselineError(f"{ours.id}: ours is of {name} {mine}, theirs of {other}; {_WHAT_TO_DO}")
    for side, kept in (("ours", ours), ("theirs", theirs)):
        gone = [entry for entry in (base.history if base else ()) if entry not in kept.history]
        if gone:
            what = f"what was accepted at {gone[0].recorded_at} is gone, or was edited"
            raise BaselineError(f"{ours.id}: in {side} {what}; {_WHAT_TO_DO}")
    first = _shared(ours, theirs)
    mine, other = (_in_order(side.history[len(first) :]) for side in (ours, theirs))
    rest = [*mine, *(one for one in other if one[1] not in ours.history)]
    return (*first, *(entry for _, entry in sorted(rest, key=lambda one: one[0])))


def _in_order(entries: Sequence[Accepted]) -> Iterator[tuple[str, Accepted]]:
    """Each acceptance with its time; a clock that was set back turns no order round."""
    return zip(accumulate((entry.recorded_at for entry in entries), max), entries, strict=True)


def _shared(ours: _Kept, theirs: _Kept) -> tuple[Accepted, ...]:
    """What both histories begin with."""
    pairs = list(zip(ours.history, theirs.history, strict=False))
    same = next((number for number, (mine, other) in enumerate(pairs) if mine != other), len(pairs))
    return ours.history[:same]


def _newest(history: Sequence[Accepted], ours: _Figures, theirs: _Figures) -> _Figures:
    """The side that accepted last."""
    return ours if ours.history[-1] == history[-1] else theirs


@dataclass(frozen=True)
class _Gate:
    """How far apart two figures may be and still be of one population."""

    unit: str
    tolerance: float
    slack: float = 0.0

    def parts(self, a: float, b: float) -> bool:
        low, high = sorted((a, b))
        return high - low > max(low * self.tolerance, self.slack)


def _gates(ours: Baseline, theirs: Baseline) -> dict[str, _Gate]:
    """By what the machine and the spec tolerate; what a project's own settings do is in no file."""
    policy = Policy.for_gpu() if ours.launches[-1].environment.driver else Policy.for_cpu()
    own = {_RATE: ours.spec.get("throughput_tolerance"), _MEMORY: ours.spec.get("memory_tolerance")}
    policy = policy.merged({name: value for name, value in own.items() if value is not None and is_positive(value)})
    tolerances = dict(policy.at(theirs.newest, ours).tolerances)
    # Whatever was tolerated where launches were replaced, it was less than what they moved by.
    tolerances[_RATE] = min([tolerances[_RATE], *(move / 2 for move in _moves(ours, theirs))])
    # Launches of one side may have begun warm and the other's cold: phases tell nothing of both.
    held = {name: METRICS[name] for name in tolerances if name in METRICS}
    return {name: _Gate(metric.unit, tolerances[name], metric.slack) for name, metric in held.items()}


def _moves(ours: Baseline, theirs: Baseline) -> Iterator[float]:
    """By which fraction a side's rate moved that replaced its launches."""
    shared = _shared(ours, theirs)
    for side in (ours, theirs):
        if _replaced_at(side, shared) is not None:
            low, high = sorted(entry.metrics.get(_RATE, math.nan) for entry in (shared[-1], side.history[-1]))
            if 0 < low < high:
                yield high / low - 1


def _refuse_apart(history: Sequence[Accepted], ours: _Figures, theirs: _Figures, gates: Mapping[str, _Gate]) -> None:
    """Where figures of both sides part, the newest stand for both if the other side found what there had been."""
    shared = [entry.metrics for entry in _shared(ours, theirs)[-1:]]
    older = theirs if _newest(history, ours, theirs) is ours else ours
    for name, gate in gates.items():
        mine, other = (side.history[-1].metrics.get(name) for side in (ours, theirs))
        if mine is None or other is None or not gate.parts(mine, other):
            continue
        if any(name in then and not gate.parts(older.history[-1].metrics[name], then[name]) for then in shared):
            continue
        figures = f"{in_sentence(mine, gate.unit)} in ours, {in_sentence(other, gate.unit)} in theirs"
        raise BaselineError(f"{ours.id}: {name} was accepted as {figures}; {_WHAT_TO_DO}")


def _replaced_at(side: Baseline, shared: Sequence[Accepted]) -> Accepted | None:
    """The acceptance whose launches took the place of all that were there when the sides parted, if one did."""
    groups = side.held
    oldest = groups[-1][0] if groups else None
    # As many as are kept at most may as well have pushed out the others.
    return oldest if shared and oldest not in shared and len(side.launches) < MAX_LAUNCHES else None


def _launches(history: Sequence[Accepted], ours: Baseline, theirs: Baseline, gate: _Gate) -> tuple[Launch, ...]:
    """In the order of ``history``, from the newest back: to what took the place of others, or to what is gone."""
    held = [group for side in (ours, theirs) for group in side.held]
    shared = _shared(ours, theirs)
    replaced = [entry for side in (ours, theirs) if (entry := _replaced_at(side, shared)) is not None]
    first = min((history.index(entry) for entry in replaced), default=0)
    newest, launches = history[-1].metrics.get(_RATE), tuple[Launch, ...]()
    for entry in reversed(history[first:]):
        own = max((group for each, group in held if each == entry), key=len, default=())
        rate = entry.metrics.get(_RATE)
        # The other side may have found the old speed still after it had been replaced here.
        if replaced and newest is not None and rate is not None and gate.parts(newest, rate):
            break
        launches = (*own, *launches)
        if len(own) < entry.launches:
            break
    return launches[-MAX_LAUNCHES:]
