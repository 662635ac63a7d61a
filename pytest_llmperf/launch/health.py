"""What else happened on a launch's GPUs: NVML, asked twice a second by the process that waits for it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from pytest_llmperf.launch.machine import Gpu, foreign_processes, nvml_session, process_line
from pytest_llmperf.records.clock_reasons import CLOCK_REASONS
from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Health

_Number = TypeVar("_Number", int, float)

_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True)
class _Sample:
    """One look at one GPU; ``None`` is what it did not tell."""

    time: float
    """Seconds since 1970, the clock that the ranks tell their end by."""
    reasons: int | None
    clock_mhz: float | None
    temperature: float | None
    joules: float | None
    """Since the driver was loaded."""


class HealthWatch:
    """Watches the GPUs of one launch; without NVML, or on the CPU, it sees nothing and says so by zeros."""

    def __init__(self, gpus: Sequence[Gpu], pid_files: Callable[[], Iterable[Path]]) -> None:
        self._gpus, self._pid_files = gpus, pid_files
        self._stack = ExitStack()
        self._handles: dict[int, Any] = {}
        self._seen: dict[int, list[_Sample]] = {gpu.index: [] for gpu in gpus}
        self._foreign: dict[str, None] = {}
        self._errors: dict[int, tuple[int | None, ...]] = {}
        self._next = 0.0
        self._trained_until = math.inf

    def __enter__(self) -> HealthWatch:  # noqa: PYI034 - typing has no Self before Python 3.11
        self._nvml = self._stack.enter_context(nvml_session()) if self._gpus else None
        for gpu in self._gpus:
            handle = self._ask("nvmlDeviceGetHandleByUUID", gpu.uuid)
            if handle is not None:
                self._handles[gpu.index] = handle
        self._foreign |= dict.fromkeys(foreign_processes(self._gpus))
        self._errors = {index: self._memory_errors(handle) for index, handle in self._handles.items()}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look(self, progress: Progress) -> None:
        """Look at the GPUs now, unless they were just looked at or no rank trains."""
        # Told some time after it came true: by then the chip has been looked at while it rested.
        self._trained_until = progress.trained_until or math.inf
        trains = progress.phase == "training" and progress.step
        if not (trains and self._handles) or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _INTERVAL_SECONDS
        for index, handle in self._handles.items():
            self._seen[index].append(self._sample(handle))
        self._foreign |= dict.fromkeys(self._others(frozenset(self._own_pids())))

    def health(self) -> Health:
        """What was seen while the ranks trained; of several GPUs the worst."""
        everyone = [[one for one in seen if one.time <= self._trained_until] for seen in self._seen.values()]
        clocks = [_told(one.clock_mhz for one in seen) for seen in everyone]
        temperatures = [_told(one.temperature for one in seen) for seen in everyone]
        limits = [self._ask("nvmlDeviceGetEnforcedPowerLimit", handle) for handle in self._handles.values()]
        errors = sum(_new(self._errors[index], self._memory_errors(handle)) for index, handle in self._handles.items())
        return Health(
            foreign_processes=tuple(self._foreign),
            clock_reasons=_shares([_told(one.reasons for one in seen) for seen in everyone]),
            sm_clock_mhz=min((median(told) for told in clocks if told), default=0.0),
            temperature_celsius=max((max(told) for told in temperatures if told), default=0.0),
            power_watts=sum_of_known([_power(seen) for seen in everyone]),
            power_limit_watts=min((limit / 1000 for limit in limits if limit is not None), default=0.0),
            memory_errors=errors,
        )

    def _sample(self, handle: Any) -> _Sample:
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        return _Sample(
            time=time.time(),
            reasons=self._reasons(handle),
            clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, 1),  # NVML_CLOCK_SM
            temperature=self._ask("nvmlDeviceGetTemperature", handle, 0),  # NVML_TEMPERATURE_GPU
            joules=None if millijoules is None else millijoules / 1000,
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        """NVML's answer, or ``None``: a container, a virtual GPU or an old driver may not tell everything."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except (AttributeError, ValueError):
            return None
        except Exception as error:
            if type(error).__name__.startswith("NVMLError"):  # the package gives each code a class of its own
                return None
            raise

    def _reasons(self, handle: Any) -> int | None:
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        # Its name before driver 535.
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) if bits is None else bits
        return None if bits is None else int(bits)

    def _memory_errors(self, handle: Any) -> tuple[int | None, ...]:
        """Uncorrected ECC errors since boot, and rows remapped or about to be for such errors; ``None``: not told."""
        uncorrected = self._ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0)  # uncorrected, volatile
        _, *rows = self._ask("nvmlDeviceGetRemappedRows", handle) or (None, None, None, None)
        return uncorrected, *rows

    def _own_pids(self) -> list[int]:
        pids = [os.getpid()]
        for path in self._pid_files():
            try:
                pids.append(int(path.read_text(encoding="ascii")))
            except (OSError, ValueError):
                continue
        return pids

    def _others(self, own: frozenset[int]) -> list[str]:
        lines = []
        for gpu in self._gpus:
            running = self._ask("nvmlDeviceGetComputeRunningProcesses", self._handles.get(gpu.index)) or []
            others = [process for process in running if process.pid not in own]
            # A container may show its own ranks under pids of the host: then one stranger is our rank.
            if len(others) < len(running) or len(others) > 1:
                lines += [process_line(gpu, process) for process in others]
        return lines


def _new(before: Sequence[int | None], after: Sequence[int | None]) -> int:
    """What was counted in between, of the counters that were told both times; a reset makes nothing new."""
    pairs = zip(before, after, strict=True)
    return sum(max(0, int(late) - int(early)) for early, late in pairs if early is not None and late is not None)


def _told(values: Iterable[_Number | None]) -> list[_Number]:
    return [value for value in values if value is not None]


def _shares(samples: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of the samples, by reason; of several GPUs the largest."""
    found: dict[str, float] = {}
    for bit, name in CLOCK_REASONS.items():
        share = max((fmean(bool(bits & bit) for bits in gpu) for gpu in samples if gpu), default=0.0)
        if share:
            found[name] = round(share, 3)
    return found


def sum_of_known(watts: Sequence[float]) -> float:
    """All of them together; 0, which is unknown, where one is not known."""
    return round(sum(watts), 1) if all(watts) else 0.0


def _power(seen: Sequence[_Sample]) -> float:
    told = [(one.time, one.joules) for one in seen if one.joules is not None]
    if len(told) < 2:  # noqa: PLR2004 - two ends of a span
        return 0.0
    (start, first), (end, last) = told[0], told[-1]
    return (last - first) / (end - start) if end > start else 0.0
