"""What the ladder's steps bring, as data: ratios that hold on hardware that has no baseline yet.

Each gain is two specs and bounds on their ratio, of tokens/s per GPU and of peak memory. On H200 both sides were
measured (baselines/); the bounds leave room for other chips, and say what the step is for. On the CPU only the last one
is a gain: Liger's kernels need a GPU, and a tiny model's attention is too small to matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from perf_tests.fine_tuning import FINE_TUNING
from perf_tests.ladder import on_cpu
from perf_tests.optimisations import HUB_KERNELS
from pytest_llmperf import TrainSpec


@dataclass(frozen=True)
class Gain:
    """One step: ``after`` over ``before``."""

    name: str
    before: TrainSpec
    after: TrainSpec
    bounds: dict[str, float] = field(default_factory=dict)
    """Arguments of ``perf.compare``."""
    inactive: tuple[str, ...] = ()
    """Settings that are asked for and known to change nothing."""
    cpu_bounds: dict[str, float] | None = None
    """The same on the CPU; ``None``: it is no gain there."""


_BASE = TrainSpec(model="llama-3.2-1b", attention="sdpa", micro_batch_size=14)
_EAGER = replace(_BASE, attention="eager", micro_batch_size=7)
_FP32 = replace(_EAGER, model_precision="fp32", mixed_precision="no", micro_batch_size=5, steps=20, min_steps=12)

_OPT = TrainSpec(model="opt-1.3b", liger=True, micro_batch_size=16)

# Rung 15.9; and each layer compiled by itself, with Liger's loss around them.
_BEST = replace(_BASE, liger=True, micro_batch_size=37, steps=30, min_steps=12)
_LAYERS = replace(_BEST, liger_kernels="fused_linear_cross_entropy", torch_compile=True, torch_compile_scope="layers")

# Eight billion weights, eight sequences of 1,024: all of them, adapters, adapters over four bits.
_FULL, _LORA, _NF4 = [case.spec for case in FINE_TUNING if case.spec.model == "llama-3.1-8b"][:3]

GAINS = [
    Gain(
        "bf16",
        _FP32,
        replace(_EAGER, micro_batch_size=5),
        # 5.7k to 28.7k tokens/s on H200: tensor cores, against true fp32.
        {"throughput_at_least": 2.0, "memory_at_most": 0.95},
    ),
    Gain(
        "sdpa",
        _EAGER,
        replace(_EAGER, attention="sdpa"),
        # 29.8k to 45.8k, 55.6 to 29.6 GiB.
        {"throughput_at_least": 1.3, "memory_at_most": 0.75},
    ),
    Gain(
        "liger",
        _BASE,
        replace(_BASE, liger=True),
        # 49.5k to 63.7k, 57.0 to 26.1 GiB.
        {"throughput_at_least": 1.2, "memory_at_most": 0.6},
    ),
    Gain(
        "hub-kernels",
        _BASE,
        replace(_BASE, hub_kernels=HUB_KERNELS),
        # A norm is one kernel each way, in the place of seven and more: 50.3k to 56.9k, 57.0 to 53.1 GiB.
        {"throughput_at_least": 1.05, "memory_at_most": 0.97},
    ),
    Gain(
        "opt-liger",
        replace(_OPT, liger=False),
        _OPT,
        # The chapter asks for Liger on OPT too, for which it has no kernels: no effect, and that is held.
        {"throughput_at_least": 0.97, "throughput_at_most": 1.03, "memory_at_least": 0.99, "memory_at_most": 1.01},
        inactive=("liger",),
    ),
    *(
        Gain(
            f"{gpus}-gpus",
            replace(_BASE, liger=True),
            replace(_BASE, liger=True, gpus=gpus),
            # Per GPU: on four H200 of one host 93 %. Skipped where there are fewer.
            {"throughput_at_least": 0.85},
        )
        for gpus in (2, 4, 8)
    ),
    Gain(
        "compiled-layers",
        _BEST,
        _LAYERS,
        # 71.7k to 72.8k on H200; the same model, to the third decimal of the loss.
        {"throughput_at_least": 0.99, "loss_within": 0.01},
    ),
    Gain(
        "float8",
        _LAYERS,
        replace(_LAYERS, fp8="tensorwise"),
        # 72.8k to 86.9k, 53.5 to 40.4 GiB. Coarser products: 0.03 apart after twelve steps.
        {"throughput_at_least": 1.1, "memory_at_most": 0.85, "loss_within": 0.1},
    ),
    Gain(
        "fused-adamw",
        _BEST,
        replace(_BEST, optimizer="adamw_torch_fused"),
        # transformers' own default; 71.7k to 72.2k on H200.
        {"throughput_at_least": 1.0, "memory_at_most": 1.01, "loss_within": 0.01},
    ),
    Gain(
        "recompute-some",
        _BEST,
        replace(
            _BEST,
            liger_kernels="rms_norm+swiglu+fused_linear_cross_entropy",
            gradient_checkpointing=True,
            checkpointing_policy="selective",
        ),
        # 71.1k to 62.0k, 52.6 to 41.8 GiB. With Liger's rope the losses are 0.03 apart: it writes over what was kept.
        {"memory_at_most": 0.85, "loss_within": 0.01},
    ),
    Gain(
        "adapters",
        _FULL,
        _LORA,
        # By arithmetic 8 products to 6, recomputation included; predicted 59.9 to 18.8 GiB. Wide until it is measured.
        {"throughput_at_least": 1.0, "memory_at_most": 0.45},
    ),
    Gain(
        "four-bits",
        _LORA,
        _NF4,
        # Predicted 18.8 to 9.1 GiB; what is saved is paid for by making each weight anew, three times a step.
        {"throughput_at_least": 0.5, "memory_at_most": 0.7},
    ),
    Gain(
        "larger-batch",
        replace(_BASE, liger=True),
        replace(_BASE, liger=True, micro_batch_size=37),
        # 63.7k to 71.7k.
        {"throughput_at_least": 1.05},
        # Sixteen sequences cost the host's overhead once.
        cpu_bounds={"throughput_at_least": 1.1},
    ),
]


def specs_of(gain: Gain, cpu: bool) -> tuple[TrainSpec, TrainSpec]:
    """Both sides, on the CPU with the tiny model of their family and without Liger."""
    if not cpu:
        return gain.before, gain.after
    small = [replace(on_cpu(spec), liger=False) for spec in (gain.before, gain.after)]
    return replace(small[0], micro_batch_size=1), replace(small[1], micro_batch_size=16)
