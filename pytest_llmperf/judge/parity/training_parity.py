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
    """``trainings`` of one spec, of several seeds and precisions, against those of the plain form.

    What is wrong is wrong whatever the weights and rows: of each figure the seed counts that is nearest to the truth.
    A rounding that happens to take a ReLU over its edge, or a token to another expert, does so for one of them.
    """
    troubles: list[str] = []
    checks: dict[str, Check] = {}
    # In fp32 rounding hides least: what is told there is told first.
    for form in sorted({one.form for one in trainings}, key=lambda form: form != FP32):
        rounding = Rounding.of([one for one in plain if one.form == form])
        best = _Best.of([one for one in trainings if one.form == form], rounding)
        troubles += _troubles(best, rounding)
        for check in _checks(best):
            known = checks.get(check.metric)
            if known is None or _share(check) > _share(known):
                checks[check.metric] = check
    return Parity(tuple(troubles), tuple(checks.values()), tuple(_notes(trainings)))


@dataclass(frozen=True)
class _Scalar:
    """One figure of one step: a loss, or how gradients were clipped."""

    step: int
    error: float
    limit: float
    value: float
    true: float

    @property
    def times(self) -> float:
        return self.error / self.limit if not math.isnan(self.error) else math.inf


@dataclass(frozen=True)
class _Best:
    """Of several seeds, each figure where it is nearest to the truth."""

    first: TrainingErrors
    tensors: Sequence[_Beside]
    losses: Sequence[_Scalar]
    clipping: Sequence[_Scalar]

    @classmethod
    def of(cls, trainings: Sequence[TrainingErrors], rounding: Rounding) -> _Best:
        by_tensor: dict[tuple[str, str, int], list[_Beside]] = {}
        losses: dict[int, list[_Scalar]] = {}
        clipping: dict[int, list[_Scalar]] = {}
        for training in trainings:
            for tensor in training.tensors:
                beside = _Beside(tensor, relative(training, tensor), rounding.limit(training, tensor))
                by_tensor.setdefault((tensor.kind, tensor.tensor, tensor.step), []).append(beside)
            limit = rounding.scalar_limit(training, rounding.loss)
            figures = zip(loss_errors(training), training.losses, training.true_losses, strict=True)
            for step, (error, loss, true) in enumerate(figures, 1):
                losses.setdefault(step, []).append(_Scalar(step, error, limit, loss, true))
            limit = rounding.scalar_limit(training, rounding.clipping)
            for step, error in enumerate(training.clipping_errors, 1):
                clipping.setdefault(step, []).append(_Scalar(step, abs(error), limit, 1 + error, 1.0))
        return cls(
            trainings[0],
            [min(found, key=lambda one: one.times) for found in by_tensor.values()],
            [min(found, key=lambda one: one.times) for found in losses.values()],
            [min(found, key=lambda one: one.times) for found in clipping.values()],
        )


def _troubles(best: _Best, rounding: Rounding) -> Iterator[str]:
    """In the order of what they follow from."""
    training, where = best.first, f"({best.first.precision})"
    for name in training.unknown:
        yield f"{name} is a parameter of one of the two alone"
    yield from (f"{line} {where}" for line in _other_types(training, rounding))
    # By step, and within one as a step goes; but a gradient says where, and a loss does not.
    found = [
        *((step, 0, line) for step, line in _far(GRADIENT, best.tensors)),
        *((step, 1, line) for step, line in _far_losses(best.losses)),
        *((step, 2, line) for step, line in _clipped_otherwise(best.clipping)),
        *((step, 3, line) for step, line in _far(UPDATE, best.tensors)),
    ]
    yield from (f"{line} {where}" for _, _, line in sorted(found))


def _other_types(training: TrainingErrors, rounding: Rounding) -> Iterator[str]:
    types, plain = training.product_types, rounding.product_types
    differ = [name for name in types if types[name] != plain.get(name, types[name])]
    if differ:
        name, more = differ[0], _more(len(differ), len(types), "linear layers")
        yield f"products of {name} come out in {types[name]}, those of the plain form in {plain[name]}{more}"


def _far(kind: str, beside: Sequence[_Beside]) -> Iterator[tuple[int, str]]:
    """Of the first step that has any: what is further off than it may be, the furthest told."""
    far = [one for one in beside if one.tensor.kind == kind and one.times > 1]
    if not far:
        return
    step = min(one.tensor.step for one in far)
    of_step = [one for one in far if one.tensor.step == step]
    worst = max(of_step, key=lambda one: one.times)
    num_tensors = sum(one.tensor.kind == kind and one.tensor.step == step for one in beside)
    yield step, f"{_told(worst)}{_more(len(of_step), num_tensors, 'tensors')}, step {step}"


def _far_losses(losses: Sequence[_Scalar]) -> Iterator[tuple[int, str]]:
    for one in losses:
        if one.times > 1:
            beside = f"rounding alone leaves {one.limit * abs(one.true):.1e} between them"
            yield one.step, f"loss of step {one.step} is {one.value:.7g}, expected {one.true:.7g}, {beside}"
            return


def _clipped_otherwise(clipping: Sequence[_Scalar]) -> Iterator[tuple[int, str]]:
    for one in clipping:
        if one.times > 1:
            times = f"{one.value:.4g} times the norm that is allowed, rounding alone leaves {one.limit:.1e} beside 1"
            yield one.step, f"gradients of step {one.step} are clipped to {times}"
            return


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
        digits = min(15, max(2, 1 - math.floor(math.log10(least - tensor.cosine))))
        return f"{what} points elsewhere: cosine {tensor.cosine:.{digits}f}, rounding alone leaves {least:.{digits}f}"
    return f"{what} is {length:.6g} times as long as it should be, rounding alone leaves {limit:.1e} beside 1"


def _more(count: int, of: int, what: str) -> str:
    return f" (and {count - 1} more of {of} {what})" if count > 1 else ""


_METRICS = {GRADIENT: "gradient_error", UPDATE: "update_error"}


def _checks(best: _Best) -> Iterator[Check]:
    loss, precision = max(best.losses, key=lambda one: one.times), best.first.precision
    yield Check(
        metric="loss_error", value=loss.error, unit="1", limit=loss.limit, detail=f"step {loss.step}, {precision}"
    )
    for kind, metric in _METRICS.items():
        of_kind = [one for one in best.tensors if one.tensor.kind == kind]
        if of_kind:
            worst = max(of_kind, key=lambda one: one.times)
            detail = f"{worst.tensor.tensor}, step {worst.tensor.step}, {precision}"
            yield Check(metric=metric, value=worst.error, unit="1", limit=worst.limit, detail=detail)


def _share(check: Check) -> float:
    return check.value / check.limit if check.limit else math.inf if check.value else 0.0


def _notes(trainings: Sequence[TrainingErrors]) -> Iterator[str]:
    for training in {one.form: one for one in trainings}.values():
        if training.lost_updates >= _LOST:
            yield (
                f"{training.lost_updates:.0%} of the weights stayed where an update should have moved them: too small "
                f"for their last bit ({training.precision})"
            )
        if not any(one.kind == UPDATE for one in training.tensors):
            yield f"updates are not compared: this optimizer has no plain form ({training.precision})"
