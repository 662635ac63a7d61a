"""A rank's clock and memory: what every device has of them, and the host's own.

Nothing synchronises the device while training runs: on a GPU (``device``) an event is recorded at each step's end and
read after the last one; on the CPU the work is done when the host says so.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Generic, TypeVar

import psutil

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
    """This rank's memory since the object was made, in bytes."""

    #: What a loss takes that is kept: of an allocator its smallest block; of a host with all that belongs to a tensor.
    loss_bytes = 4096

    @abstractmethod
    def now(self) -> int:
        """Held at this moment."""

    @abstractmethod
    def allocated(self) -> int | None:
        """Held by tensors at this moment, as the host counts them: nothing waits; ``None`` where nothing counts."""

    @abstractmethod
    def peaks(self) -> tuple[int, int]:
        """Held at most by the allocator, and by tensors; on the CPU both are what was resident above the start."""

    def apart(self) -> AbstractContextManager[None]:
        """While it is entered, what is held is none of the training's."""
        return nullcontext()


class HostMemory(Memory):
    """Resident memory above what the process held when the object was made (libraries, the interpreter)."""

    def __init__(self) -> None:
        # Importing may have held more than it left behind: without this, that peak would hide a smaller model's.
        _forget_peak()
        self._start = _resident()
        # glibc's count of what malloc has given away: exact, as resident memory is not. Another libc has none.
        self._malloc = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._malloc is not None:
            self._malloc.restype = _MallocInfo

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

    def peaks(self) -> tuple[int, int]:
        peak = max(0, _peak_resident() - self._start)
        return peak, peak


def _resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: what it gave away of its heaps and by maps of their own, among others."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def _forget_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_resident() -> int:
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # noqa: PLC0415 - absent on Windows, where /proc is too

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
