"""Small trainings beside the plain form: which a launch makes, and what they did, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

#: Trainings of the plain form, each with weights and rows of its own, from which the measure of its rounding is taken;
#: and of these as many as are made of a spec beside them.
SEEDS, BESIDE = 5, 3


@dataclass(frozen=True, kw_only=True)
class ParityOrder:
    """The plain form's truth and rounding, or one training beside that truth."""

    truth: str = ""
    """The folder of the launch that left it; empty: this launch makes it."""
    shrinks: float = 1.0
    """How long a sliding window is in the small model beside that in the measured one, as its sequences are."""
    gathered: str = "no"
    """In which type the plain form's weights are used, where that is another than theirs and there is no autocast."""


#: The launch's file.
FILE = "training-errors.json"

GRADIENT, UPDATE = "gradient", "update"

#: Forms: in the spec's own precision, and in fp32.
OWN, FP32 = "own", "fp32"


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """One tensor of one step beside the true one; norms are Euclidean."""

    kind: str
    """``gradient``, or ``update``: what the optimizer made of the gradients that this very training gave it."""
    tensor: str
    step: int
    """From 1."""
    true_norm: float
    norm: float
    """0 where there is none."""
    cosine: float
    error: float
    """Norm of the difference."""
    rank: int = 0

    @property
    def relative(self) -> float:
        """The error as a fraction of the true norm."""
        return self.error / self.true_norm if self.true_norm else math.inf


@dataclass(frozen=True, kw_only=True)
class TrainingErrors:
    """A few steps of one training."""

    form: str
    """``own`` or ``fp32``."""
    precision: str
    """For people."""
    roundoff: float
    """Of the type of its products: by which fraction one rounding changes a value at most."""
    seed: int
    losses: tuple[float, ...]
    true_losses: tuple[float, ...]
    true_norms: tuple[float, ...]
    """Of all gradients of a step together."""
    clipping_errors: tuple[float, ...]
    """By which fraction gradients came out of clipping longer or shorter than they should."""
    tensors: tuple[TensorError, ...]
    product_types: Mapping[str, str] = field(default_factory=dict)
    """Type of each linear layer's products; of a compiled model nobody looks."""
    true_optimizer: bool = True
    """Whether its optimizer is the plain form's, and not one that rounds its states."""
    short_scalars: bool = False
    """Whether its optimizer may compute bias corrections in fp32, as fused ones do; the plain form has Python's."""
    unknown: tuple[str, ...] = ()
    """Parameters that one of the two trains and the other does not have."""
    lost_updates: float = 0.0
    """Share of weights that an update should have moved and that stayed."""


def merged(by_rank: Sequence[TrainingErrors]) -> TrainingErrors:
    """Merge all ranks: the mean of their losses, and of each tensor what the rank says that is furthest off."""
    first, count = by_rank[0], len(by_rank)
    worst: dict[tuple[str, str, int], TensorError] = {}
    for rank, one in enumerate(by_rank):
        for tensor in one.tensors:
            key = (tensor.kind, tensor.tensor, tensor.step)
            if key not in worst or not tensor.error <= worst[key].error:  # what is not a number is as wrong as can be
                worst[key] = replace(tensor, rank=rank)
    return replace(
        first,
        losses=tuple(sum(losses) / count for losses in zip(*(one.losses for one in by_rank), strict=True)),
        clipping_errors=tuple(
            max(errors, key=abs) for errors in zip(*(one.clipping_errors for one in by_rank), strict=True)
        ),
        tensors=tuple(worst.values()),
        unknown=tuple(dict.fromkeys(name for one in by_rank for name in one.unknown)),
        lost_updates=max(one.lost_updates for one in by_rank),
    )
