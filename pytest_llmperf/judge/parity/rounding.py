"""Rounding: how far the plain form is from the truth by itself, and what that allows others. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.records.training_errors import GRADIENT, UPDATE, TensorError, TrainingErrors


@dataclass(frozen=True)
class Rounding:
    """Of the plain form in one precision, from several trainings of different weights and rows."""

    tensors: Mapping[tuple[str, str, int], float]
    """The largest relative error of each tensor by kind, name and step."""
    factors: Mapping[tuple[str, int], float]
    """By kind and step: how much further another training may be off than that; see ``_factor``."""
    loss: float
    """The largest error of any step's loss, as a fraction of it."""
    clipping: float
    product_types: Mapping[str, str]

    @classmethod
    def of(cls, trainings: Sequence[TrainingErrors]) -> Rounding:
        """What ``trainings`` of the plain form, all in one precision, tell."""
        by_tensor: dict[tuple[str, str, int], list[float]] = {}
        alike: dict[tuple[str, int], dict[tuple[str, bool], list[float]]] = {}
        for training in trainings:
            for tensor in training.tensors:
                if _shows_no_rounding(training, tensor):
                    continue
                share = relative(training, tensor)
                by_tensor.setdefault((tensor.kind, tensor.tensor, tensor.step), []).append(share)
                if tensor.true_norm > _least(training, tensor):
                    of_step = alike.setdefault((tensor.kind, tensor.step), {})
                    of_step.setdefault((tensor.tensor, training.true_optimizer), []).append(share)
        return cls(
            tensors={key: max(shares) for key, shares in by_tensor.items()},
            factors={key: _factor(list(of.values())) for key, of in alike.items()},
            loss=max(share for training in trainings for share in loss_errors(training)),
            clipping=max(abs(error) for training in trainings for error in training.clipping_errors),
            product_types=trainings[0].product_types,
        )

    def limit(self, training: TrainingErrors, tensor: TensorError) -> float:
        """The relative error that ``tensor`` of another training may have."""
        factor = self.factors.get((tensor.kind, tensor.step), 1.0)
        own = factor * self.tensors.get((tensor.kind, tensor.tensor, tensor.step), 0.0)
        least = _least(training, tensor)
        # One rounding of all gradients together: a tensor that is a small part of them is not told from that.
        return max(own, least / max(tensor.true_norm, least)) if least else own

    def scalar_limit(self, training: TrainingErrors, measured: float) -> float:
        """Of one figure a step, of which nothing averages out."""
        factor = max((value for (kind, _), value in self.factors.items() if kind == GRADIENT), default=1.0)
        return factor * max(measured, training.roundoff)


def relative(training: TrainingErrors, tensor: TensorError) -> float:
    """Its error, as a fraction of its norm, or of what one rounding makes of all gradients, where that is more."""
    whole = max(tensor.true_norm, _least(training, tensor))
    if whole:
        return tensor.error / whole
    return 0.0 if tensor.error == 0 else math.inf


def loss_errors(training: TrainingErrors) -> Iterator[float]:
    """Of each step, as a fraction of the loss."""
    for loss, true in zip(training.losses, training.true_losses, strict=True):
        yield abs(loss - true) / abs(true)


def _least(training: TrainingErrors, tensor: TensorError) -> float:
    """A gradient of this norm is no more than one rounding of all gradients together; updates have no such floor."""
    return training.roundoff * training.true_norms[tensor.step - 1] if tensor.kind == GRADIENT else 0.0


def _factor(tensors: Sequence[Sequence[float]]) -> float:
    """The square of how far one tensor's largest error is above its smallest, of the tensor where that is most.

    The plain form's own trainings are this far apart; another's sums are in another order besides, which may move
    them once as far again.
    """
    ratios = [max(shares) / min(shares) for shares in tensors if min(shares) > 0]
    return max(ratios, default=1.0) ** 2


def _shows_no_rounding(training: TrainingErrors, tensor: TensorError) -> bool:
    # Short states are short from the second step on: what the first one shows is no rounding of theirs.
    return tensor.kind == UPDATE and tensor.step == 1 and not training.true_optimizer
