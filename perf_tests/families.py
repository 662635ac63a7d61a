"""Other families than the ladder's, as data: each as it comes, and with Liger, in bf16 with SDPA on one GPU.

Qwen3 0.6B, Gemma 3 270M, SmolLM2 360M and GPT-2 medium in their published sizes. Two are of their family in sizes
that were chosen: a Mistral of one billion weights (16 layers of 2,048, 16 heads of 128 over 4 of keys and values, a
window of 4,096 that its sequences fill), and a Mixtral of 0.6 billion (12 layers of 1,024, 8 experts of 1,792, two for
each token). On the CPU the tiny model of each family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from perf_tests.ladder import on_cpu
from pytest_llmperf import TrainSpec

# Steady after four steps and known to 0.2 % after twelve: no more are needed.
_SHORT: dict[str, Any] = {"steps": 30, "min_steps": 12}

# The same tokens a step for all: 8 sequences of 1,024, and where a family is there for long ones, 2 of 4,096.
_PLAIN = tuple(
    TrainSpec(model=model, micro_batch_size=micro_batch_size, sequence_length=sequence_length, **_SHORT)
    for model, micro_batch_size, sequence_length in (
        ("qwen3-0.6b", 8, 1024),
        ("gemma-3-270m", 8, 1024),
        ("smollm2-360m", 8, 1024),
        ("gpt2-medium", 8, 1024),
        ("mistral-like-1b", 2, 4096),
        ("mixtral-like-0.6b", 8, 1024),
    )
)

# It has no kernels for them: asked for all the same, so that the day it has some is noticed.
_WITHOUT_LIGER = frozenset({"gpt2"})


@dataclass(frozen=True)
class Family:
    """One case."""

    spec: TrainSpec
    inactive: tuple[str, ...] = ()
    """Settings that are asked for and change nothing for this model."""

    def on_cpu(self) -> Family:
        """The same with the tiny model of its family."""
        return replace(self, spec=on_cpu(self.spec))


def _with_liger(plain: TrainSpec) -> Family:
    has_none = plain.architecture.model_type in _WITHOUT_LIGER
    return Family(replace(plain, liger=True), ("liger",) if has_none else ())


FAMILIES = [case for plain in _PLAIN for case in (Family(plain), _with_liger(plain))]
