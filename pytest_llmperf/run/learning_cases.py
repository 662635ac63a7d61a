"""What a case learns: a small form of it beside the truth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_llmperf.judge.trainings import Parity, judge_parity
from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.learning import MadeTrainings, ParityOrder
from pytest_llmperf.records.result import joined_reasons
from pytest_llmperf.run.case import Caller, Case
from pytest_llmperf.run.findings import CannotRunError, Concluded
from pytest_llmperf.run.runner import Runner
from pytest_llmperf.settings.attention import has_fp32
from pytest_llmperf.settings.models import is_dropout
from pytest_llmperf.settings.parallelism import gathered_precision, is_context
from pytest_llmperf.settings.registry import plainest, small
from pytest_llmperf.settings.train_spec import TrainSpec


def parity(caller: Caller, runner: Runner, case: Case, specs: Sequence[TrainSpec]) -> Concluded:
    """Whether each of ``specs``, small, is no further from the truth than rounding takes its plain form."""
    if not caller.run.site.is_here:
        raise CannotRunError(f"{case.id}: small trainings are launched on this machine alone: --perf-launcher local")
    sides = [(spec, _beside_truth(caller, runner, spec)) for spec in specs]
    troubles = [f"{spec.id}: {line}" if len(sides) > 1 else line for spec, side in sides for line in side.troubles]
    checks = tuple({check.metric: check for _, side in reversed(sides) for check in side.checks}.values())
    notes = dict.fromkeys(note for spec, side in sides for note in (*side.notes, *_notes(spec)))
    parts = [f"{check.metric} {check.value:.1e} of {check.limit:.1e} ({check.detail})" for check in checks]
    reason = joined_reasons(troubles) or f"trains as its plain form does: {', '.join(parts)}"
    result = caller.result(case, "invalid" if troubles else "pass", reason, checks)
    result = replace(result, notes=(*notes, *result.notes))
    return Concluded(result=result, held_against="the plain form in double precision")


def _beside_truth(caller: Caller, runner: Runner, spec: TrainSpec) -> Parity:
    known, few, plain = caller.run.result_cache, small(spec), plainest(spec)
    shrinks = few.sequence_length / spec.sequence_length
    order = ParityOrder(gathered=gathered_precision(spec), shrinks=shrinks)
    truth = known.true_trainings.get((plain.digest, order)) or _made(caller, runner, plain, order)
    known.true_trainings[plain.digest, order] = truth
    key = few.digest, truth.folder
    if key not in known.training_errors:
        order = ParityOrder(truth=truth.folder, shrinks=shrinks)
        known.training_errors[key] = _made(caller, runner, few, order).errors
    return judge_parity(known.training_errors[key], truth.errors)


def _made(caller: Caller, runner: Runner, spec: TrainSpec, order: ParityOrder) -> MadeTrainings:
    """The small trainings that ``order`` asks for, in one launch here; ``LaunchFailed``: nothing is known."""
    shown = f"{spec.id} parity" if order.truth else f"{spec.id} the plain form's parity"
    with runner.attempt(spec, shown, shared=True, parity=order, trace=False) as attempt:
        attempt.outcome = caller.run.site.training_errors(attempt.request, attempt.watch)
    if isinstance(attempt.outcome, Failure):
        raise LaunchFailed(spec.id, attempt.outcome)
    return MadeTrainings(str(attempt.request.folder), tuple(attempt.outcome))


def _notes(spec: TrainSpec) -> Iterator[str]:
    if off := [name for name, value in spec.architecture.config.items() if is_dropout(name, value)]:
        yield f"the small model has no dropout: {', '.join(off)} is 0 there"
    if not has_fp32(spec):
        yield "flash attention has no fp32: in fp32 everything else is compared, with attention sdpa"
    if is_context(spec):
        yield "context's fused kernels may have no fp32: in fp32 everything else is compared, with parallelism fsdp"
