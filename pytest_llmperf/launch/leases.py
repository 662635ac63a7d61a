"""Leases: two processes on one host never train on the same GPU, and CPU runs take turns.

A lease is a file lock, which the system releases however its holder ends. Small trainings that nobody times share one
with each other, and none with what is timed.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from pytest_llmperf.launch.machine import Gpu, foreign_processes

# Not TMPDIR, which schedulers set for each job: all processes of a host must meet in one place.
_FOLDER = "/tmp/pytest-llmperf-leases"  # noqa: S108 - shared on purpose; it holds empty files

_POLL_SECONDS = 0.5
_REMIND_SECONDS = 60.0


class _SharedLock:
    """Held by several at once, and by nobody while one holds a ``FileLock`` of the same file."""

    def __init__(self, path: Path) -> None:
        self.lock_file = str(path)
        self._descriptor = -1

    def acquire(self, *, blocking: Literal[False]) -> None:
        """As a ``FileLock`` is.

        Raises:
            OSError: the file cannot be opened or locked.
            Timeout: somebody holds it alone.
        """
        del blocking
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(PermissionError):  # somebody else's has its mode already
                os.fchmod(descriptor, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.fstat(descriptor).st_nlink:  # who held it alone took the file away
                raise BlockingIOError
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise Timeout(self.lock_file) from None
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        os.close(self._descriptor)


@contextmanager
def lease_gpus(
    num_gpus: int,
    gpus: Sequence[Gpu],
    say: Callable[[str], None],
    *,
    shared: bool = False,
    wait: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Gpu, ...]]:
    """Hold ``num_gpus`` of ``gpus`` for oneself, waiting with a message while they are leased.

    GPUs without foreign processes come first; one that has some is leased only when no other is left, and said so.
    ``shared``: others that say so too may hold them at the same time. ``wait`` is called again and again while they
    are leased, with what is waited for; what it raises ends the wait.

    Raises:
        OSError: the folder of leases, or a lock in it, cannot be used; in one line.
        ValueError: fewer GPUs than asked for.
    """
    if num_gpus > len(gpus):
        raise ValueError(f"{num_gpus} GPUs asked for, {len(gpus)} visible")
    folder = _folder()
    with ExitStack() as held:
        # One process gathers at a time: those that wait do so in turn, and two half-gathered sets never wait for
        # each other.
        with _acquired(_lock(folder / "queue.lock"), "a place in the queue", say, wait):
            chosen: list[Gpu] = []
            waiting = _Waiting(f"{num_gpus} GPU(s)", say, wait)
            while True:
                for gpu in _in_turn(gpus, chosen) if shared else undisturbed_first(set(gpus) - set(chosen)):
                    lock = _lock(folder / f"{gpu.uuid}.lock", shared=shared)
                    if _is_acquired(lock):
                        held.callback(lock.release)
                        chosen.append(gpu)
                    if len(chosen) == num_gpus:
                        break
                if len(chosen) == num_gpus:
                    break
                waiting.tick()
        for line in [] if shared else foreign_processes(chosen):
            say(f"warning: another process is on the GPU leased for this launch: {line}")
        yield tuple(sorted(chosen, key=lambda gpu: gpu.index))


@contextmanager
def lease_cpu(
    say: Callable[[str], None], *, shared: bool = False, wait: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Hold this host's CPU: runs that would slow each other take turns; ``shared``: those that say so too need not.

    ``wait``: as for GPUs.

    Raises:
        OSError: the folder of leases, or a lock in it, cannot be used; in one line.
    """
    with _acquired(_lock(_folder() / "cpu.lock", shared=shared), "the CPU", say, wait):
        yield


@contextmanager
def lease_nodes(num_nodes: int, job_id: str, nodes: Sequence[str], say: Callable[[str], None]) -> Iterator[list[str]]:
    """Hold ``num_nodes`` of an allocation's ``nodes``, the first that are free; processes of one job share them.

    Raises:
        OSError: the folder of leases, or a lock in it, cannot be used; in one line.
        ValueError: fewer nodes than asked for.
    """
    if num_nodes > len(nodes):
        raise ValueError(f"{num_nodes} nodes asked for, {len(nodes)} left")
    folder = _folder()
    with ExitStack() as held:
        with _acquired(_lock(folder / f"slurm-{job_id}-queue.lock"), "a place in the queue", say):
            chosen: list[str] = []
            waiting = _Waiting(f"{num_nodes} node(s)", say)
            while True:
                for node in nodes:
                    lock = _lock(folder / f"slurm-{job_id}-{node}.lock")
                    if len(chosen) < num_nodes and node not in chosen and _is_acquired(lock):
                        held.callback(lock.release)
                        chosen.append(node)
                if len(chosen) == num_nodes:
                    break
                waiting.tick()
        yield sorted(chosen, key=list(nodes).index)


def undisturbed_first(gpus: Iterable[Gpu]) -> list[Gpu]:
    """``gpus`` by their index, those with foreign processes last."""
    return sorted(gpus, key=lambda gpu: (bool(foreign_processes([gpu])), gpu.index))


def _in_turn(gpus: Sequence[Gpu], but: Sequence[Gpu]) -> list[Gpu]:
    """Another one first in each process, so that those who share do not all share one."""
    first = os.getpid() % len(gpus)
    return [gpu for gpu in (*gpus[first:], *gpus[:first]) if gpu not in but]


@contextmanager
def _acquired(
    lock: FileLock | _SharedLock, what: str, say: Callable[[str], None], wait: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    waiting = _Waiting(what, say, wait)
    while not _is_acquired(lock):
        waiting.tick()
    try:
        yield
    finally:
        lock.release()


def _is_acquired(lock: FileLock | _SharedLock) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:  # an OSError too
        return False
    except OSError as error:
        raise _unusable(Path(lock.lock_file), error) from error
    return True


class _Waiting:
    """Says that one waits: at once, and again each minute."""

    def __init__(self, what: str, say: Callable[[str], None], wait: Callable[[str], None] = lambda _: None) -> None:
        self._what, self._say, self._wait = what, say, wait
        self._start, self._said = time.monotonic(), -_REMIND_SECONDS

    def tick(self) -> None:
        waited = time.monotonic() - self._start
        if waited - self._said >= _REMIND_SECONDS:
            self._say(f"waiting for {self._what}: in use by another launch on this host ({waited:.0f} s so far)")
            self._said = waited
        self._wait(self._what)
        time.sleep(_POLL_SECONDS)


def _lock(path: Path, *, shared: bool = False) -> FileLock | _SharedLock:
    return _SharedLock(path) if shared else FileLock(path, mode=0o666)


def _folder() -> Path:
    named = os.environ.get("LLMPERF_LEASE_DIR")
    folder = Path(named or _FOLDER)
    try:
        is_ours = _make(folder)
        if is_ours or not named:
            with suppress(PermissionError):  # somebody else's folder has its mode already
                # Not sticky: in a sticky folder Linux lets nobody open another user's lock (fs.protected_regular).
                folder.chmod(0o777)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def _make(folder: Path) -> bool:
    """Make ``folder`` unless it is there; whether it was made."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


def _unusable(path: Path, error: OSError) -> OSError:
    why = error.strerror or error
    return OSError(f"leases cannot be kept in {path} ({why}); name another folder in LLMPERF_LEASE_DIR")
