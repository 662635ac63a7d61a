"""What one rank observes while it trains: step times, losses, tokens, peak memory.

Nothing here synchronises the device while training runs. On a GPU an event is recorded at each step's end and read
after the last one; on the CPU the work is done when the host says so and ``perf_counter`` is exact.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

import psutil
import torch

from pytest_llmperf.records.clock_reasons import CLOCK_REASONS, THROTTLES

Instant = TypeVar("Instant")


class Clock(ABC, Generic[Instant]):
    """Instants in the order of the work; the distances between them, read once the work is done."""

    def __init__(self) -> None:
        self._marks: list[Instant] = []

    @abstractmethod
    def instant(self) -> Instant:
        """The end of all work issued so far."""

    @abstractmethod
    def has_passed(self, instant: Instant) -> bool:
        """Whether the work is beyond it by now; waits for nothing."""

    @abstractmethod
    def between(self, start: Instant, end: Instant) -> float:
        """Seconds; both have passed."""

    @abstractmethod
    def wait(self) -> None:
        """Until all work has ended."""

    def mark(self) -> None:
        """Keep this instant as one that ``seconds`` goes by."""
        self._marks.append(self.instant())

    def so_far(self) -> tuple[float, ...]:
        """The times, in seconds, between the marks that the work has passed by now; waits for nothing."""
        passed = itertools.takewhile(self.has_passed, self._marks)
        return tuple(itertools.starmap(self.between, itertools.pairwise(passed)))

    def seconds(self) -> tuple[float, ...]:
        """The time from each mark to the next, in seconds; waits for the work to end."""
        self.wait()
        return self.so_far()


class CudaClock(Clock[torch.cuda.Event]):
    """CUDA events on the current stream: what the GPU did, whatever the host did meanwhile."""

    def instant(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, instant: torch.cuda.Event) -> bool:
        return instant.query()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000

    def wait(self) -> None:
        torch.cuda.synchronize()


class HostClock(Clock[float]):
    """The host's monotonic clock, for work that the host itself does."""

    def instant(self) -> float:
        return time.perf_counter()

    def has_passed(self, instant: float) -> bool:  # noqa: ARG002 - the host has done what it says
        return True

    def between(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        return None


class Memory(ABC):
    """Peak memory of this rank since the object was made, in bytes."""

    #: What a loss takes that is kept: of an allocator its smallest block; of a host with all that belongs to a tensor.
    loss_bytes = 4096

    @abstractmethod
    def now(self) -> int:
        """Held at this moment."""

    @abstractmethod
    def allocated(self) -> int | None:
        """Held by tensors at this moment, as the host counts them: nothing waits; ``None`` where nothing counts."""

    @abstractmethod
    def peak_reserved(self) -> int:
        """Held at most by the allocator (on the CPU: resident above the start)."""

    @abstractmethod
    def peak_allocated(self) -> int:
        """Held at most by tensors (on the CPU: the same as reserved)."""

    def apart(self) -> AbstractContextManager[None]:
        """While it is entered, what is held is none of the training's."""
        return nullcontext()


class CudaMemory(Memory):
    """The caching allocator's own counters."""

    loss_bytes = 512

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        return torch.cuda.memory_reserved()

    def allocated(self) -> int:
        # ``memory_allocated`` sorts all of the allocator's counters first, which takes the host five times as long.
        return int(torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"])

    def peak_reserved(self) -> int:
        return torch.cuda.max_memory_reserved()

    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()


class HostMemory(Memory):
    """Resident memory above what the process held when the object was made (libraries, the interpreter)."""

    def __init__(self) -> None:
        # Importing may have held more than it left behind: without this, that peak would hide a smaller model's.
        _forget_peak()
        self._start = _resident()
        self._malloc = _mallinfo()

    def now(self) -> int:
        return max(0, _resident() - self._start)

    @contextmanager
    def apart(self) -> Iterator[None]:
        before = _resident()
        yield
        _forget_peak()
        self._start += max(0, _resident() - before)

    def allocated(self) -> int | None:
        if self._malloc is None:
            return None
        found = self._malloc()
        return int(found.uordblks + found.hblkhd)

    def peak_reserved(self) -> int:
        return max(0, _peak_resident() - self._start)

    def peak_allocated(self) -> int:
        return self.peak_reserved()


def _resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: what it gave away of its heaps and by maps of their own, among others."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def _mallinfo() -> Callable[[], Any] | None:
    """glibc's count of what ``malloc`` has given away: exact, as resident memory is not; ``None``: another libc's."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocInfo
    return function


def _forget_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_resident() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    import resource  # noqa: PLC0415 - absent on Windows, where /proc is too

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# What NVML tells this rank of its own GPU while something runs on it; nothing at all where nobody tells.


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
