"""Measurement: one rank's timed steps, read off where they end by a clock and a memory; what comes later is no part.

Nothing synchronises the device while training runs: on a GPU (``device``) an event is recorded at each step's end and
read after the last one; on the CPU the work is done when the host says so."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, pairwise, starmap, takewhile
from pathlib import Path
from typing import Any

import psutil
import torch

from pytest_llmperf.observe.vital_signs import Objects, grown
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.launch import RankRecord, soak_seconds_of
from pytest_llmperf.records.ranks import Trained
from pytest_llmperf.records.steady_state import MOST_GROWTH, growth
from pytest_llmperf.support.files import kernel_number

# Where a container has its limits.
_CGROUP = Path("/sys/fs/cgroup")


class Clock:
    """Instants in the order of the work, and the times between them. This one is the host's; ``device`` has a GPU's."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def instant(self) -> Any:
        """The end of all work issued so far."""
        return time.perf_counter()

    def has_passed(self, instant: Any) -> bool:  # noqa: ARG002 - a GPU's need not have
        """Whether the work is beyond it by now; waits for nothing."""
        return True

    def between(self, start: Any, end: Any) -> float:
        """Seconds; both have passed."""
        return float(end - start)

    def wait(self) -> None:
        """Until all work has ended."""

    def mark(self, instant: Any = None) -> None:
        """Keep ``instant``, or this one, as one that ``seconds`` goes by."""
        self._marks.append(self.instant() if instant is None else instant)

    def so_far(self) -> tuple[float, ...]:
        """The times, in seconds, between the marks that the work has passed by now; waits for nothing."""
        return tuple(starmap(self.between, pairwise(takewhile(self.has_passed, self._marks))))

    def seconds(self) -> tuple[float, ...]:
        """The time from each mark to the next, in seconds; waits for the work to end."""
        self.wait()
        return self.so_far()

    def cores(self) -> tuple[float, ...]:
        """What was made of the host's so far, which this clock times, as ``RankRecord.core_seconds`` has it."""
        with suppress(OSError, psutil.Error, IndexError):
            for quota in filter(Path.is_file, (_CGROUP / "cpu.max", _CGROUP / "cpu/cpu.cfs_quota_us")):
                if quota.read_text(encoding="ascii").split()[0] not in ("max", "-1"):  # who waits for it has no others
                    return ()
            told = [_on_cores(thread) for thread in os.listdir("/proc/self/task")]  # noqa: PTH208 - names alone
            own, every = psutil.Process(), psutil.cpu_times(percpu=True)
            spent = (one.cpu_times()[:4] for one in (own, *own.children(recursive=True)))  # and of those that ended
            used = (every[core] for core in own.cpu_affinity())
            busy = sum(sum(each[:8]) - each.idle - each.iowait for each in used)
            return sum(each[1] for each in told if each), sum(map(sum, spent)), busy
        return ()


class Memory:
    """This rank's since the object was made, in bytes: what is resident above what was then; ``device`` has a GPU's."""

    #: What a loss takes that is kept: of an allocator its smallest block; of a host with all that belongs to a tensor.
    loss_bytes = 4096

    def __init__(self, start: int | None = None) -> None:
        """``start``: what was resident then, where another than now; the peak counts from the process's begin then."""
        if start is None:
            # Importing may have held more than it left behind: without this, that peak would hide a smaller model's.
            _forget_peak()
        self._start = resident() if start is None else start
        # glibc's count of what malloc has given away: exact, as resident memory is not. Another libc has none.
        self._malloc = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._malloc is not None:
            self._malloc.restype = _MallocInfo

    def now(self) -> int:
        """Held at this moment."""
        return max(0, resident() - self._start)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While it is entered, what is held is none of the training's."""
        before = resident()
        yield
        _forget_peak()
        self._start += max(0, resident() - before)

    def allocated(self) -> int | None:
        """Held by tensors at this moment, as the host counts them: nothing waits; ``None`` where nothing counts."""
        if self._malloc is None:
            return None
        found = self._malloc()
        return int(found.uordblks + found.hblkhd)

    def peaks(self) -> tuple[int, int]:
        """Held at most by the allocator, and by tensors; on the CPU both are what was resident above the start."""
        peak = kernel_number("/proc/self/status", "VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        above = max(0, 1024 * peak - self._start)
        return above, above


def resident() -> int:
    """Bytes of this process."""
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


# Of which gradients' norms are kept: the first is of weights that are known to the last bit.
_FIRST_STEPS = 4


@dataclass(frozen=True)
class Boundary:
    """Where a step ended, as it was when all its work had been issued."""

    instant: Any
    """Of its clock."""
    held: int | None
    """Bytes in tensors."""
    passes: int
    """Micro-batches so far, and their tokens."""
    tokens: int
    fetched: float
    """Seconds so far in which the host was inside a loader, where whoever drives says so."""


class Measurement:
    """Filled while the rank trains; ``trained`` reads it once it is over."""

    def __init__(self, clock: Clock, memory: Memory) -> None:
        self.step_seconds: tuple[float, ...] = ()
        self.is_begun = self.is_over = False
        """A pass has ended; all timed steps have."""
        self._clock, self._memory = clock, memory
        self._losses: list[torch.Tensor] = []  # of each micro-batch, on its device
        self._norms: list[torch.Tensor] = []
        self._num_tokens, self._fetched = 0, 0.0
        self._real_tokens: list[int] = []
        self._start = self._seconds = 0.0
        self._ends: list[Boundary] = []
        self._peaks = 0, 0
        self._cores: tuple[float, ...] = ()

    def begin(self) -> None:
        """With the first step."""
        self._cores = self._clock.cores()
        self._start = time.perf_counter()
        self._clock.mark()

    def end_pass(self, loss: torch.Tensor | None, tokens: int, real_tokens: int | None) -> None:
        """A micro-batch is done; ``real_tokens`` are those that are no padding. ``None``: it has none."""
        if not self.is_over:
            self.is_begun = True
            self._losses += [] if loss is None else [loss]
            self._num_tokens += tokens
            if real_tokens is not None:
                self._real_tokens.append(real_tokens)

    def fetched(self, seconds: float) -> None:
        self._fetched += seconds

    def end_gradients(self, norm: Any) -> None:
        """A step's are clipped, before its update, and had this norm before."""
        if len(self._norms) < _FIRST_STEPS and isinstance(norm, torch.Tensor):
            self._norms.append(norm.detach())

    def boundary(self) -> Boundary:
        """This moment as the end of a step; waits for nothing."""
        instant, held = self._clock.instant(), self._memory.allocated()
        return Boundary(instant, held, len(self._losses), self._num_tokens, self._fetched)

    def end_step(self, at: Boundary | None = None) -> None:
        """All its work has been issued: now, or ``at`` a moment before."""
        end = at or self.boundary()
        self._clock.mark(end.instant)
        self._ends.append(end)

    def end(self) -> None:
        """That was the last step: wait for the device, and read what later steps would change."""
        self.step_seconds = self._clock.seconds()
        self._seconds = time.perf_counter() - self._start
        self._peaks = self._memory.peaks()
        # A thread that ended takes its waits along.
        spent = zip(self._clock.cores(), self._cores, strict=False)
        self._cores = tuple(round(max(0.0, now - before), 4) for now, before in spent)
        self.is_over = True

    def _so_far(self, name: str) -> list[Any]:
        """What was counted before the first step, and at the end of each."""
        return [0, *(getattr(end, name) for end in self._ends)]

    def leaves_memory(self, warmup_steps: int) -> bool:
        """Whether steps leave more behind than a training may."""
        return (growth([end.held for end in self._ends[warmup_steps:] if end.held is not None]) or 0.0) > MOST_GROWTH

    @property
    def fetch_seconds(self) -> list[float]:
        return [b - a for a, b in pairwise(self._so_far("fetched"))]

    def trained(
        self, place: Place, rank: int, rates: Mapping[str, Any], *, keeps_losses: bool = True, **facts: Any
    ) -> Trained:
        """Return what was seen, with what a measurement does not know: its record's ``rates`` and ``Trained``'s others.
        ``keeps_losses``: they are the training's own tensors, which would be gone otherwise."""
        steps, passes = len(self._ends), self._so_far("passes")
        spans, each = [slice(*pair) for pair in pairwise(passes)], [b - a for a, b in pairwise(self._so_far("tokens"))]
        # Losses that are kept by this measurement are no growth of the training's.
        own = passes[-1] // steps * self._memory.loss_bytes if keeps_losses else 0
        held = [end.held for end in self._ends]
        losses = torch.stack(self._losses).float().cpu() if self._losses else torch.empty(0)
        # Ranks of sharded weights add theirs up here. None where the loss's scale made one infinite.
        whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in self._norms]
        norms = tuple(torch.stack(whole).float().tolist()) if whole else ()
        record = RankRecord(
            rank=rank,
            **vars(place),
            tokens_per_step=round(sum(each) / steps),
            step_tokens=tuple(each) if len(set(each)) > 1 else (),
            real_tokens=tuple(sum(self._real_tokens[span]) for span in spans) if self._real_tokens else (),
            step_seconds=self.step_seconds,
            allocated_bytes=tuple(bytes_ - own * step for step, bytes_ in enumerate(held) if bytes_ is not None),
            peak_reserved_bytes=self._peaks[0],
            peak_allocated_bytes=self._peaks[1],
            core_seconds=self._cores,
            **rates,
        )
        return Trained(
            record=record,
            # Those of micro-batches are scaled so that they add up to their step's.
            losses=tuple(float(losses[span].sum()) for span in spans) if self._losses else (),
            gradient_norms=norms if all(map(math.isfinite, norms)) else (),
            train_seconds=self._seconds,
            **facts,
        )


# Diary: of however many steps each is written down once the device has passed it, and then forgotten. A thread writes,
# and looks at the process beside it, twice a second: the loop does what it does anyway.

_WRITE_SECONDS = 0.5
# Threads whose wait for a core is looked at: to read a file of each of hundreds would be felt.
_MOST_THREADS = 16
_DECIMALS = 6
# Objects are counted after this share of the time, no later than so many seconds, and as long before the end at most.
_COUNTED_FROM, _COUNTED_FROM_SECONDS, _LAST_SECONDS = 0.05, 30.0, 3.0


class Diary(Measurement):
    """It is never over: its launcher ends the process."""

    def __init__(self, clock: Clock, memory: Memory, path: Path) -> None:
        super().__init__(clock, memory)
        self._path = path
        self._pending: deque[tuple[Boundary, float]] = deque()
        """Ends of steps that the device need not have passed, with the seconds of garbage collection until then."""
        self._passed: deque[tuple[tuple[float, ...], int | None]] = deque()
        """Of each step that it has: its seconds, those of its loader and of garbage collection; what tensors held."""
        self._looked: Mapping[str, tuple[float, float]] = {}
        """Seconds on a core and of waits for one, by thread."""
        self._thread = str(threading.get_native_id())
        self._collecting = self._collected = 0.0
        self._num_passed, self._seconds_asked = 0, soak_seconds_of(path.parent)
        gc.callbacks.append(self._collects)

    def begin(self) -> None:
        self._pending.append((self.boundary(), self._collected))
        threading.Thread(target=self._write, name="llmperf-diary", daemon=True).start()

    def end_pass(self, *_: Any) -> None:
        self.is_begun = True

    def end_gradients(self, norm: Any) -> None:
        """Nobody asks for it."""

    def end_step(self, at: Boundary | None = None) -> None:
        self._pending.append((at or self.boundary(), self._collected))
        # Here: what another thread asks of a device while this one captures a CUDA graph breaks the capture.
        while len(self._pending) > 1 and self._clock.has_passed(self._pending[1][0].instant):
            (start, before), (end, after) = self._pending.popleft(), self._pending[0]
            seconds = self._clock.between(start.instant, end.instant), end.fetched - start.fetched, after - before
            self._passed.append((tuple(round(each, _DECIMALS) for each in seconds), end.held))
            self._num_passed += 1

    def _collects(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self._collected += time.perf_counter() - self._collecting

    def _write(self) -> None:
        """Objects are counted in the warm-up, and once the last line is known: each takes a step some milliseconds."""
        asked, began, before = self._seconds_asked or math.inf, time.monotonic(), None
        with self._path.open("a", encoding="utf-8") as file:
            while True:
                time.sleep(_WRITE_SECONDS)
                if not self._passed:  # what only goes backward is no rank; of a long step all waits are of its line
                    continue
                line, now = self._line(), time.monotonic() - began
                if before is None and now >= min(_COUNTED_FROM * asked, _COUNTED_FROM_SECONDS):
                    before = Objects().look(), self._num_passed
                is_last = before is not None and now >= asked - min(2 * _COUNTED_FROM * asked, _LAST_SECONDS)
                if before and is_last:
                    line["grown"] = grown(before[0], max(1, self._num_passed - before[1]))
                with suppress(OSError):  # a full disk ends the training itself
                    file.write(f"{json.dumps(line)}\n")
                    file.flush()
                if is_last:
                    return

    def _line(self) -> dict[str, Any]:
        """The steps since the last one; the process now."""
        passed = [self._passed.popleft() for _ in range(len(self._passed))]
        threads = os.listdir("/proc/self/task")  # noqa: PTH208 - names alone
        peaks = self._memory.peaks()
        # Since the last look, each thread's seconds on a core, and of waits for one: others wait for it then.
        now = {thread: told for thread in islice(threads, _MOST_THREADS) if (told := _on_cores(thread))}
        before, self._looked = self._looked, now
        pairs = ((thread, before.get(thread, told), told) for thread, told in now.items())
        spent = {thread: (b[0] - a[0], b[1] - a[1]) for thread, a, b in pairs}
        return {
            "time": round(time.time(), 3),
            "steps": [seconds for seconds, _ in passed],
            "allocated_bytes": passed[-1][1],
            # But for pages of files: of a data set that is mapped each step touches others, and the system takes them.
            "host_bytes": resident() - 1024 * kernel_number("/proc/self/status", "RssFile:"),
            "open_files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - as above
            "threads": len(threads),
            "written_bytes": kernel_number("/proc/self/io", "wchar:"),  # to whatever file
            "waited_seconds": round(max((waited for _, waited in spent.values()), default=0.0), _DECIMALS),
            "computed_seconds": round(spent[self._thread][0], _DECIMALS) if self._thread in spent else None,
            "peak_reserved_bytes": peaks[0],
            "peak_allocated_bytes": peaks[1],
        }


def _on_cores(thread: str) -> tuple[float, float] | None:
    """For how long a thread was on a core so far, and could have been and waited for one; ``None``: nobody counts."""
    with suppress(OSError, ValueError):
        told = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()
        return int(told[0]) / 1e9, int(told[1]) / 1e9
    return None
