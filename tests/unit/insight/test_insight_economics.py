"""Peak rates and MFU."""

from __future__ import annotations

import pytest

from pytest_llmperf.analysis.formulas import least_traffic, mfu, peak_bandwidth, peak_flops
from pytest_llmperf.settings import models


@pytest.mark.parametrize(
    ("gpu_name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
    ],
)
def test_a_known_chip_has_its_datasheets_dense_peak(gpu_name: str, precision: str, tflops: float) -> None:
    assert peak_flops(gpu_name, precision) == tflops * 1e12


@pytest.mark.parametrize(
    ("gpu_name", "precision"),
    [
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("NVIDIA RTX A1000 Laptop GPU", "bf16"),
        ("NVIDIA GB200", "bf16"),
        ("NVIDIA H200 NVL", "bf16"),
        ("NVIDIA H100 NVL", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA L40", "bf16"),
        ("Intel(R) Xeon(R) CPU", "fp32"),
        ("", "fp32"),
        ("NVIDIA A100-SXM4-80GB", "fp8"),
    ],
)
def test_a_chip_or_a_rate_that_is_not_known_has_none(gpu_name: str, precision: str) -> None:
    assert peak_flops(gpu_name, precision) is None


@pytest.mark.parametrize(
    ("gpu_name", "tera"), [("NVIDIA H200", 4.8), ("NVIDIA H100 80GB HBM3", 3.35), ("NVIDIA H200 NVL", None), ("", None)]
)
def test_a_known_chip_has_its_memorys_peak(gpu_name: str, tera: float | None) -> None:
    assert peak_bandwidth(gpu_name) == (None if tera is None else tera * 1e12)


def test_a_step_moves_ten_gigabytes_for_the_designs_model() -> None:
    # 2.1 ms at the H200's 4.8 TB/s: a step that says less did no work.
    assert least_traffic(1_235_814_400, 2) / 4.8e12 == pytest.approx(0.00206, rel=0.01)


def test_mfu_of_the_designs_best_rung() -> None:
    geometry, peak = models.resolve("llama-3.2-1b").geometry, peak_flops("NVIDIA H200", "bf16")
    assert geometry is not None
    assert peak is not None
    assert mfu(72_271, geometry.flops_per_token(1024), peak) == pytest.approx(0.57, abs=0.002)
