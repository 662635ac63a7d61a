"""Rounding: how far the plain form is from the truth by itself, and what that allows others. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from pytest_llmperf.records.training_errors import GRADIENT, UPDATE, TensorError, TrainingErrors

_Key = tuple[str, str, int]

# Another kernel may round each value once more than the plain form does, so its error may be twice as large: the many
# numbers of a large tensor make its error nearly the same for all seeds, which would allow nothing.
_LEAST_FACTOR = 2.0

# What fp32 makes of a scalar, and AdamW's betas: its bias corrections are 1 - beta**step.
_FP32, _BETAS = 2.0**-24, (0.9, 0.999)


@dataclass(frozen=True)
class Rounding:
    """Of the plain form in one precision, from several trainings of different weights and rows.

    Of these the middle one counts, and how far it is above the smallest: where rounding takes a ReLU over its edge, an
    error is a thousand times what it is elsewhere, and would allow everything.
    """

    tensors: Mapping[_Key, float]
    """The usual relative error of each tensor by kind, name and step."""
    factors: Mapping[tuple[str, int], float]
    """By kind and step: how many times that another training may have; see ``_factor``."""
    loss: float
    """The largest error of any step's loss, as a fraction of it."""
    clipping: float
    product_types: Mapping[str, str]

    @classmethod
    def of(cls, trainings: Sequence[TrainingErrors]) -> Rounding:
        """What ``trainings`` of the plain form, all in one precision, tell."""
        usual: dict[_Key, float] = {}
        factors: dict[tuple[str, int], float] = {}
        # Optimizers that round their states are another kind than those that do not; the wider one is the limit.
        for exact in sorted({training.true_optimizer for training in trainings}):
            alike = [training for training in trainings if training.true_optimizer is exact]
            by_seed = _by_seed(alike)
            for key, seeds in by_seed.items():
                usual[key] = max(usual.get(key, 0.0), median_low(seeds))
            for kind, step in {(kind, step) for kind, _, step in by_seed}:
                clear = [by_seed[key] for key in by_seed if key[::2] == (kind, step) and _is_clear(key, alike)]
                factors[kind, step] = max(factors.get((kind, step), 1.0), _factor(clear))
        return cls(
            tensors=usual,
            factors=factors,
            loss=max(share for training in trainings for share in loss_errors(training)),
            clipping=max(abs(error) for training in trainings for error in training.clipping_errors),
            product_types=trainings[0].product_types,
        )

    def limit(self, training: TrainingErrors, tensor: TensorError) -> float:
        """The relative error that ``tensor`` of another training may have."""
        factor = self.factors.get((tensor.kind, tensor.step), 1.0)
        own = factor * self.tensors.get((tensor.kind, tensor.tensor, tensor.step), 0.0)
        if tensor.kind == UPDATE and training.short_scalars:
            own = max(own, _of_scalars(tensor.step))
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


def _by_seed(trainings: Sequence[TrainingErrors]) -> dict[_Key, list[float]]:
    """The relative errors of each tensor, one of each seed: the largest that it has."""
    found: dict[_Key, dict[int, float]] = {}
    for training in trainings:
        for tensor in training.tensors:
            # Short states are short from the second step on: what the first one shows is no rounding of theirs.
            if tensor.kind == UPDATE and tensor.step == 1 and not training.true_optimizer:
                continue
            seeds = found.setdefault((tensor.kind, tensor.tensor, tensor.step), {})
            seeds[training.seed] = max(seeds.get(training.seed, 0.0), relative(training, tensor))
    return {key: list(seeds.values()) for key, seeds in found.items()}


def _is_clear(key: _Key, trainings: Sequence[TrainingErrors]) -> bool:
    """Whether the tensor is more than one rounding of all gradients together."""
    of_key = ((one, tensor) for one in trainings for tensor in one.tensors if key == _key(tensor))
    return all(tensor.true_norm > _least(training, tensor) for training, tensor in of_key)


def _key(tensor: TensorError) -> _Key:
    return tensor.kind, tensor.tensor, tensor.step


def _least(training: TrainingErrors, tensor: TensorError) -> float:
    """A gradient of this norm is no more than one rounding of all gradients together; updates have no such floor."""
    return training.roundoff * training.true_norms[tensor.step - 1] if tensor.kind == GRADIENT else 0.0


def _factor(tensors: Sequence[Sequence[float]]) -> float:
    """The cube of how far one tensor's usual error is above its smallest, of the tensor where that is most; at least 2.

    From the usual one to the largest is as far again, and another kernel's sums may be once as far beyond.
    """
    ratios = [median_low(seeds) / min(seeds) for seeds in tensors if min(seeds) > 0]
    return max(_LEAST_FACTOR, max(ratios, default=1.0) ** 3)


def _of_scalars(step: int) -> float:
    """How far an update may be off whose bias corrections were computed in fp32: the second one enters by its root."""
    first, second = (_FP32 / (1 - beta**step) for beta in _BETAS)
    return first + second / 2
