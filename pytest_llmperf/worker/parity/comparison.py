"""From what a small training did, and the true one beside it, to figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_llmperf.records.training_errors import GRADIENT, UPDATE, TensorError, TrainingErrors
from pytest_llmperf.spec import small_spec
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support.files import replacing
from pytest_llmperf.worker.parity.plain_updates import plain_updates
from pytest_llmperf.worker.parity.small_trainer import LEARNING_RATE, LONGEST_GRADIENT, WEIGHT_DECAY, SmallSteps

# Half the distance from 1 to the next number of the type.
_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4}

# What clipping adds to a norm before it divides by it.
_CLIPPING_EPSILON = 1e-6


@dataclass(frozen=True)
class Truth:
    """Losses and gradients of the plain form in double precision."""

    losses: Sequence[float]
    gradients: Sequence[Mapping[str, torch.Tensor]]

    def save(self, path: Path) -> None:
        """Whole, or not at all."""
        with replacing(path, lasts=False) as file:
            torch.save({"losses": list(self.losses), "gradients": [dict(one) for one in self.gradients]}, file)

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> Truth:
        """As ``save`` left it, on ``device``, wherever it was made."""
        return cls(**torch.load(path, map_location=device, weights_only=True))


def errors_of(form: str, spec: TrainSpec, seen: SmallSteps, truth: Truth) -> TrainingErrors:
    """The figures of one training of ``spec``, as this rank saw it.

    Of an optimizer that has no plain form only the first step is held against the truth, and no update: the later
    steps have other weights.
    """
    optimizer = small_spec.true_optimizer(spec)
    steps = spec.steps if optimizer else 1
    norms = [_total(one) for one in truth.gradients[:steps]]
    tensors = [*_compared(GRADIENT, seen.gradients[:steps], truth.gradients[:steps])]
    lost = 0.0
    if optimizer:
        given = seen.weights, seen.clipped, seen.decaying
        updates = plain_updates(optimizer, *given, LEARNING_RATE, WEIGHT_DECAY)
        tensors += _compared(UPDATE, seen.updates, updates)
        lost = _lost(seen.updates, updates)
    return TrainingErrors(
        form=form,
        precision=spec.precision if spec.fp8 == "no" else f"fp8 {spec.fp8}",
        roundoff=_ROUNDOFF[spec.compute_precision],
        seed=spec.seed,
        losses=tuple(seen.losses[:steps]),
        true_losses=tuple(truth.losses[:steps]),
        true_norms=tuple(norms),
        clipping_errors=tuple(_clipping_errors(seen)),
        tensors=tuple(tensors),
        product_types=seen.product_types,
        true_optimizer=not small_spec.keeps_states_short(spec),
        short_scalars=spec.optimizer != optimizer,
        unknown=tuple(sorted(seen.weights[0].keys() ^ truth.gradients[0].keys())),
        lost_updates=lost,
    )


def _compared(
    kind: str, own: Sequence[Mapping[str, torch.Tensor]], true: Sequence[Mapping[str, torch.Tensor]]
) -> Iterator[TensorError]:
    for step, (ours, truth) in enumerate(zip(own, true, strict=True), 1):
        pairs = [(ours.get(name, torch.zeros_like(expected)), expected) for name, expected in truth.items()]
        norms = _fetched(found.norm() for found, _ in pairs)
        true_norms = _fetched(expected.norm() for _, expected in pairs)
        products = _fetched((found * expected).sum() for found, expected in pairs)
        errors = _fetched((found - expected).norm() for found, expected in pairs)
        for name, norm, true_norm, product, error in zip(truth, norms, true_norms, products, errors, strict=True):
            longest = norm * true_norm
            yield TensorError(
                kind=kind,
                tensor=name,
                step=step,
                true_norm=true_norm,
                norm=norm,
                cosine=product / longest if longest else 0.0,
                error=error,
            )


def _clipping_errors(seen: SmallSteps) -> Iterator[float]:
    for before, after in zip(seen.gradients, seen.clipped, strict=True):
        norm = _total(before)
        expected = norm * min(1.0, LONGEST_GRADIENT / (norm + _CLIPPING_EPSILON))
        yield _total(after) / expected - 1 if expected else 0.0


def _lost(own: Sequence[Mapping[str, torch.Tensor]], true: Sequence[Mapping[str, torch.Tensor]]) -> float:
    pairs = [(ours[name], expected) for ours, truth in zip(own, true, strict=True) for name, expected in truth.items()]
    wanted = sum(_fetched((expected != 0).sum() for _, expected in pairs))
    stayed = sum(_fetched(((expected != 0) & (found == 0)).sum() for found, expected in pairs))
    return stayed / wanted if wanted else 0.0


def _total(tensors: Mapping[str, torch.Tensor]) -> float:
    return float(sum(norm**2 for norm in _fetched(one.norm() for one in tensors.values())) ** 0.5)


def _fetched(figures: Iterable[torch.Tensor]) -> list[float]:
    """All of them at once: a device is waited for whenever one figure is asked for."""
    found = list(figures)
    return torch.stack(found).tolist() if found else []
