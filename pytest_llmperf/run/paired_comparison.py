"""A paired comparison: two specs, or two environments, launched A B B A … on the same GPUs until they decide."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.exact import StoredTrace, changed_evidence, changes, count_checks
from pytest_llmperf.judge.pairs import Bounds, judge_gain
from pytest_llmperf.judge.policy import Reference
from pytest_llmperf.judge.repeats import Repeats
from pytest_llmperf.judge.validity import Circumstances
from pytest_llmperf.judge.verdict import Judgement, growth_checks, joined, judge, judge_pairs, phase_checks
from pytest_llmperf.launch.histories import GitHistory, HistoryError, NotMadeError
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import RATE
from pytest_llmperf.records.result import CaseResult, Check, is_choice, joined_reasons
from pytest_llmperf.run.baseline_comparison import beside_verdict, contradictions, diagnosed, fewest_launches
from pytest_llmperf.run.case import Caller, Case
from pytest_llmperf.run.derived_metrics import figures
from pytest_llmperf.run.findings import CaseFailedError, Concluded
from pytest_llmperf.run.measured import Scaling
from pytest_llmperf.run.runner import LaunchRetry, Runner, Turn
from pytest_llmperf.settings.spec import Spec

Pairs = tuple[tuple[Launch, Launch], ...]


@dataclass(frozen=True)
class Side:
    """One that takes turns."""

    name: str
    """Its spec's id, or its interpreter."""
    spec: Spec
    python: str = sys.executable
    shown: str = ""
    """To people, where its spec does not tell."""
    tree: Path | None = None
    """The project at another revision, where a script runs there."""


@dataclass(frozen=True)
class Turns:
    """How two sides did."""

    pairs: Pairs
    judgement: Judgement
    notes: tuple[str, ...]

    @property
    def before(self) -> tuple[Launch, ...]:
        return tuple(launch for launch, _ in self.pairs)

    @property
    def after(self) -> tuple[Launch, ...]:
        return tuple(launch for _, launch in self.pairs)


class PairedComparison:
    """Takes turns on the same GPUs; judged by what the second side's spec is judged by."""

    def __init__(self, caller: Caller, runner: Runner, after: Spec) -> None:
        self._caller, self._runner, self._policy = caller, runner, caller.policy(after)

    def gain(self, case: Case, bounds: Mapping[str, Bounds]) -> Concluded:
        """Measure what the second spec of ``case`` brings over the first."""

        def decide(pairs: Pairs, troubles: Sequence[str]) -> Judgement:
            if troubles:
                return Judgement("invalid", joined_reasons(troubles), ())
            judgement = judge_gain(pairs, bounds, self._policy)
            if any(True for each in bounds.values() for _ in each):
                return judgement
            return replace(judgement, reason=f"no bound was given, nothing is held: {judgement.reason}")

        turns = self.take_turns([Side(spec.id, spec) for spec in case.specs], decide)
        # What a gain is, a reader wants to know of a ``pass`` too.
        notes = (turns.judgement.reason,) if turns.judgement.verdict == "pass" else ()
        result = self._result(case, turns)
        differences = (*result.differences, *changed_evidence(turns.after, turns.before))
        result = replace(result, differences=differences, notes=(*notes, *result.notes))
        return Concluded(result=_diagnosed(result, turns), held_against="turns with the other spec")

    def environments(self, case: Case, scaling: Scaling | None = None) -> CaseResult:
        """The spec of ``case`` here against itself under ``--perf-against``; ``scaling`` is of this side alone."""
        (spec,), python = case.specs, self._caller.run.settings.against

        def decide(pairs: Pairs, troubles: Sequence[str]) -> Judgement:
            # Of launches that are in trouble no figure can be computed.
            ours = tuple(after for _, after in pairs)
            judgement = judge_pairs(pairs, self._policy, troubles, () if troubles else self._figures(spec, ours))
            if judgement.verdict != "invalid":
                theirs = tuple(before for before, _ in pairs)
                phases = phase_checks(ours, Reference(theirs, theirs, theirs), self._policy)
                judgement = joined(judgement, phases.checks, undecided=phases.undecided)
                judgement = joined(judgement, growth_checks(ours, theirs, self._policy.rule.budget), undecided=False)
                if spec.is_script:  # which need not do the same in each launch
                    counts = count_checks(ours, StoredTrace.of(theirs), Repeats.of(theirs))
                    judgement = joined(judgement, counts, undecided=False)
            return scaling.joined(judgement, ours, None) if scaling else judgement

        if revision := self._caller.run.settings.other_revision:
            try:
                tree = GitHistory(self._caller.run.rootdir).tree(revision)
            except (HistoryError, NotMadeError) as error:
                raise CaseFailedError(f"--perf-against {python}: {error}") from None
            other = Side(python, spec, shown=f"at {revision}", tree=tree)
            sides = [other, Side("the work tree", spec, shown="as it is")]
        else:
            # As short as it can be typed here: a line about a launch has room for little else.
            shown = min(python, os.path.relpath(python), key=len)
            sides = [
                Side(python, spec, python, f"under {shown}"),
                Side(sys.executable, spec, shown="under this Python"),
            ]
        turns = self.take_turns(sides, decide, fewest=fewest_launches(1, spec))
        result, shared = self._result(case, turns), os.environ.get("PYTHONPATH")
        notes = (f"PYTHONPATH={shared} comes before the packages of both environments",) if shared else ()
        changed = changes(turns.after, turns.before)
        changed += tuple(Repeats.of(turns.before).changes(turns.after, turns.before)) if spec.is_script else ()
        changed = tuple(sorted(changed, key=lambda line: not (spec.is_script and is_choice(line))))
        result = replace(result, changed=changed, notes=(*result.notes, *notes))
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
        if found := contradictions(side.spec, launches, self._caller.terms.inactive):
            return list(found)
        judgement = judge(launches, None, self._policy, extra=self._figures(side.spec, launches))
        return [f"{side.name}: {judgement.reason}"] if judgement.verdict == "invalid" else []

    def _figures(self, spec: Spec, launches: tuple[Launch, ...]) -> tuple[Check, ...]:
        return figures(spec, launches, self._caller.run.model_flops)

    def _pair(self, sides: Sequence[Side], number: int, retry: LaunchRetry) -> tuple[Launch, Launch]:
        order = (0, 1) if number % 2 == 0 else (1, 0)
        launches: dict[int, Launch] = {}
        for place, index in enumerate(order, 1):
            side = sides[index]
            turn = Turn(side.python, sides=2, side=side.shown, tree=side.tree)
            try:
                launches[index] = retry.launch(side.spec, 2 * number + place, self._circumstances, turn=turn)
            except LaunchFailed as error:
                if side.name == side.spec.id:  # it is named already
                    raise
                message = f"{error.failure.message} (under {side.name})"
                raise LaunchFailed(error.spec_id, replace(error.failure, message=message)) from None
        return launches[0], launches[1]

    def _circumstances(self, launch: Launch) -> Circumstances:
        tolerance = self._policy.in_pairs().tolerances.get(RATE, math.inf)
        return validity.circumstances(launch, tolerance, self._caller.run.stored.experience)


def _diagnosed(result: CaseResult, turns: Turns) -> CaseResult:
    before, after = turns.pairs[-1]
    return diagnosed(beside_verdict(result, before, before.trace), before.trace, after.trace)
