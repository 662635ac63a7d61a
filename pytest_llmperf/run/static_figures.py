"""What a step does without a launch on a GPU: of a spec as fake tensors tell it, of a script as its small form does.

The small form, a command that the user gave, runs on this machine's CPU, and nobody times it. What it does is exact
where it repeats: figures that are not the stored ones count once a second launch has the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from pytest_llmperf.launch.device import NO_GPU
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.prediction import PredictionError, why_none
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.phases import OTHER
from pytest_llmperf.records.result import Spent
from pytest_llmperf.records.trace import StaticStep
from pytest_llmperf.run.case import Caller
from pytest_llmperf.settings.spec import ScriptSpec, Spec
from pytest_llmperf.settings.train_spec import TrainSpec

# Enough to know which optimizer ends a step.
_MOST_STEPS = 30
# Those of Python and numpy call no operator.
_IRRELEVANT = frozenset({"python", "numpy"})


@dataclass(frozen=True)
class NoStep:
    """Why nothing is known of a case's step."""

    why: str
    is_lost: bool
    """Whether it should be: green would be a lie."""


def step_of(caller: Caller, spec: Spec, stored: Collection[StaticStep]) -> StaticStep | NoStep:
    """The step of ``spec``, of which these are ``stored``.

    Raises:
        LaunchFailed: the small form of a script yielded no record.
    """
    if isinstance(spec, ScriptSpec):
        return _of_script(caller, spec, stored)
    assert isinstance(spec, TrainSpec)  # noqa: S101 - there are these two
    try:
        caller.run.static_steps.check()
    except PredictionError as error:
        return NoStep(str(error), is_lost=True)
    step = caller.run.static_steps.of(spec)
    if isinstance(step, StaticStep):
        return step
    return NoStep(str(step), is_lost=step.is_lost or (bool(stored) and why_none(spec) is None))


def _of_script(caller: Caller, spec: ScriptSpec, stored: Collection[StaticStep]) -> StaticStep | NoStep:
    if not spec.tiny:
        why = '--perf-static takes a small form of a script: give one for the CPU, e.g. tiny="python train.py --tiny"'
        return NoStep(f"{spec.id}: {why}", is_lost=bool(stored))
    first = _launched(caller, spec, 1)
    if isinstance(first, NoStep) or first in stored:
        return first
    second = _launched(caller, spec, 2)
    if isinstance(second, NoStep) or first == second:
        return second
    names = sorted({*first.operators.items()} ^ {*second.operators.items()})
    name = names[0][0]
    apart = f"{first.operators.get(name, 0):g} and {second.operators.get(name, 0):g} of {name}"
    why = f"its small form does not repeat itself, two launches had {apart} a step; seed= may make it"
    return NoStep(f"{spec.id}: not claimed: {why}", is_lost=bool(stored))


def _launched(caller: Caller, spec: ScriptSpec, number: int) -> StaticStep | NoStep:
    """What a step of one launch of its small form did."""
    run, few = caller.run, min(spec.steps, max(_MOST_STEPS, spec.warmup_steps + 2))
    ranks = spec.gpus if "{gpus}" in spec.tiny else 0
    env = {**spec.env, **NO_GPU}
    small = replace(spec, command=spec.tiny, tiny="", name=f"{spec.id}-tiny", gpus=ranks, steps=few, env=env)
    before = sum(1 for _ in run.run_folder.glob(f"{small.id}-*"))
    request = LaunchRequest(
        spec=small,
        folder=run.run_folder / f"{small.id}-{before + 1}",
        gpus=(),
        timeout_seconds=run.launch_seconds,
        root=run.rootdir,
    )
    with caller.observer.launch(f"{spec.id} small", number, 2) as live:
        try:
            outcome = LocalLauncher().launch(request, live.update)
        finally:
            live.clear()
            caller.findings.spent += Spent(launches=1, phases={OTHER: request.meter.seconds})
    if isinstance(outcome, Failure):
        raise LaunchFailed(spec.id, outcome)
    if not outcome.trace:
        return NoStep(f"{spec.id}: not claimed: no trace: {outcome.trace.none}", is_lost=True)
    versions = outcome.environment.versions.items()
    exact = {name: version.partition("+")[0] for name, version in versions if name not in _IRRELEVANT}
    return StaticStep.of(outcome.trace, {**exact, "tiny": spec.tiny})
