"""Model families of which all is known: what each configuration of them takes, by a roofline with real ones' faults.

A family's matrix products, bytes, kernels and memory follow from its geometry, as does what a choice changes of them.
How well kernels do, and what two choices bring together, is drawn anew for each seed. The scale is an H200's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from pytest_llmperf.settings.space import Space, axes_of
from pytest_llmperf.settings.train_spec import TrainSpec

_PEAK, _BANDWIDTH, _MEMORY = 990e12, 4.0e12, 138e9
_SEQUENCE = 1024
# Seconds to start a kernel from Python, and of a launch outside of its steps by what it compiles.
_START, _OUTSIDE = 7e-6, {"no": 3.0, "layers": 12.0, "model": 25.0, "layers autotuned": 80.0}
_AXES = {
    "micro_batch_size": [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192],
    "attention": {
        "sdpa": {"attention": "sdpa", "sdpa_backend": "auto"},
        "sdpa flash": {"attention": "sdpa", "sdpa_backend": "flash"},
        "sdpa cudnn": {"attention": "sdpa", "sdpa_backend": "cudnn"},
        "flash_attention_2": {"attention": "flash_attention_2", "sdpa_backend": "auto"},
        "flex_attention": {"attention": "flex_attention", "sdpa_backend": "auto"},
        "eager": {"attention": "eager", "sdpa_backend": "auto"},
    },
    "liger": {
        "off": {"liger": False},
        "all": {"liger": True},
        "loss": {"liger": True, "liger_kernels": "fused_linear_cross_entropy"},
        "without swiglu": {"liger": True, "liger_kernels": "rope+rms_norm+fused_linear_cross_entropy"},
        "without rms_norm": {"liger": True, "liger_kernels": "rope+swiglu+fused_linear_cross_entropy"},
        "without rope": {"liger": True, "liger_kernels": "rms_norm+swiglu+fused_linear_cross_entropy"},
    },
    "compile": {
        "no": {"torch_compile": False},
        "layers": {"torch_compile": True, "torch_compile_scope": "layers"},
        "model": {"torch_compile": True, "torch_compile_scope": "model"},
        "layers autotuned": {
            "torch_compile": True,
            "torch_compile_scope": "layers",
            "torch_compile_mode": "max-autotune-no-cudagraphs",
        },
    },
    "optimizer": ["adamw_torch", "adamw_torch_fused"],
    "checkpointing": {
        "no": {"gradient_checkpointing": False},
        "selective": {"gradient_checkpointing": True, "checkpointing_policy": "selective"},
        "full": {"gradient_checkpointing": True, "checkpointing_policy": "full"},
    },
}


@dataclass(frozen=True)
class Family:
    """A model's geometry; ``trained`` is the part of its weights with gradients; ``experts`` are started one by one."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    trained: float = 1.0
    experts: int = 1

    @property
    def weights(self) -> float:
        """Those of its matrices, the embedding once."""
        own = 4 * self.hidden**2 + 3 * self.hidden * self.inner * self.experts
        return self.layers * own + self.vocabulary * self.hidden


FAMILIES = (
    Family("llama-1b", 16, 2048, 8192, 32, 128_256),
    Family("opt-1.3b", 24, 2048, 5461, 32, 50_272),
    Family("qwen-0.6b", 28, 1024, 3072, 16, 151_936),
    Family("gemma-270m", 18, 640, 2048, 4, 262_144),
    Family("smollm-360m", 32, 960, 2560, 15, 49_152),
    Family("llama-8b-lora", 32, 4096, 14336, 32, 128_256, trained=0.005),
    Family("mixtral-0.6b", 12, 1024, 1792, 16, 32_000, experts=8),
    Family("gpt2-medium", 24, 1024, 2731, 16, 50_257),
)


@cache
def space() -> tuple[Space, tuple[TrainSpec, ...]]:
    """What is searched, whatever the family, and its candidates."""
    found = Space(TrainSpec(model="llama-3.2-1b", micro_batch_size=8), axes_of(_AXES))
    return found, found.candidates().specs


@dataclass(frozen=True)
class Known:
    """One configuration: seconds of a step and of the rest of a launch, and bytes."""

    step_seconds: float
    outside: float
    peak: float
    failure: str = ""
    """Of a launch that is made all the same: ``oom``, ``timeout``, ..."""

    @property
    def fits(self) -> bool:
        return self.peak <= _MEMORY


class World:
    """One family with one draw of how well everything does."""

    def __init__(self, family: Family, seed: int) -> None:
        self.family, self._drawn = family, dict[tuple[str, ...], float]()
        self._chance = random.Random(f"{family.name} {seed}")  # noqa: S311 - a world, no secret
        self.efficiency = self._chance.uniform(0.55, 0.75)
        self.host = self._chance.uniform(0.7, 1.6)

    def _draw(self, *words: str, sd: float) -> float:
        """A factor that is the same whenever it is asked for."""
        if words not in self._drawn:
            self._drawn[words] = math.exp(random.Random(f"{self.family.name} {self.efficiency} {words}").gauss(0, sd))  # noqa: S311
        return self._drawn[words]

    def known(self, spec: TrainSpec, choices: dict[str, str]) -> Known:
        """Everything about ``spec``, which has made these choices."""
        one, tokens = self.family, spec.micro_batch_size * _SEQUENCE
        attention, liger, compiled, fused, kept = (
            choices[name] for name in ("attention", "liger", "compile", "optimizer", "checkpointing")
        )
        active = one.weights - one.layers * 3 * one.hidden * one.inner * (one.experts - min(2, one.experts))
        passes = (2 + 2 + 2 * (one.trained > 0.1)) + {"no": 0.0, "selective": 0.5, "full": 2.0}[kept]  # noqa: PLR2004
        full = tokens / (tokens + 1500 * self._draw("full", sd=0.5))
        products = active * tokens * passes / (_PEAK * self.efficiency * full)
        score = one.layers * tokens * _SEQUENCE * one.hidden * 6 / (_PEAK * 0.25)
        score *= {"flex_attention": 1.3, "eager": 2.0}.get(attention, 1.0)
        score *= self._draw("attention", attention, sd=0.12)
        squares = one.layers * one.heads * tokens * _SEQUENCE * 30 if attention == "eager" else 0.0
        fuses = {"off": 1.0, "loss": 1.0, "all": 0.55}.get(liger, 0.7) * (0.5 if compiled != "no" else 1.0)
        elementwise = one.layers * tokens * (40 * one.hidden + 12 * one.inner) * 2 * max(fuses, 0.4)
        logits = tokens * one.vocabulary * (6 if liger != "off" else 26 * (0.6 if compiled == "model" else 1.0))
        states = one.weights * one.trained * (16 if fused == "adamw_torch_fused" else 40)
        recomputed = {"no": 1.0, "selective": 1.15, "full": 1.35}[kept]
        gpu = products + score + (elementwise * recomputed + logits + squares + states) / _BANDWIDTH
        kernels = one.layers * (90 + 60 * (one.experts > 1) * one.experts / 4) * recomputed
        kernels *= {"no": 1.0, "model": 0.35}.get(compiled, 0.5) * (1.0 if liger in ("off", "loss") else 0.85)
        kernels += (10 if fused == "adamw_torch_fused" else 120) * one.layers * (one.trained > 0.1) / 4  # noqa: PLR2004
        seconds = max(gpu, kernels * _START * self.host) + 0.1 * min(gpu, kernels * _START * self.host)
        named = list(choices.items())
        for place, (name, choice) in enumerate(named):
            if name == "micro_batch_size":
                seconds *= self._draw(choice, attention, sd=0.003)
                continue
            seconds *= self._draw(name, choice, sd=0.015)
            for other in named[place + 1 :]:
                seconds *= self._draw(name, choice, *other, sd=0.006)
        saved = {"no": 1.0, "selective": 0.55, "full": 0.15}[kept]
        each = one.layers * (26 * one.hidden + 8 * one.inner) * 2 * saved * (0.45 + 0.55 * fuses)
        each += one.vocabulary * (2 if liger != "off" else 12)
        each += one.layers * one.heads * _SEQUENCE * 10 * saved if attention == "eager" else 0.0
        peak = 2e9 + one.weights * (2 + 10 * one.trained) + tokens * each
        outside = _OUTSIDE[compiled] + (6.0 if attention == "flex_attention" else 0.0)
        return Known(seconds, outside * self._draw("launch", *choices.values(), sd=0.2), peak)

    def all(self, specs: Sequence[TrainSpec], found: Space) -> list[Known]:
        """Each of ``specs``, which are of the space ``found``."""
        return [self.known(spec, found.choices_of(spec)) for spec in specs]
