"""``perf.same_training``: a spec made small beside its plain form, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.engine.case import Case
from pytest_llmperf.engine.runner import Runner
from pytest_llmperf.judge.parity.training_parity import Parity, judge_parity
from pytest_llmperf.records.parity_order import ParityOrder
from pytest_llmperf.records.result import CaseResult, Check, joined_reasons
from pytest_llmperf.run.small_trainings import MadeTrainings, SmallTrainings
from pytest_llmperf.spec.small_config import is_dropout
from pytest_llmperf.spec.small_spec import is_gathered, plainest, small
from pytest_llmperf.spec.train_spec import TrainSpec

#: Launches of a spec and of its plain form.
LAUNCHES = 2


class ParityCheck:
    """Holds specs of one caller beside their plain forms."""

    def __init__(self, caller: Caller, runner: Runner, known: SmallTrainings) -> None:
        self._caller, self._runner, self._known = caller, runner, known

    def check(self, case: Case, specs: Sequence[TrainSpec]) -> CaseResult:
        """Whether each of ``specs``, small, is no further from the truth than rounding takes its plain form.

        Raises:
            LaunchFailed: a launch yielded nothing.
        """
        sides = [(spec, self._parity(spec)) for spec in specs]
        several = len(sides) > 1
        troubles = [f"{spec.id}: {line}" if several else line for spec, side in sides for line in side.troubles]
        checks = {check.metric: check for _, side in reversed(sides) for check in side.checks}
        notes = dict.fromkeys(note for spec, side in sides for note in (*side.notes, *_notes(spec)))
        result = self._caller.result(
            case,
            "invalid" if troubles else "pass",
            joined_reasons(troubles) or _told(tuple(checks.values())),
            tuple(checks.values()),
        )
        return replace(result, notes=(*notes, *result.notes))

    def _parity(self, spec: TrainSpec) -> Parity:
        truth, few = self._truth(spec), small(spec)
        key = (few.digest, truth.folder)
        if key not in self._known.errors:
            order = ParityOrder(truth=truth.folder, shrinks=_shrinks(spec))
            self._known.errors[key] = self._runner.small_trainings(few, order).errors
        return judge_parity(self._known.errors[key], truth.errors)

    def _truth(self, spec: TrainSpec) -> MadeTrainings:
        order = ParityOrder(gathered=spec.mixed_precision if is_gathered(spec) else "no", shrinks=_shrinks(spec))
        plain = plainest(spec)
        key = (plain.digest, order)
        if key not in self._known.truths:
            self._known.truths[key] = self._runner.small_trainings(plain, order)
        return self._known.truths[key]


def small_case(*specs: TrainSpec) -> Case:
    """The case of ``specs``, the last one held beside the others, or its plain form; all of them small."""
    named = [spec.id for spec in specs]
    return Case(
        id=f"{named[-1]}-as-{named[0] if len(named) > 1 else 'plain'}",
        digest="-".join(["parity", *(spec.digest for spec in specs)]),
        specs=tuple(small(spec) for spec in specs),
        baselines=(),
    )


def _shrinks(spec: TrainSpec) -> float:
    return small(spec).sequence_length / spec.sequence_length


def _told(checks: tuple[Check, ...]) -> str:
    parts = [f"{check.metric} {check.value:.1e} of {check.limit:.1e} ({check.detail})" for check in checks]
    return f"trains as its plain form does: {', '.join(parts)}"


def _notes(spec: TrainSpec) -> Iterator[str]:
    off = [name for name, value in spec.architecture.config.items() if is_dropout(name, value)]
    if off:
        yield f"the small model has no dropout: {', '.join(off)} is 0 there"
    if spec.attention == "flash_attention_2":
        yield "flash_attention_2 has no fp32: in fp32 everything else is compared, with attention sdpa"
