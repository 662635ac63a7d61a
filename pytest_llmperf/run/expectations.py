"""Stored baselines of every kind of GPU as cases that an expectation is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

from pytest_llmperf.analysis.expectation import Case, Error, Expectation, expected, filled, judged, standing
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.records.launch import OLDER, Launch
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec

_RATES = ("matmul_flops", "copy_bytes_per_second")


@cache
def stored_cases(root: Path) -> list[Case]:
    """Those of GPUs under ``root``, as they were first; a step that is counted for one kind of GPU is that of all."""
    store = BaselineStore(root)
    baselines = [baseline for machine in store.machines() for baseline in store.baselines(machine)]
    steps = {one.digest: one.static.step for one in baselines if one.static}
    found = (_case(one) for one in baselines)
    return [replace(one, static=steps.get(one.digest)) for one in found if one]


def _case(baseline: Baseline) -> Case | None:
    on_a_gpu = all(launch.seen.run.is_on_gpu for launch in baseline.launches)
    try:
        spec = TrainSpec.from_dict(baseline.spec)
    except (TypeError, ValueError):  # a script, or settings that are none of today's
        return None
    if not on_a_gpu or spec.digest != baseline.digest:
        return None
    seconds = math.exp(fmean(math.log(launch.median_step_seconds) for launch in baseline.launches))
    trace = baseline.trace.trace if baseline.trace else None
    rates = rates_of(baseline.launches)
    return Case(spec=spec, kind=baseline.machine, step_seconds=seconds, trace=trace, rates=rates)


def rates_of(launches: Iterable[Launch]) -> tuple[float, float] | None:
    """What their chips gave to products and copies that never change."""
    told = [launch.canary for launch in launches if all(launch.canary.get(name) for name in _RATES)]
    return (median(one[_RATES[0]] for one in told), median(one[_RATES[1]] for one in told)) if told else None


@cache
def _judged(root: Path) -> tuple[list[Case], list[Error]]:
    cases = filled(stored_cases(root))
    return cases, judged(cases)


def expectation(spec: TrainSpec, kind: str, root: Path, launches: Sequence[Launch] = ()) -> Expectation | None:
    """Of ``spec`` on ``kind``, by all others under ``root``; ``launches`` tell what a chip that nobody knew gives."""
    cases, errors = _judged(root)
    static = next((one.static for one in cases if one.digest == spec.digest), None)
    return expected(Case(spec=spec, kind=kind, static=static, rates=rates_of(launches)), cases, errors)


def newest_launch(spec: TrainSpec, kind: str, root: Path) -> Launch | None:
    """What is stored of it; a baseline keeps one trace beside its launches."""
    stored = BaselineStore(root).load(kind, spec)
    if stored is None:
        return None
    return replace(stored.newest[-1], trace=stored.trace.trace if stored.trace else Trace(none=OLDER))


def first_guess(spec: Spec, kind: str, root: Path, launches: Sequence[Launch]) -> tuple[str, ...]:
    """What stored cases, of other kinds of GPU too, say of the first figure of ``spec``; nothing is held by it."""
    found = expectation(spec, kind, root, launches) if isinstance(spec, TrainSpec) else None
    if found is None:
        return ()
    newest = next((launch for launch in reversed(launches) if launch.trace), launches[-1])
    return (f"{standing(found, newest)} (by {found.nearest.spec.id} on {found.nearest.kind}, and others)",)
