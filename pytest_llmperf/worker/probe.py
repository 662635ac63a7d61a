"""What one rank observes while it trains: step times, losses, tokens, peak memory.

Nothing here synchronises the device while training runs. On a GPU an event is recorded at each step's end and read
after the last one; on the CPU the work is done when the host says so and ``perf_counter`` is exact.
"""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

import psutil
import torch


class Clock(ABC):
    """Marks in the order of the work; the distances between them, read once the work is done."""

    @abstractmethod
    def mark(self) -> None:
        """Note that all work issued so far ends here."""

    @abstractmethod
    def so_far(self) -> tuple[float, ...]:
        """The times, in seconds, between the marks that the work has passed by now; waits for nothing."""

    @abstractmethod
    def seconds(self) -> tuple[float, ...]:
        """The time from each mark to the next, in seconds; waits for the work to end."""


class CudaClock(Clock):
    """CUDA events on the current stream: what the GPU did, whatever the host did meanwhile."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def so_far(self) -> tuple[float, ...]:
        passed = itertools.takewhile(lambda event: event.query(), self._events)
        return tuple(start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(passed))

    def seconds(self) -> tuple[float, ...]:
        torch.cuda.synchronize()
        return self.so_far()


class HostClock(Clock):
    """The host's monotonic clock, for work that the host itself does."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def so_far(self) -> tuple[float, ...]:
        return tuple(end - start for start, end in itertools.pairwise(self._marks))

    def seconds(self) -> tuple[float, ...]:
        return self.so_far()


class Memory(ABC):
    """Peak memory of this rank since the object was made, in bytes."""

    @abstractmethod
    def now(self) -> int:
        """Held at this moment."""

    @abstractmethod
    def peak_reserved(self) -> int:
        """Held at most by the allocator (on the CPU: resident above the start)."""

    @abstractmethod
    def peak_allocated(self) -> int:
        """Held at most by tensors (on the CPU: the same as reserved)."""


class CudaMemory(Memory):
    """The caching allocator's own counters."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        return torch.cuda.memory_reserved()

    def peak_reserved(self) -> int:
        return torch.cuda.max_memory_reserved()

    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()


class HostMemory(Memory):
    """Resident memory above what the process held when the object was made (libraries, the interpreter)."""

    def __init__(self) -> None:
        with suppress(OSError):
            # Importing may have held more than it left behind: without this, that peak would hide a smaller model's.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._start = psutil.Process(os.getpid()).memory_info().rss

    def now(self) -> int:
        return max(0, int(psutil.Process(os.getpid()).memory_info().rss) - self._start)

    def peak_reserved(self) -> int:
        return max(0, _peak_resident() - self._start)

    def peak_allocated(self) -> int:
        return self.peak_reserved()


def _peak_resident() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    import resource  # noqa: PLC0415 - absent on Windows, where /proc is too

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
