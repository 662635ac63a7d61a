"""The hardware at hand, found without torch, the name of its kind, and who holds it.

Two processes on one host never train on the same GPU, and CPU runs take turns: each holds a lease, a file lock, which
the system releases however its holder ends. Small trainings that nobody times share one with each other, and none with
what is timed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from pytest_llmperf.launch.device import UNKNOWN, VISIBLE, Gpu, foreign_processes, visible_gpus
from pytest_llmperf.settings.optimizer import least_copies
from pytest_llmperf.settings.parallelism import is_sharded
from pytest_llmperf.settings.precision import bytes_each
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import cpu_name, is_at, open_shared, shared_folder, text_of
from pytest_llmperf.support.formats import GIB, memory

Say = Callable[[str], None]

# Not TMPDIR, which schedulers set for each job: all processes of a host must meet in one place.
_FOLDER = "/tmp/pytest-llmperf-leases"  # noqa: S108 - shared on purpose; it holds empty files

# Locks of those who gather what they wait for.
_GPUS, _CPUS = "queue", "cpu-queue"

_POLL_SECONDS = 0.5
_REMIND_SECONDS = 60.0


@dataclass(frozen=True)
class Machine:
    gpus: tuple[Gpu, ...]
    cpu_name: str
    cores: int
    """Logical cores this process may run on; in a SLURM job, ranks that it has room for."""
    node_cores: int = 0
    """All logical cores of a node, where a scheduler gives some of them; 0: those are all that is known."""

    @property
    def gpu_kind(self) -> str:
        """The machine kind of its GPUs, e.g. ``nvidia-h200-140gib``; ValueError: several must not share a baseline."""
        kinds = sorted({_kind(gpu) for gpu in self.gpus})
        if len(kinds) > 1:
            raise ValueError(f"GPUs of different kinds are visible ({', '.join(kinds)}); choose with {VISIBLE}")
        return kinds[0]

    @property
    def cpu_kind(self) -> str:
        """The machine kind of its CPU, e.g. ``cpu-amd-epyc-2c``; of a node what it is, whatever a job has of it."""
        return f"cpu-{_slug(self.cpu_name)}-{self.node_cores or self.cores}c"


def find_machine() -> Machine:
    """The machine as this process sees it, with the GPUs that the environment leaves it; raises as ``visible_gpus``."""
    return Machine(gpus=visible_gpus(), cpu_name=cpu_name(), cores=len(os.sched_getaffinity(0)))


def host_memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def want_of_room(spec: Spec) -> str:
    """Why training ``spec`` on this host's CPU does not fit into its memory, as far as weights, gradients and states
    alone can tell. A host that is short of memory swaps, or kills somebody else's process, and neither says why."""
    geometry = spec.architecture.geometry if isinstance(spec, TrainSpec) else None
    if not isinstance(spec, TrainSpec) or geometry is None:
        return ""
    shards = 1 if is_sharded(spec) else spec.gpus  # each rank has its own, or its share
    least, host = geometry.weights * bytes_each(spec) * least_copies(spec) * shards, host_memory_bytes()
    if least <= host:
        return ""
    return (
        f"{spec.id}: training needs at least {memory(least)} for weights, gradients and optimizer states, and this "
        f"host has {memory(host)}: give a model of fewer layers, or run it on GPUs"
    )


def _kind(gpu: Gpu) -> str:
    if gpu == UNKNOWN:
        return "unknown"
    # A lowered power limit makes another machine of it: most of training runs at that limit.
    lowered = f"-{gpu.power_limit_watts}w" if gpu.power_limit_watts else ""
    return f"{_slug(gpu.name)}-{round(gpu.memory_bytes / GIB)}gib{lowered}"


def is_of_kind(name: str, kind: str) -> bool:
    """Whether a GPU, or a CPU, of this ``name`` makes a machine of this ``kind``."""
    return re.fullmatch(rf"(cpu-)?{_slug(name)}-\d+(gib|c)(-.*)?", kind) is not None


def _slug(name: str) -> str:
    plain = re.sub(r"\((r|tm)\)|@.*|\bcpu\b|\bprocessor\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"


@contextmanager
def lease_gpus(
    num_gpus: int, gpus: Sequence[Gpu], say: Say, *, shared: bool = False, wait: Say = lambda _: None
) -> Iterator[tuple[Gpu, ...]]:
    """Hold ``num_gpus`` of ``gpus`` for oneself, waiting with a message while they are leased; foreign processes' GPUs
    come last, and it is said. ``shared``: others that say so too may hold them meanwhile. ``wait`` hears again and
    again what is waited for; what it raises ends the wait. OSError: no leases here; ValueError: there are fewer."""
    if num_gpus > len(gpus):
        raise ValueError(f"{num_gpus} GPUs asked for, {len(gpus)} visible")
    first = os.getpid() % (len(gpus) or 1)  # another in each process, so that those who share do not all share one
    by_name = {gpu.uuid: gpu for gpu in (*gpus[first:], *gpus[:first])}

    def left(taken: Sequence[str]) -> list[str]:
        others = [gpu for name, gpu in by_name.items() if name not in taken]
        return [gpu.uuid for gpu in (others if shared else undisturbed_first(others))]

    with _gathered(num_gpus, left, _GPUS, _Waiting(f"{num_gpus} GPU(s)", say, wait), shared=shared) as names:
        chosen = sorted((by_name[name] for name in names), key=lambda gpu: gpu.index)
        for line in [] if shared else foreign_processes(chosen):
            say(f"warning: another process is on the GPU leased for this launch: {line}")
        yield tuple(chosen)


@contextmanager
def lease_cpu(say: Say, *, shared: bool = False, wait: Say = lambda _: None) -> Iterator[tuple[()]]:
    """Hold this host's CPU: runs that would slow each other take turns; ``shared``, ``wait`` and errors as of GPUs."""
    with _gathered(1, lambda taken: [] if taken else ["cpu"], _CPUS, _Waiting("the CPU", say, wait), shared=shared):
        yield ()


def is_awaited(gpus: Sequence[Gpu]) -> bool:
    """Whether another process waits in the queue for some of ``gpus``, or, of none, for the CPU."""
    with _folder() as folder:
        lock = _Lock(folder, _GPUS if gpus else _CPUS)
        if is_free := lock.is_acquired():
            lock.release()
    return not is_free


@contextmanager
def lease_nodes(num_nodes: int, job_id: str, nodes: Sequence[str], say: Say) -> Iterator[list[str]]:
    """Hold ``num_nodes`` of a job's ``nodes``, the first that are free; its processes share them. As ``lease_gpus``."""
    if num_nodes > len(nodes):
        raise ValueError(f"{num_nodes} nodes asked for, {len(nodes)} left")

    job = f"slurm-{job_id}"
    by_name = {f"{job}-{node}": node for node in nodes}

    def left(taken: Sequence[str]) -> list[str]:
        return [name for name in by_name if name not in taken]

    with _gathered(num_nodes, left, f"{job}-queue", _Waiting(f"{num_nodes} node(s)", say)) as names:
        yield [node for name, node in by_name.items() if name in names]


def undisturbed_first(gpus: Iterable[Gpu]) -> list[Gpu]:
    """``gpus`` by their index, those with foreign processes last."""
    return sorted(gpus, key=lambda gpu: (bool(foreign_processes([gpu])), gpu.index))


class _Lock:
    """A lock of the file ``name`` in the folder of leases: held alone, or ``shared`` with others that say so too. Not a
    ``FileLock``, which opens for writing: Linux lets nobody do that to another user's file in a sticky folder."""

    def __init__(self, folder: tuple[Path, int], name: str, *, shared: bool = False) -> None:
        self.name, (path, self._folder), self._shared = name, folder, shared
        self.path = path / f"{name}.lock"
        self._descriptor = -1

    def is_acquired(self) -> bool:
        """Whether it is ours now; OSError, in one line, where the file cannot be opened or locked."""
        descriptor = -1
        try:
            descriptor = open_shared(self._folder, self.path.name)
            fcntl.flock(descriptor, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if is_at(descriptor, self._folder, self.path.name):
                self._descriptor, descriptor = descriptor, -1
                return True
        except (FileNotFoundError, BlockingIOError):  # its last holder removed it just now, or somebody holds it
            pass
        except OSError as error:
            raise _unusable(self.path, error) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return False

    def release(self) -> None:
        """Others may have it; the file goes too where nobody else can hold it, so that none is left."""
        if not self._shared:
            with suppress(OSError):  # of another user
                os.unlink(self.path.name, dir_fd=self._folder)
        os.close(self._descriptor)


@contextmanager
def _gathered(
    number: int, left: Callable[[Sequence[str]], list[str]], queue: str, waiting: _Waiting, *, shared: bool = False
) -> Iterator[list[str]]:
    """Hold so many of what is ``left`` beside those that are taken. One process gathers at a time: those that wait do
    so in turn, and two half-gathered sets never wait for each other."""
    chosen: list[str] = []
    with _folder() as folder, ExitStack() as held:
        turn, for_turn = _Lock(folder, queue), replace(waiting, what="a place in the queue")
        while not turn.is_acquired():
            for_turn.tick([turn.path])
        with ExitStack() as queued:
            queued.callback(turn.release)
            while len(chosen) < number:
                for lock in [_Lock(folder, name, shared=shared) for name in left(chosen)]:
                    if len(chosen) < number and lock.is_acquired():
                        held.callback(lock.release)
                        chosen.append(lock.name)
                if len(chosen) < number:
                    waiting.tick(_Lock(folder, name).path for name in left(chosen))
        yield chosen


@dataclass
class _Waiting:
    """Says that one waits, and for whom: at once, and again each minute."""

    what: str
    say: Say
    wait: Say = lambda _: None
    start: float = field(default_factory=time.monotonic)
    said: float = -_REMIND_SECONDS

    def tick(self, locks: Iterable[Path]) -> None:
        waited = time.monotonic() - self.start
        if waited - self.said >= _REMIND_SECONDS:
            who = ", ".join(_holders(locks)) or "another launch on this host"
            self.say(f"waiting for {self.what}: in use by {who} ({waited:.0f} s so far)")
            self.said = waited
        self.wait(self.what)
        time.sleep(_POLL_SECONDS)


def _holders(locks: Iterable[Path]) -> list[str]:
    """Who holds ``locks``, as the kernel has it; those of another container it does not show."""
    inodes = set()
    for path in locks:
        with suppress(OSError):
            inodes.add(str(path.lstat().st_ino))
    found = {}
    for line in text_of(Path("/proc/locks")).splitlines():
        # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF; one that only waits has an arrow after its number. Devices are
        # left out: a layered file system has others for its files than the kernel has for its locks.
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] in inodes:  # noqa: PLR2004
            found[words[4]] = f"pid {words[4]}"
    for pid in found:
        with suppress(psutil.Error, ValueError):
            found[pid] += f" of {psutil.Process(int(pid)).username()}"
    return [found[pid] for pid in sorted(found)]


@contextmanager
def _folder() -> Iterator[tuple[Path, int]]:
    """Where all users of this host find one another's locks, and its open descriptor."""
    named = os.environ.get("LLMPERF_LEASE_DIR")
    path = Path(named or _FOLDER)
    with ExitStack() as opened:
        try:
            descriptor = opened.enter_context(shared_folder(path, is_everyones=not named))
        except OSError as error:
            raise _unusable(path, error) from error
        yield path, descriptor


def _unusable(path: Path, error: OSError) -> OSError:
    why = error.strerror or error
    if error.errno == errno.EBADF:
        why = "its file system locks only what may be written, and this is another user's"
    return OSError(f"leases cannot be kept in {path} ({why}); name another folder in LLMPERF_LEASE_DIR")
