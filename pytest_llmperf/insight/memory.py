"""What a training step needs of a GPU's memory: the prediction's parts, and the chapter's formulas beside it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_llmperf.models import Geometry
from pytest_llmperf.spec import TrainSpec

#: In the order in which they are told.
PARTS: Mapping[str, str] = {
    "weights": "the model",
    "gradients": "of the weights, as far as they exist at the peak",
    "optimizer": "its states",
    "activations": "kept for the backward pass, and what it works in",
    "logits": "of the vocabulary's size",
    "buckets": "in which DDP reduces gradients",
    "workspace": "of the matrix library",
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank at its peak, by part."""

    parts: Mapping[str, int]

    @property
    def peak_allocated_bytes(self) -> int:
        return sum(self.parts.values())


def chapter_parameters(geometry: Geometry) -> int:
    """N = h·v + L·(12h² + 13h) + 2h: the seeds' formula, of a GPT with a plain feed-forward block of 4h."""
    h, layers = geometry.hidden_size, geometry.num_layers
    return h * geometry.vocabulary_size + layers * (12 * h * h + 13 * h) + 2 * h


def chapter_model_bytes(num_parameters: int) -> int:
    """16 bytes a parameter: 16-bit weights and gradients, fp32 weights and Adam's states (Rajbhandari et al. 2020)."""
    return 16 * num_parameters


def chapter_activation_bytes(geometry: Geometry, spec: TrainSpec) -> int:
    """s·b·h·L·(34 + 5·a·s/h): 16-bit activations with eager attention (Korthikanti et al. 2022), without the logits."""
    h, heads, length = geometry.hidden_size, geometry.num_heads, spec.sequence_length
    per_layer = length * spec.micro_batch_size * h * (34 + 5 * heads * length / h)
    return round(per_layer * geometry.num_layers)
