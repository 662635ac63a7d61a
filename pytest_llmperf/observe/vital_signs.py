"""Threads beside the training loop: how far it is, what it is doing, who still waits for it, and what memory is left.

The loop itself only increments an integer; reading it, asking the allocator and writing happen here twice a second.
Nothing here imports torch, which a rank may lack."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil

from pytest_llmperf.records.failure import Room
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import boot_id, write_text

if TYPE_CHECKING:
    import torch

_INTERVAL_SECONDS = 0.5


class Heartbeat:
    """Progress of one rank. ``step`` and the others are set by the rank and read by the thread."""

    def __init__(self, folder: Path, rank: int, words: LastWords, *, has_parent: bool = True) -> None:
        """``has_parent``: whoever started it waits for it; a script's own wrapper may have gone."""
        self.step, self.steps, self.tokens_per_step, self.compiles = 0, 0, 0, False
        self._phase = ""
        self._reached: Mapping[str, float] = {}
        self.enter("importing")
        self.reserved_bytes: Callable[[], int] = lambda: 0
        self.has_place: Callable[[], bool] = lambda: True
        """Whether no other process has become this rank: two would tell of two trainings in turns."""
        self._path = folder / "progress.json" if rank == 0 else None
        self.words = words
        # torchrun, or nobody where it has gone already and this process belongs to the system's first one.
        pid = os.getppid()
        self._parent = psutil.Process(pid) if has_parent and pid > 1 and psutil.pid_exists(pid) else None
        self._launcher_lock = _launcher_lock(folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="llmperf-heartbeat", daemon=True)

    def start(self) -> None:
        """Once, however often: a rank whose place another process took in the same moment takes it back."""
        if self._thread.ident is None:
            self._thread.start()

    def enter(self, phase: str) -> None:
        """Begin ``phase``, unless it has begun."""
        if phase != self._phase:
            # By the clock that a launcher on another host has too; a new mapping each time, since the thread reads it.
            self._phase, self._reached = phase, {**self._reached, phase: time.time()}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.write()

    def _beat(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            if _is_gone(self._parent) or _is_free(self._launcher_lock):
                # torchrun or the launcher was killed and could not reap us: nobody will read what we would write.
                os._exit(1)
            self.words.poll()
            self.write()

    def write(self) -> None:
        if self._path is None:
            return
        beat: dict[str, Any] = {"phase": self._phase, "step": self.step, "steps": self.steps, "time": time.time()}
        beat |= {"reserved_bytes": self.reserved_bytes(), "tokens_per_step": self.tokens_per_step}
        beat |= {"reached": dict(self._reached), "compiles": self.compiles}
        with suppress(OSError):  # a full disk ends the run where its results are written, not here
            if self.has_place():
                write_text(self._path, json.dumps(beat), lasts=False)


def _is_gone(process: psutil.Process | None) -> bool:
    if process is None:
        return False
    try:
        # Where nobody reaps it, as under some containers' first process, one that was killed stays as a zombie.
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _launcher_lock(folder: Path) -> int | None:
    """The open file that the launcher keeps locked while it lives; ``None``: nothing can be known from here."""
    # Between two kernels a lock may hold for nobody: on a network's file system, or on a copy of the folder.
    if not boot_id() or os.environ.get("LLMPERF_LAUNCHER_BOOT") != boot_id():
        return None
    try:
        return os.open(folder / "launcher.lock", os.O_RDONLY)
    except OSError:
        return None


def _is_free(lock: int | None) -> bool:
    if lock is None:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, as it should be; any other reason says nothing of the launcher
        return False
    return True


class LastWords:
    """Says what a rank is doing when a signal asks for it: at the time limit, before it is reaped.
    ``stacks-rank-N.txt`` is written by the signal's handler, in C: a rank that waits inside a collective still answers.
    ``trace-rank-N``, collectives by the name that torchfrtrace takes, follows from the heartbeat's thread."""

    def __init__(self, folder: Path, rank: int, asked_by: int = signal.SIGUSR1) -> None:
        self._stacks, self._trace = folder / f"stacks-rank-{rank}.txt", folder / f"trace-rank-{rank}"
        self._file = self._stacks.open("w+b")
        faulthandler.register(asked_by, file=self._file, all_threads=True)
        self._told, self._written = False, 0

    def poll(self) -> None:
        """Write the collectives down once the stacks are there: by that file whoever asked knows that this is all."""
        if self._told or not self._are_written():
            return
        self._told = True
        try:
            from pytest_llmperf.observe.places import recorded  # noqa: PLC0415 - torch is there by now, or none

            if trace := recorded(sys.modules.get("torch.distributed")):
                part = self._trace.with_name(f".{self._trace.name}")
                part.write_bytes(trace)
                part.replace(self._trace)
        except Exception as error:  # noqa: BLE001 - whatever a version of torch raises: the stacks are there
            sys.stderr.write(f"llmperf: no flight recorder's trace ({error})\n")

    def close(self) -> None:
        """Leave no empty file; the handler stays, so that a late question ends nobody."""
        if not os.fstat(self._file.fileno()).st_size:
            self._stacks.unlink(missing_ok=True)

    def _are_written(self) -> bool:
        """The handler may still be at it in another thread, or wait for its core; it has the main thread last."""
        try:
            before, self._written = self._written, os.fstat(self._file.fileno()).st_size
            if not self._written or self._written != before:
                return False
            said = os.pread(self._file.fileno(), self._written, 0)
        except OSError:  # a folder that is gone for a moment: the next look tells
            return False
        # Of more threads than faulthandler writes, the main one is among those left out.
        return b"hread 0x%016x" % (threading.main_thread().ident or 0) in said or said.endswith(b"\n...\n")


# The limit of memory: a lower one than the card's, and what is left of it.

_M_MMAP_THRESHOLD = -3  # of malloc.h


class Headroom:
    """How much memory this rank may still take: of its limit, of its GPU, or of the host where it has neither."""

    def __init__(self) -> None:
        self._limit_bytes = self._held_before = 0
        self.least: Room | None = None
        """The least that a look has found; a rank that dies without a word is judged by it."""

    def cap(self, device: torch.device, limit_bytes: int) -> None:
        """Let this rank have no more memory than a card of ``limit_bytes`` would. On a GPU the allocator is told: what
        the driver and the libraries took before it is part of the card's. On the CPU the process may hold as much above
        what it holds now. ValueError: the card has less, or the limit is below what is held already."""
        gpu = _gpu() if device.type != "cpu" else None
        if gpu is not None:
            room = gpu.room(device)
            total, held = room.limit_bytes, room.limit_bytes - room.left_bytes
            if limit_bytes > total or limit_bytes <= held:
                raise ValueError(f"a limit of {limit_bytes} bytes: {total} there are, {held} are held already")
            gpu.allow_share(device, (limit_bytes - held) / total)
            return
        # What is freed is the system's again, which counts it: else glibc learns to keep blocks of up to 32 MiB.
        with suppress(OSError, AttributeError):  # another C library has no such call
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        self._held_before, self._limit_bytes = _held_bytes()[_DATA], limit_bytes
        limit = self._held_before + limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        self.least = None

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let the rank go beyond its limit: to tell what happened takes memory too."""
        if not self.is_capped:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    @property
    def is_capped(self) -> bool:
        """Whether the system itself refuses this rank more than its limit."""
        return self._limit_bytes > 0

    def look(self) -> Room:
        if self.is_capped:
            held = _held_bytes()[_DATA] - self._held_before
            room = Room("its limit", self._limit_bytes, max(0, self._limit_bytes - held))
        else:
            host = psutil.virtual_memory()
            of_the_host = Room("the host", int(host.total), int(host.available))
            room = min((of_the_host, *_of_the_process()), key=lambda room: room.share)
        least = self.least  # a look of another thread may come between
        if least is None or room.share < least.share:
            self.least = room
        return room

    def after(self) -> Iterator[Room]:
        """Return what there was at least, once something failed, and what the GPU has."""
        self.look()
        yield from filter(None, (self.least,))
        if (gpu := _gpu()) is not None:
            with suppress(RuntimeError):  # the context is lost
                yield gpu.room()


def _gpu() -> ModuleType | None:
    """The module ``device``; ``None`` where there is no GPU, or torch could not be imported."""
    if "torch" not in sys.modules:
        return None
    from pytest_llmperf.observe import device  # noqa: PLC0415 - a rank without torch asks what failed

    return device if device.has_gpu() else None


def _of_the_process() -> Iterator[Room]:
    """Limits that somebody else has set: a shell's ``ulimit``, a scheduler."""
    held = _held_bytes()
    for limited, which in ((resource.RLIMIT_AS, _ALL), (resource.RLIMIT_DATA, _DATA)):
        limit = resource.getrlimit(limited)[0]
        if limit != resource.RLIM_INFINITY:
            yield Room("its limit", limit, max(0, limit - held[which]))


# Of what Linux tells of a process's memory: all addresses, and what it may write to and shares with nobody.
_ALL, _DATA = 0, 5


def _held_bytes() -> tuple[int, ...]:
    """Read with as little memory as can be, since there may be no more."""
    with suppress(OSError, ValueError):
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            return tuple(int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in os.read(statm, 256).split())
        finally:
            os.close(statm)
    return (0,) * 7


# A limit is come to within a step; a look takes some 20 us.
_CAPPED_SECONDS = 0.02

# The file is written over, so its words are padded to the same length.
_WIDTH = 256


@contextmanager
def watched(headroom: Headroom, path: Path, *, to_be_capped: bool) -> Iterator[None]:
    """Keep at ``path`` the least room that was seen of ``headroom``: a rank that dies of it may say no word. Entered
    before the limit is set: the thread's own stack is none of what the training takes."""
    stop, seconds = threading.Event(), _CAPPED_SECONDS if to_be_capped else _INTERVAL_SECONDS

    def watch() -> None:
        written = None
        while not stop.wait(seconds):
            # At the limit even small things may fail: the next look comes soon. A full disk ends the run elsewhere.
            with suppress(OSError, MemoryError):
                headroom.look()
                least = headroom.least
                if least is not None and least != written:
                    os.pwrite(file.fileno(), json.dumps(codec.plain(least)).ljust(_WIDTH).encode(), 0)
                    written = least

    with path.open("wb", buffering=0) as file:
        thread = threading.Thread(target=watch, name="llmperf-room", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


# Objects: which kinds there are more of, and by which variable one finds them. Nobody times what comes meanwhile.

# How many kinds are told, how many objects of one are looked for, and how far from a variable, each time among so many.
_MOST_KINDS, _LOOKED_FOR, _DEEP, _MOST_NEAR = 3, 20, 3, 200
_OURS = Path(__file__).parents[1]

_HOLDERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})


class Objects:
    """What the garbage collector knows: how many of each kind, and how many each list, dict, set and deque holds."""

    def __init__(self) -> None:
        # There before anybody looks: each is an object, too.
        self.kinds, self._ids, self._lengths = Counter[type](), array("Q"), array("Q")

    def look(self) -> Objects:
        known = gc.get_objects()
        self.kinds.update(map(type, known))
        holders = [each for each in known if type(each) in _HOLDERS]
        self._ids.extend(map(id, holders))
        self._lengths.extend(map(len, holders))
        return self

    def growing(self) -> list[tuple[Sequence[object], int]]:
        """What each holder has now that has more, and by how many."""
        before = dict(zip(self._ids, self._lengths, strict=True))
        held = [
            each for each in gc.get_objects() if type(each) in _HOLDERS and len(each) > before.get(id(each), len(each))
        ]
        return [([*(each.values() if isinstance(each, dict) else each)], len(each) - before[id(each)]) for each in held]


def grown(before: Objects, steps: int, among: Container[type] | None = None) -> dict[str, float]:
    """By kind, with the variable that leads to the newest, how many more there are a step than ``before``: of one in
    two steps at least, and ``among`` some kinds only."""
    more = (Counter(map(type, gc.get_objects())) - before.kinds).most_common(_MOST_KINDS if among is None else None)
    found = {kind: number / steps for kind, number in more if number > steps / 2 and (among is None or kind in among)}
    found = dict([*found.items()][:_MOST_KINDS])
    holders = before.growing() if found else []
    newest = {kind: _newest(kind, holders) for kind in found}
    del holders
    return {f"{kind.__name__}{_held_by(newest[kind])}": round(number, 1) for kind, number in found.items()}


def _newest(kind: type, holders: Sequence[tuple[Sequence[object], int]]) -> Sequence[object]:
    """Of those that came into the holder which got most of them. By age alone gradients would be newer, of which each
    step makes as many again; so it is where no holder grows."""
    came = [[one for one in _with_parts(held[-more:]) if type(one) is kind] for held, more in holders]
    kept = max(came, key=len, default=[])
    aged = [] if kept else [gc.get_objects(generation) for generation in range(3)]
    aged = [[one for one in each if type(one) is kind][-_LOOKED_FOR:] for each in aged]
    return kept[-_LOOKED_FOR:] or [*chain.from_iterable(aged)]


def _with_parts(came: Sequence[object]) -> Iterator[object]:
    """Each with what it has: a loss is often kept beside the number of its step."""
    for one in came:
        yield one
        if type(one) in {tuple, list, dict}:
            yield from gc.get_referents(one)


def _held_by(found: Sequence[object]) -> str:
    """`` in 'history' of main() in train.py``: a variable of the main thread; empty: none leads there."""
    frame, variables = sys._current_frames().get(threading.main_thread().ident or 0), dict[int, str]()  # noqa: SLF001
    while frame is not None:
        function, file = frame.f_code.co_name, Path(frame.f_code.co_filename)
        where = f"{function}() in {file.name}" if function.isidentifier() else file.name
        if _OURS not in file.parents:
            variables |= {id(value): f" in {name!r} of {where}" for name, value in frame.f_locals.items()}
        frame = frame.f_back
    near: Sequence[object] = found
    for _ in range(_DEEP):
        reached = {id(each) for each in near}
        near = gc.get_referrers(*near)[:_MOST_NEAR]
        named = [each for each in near if id(each) in variables]
        if named:  # the one that has most of them
            return variables[id(max(named, key=lambda one: sum(id(each) in reached for each in gc.get_referents(one))))]
    return ""
