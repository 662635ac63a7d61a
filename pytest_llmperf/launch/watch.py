"""What the process that waits for a launch sees meanwhile: its time, its progress, what happens on its GPUs, and
how the one before it ends."""

from __future__ import annotations

import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import psutil

from pytest_llmperf.launch import device
from pytest_llmperf.launch.fork_servers import ForkedAgent
from pytest_llmperf.launch.process import GONE_SECONDS, Ended, kill, returncode_of, signal_name
from pytest_llmperf.records.calibration import CLOCK_REASONS, Health
from pytest_llmperf.records.failure import Progress, phases_of
from pytest_llmperf.records.launch import SENSORS_FILE, SOAK_FILE, Launch

_READ_SECONDS = 0.25
_Number = TypeVar("_Number", int, float)
_LOOK_SECONDS = 0.5


@dataclass
class Lap:
    began: float
    """In seconds since 1970, as other hosts tell their times."""
    seconds: float = 0.0
    """From its start to its end; 0 while it runs."""


class Meter:
    """Counts the seconds between the start and the end of what runs under it, failed attempts too."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waited_seconds = 0.0
        """Before, until there was hardware for it."""

    @contextmanager
    def running(self) -> Iterator[Lap]:
        """Count for as long as this lasts, however it ends."""
        lap, start = Lap(time.time()), time.monotonic()
        try:
            yield lap
        finally:
            lap.seconds = time.monotonic() - start
            self.seconds += lap.seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count for as long as this lasts as the wait for hardware, however it ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.waited_seconds += time.monotonic() - start


class ProgressReader:
    """Reads how far a launch has come, and tells ``watch``, at most four times a second."""

    def __init__(self, path: Path, watch: Callable[[Progress], None]) -> None:
        self.last = Progress(phase="starting")
        self._path, self._watch = path, watch
        self._next = 0.0
        self._marks: list[tuple[float, int]] = []

    def poll(self) -> Progress:
        """Look, unless it was just looked; a file that is absent or broken is no news."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _READ_SECONDS
            self._watch(self.read())
        return self.last

    def read(self) -> Progress:
        """Look now, and tell nobody."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            beat = json.loads(self._path.read_text(encoding="utf-8"))
            reached, step = {str(phase): float(at) for phase, at in beat["reached"].items()}, int(beat["step"])
            if not all(map(math.isfinite, reached.values())):
                return self.last
            self.last = Progress(
                phase=str(beat["phase"]),
                step=step,
                steps=int(beat["steps"]),
                tokens_per_second=self._rate(float(beat["time"]), step, int(beat["tokens_per_step"])),
                reserved_bytes=int(beat["reserved_bytes"]),
                reached=reached,
                phase_seconds=max(0.0, float(beat["time"]) - reached.get(str(beat["phase"]), math.inf)),
                compiles=bool(beat["compiles"]),
                stepped=self.last.stepped if step == self.last.step else float(beat["time"]),
            )
        return self.last

    def _rate(self, now: float, step: int, tokens_per_step: int) -> float:
        if step > 0 and (not self._marks or step > self._marks[-1][1]):
            self._marks = [*self._marks[-8:], (now, step)]  # the recent past: the first step would weigh on it for long
        return tokens_per_step * _a_second(self._marks)


def _a_second(marks: Sequence[tuple[float, float]]) -> float:
    """By how much what is counted grows, from the first of these times to the last; 0 where there is but one."""
    if not marks or marks[-1][0] <= marks[0][0]:
        return 0.0
    (start, first), (end, last) = marks[0], marks[-1]
    return (last - first) / (end - start)


class HealthWatch:
    """Watches the GPUs of one launch; where they cannot be asked, or on the CPU, it sees nothing: zeros."""

    def __init__(self, gpus: Sequence[device.Gpu], folder: Path) -> None:
        """``folder`` is the launch's, where its ranks write their pids."""
        self._gpus, self._folder = gpus, folder
        self._stack = ExitStack()
        self._sensors: tuple[device.Sensors, ...] = ()
        self._seen: dict[int, list[device.Sample]] = {gpu.index: [] for gpu in gpus}
        self._foreign: dict[str, None] = {}
        self._errors: list[tuple[int | None, ...]] = []
        self._next = 0.0
        self._trained_until = math.inf

    def __enter__(self) -> HealthWatch:  # noqa: PYI034 - typing has no Self before Python 3.11
        self._sensors = self._stack.enter_context(device.sensors(self._gpus))
        self._foreign |= dict.fromkeys(device.foreign_processes(self._gpus, self._own()))
        self._errors = [sensors.memory_errors() for sensors in self._sensors]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look(self, progress: Progress) -> None:
        """Look at the GPUs now, unless they were just looked at or no rank trains."""
        # Told some time after it came true: by then the chip has been looked at while it rested.
        self._trained_until = progress.trained_until or math.inf
        trains = progress.phase == "training" and progress.step
        if not (trains and self._sensors) or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOOK_SECONDS
        own = {os.getpid(), *self._own()}
        for sensors in self._sensors:
            self._seen[sensors.gpu.index].append(sensors.sample())
            self._foreign |= dict.fromkeys(sensors.others(own))
        if (self._folder / SOAK_FILE).exists():
            path = self._folder / SENSORS_FILE.format(platform.node())
            with suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps([asdict(seen[-1]) for seen in self._seen.values()])}\n")

    def _own(self) -> set[int]:
        """The launch's processes; a script's are known before they are ranks."""
        own = {int(path.name.partition("-")[2]) for path in self._folder.glob("seen-*")}
        for path in self._folder.glob("rank-*.pid"):
            with suppress(OSError, ValueError):
                own.add(int(path.read_text(encoding="ascii")))
        return own

    def health(self) -> Health:
        """What was seen while the ranks trained; of several GPUs the worst."""
        seen = [[one for one in every if one.time <= self._trained_until] for every in self._seen.values()]
        joules = ([(one.time, one.joules) for one in gpu if one.joules is not None] for gpu in seen)
        clocks = [_known(one.clock_mhz for one in gpu) for gpu in seen]
        temperatures = [_known(one.temperature for one in gpu) for gpu in seen]
        now = [sensors.memory_errors() for sensors in self._sensors]
        return Health(
            foreign_processes=tuple(self._foreign),
            clock_reasons=_shares([_known(one.reasons for one in gpu) for gpu in seen]),
            sm_clock_mhz=min((median(known) for known in clocks if known), default=0.0),
            temperature_celsius=max((max(known) for known in temperatures if known), default=0.0),
            power_watts=sum_of_known([*map(_a_second, joules)]),
            power_limit_watts=min(_known(sensors.power_limit_watts() for sensors in self._sensors), default=0.0),
            memory_errors=sum(map(_new, self._errors, now)),
        )


def _new(before: Sequence[int | None], after: Sequence[int | None]) -> int:
    """What was counted in between, of the counters that were told both times; a reset makes nothing new."""
    pairs = zip(before, after, strict=True)
    return sum(max(0, int(late) - int(early)) for early, late in pairs if early is not None and late is not None)


def _known(values: Iterable[_Number | None]) -> list[_Number]:
    return [value for value in values if value is not None]


def _shares(samples: Sequence[Sequence[int]]) -> dict[str, float]:
    """In what part of the samples each reason was seen; of several GPUs the largest."""
    found: dict[str, float] = {}
    for bit, name in CLOCK_REASONS.items():
        if share := max((fmean(bool(bits & bit) for bits in gpu) for gpu in samples if gpu), default=0.0):
            found[name] = round(share, 3)
    return found


def sum_of_known(watts: Sequence[float]) -> float:
    """All of them together; 0, which is unknown, where one is not known."""
    return round(sum(watts), 1) if all(watts) else 0.0


def with_phases(launch: Launch, lap: Lap, progress: Progress) -> Launch:
    """``launch`` as its launcher timed it, and where in that time its rank 0 said it was."""
    phases = phases_of(lap.began, lap.seconds, progress.reached, launch.ranks[0].step_seconds[0])
    return replace(launch, wall_seconds=round(lap.seconds, 3), phases=phases)


# What a process has that has nothing left to do.
_LEAVE_SECONDS = 10.0


class Former:
    """The last launch of a run that left its record, as long as its processes end, and what is held until they have."""

    of: object = None
    """What it ran on."""

    def __init__(self) -> None:
        self.bad_ends: list[str] = []
        """Of each that ended with an error after its record, a line."""
        self._lock, self._lease, self._is_over = threading.Lock(), ExitStack(), True
        self._thread: threading.Thread | None = None

    @property
    def is_leaving(self) -> bool:
        return self._thread is not None

    def leaves(  # noqa: PLR0913, PLR0917 - what ends, and who hears of it
        self, agent: ForkedAgent, ended: Ended, held: ExitStack, say: Callable[[str], None], name: str, folder: Path
    ) -> None:
        """From now on ``agent`` ends with its ranks; of a bad end ``say`` hears, by the launch's ``name``."""
        self._agent, self._told = agent, (say, name, folder)
        self._is_over = self._was_killed = False
        # In a thread: others wait for what is held, and nobody here may look for a while.
        args = {*ended.left}, held
        self._thread = threading.Thread(target=self._end, args=args, name="llmperf-former", daemon=True)
        self._thread.start()

    def _end(self, left: set[psutil.Process], held: ExitStack) -> None:
        _, alive = psutil.wait_procs(left, timeout=_LEAVE_SECONDS)
        if alive:
            self._was_killed = True
            kill(alive)
            psutil.wait_procs(alive, timeout=GONE_SECONDS)
        with self._lock, self._lease, held:
            self._is_over = True

    def keep(self, lease: ExitStack) -> None:
        """Hold ``lease`` until it is over; where it is, not at all."""
        with self._lock:
            self._lease.push(lease.pop_all())
            if self._is_over:
                self._lease.close()

    def handed(self) -> ExitStack | None:
        """The lease, to the launch that comes next; ``None``: it was let go."""
        with self._lock:
            return None if self._is_over else self._lease.pop_all()

    def gone(self) -> None:
        """Wait until nothing of it is left."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, returncode = None, returncode_of(self._agent)
        how = f"ended with {signal_name(returncode) or returncode}"
        if self._was_killed:
            how = f"did not end within {_LEAVE_SECONDS:.0f} s, and was killed"
        if returncode or self._was_killed:
            say, name, folder = self._told
            say(line := f"{name}: {how} after its record was there, which stands")
            if not (self._was_killed or self._agent.is_lost):  # then nobody knows how it ended
                self.bad_ends.append(f"{line}; its logs are in {folder}")
