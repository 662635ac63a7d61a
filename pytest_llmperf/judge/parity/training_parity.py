"""Parity: one training beside the truth, no further from it than rounding takes the plain form; else what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_llmperf.judge.parity.rounding import Rounding, loss_errors, relative
from pytest_llmperf.records.result import Check
from pytest_llmperf.records.training_errors import FP32, GRADIENT, UPDATE, TensorError, TrainingErrors

# Shares of weights that did not move, from which on a reader is told.
_LOST = 0.01


@dataclass(frozen=True)
class Parity:
    """Of one training, in each precision that it was made in."""

    troubles: tuple[str, ...]
    """What is further off than rounding takes it, the cause first; empty: nothing."""
    checks: tuple[Check, ...]
    """Of losses, gradients and updates what comes nearest to its limit, or is furthest beyond."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Beside:
    tensor: TensorError
    error: float
    limit: float

    @property
    def times(self) -> float:
        """Its error in limits; what is no number is beyond every limit."""
        if self.error == 0:
            return 0.0
        return self.error / self.limit if self.limit and not math.isnan(self.error) else math.inf


def judge_parity(trainings: Sequence[TrainingErrors], plain: Sequence[TrainingErrors]) -> Parity:
    """``trainings`` of one spec, each in a precision of its own, against those of the plain form."""
    troubles: list[str] = []
    checks: dict[str, Check] = {}
    # In fp32 rounding hides least: what is told there is told first.
    for training in sorted(trainings, key=lambda one: one.form != FP32):
        rounding = Rounding.of([one for one in plain if one.form == training.form])
        beside = [
            _Beside(tensor, relative(training, tensor), rounding.limit(training, tensor)) for tensor in training.tensors
        ]
        troubles += _troubles(training, rounding, beside)
        for check in _checks(training, rounding, beside):
            known = checks.get(check.metric)
            if known is None or _share(check) > _share(known):
                checks[check.metric] = check
    return Parity(tuple(troubles), tuple(checks.values()), tuple(_notes(trainings)))


def _troubles(training: TrainingErrors, rounding: Rounding, beside: Sequence[_Beside]) -> Iterator[str]:
    where = f"({training.precision})"
    for name in training.unknown:
        yield f"{name} is a parameter of one of the two alone"
    types, plain_types = training.product_types, rounding.product_types
    differ = [name for name in types if types[name] != plain_types.get(name, types[name])]
    if differ:
        first = differ[0]
        yield (
            f"products of {first} come out in {types[first]}, those of the plain form in {plain_types[first]}"
            f"{_more(len(differ), len(types), 'linear layers')} {where}"
        )
    far = [one for one in beside if one.times > 1]
    for step, kind in sorted({(one.tensor.step, one.tensor.kind) for one in far}):
        of_kind = [one for one in beside if (one.tensor.step, one.tensor.kind) == (step, kind)]
        beyond = [one for one in of_kind if one.times > 1]
        worst = max(beyond, key=lambda one: one.times)
        yield f"{_told(worst)}{_more(len(beyond), len(of_kind), 'tensors')}, step {step} {where}"
        break  # what follows from a first difference differs too
    for step, error in enumerate(loss_errors(training), 1):
        limit = rounding.scalar_limit(training, rounding.loss)
        if not error <= limit:
            loss, true = training.losses[step - 1], training.true_losses[step - 1]
            yield (
                f"loss of step {step} is {loss:.7g}, expected {true:.7g}, rounding alone leaves "
                f"{limit * abs(true):.1e} between them {where}"
            )
            break
    for step, error in enumerate(training.clipping_errors, 1):
        limit = rounding.scalar_limit(training, rounding.clipping)
        if not abs(error) <= limit:
            yield (
                f"gradients of step {step} are clipped to {1 + error:.4g} times the norm that is allowed, rounding "
                f"alone leaves {limit:.1e} {where}"
            )
            break


def _told(one: _Beside) -> str:
    """``gradient of model.norm.weight points elsewhere: cosine 0.83, rounding alone leaves 0.9998``."""
    tensor, limit = one.tensor, one.limit
    what = f"{tensor.kind} of {tensor.tensor}" + (f" on rank {tensor.rank}" if tensor.rank else "")
    if math.isnan(tensor.error) or math.isinf(tensor.error):
        return f"{what} is no number"
    if not tensor.norm:
        return f"{what} is zero, expected one of norm {tensor.true_norm:.3g}"
    if not tensor.true_norm:
        return f"{what} is of norm {tensor.norm:.3g}, expected none"
    least = math.sqrt(max(0.0, 1 - limit**2))
    length = tensor.norm / tensor.true_norm
    # Of the two parts of an error, the larger: across the true one, and along it.
    across, along = length * math.sqrt(max(0.0, 1 - tensor.cosine**2)), abs(length * tensor.cosine - 1)
    if tensor.cosine < least and (tensor.cosine < 0 or across > along):
        digits = min(12, max(4, 1 - math.floor(math.log10(max(1 - least, 1e-12)))))
        return f"{what} points elsewhere: cosine {tensor.cosine:.{digits}f}, rounding alone leaves {least:.{digits}f}"
    return f"{what} is {length:.6g} times as long as it should be, rounding alone leaves {limit:.1e} beside 1"


def _more(count: int, of: int, what: str) -> str:
    return f", and so do {count - 1} more of {of} {what}" if count > 1 else ""


_METRICS = {GRADIENT: "gradient_error", UPDATE: "update_error"}


def _checks(training: TrainingErrors, rounding: Rounding, beside: Sequence[_Beside]) -> Iterator[Check]:
    error = max(loss_errors(training))
    limit = rounding.scalar_limit(training, rounding.loss)
    yield Check(metric="loss_error", value=error, unit="1", limit=limit, detail=training.precision)
    for kind, metric in _METRICS.items():
        of_kind = [one for one in beside if one.tensor.kind == kind]
        if of_kind:
            worst = max(of_kind, key=lambda one: one.times)
            detail = f"{worst.tensor.tensor}, step {worst.tensor.step}, {training.precision}"
            yield Check(metric=metric, value=worst.error, unit="1", limit=worst.limit, detail=detail)


def _share(check: Check) -> float:
    return check.value / check.limit if check.limit else math.inf if check.value else 0.0


def _notes(trainings: Sequence[TrainingErrors]) -> Iterator[str]:
    for training in trainings:
        if training.lost_updates >= _LOST:
            yield (
                f"{training.lost_updates:.0%} of the weights stayed where an update should have moved them: too small "
                f"for their last bit ({training.precision})"
            )
        if not any(one.kind == UPDATE for one in training.tensors):
            yield f"updates are not compared: this optimizer has no plain form ({training.precision})"
