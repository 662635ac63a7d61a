"""A paired comparison: two specs, or two environments, launched A B B A … on the same GPUs until they decide."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pytest_llmperf.engine.baseline_comparison import RATE, contradictions, figures
from pytest_llmperf.engine.launch_retry import LaunchRetry
from pytest_llmperf.engine.runner import Runner
from pytest_llmperf.engine.scaling_reference import Scaling
from pytest_llmperf.judge import validity
from pytest_llmperf.judge.exact_changes import changed_evidence, changes
from pytest_llmperf.judge.gain import Bounds, judge_gain
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.verdict import Judgement, judge, judge_pairs
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, joined_reasons
from pytest_llmperf.run.context import Context
from pytest_llmperf.spec.train_spec import TrainSpec

Pairs = tuple[tuple[Launch, Launch], ...]


@dataclass(frozen=True)
class Side:
    """What takes turns."""

    name: str
    """What tells it from the other: its spec's id, or its interpreter."""
    spec: TrainSpec
    start: Callable[[TrainSpec, int], Launch]
    """Launches a spec as the case's n-th launch."""


@dataclass(frozen=True)
class Judged:
    """How it ended."""

    pairs: Pairs
    judgement: Judgement
    notes: tuple[str, ...]
    changed: tuple[str, ...] = ()
    """What is exact and differs between two sides that should train alike."""
    different: tuple[str, ...] = ()
    """The same between two sides that are meant to differ."""

    @property
    def before(self) -> tuple[Launch, ...]:
        return tuple(launch for launch, _ in self.pairs)

    @property
    def after(self) -> tuple[Launch, ...]:
        return tuple(launch for _, launch in self.pairs)

    def told(self, result: CaseResult) -> CaseResult:
        """``result`` with what was judged; the second side is the one that it is about."""
        before, after = self.pairs[-1]
        return replace(
            result,
            verdict=self.judgement.verdict,
            reason=self.judgement.reason,
            checks=self.judgement.checks,
            launches=self.after,
            launches_before=self.before,
            changed=self.changed,
            differences=(*before.differences(after), *self.different),
            notes=(*self.notes, *result.notes),
        )


class PairedComparison:
    """Takes turns on the GPUs of one test."""

    def __init__(self, context: Context, runner: Runner, say: Callable[[str], None], policy: Policy) -> None:
        self._context, self._runner, self._say, self._policy = context, runner, say, policy

    def gain(
        self, before: TrainSpec, after: TrainSpec, bounds: Mapping[str, Bounds], inactive: frozenset[str]
    ) -> Judged:
        """What ``after`` brings over ``before``.

        Raises:
            LaunchFailed: a launch yielded no record.
        """

        def decide(pairs: Pairs, troubles: Sequence[str]) -> Judgement:
            if troubles:
                return Judgement("invalid", joined_reasons(troubles), ())
            judgement = judge_gain(pairs, bounds, self._context.experience.noise, self._context.rule)
            if any(True for each in bounds.values() for _ in each):
                return judgement
            return replace(judgement, reason=f"no bound was given, nothing is held: {judgement.reason}")

        start = partial(self._runner.launch, sides=2)
        sides = (Side(before.id, before, start), Side(after.id, after, start))
        judged = self._take_turns(sides, inactive, decide)
        # What a gain is, a reader wants to know of a ``pass`` too.
        told = (judged.judgement.reason,) if judged.judgement.verdict == "pass" else ()
        different = changed_evidence(judged.after, judged.before)
        return replace(judged, different=different, notes=(*told, *judged.notes))

    def environments(
        self, spec: TrainSpec, python: str, inactive: frozenset[str], scaling: Scaling | None = None
    ) -> Judged:
        """``spec`` in this environment against itself under the interpreter ``python``.

        ``scaling`` holds what this environment alone must keep, where the spec has several GPUs.

        Raises:
            LaunchFailed: a launch yielded no record.
        """

        def decide(pairs: Pairs, troubles: Sequence[str]) -> Judgement:
            # Of launches that are in trouble no figure can be computed.
            ours = tuple(after for _, after in pairs)
            extra = () if troubles else figures(spec, ours)
            rule, experience = self._context.rule, self._context.experience
            judgement = judge_pairs(pairs, self._policy, troubles, extra, rule, experience)
            return scaling.joined(judgement, ours) if scaling else judgement

        start = partial(self._runner.launch, sides=2)
        sides = (
            Side(python, spec, partial(start, python=python, side=f"under {_shown(python)}")),
            Side(sys.executable, spec, partial(start, side="under this Python")),
        )
        judged = self._take_turns(sides, inactive, decide)
        shared = os.environ.get("PYTHONPATH")
        notes = (f"PYTHONPATH={shared} comes before the packages of both environments",) if shared else ()
        return replace(judged, notes=(*judged.notes, *notes), changed=changes(judged.after, judged.before))

    def _take_turns(
        self,
        sides: tuple[Side, Side],
        inactive: frozenset[str],
        decide: Callable[[Pairs, Sequence[str]], Judgement],
    ) -> Judged:
        """Pairs until ``decide`` has; every second one begins with the other side.

        What drifts slowly (heat, neighbours) then weighs on both alike.
        """
        settings = self._context.settings
        sound = LaunchRetry(self._circumstances, self._say)
        pairs: Pairs = ()
        with self._runner.hold(max(side.spec.gpus for side in sides)):
            while True:
                pairs = (*pairs, self._pair(sides, len(pairs), sound))
                if len(pairs) < settings.launches and not sound.spoilt:
                    continue
                lines = [
                    line
                    for index, side in enumerate(sides)
                    for line in self._troubles(side, tuple(pair[index] for pair in pairs), inactive)
                ]
                judgement = decide(pairs, [*dict.fromkeys(lines), *sound.spoilt])
                if not judgement.undecided or len(pairs) >= settings.max_launches:
                    return Judged(pairs, judgement, sound.notes)

    def _troubles(self, side: Side, launches: tuple[Launch, ...], inactive: frozenset[str]) -> list[str]:
        """What contradicts the spec of one side; where nothing does, what its chip cannot have done."""
        found = contradictions(side.spec, launches, inactive)
        if found:
            return list(found)
        judgement = judge(launches, None, self._policy, extra=figures(side.spec, launches))
        return [f"{side.name}: {judgement.reason}"] if judgement.verdict == "invalid" else []

    def _pair(self, sides: tuple[Side, Side], number: int, sound: LaunchRetry) -> tuple[Launch, Launch]:
        order = (0, 1) if number % 2 == 0 else (1, 0)
        launches: dict[int, Launch] = {}
        for turn, index in enumerate(order, 1):
            start = partial(_start, sides[index], 2 * number + turn)
            launches[index] = sound.launch(sides[index].spec, start)
        return launches[0], launches[1]

    def _circumstances(self, launch: Launch) -> tuple[str, ...]:
        tolerance = self._policy.in_pairs().tolerances.get(RATE, math.inf)
        return validity.circumstances(launch, tolerance, self._context.experience)


def _shown(python: str) -> str:
    """As short as it can be typed here: a line about a launch has room for little else."""
    return min(python, os.path.relpath(python), key=len)


def _start(side: Side, number: int, spec: TrainSpec) -> Launch:
    try:
        return side.start(spec, number)
    except LaunchFailed as error:
        if side.name == side.spec.id:
            raise  # it is named already
        failure = replace(error.failure, message=f"{error.failure.message} (under {side.name})")
        raise LaunchFailed(spec.id, failure) from None
