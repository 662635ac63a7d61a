"""What NVML tells this rank of its own GPU while something runs on it; nothing at all where nobody tells."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from pytest_llmperf.records.clock_reasons import CLOCK_REASONS, THROTTLES

_SM_CLOCK, _GPU_TEMPERATURE = 1, 0  # NVML's numbers for them


@dataclass(frozen=True)
class Look:
    """One look at the GPU; ``None`` is what it did not tell."""

    clock_mhz: float | None
    milliwatts: float | None
    temperature: float | None
    reasons: int | None
    num_foreign: int


class GpuSensors:
    """One GPU's; every look is kept."""

    def __init__(self, nvml: Any, device: torch.device) -> None:
        self._nvml, self._handle = nvml, None
        self.looks: list[Look] = []
        if nvml is not None and device.type == "cuda":
            self._handle = self._ask(
                "nvmlDeviceGetHandleByUUID", f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            )

    @property
    def power_limit_watts(self) -> float:
        """The one in force; 0 where nobody tells."""
        return (self._of("nvmlDeviceGetEnforcedPowerLimit") or 0) / 1000

    def look(self) -> None:
        """Look now."""
        if self._handle is None:
            return
        reasons = self._of("nvmlDeviceGetCurrentClocksEventReasons")
        # Its name before driver 535.
        reasons = self._of("nvmlDeviceGetCurrentClocksThrottleReasons") if reasons is None else reasons
        self.looks.append(
            Look(
                clock_mhz=self._of("nvmlDeviceGetClockInfo", _SM_CLOCK),
                milliwatts=self._of("nvmlDeviceGetPowerUsage"),
                temperature=self._of("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
                reasons=reasons,
                num_foreign=self._num_foreign(),
            )
        )

    def _num_foreign(self) -> int:
        running = self._of("nvmlDeviceGetComputeRunningProcesses") or []
        others = [process for process in running if process.pid != os.getpid()]
        # A container may show this process under its pid of the host: then one stranger is ourselves.
        return len(others) if len(others) < len(running) else max(0, len(others) - 1)

    def _of(self, name: str, *arguments: Any) -> Any:
        return None if self._handle is None else self._ask(name, self._handle, *arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """NVML's answer, or ``None``: a container, a virtual GPU or an old driver may not tell everything."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except (AttributeError, ValueError, self._nvml.NVMLError):
            return None


@contextmanager
def sensors(device: torch.device) -> Iterator[GpuSensors]:
    """Those of ``device``; they tell nothing of a CPU, and where there is no package, no library or no driver."""
    nvml = _initialised() if device.type == "cuda" else None
    try:
        yield GpuSensors(nvml, device)
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def _initialised() -> Any:
    try:
        import pynvml as nvml  # noqa: PLC0415 - another environment may have the training's own packages alone
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        return None
    return nvml


def mean(values: Sequence[float | None]) -> float:
    """Of those that were told; 0, which is unknown, where none was."""
    told = [value for value in values if value is not None]
    return fmean(told) if told else 0.0


def disturbances(looks: Sequence[Look]) -> list[str]:
    """What makes figures of that time the room's, the board's or a neighbour's: a line for each."""
    lines = []
    most = max((look.num_foreign for look in looks), default=0)
    if most:
        lines.append(f"{most} other process(es) on the GPU")
    bits = 0
    for look in looks:
        bits |= look.reasons or 0
    reasons = [name for bit, name in CLOCK_REASONS.items() if bits & bit and name in THROTTLES]
    return lines + [f"clocks were lowered by {name}" for name in reasons]
