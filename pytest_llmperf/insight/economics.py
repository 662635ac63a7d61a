"""How well a chip is used: its peak rate and the model FLOPs utilisation (MFU)."""

from __future__ import annotations

from collections.abc import Mapping

_TERA = 1e12

# Dense (not sparse) peak rates in TFLOP/s by compute precision, from NVIDIA's datasheets of each product. Ordered:
# the first whose words are all in the device's name counts, so that a special product comes before its family.
_PEAKS: tuple[tuple[tuple[str, ...], Mapping[str, float]], ...] = (
    (("GH200",), {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (("H200", "NVL"), {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    (("H200",), {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (("H100", "PCIe"), {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.0}),
    (("H100", "NVL"), {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    (("H100",), {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (("A100",), {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    (("L40S",), {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6}),
    (("V100",), {"fp16": 125.0, "fp32": 15.7}),
)


def peak_flops(gpu_name: str, compute_precision: str) -> float | None:
    """The chip's dense peak in FLOP/s for ``bf16``, ``fp16``, ``tf32`` or ``fp32``; ``None`` where it is not known.

    Source: NVIDIA's product datasheets, rates without sparsity.
    """
    for words, peaks in _PEAKS:
        if all(word in gpu_name for word in words):
            tflops = peaks.get(compute_precision)
            return None if tflops is None else tflops * _TERA
    return None


def mfu(tokens_per_second_per_gpu: float, flops_per_token: float, peak: float) -> float:
    """Model FLOPs utilisation, a fraction: useful training FLOPs over the chip's peak (Chowdhery et al. 2022)."""
    return tokens_per_second_per_gpu * flops_per_token / peak
