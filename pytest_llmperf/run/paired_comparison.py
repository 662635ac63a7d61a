"""A paired comparison: two specs, or two environments, launched A B B A … on the same GPUs until they decide."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.pairs import Bounds, Turns, judge_environments, judge_gain
from pytest_llmperf.judge.verdict import Judgement, judge
from pytest_llmperf.launch.histories import GitHistory, HistoryError, NotMadeError
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run.case import Caller, Case, fewest_launches
from pytest_llmperf.run.diagnosis import beside_verdict, diagnosed
from pytest_llmperf.run.findings import CaseFailedError, Concluded
from pytest_llmperf.run.runner import LaunchRetry, Runner, Turn
from pytest_llmperf.settings.spec import Spec

Pairs = tuple[tuple[Launch, Launch], ...]


@dataclass(frozen=True, kw_only=True)
class Side(Turn):
    sides: int = 2
    name: str
    """Its spec's id, or its interpreter."""
    spec: Spec


class PairedComparison:
    """Takes turns on the same GPUs; judged by what the second side's spec is judged by."""

    def __init__(self, caller: Caller, after: Spec, *, bare: bool = False) -> None:
        """``bare``: of timed steps alone."""
        self._caller, self._runner, self._policy = caller, Runner(caller, bare=bare), caller.policy(after)
        self._figures = caller.run.model_flops.figures

    def gain(self, case: Case, bounds: Mapping[str, Bounds]) -> Concluded:
        """Measure what the second spec of ``case`` brings over the first."""

        def decide(pairs: Pairs, troubles: Sequence[str]) -> Judgement:
            judgement = judge_gain(pairs, bounds, self._policy, troubles)
            if troubles or any(True for each in bounds.values() for _ in each):
                return judgement
            return replace(judgement, reason=f"no bound was given, nothing is held: {judgement.reason}")

        turns = self.take_turns([Side(name=spec.id, spec=spec) for spec in case.specs], decide)
        # What a gain is, a reader wants to know of a ``pass`` too.
        notes = (turns.judgement.reason,) if turns.judgement.verdict == "pass" else ()
        result = self._result(case, turns)
        differences = (*result.differences, *turns.other_evidence)
        result = replace(result, differences=differences, notes=(*notes, *result.notes))
        return Concluded(result=_diagnosed(result, turns), held_against="turns with the other spec")

    def environments(self, case: Case, scaled: Callable[..., Judgement] | None = None) -> CaseResult:
        """``case`` against itself under ``--perf-against``; ``scaled`` adds what more GPUs brought, of this side."""
        (spec,), python = case.specs, self._caller.run.settings.against

        def decide(pairs: Pairs, troubles: Sequence[str]) -> Judgement:
            # Of launches that are in trouble no figure can be computed.
            ours = tuple(after for _, after in pairs)
            extra = () if troubles else self._figures(spec, ours)
            judgement = judge_environments(pairs, self._policy, troubles, extra)
            return scaled(judgement, ours, None) if scaled else judgement

        if revision := self._caller.run.settings.other_revision:
            try:
                tree = GitHistory(self._caller.run.rootdir).tree(revision)
            except (HistoryError, NotMadeError) as error:
                raise CaseFailedError(f"--perf-against {python}: {error}") from None
            other = Side(name=python, spec=spec, side=f"at {revision}", tree=tree)
            sides = [other, Side(name="the work tree", spec=spec, side="as it is")]
        else:
            # As short as it can be typed here: a line about a launch has room for little else.
            shown = min(python, os.path.relpath(python), key=len)
            sides = [
                Side(name=python, spec=spec, python=python, side=f"under {shown}"),
                Side(name=sys.executable, spec=spec, side="under this Python"),
            ]
        turns = self.take_turns(sides, decide, fewest=fewest_launches(1, spec))
        result, shared = self._result(case, turns), os.environ.get("PYTHONPATH")
        notes = (f"PYTHONPATH={shared} comes before the packages of both environments",) if shared else ()
        result = replace(result, changed=turns.changed, notes=(*result.notes, *notes))
        return _diagnosed(result, turns)

    def _result(self, case: Case, turns: Turns) -> CaseResult:
        (before, after), judgement = turns.pairs[-1], turns.judgement
        result = self._caller.result(case, judgement.verdict, judgement.reason, judgement.checks)
        return replace(
            result,
            launches=turns.after,
            launches_before=turns.before,
            differences=before.differences(after),
            notes=(*turns.notes, *self._caller.run.model_flops.notes(*case.specs), *result.notes),
        )

    def take_turns(
        self,
        sides: Sequence[Side],
        decide: Callable[[Pairs, Sequence[str]], Judgement],
        begun: Pairs = (),
        fewest: int = 1,
    ) -> Turns:
        """Pairs until ``decide`` has, after those that were ``begun``; every second one begins with the other side.
        What drifts slowly (heat, neighbours) then weighs on both alike."""
        settings, retry = self._caller.run.settings, LaunchRetry(self._runner, self._caller.observer.say)
        pairs, fewest = begun, max(fewest, settings.launches)
        self._caller.run.settle(*(side.spec for side in sides))  # during the turns GPUs are held
        with self._runner.hold(max(side.spec.gpus for side in sides)):
            while True:
                pairs = (*pairs, self._pair(sides, len(pairs), retry))
                if len(pairs) < fewest and not retry.spoilt:
                    continue
                both = zip(sides, zip(*pairs, strict=True), strict=True)
                lines = dict.fromkeys(line for side, launches in both for line in self.troubles(side, launches))
                judgement = decide(pairs, [*lines, *retry.spoilt])
                if not judgement.undecided or len(pairs) >= max(fewest, settings.max_launches):
                    return Turns(pairs, judgement, retry.notes)

    def troubles(self, side: Side, launches: tuple[Launch, ...]) -> list[str]:
        """What contradicts the spec of one side; where nothing does, what its chip cannot have done."""
        if found := validity.all_troubles(side.spec, launches, self._caller.terms.inactive):
            return list(found)
        judgement = judge(launches, None, self._policy, extra=self._figures(side.spec, launches))
        return [f"{side.name}: {judgement.reason}"] if judgement.verdict == "invalid" else []

    def _pair(self, sides: Sequence[Side], number: int, retry: LaunchRetry) -> tuple[Any, ...]:
        """Launches of all ``sides``, in their order, of which a search has more than two."""
        order = range(len(sides))[:: 1 if number % 2 == 0 else -1]
        launches: dict[int, Launch] = {}
        tolerance, experience = self._policy.in_pairs().speed_tolerance, self._caller.run.stored.experience
        around = partial(validity.circumstances, tolerance=tolerance, experience=experience)
        for place, index in enumerate(order, 1):
            side = sides[index]
            try:
                launches[index] = retry.launch(side.spec, len(sides) * number + place, around, turn=side)
            except LaunchFailed as error:
                if side.name == side.spec.id:  # it is named already
                    raise
                message = f"{error.failure.message} (under {side.name})"
                raise LaunchFailed(error.spec_id, replace(error.failure, message=message)) from None
        return tuple(launches[index] for index in range(len(sides)))


def _diagnosed(result: CaseResult, turns: Turns) -> CaseResult:
    before, after = turns.pairs[-1]
    return diagnosed(beside_verdict(result, before, before.trace), before.trace, after.trace)
