"""One process tree from its start to its end: nothing of it outlives ``watch``, whoever started it.

Ranks that came to their time limit are asked what they do before they are reaped; ``outcome`` reads their answers."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from pytest_llmperf.support.files import boot_id, kernel_number, write_text

_POLL_SECONDS = 0.05
# For ranks to answer that are asked what they do.
_ANSWER_SECONDS = 5.0
# torchrun gives its ranks 30 s after SIGTERM before it kills them itself.
_GRACE_SECONDS = 35.0
# To leave a GPU takes a process some.
GONE_SECONDS = 10.0
# A process that forks while others are stopped is found in the next round.
_ROUNDS = 20
# POSIX shared memory, and semaphores.
_SHARED = Path("/dev/shm")  # noqa: S108 - it is the system's

_PACKAGE = Path(__file__).parents[1]
#: In a launch's folder, where another Python than this one finds this package.
OTHER_PATH = "path"
_FORK_SERVER = "pytest_llmperf.worker.warm.fork_server"


@dataclass(frozen=True)
class Ended:
    returncode: int
    timed_out: bool
    seconds: float
    where: str = ""
    """For a sentence: `` on node n2``; empty where there is only one."""
    oom_kills: int = 0
    """Processes of this host that the kernel has ended meanwhile because memory was short."""
    left: frozenset[psutil.Process] = frozenset()
    """What still ends by itself, of one that was over before."""
    stuck_seconds: float = 0.0
    """For which it had done nothing that it should, where it was ended for that."""
    is_soaked: bool = False
    """Whether its minutes of steps were over."""


class Started(Protocol):
    """A process that was started, by whomever: what ``subprocess.Popen`` has of the same names."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def package_path() -> str:
    """What ``PYTHONPATH`` needs so that another process finds this package."""
    return str(_PACKAGE.parent)


def home_of_package(python: str, folder: Path) -> str:
    """What ``PYTHONPATH`` needs first for ``python`` to find this package: for another Python a link in ``folder``."""
    if python == sys.executable:
        return package_path()
    place = folder / OTHER_PATH
    if not place.exists():
        place.mkdir()
        (place / _PACKAGE.name).symlink_to(_PACKAGE)
    return str(place)


def python_path(first: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that lets a process find what is in ``first`` before all that its ``environment`` names."""
    return {"PYTHONPATH": os.pathsep.join([first, *filter(None, [environment.get("PYTHONPATH")])])}


def start(  # noqa: PLR0913 - what Popen takes
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    stdin: int = subprocess.DEVNULL,
    folder: Path | str | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command`` with its output in ``log``; OSError where that cannot be."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            pass_fds=pass_fds,
            start_new_session=True,  # a Ctrl-C at the terminal reaches us alone, and we end the tree in order
        )


@contextmanager
def lifeline(folder: Path) -> Iterator[dict[str, str]]:
    """Hold a lock while the launch runs; yields the variables that make the ranks watch it. The system lets go of it
    however this process ends. A pid would say less: one that is not there may as well be another container's."""
    with locked(folder / "launcher.lock") as is_held:  # else the ranks watch torchrun alone, as without an id
        yield {"LLMPERF_LAUNCHER_BOOT": boot_id()} if is_held else {}


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock on a file of our own; whether its file system has locks."""
    is_held = False
    with path.open("wb") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        yield is_held


def watch(  # noqa: PLR0913 - what runs, and who hears of it
    starting: Callable[[], Started],
    *,
    timeout_seconds: float,
    poll: Callable[[], object],
    pid_files: Callable[[], Iterable[Path]] = tuple,
    at_timeout: Callable[[int], None] = lambda _: None,
    is_over: Callable[[], bool] = lambda: False,
    leaves: Callable[[], bool] = lambda: False,
    stuck: Callable[[float], float] = lambda _: 0.0,
    tree: WholeTree | None = None,
) -> Ended:
    """Call ``poll`` while what ``starting`` starts runs, and reap its whole tree; the time is that from its start.
    ``pid_files`` names files in which descendants wrote their pids: ranks lead sessions of their own, and one whose
    parent is gone is found only there; where ranks of other hosts write theirs too, pids mean nothing. ``at_timeout``
    is called with its pid before what took too long, or by then was ``stuck`` for some seconds, is ended. What has a
    ``tree``, a user's own command, is killed where it stands: once it ``is_over``, and however it ends. One that
    ``leaves`` has done all that it was asked for, and nothing waits here for its end."""
    begun, oom_kills = time.monotonic(), _oom_kills()
    process = starting()
    timed_out, is_leaving, born, still = False, False, float("inf"), 0.0
    with suppress(psutil.Error):  # it is gone already, and has no descendants
        born = psutil.Process(process.pid).create_time()
    try:
        if tree:
            tree.guard()
        while process.poll() is None:
            if (lasted := time.monotonic() - begun) > timeout_seconds or (still := stuck(lasted)):
                timed_out = True
                at_timeout(process.pid)
                break
            poll()
            if is_over() or (is_leaving := leaves()):
                break
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
    finally:
        seconds = time.monotonic() - begun
        if tree:
            own = {psutil.Process(process.pid)} if process.poll() is None else set()
            tree.end(lambda: own | {one for one in _descendants(process.pid, born, pid_files()) if is_alive(one)})
        left = set[psutil.Process]()
        with suppress(psutil.Error):
            left = {psutil.Process(process.pid), *_descendants(process.pid, born, pid_files())} if is_leaving else left
        returncode = 0 if left else reap(process, lambda: _descendants(process.pid, born, pid_files()))
    return Ended(returncode, timed_out, seconds, "", _oom_kills() - oom_kills, frozenset(left), still)


def _oom_kills() -> int:
    """Since the system began; of a container's limit too."""
    return kernel_number("/proc/vmstat", "oom_kill ")


def reap(process: Started, descendants: Callable[[], set[psutil.Process]]) -> int:
    """End a process and its ``descendants``; its return code. SIGTERM first, by which torchrun ends its ranks;
    Ctrl-C only hurries."""
    survivors = descendants()
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
    finally:
        survivors |= descendants()
        if process.poll() is None:
            process.kill()
        kill(survivors)
        psutil.wait_procs(survivors, timeout=5)
    return returncode_of(process)


def returncode_of(process: Started) -> int:
    """Of one that ends; SIGKILL's where nobody tells."""
    try:
        return process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def kill_with_children(process: psutil.Process) -> None:
    """Kill a process that does not listen, and what it has forked, which may not either."""
    forked: list[psutil.Process] = []
    with suppress(psutil.Error):
        forked = process.children(recursive=True)
    kill([process, *forked])


def is_alive(process: psutil.Process) -> bool:
    """Whether it is more than an entry that its parent has not looked at."""
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


class WholeTree:
    """The processes that have ``variable`` in their environment, which names one launch: nobody else's."""

    def __init__(self, variable: str) -> None:
        self._variable = variable.encode()
        self._shared_before = _shared()
        self._guard: subprocess.Popen[bytes] | None = None

    def guard(self) -> None:
        """Let another process end them where this one does not live to do it."""
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "pytest_llmperf.launch.process", self._variable.decode()],
            env={**os.environ, **python_path(package_path(), os.environ)},
            stdin=subprocess.PIPE,  # which the system closes however this one ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end(self, descendants: Callable[[], set[psutil.Process]]) -> None:
        """Stop them and ``descendants``, so that none sees another go, and kill them: no handler of theirs runs. What
        they alone had in shared memory goes; and the locks of torch's extensions: who finds one waits for ever."""
        stopped, shared, locks = set[psutil.Process](), set[Path](), set[Path]()
        try:
            for _ in range(_ROUNDS):
                found = descendants() - stopped
                for pid in psutil.pids():
                    with suppress(OSError, psutil.Error):
                        if self._variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                            found |= {psutil.Process(pid)} - stopped
                if not found:
                    break
                for process in found:
                    with suppress(psutil.Error):
                        process.suspend()
                stopped |= found
            used = _used(process.pid for process in stopped)
            shared = used - self._shared_before
            locks = {path for path in used if path.name == "lock" and (path.parent / "build.ninja").exists()}
        finally:  # Ctrl-C leaves none of them stopped
            kill(stopped)
        deadline = time.monotonic() + GONE_SECONDS
        while any(map(is_alive, stopped)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        left = (shared & _shared()) | locks
        # Our user's of these, which nobody uses.
        for path in left - _used(psutil.pids()) if left else ():
            with suppress(OSError):
                if path.lstat().st_uid == os.geteuid():
                    path.unlink()
        if self._guard:
            self._guard.kill()
            self._guard.communicate()


def _shared() -> set[Path]:
    with suppress(OSError):
        return set(_SHARED.iterdir())
    return set()


def _used(pids: Iterable[int]) -> set[Path]:
    """Files that these processes have mapped or open."""
    found = set[Path]()
    for folder in (Path(f"/proc/{pid}") for pid in pids):
        with suppress(OSError):
            lines = (folder / "maps").read_text(errors="replace").splitlines()
            found |= {Path(line.split(maxsplit=5)[5]) for line in lines if str(_SHARED) in line}
        for link in folder.glob("fd/*"):
            with suppress(OSError):
                found.add(link.readlink())
    return found


def _descendants(pid: int, born: float, pid_files: Iterable[Path]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    with suppress(psutil.Error):
        found |= set(psutil.Process(pid).children(recursive=True))
    for path in pid_files:
        with suppress(OSError, ValueError, psutil.Error):
            process = psutil.Process(int(path.read_text(encoding="ascii")))
            # Ours were born after the launch began and before they wrote their file; else the pid was given anew, and
            # what we did not start we never end.
            if born <= process.create_time() <= path.stat().st_mtime + 1:
                found |= {process, *process.children(recursive=True)}
    return {one for one in found if is_alive(one)}  # one that nobody looks at after its end would be waited for


def signal_name(returncode: int) -> str | None:
    """``SIGKILL`` for -9 or 137; ``None`` for a code that is no signal's."""
    number = -returncode if returncode < 0 else returncode - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def ask_ranks(folder: Path, torchrun: int, node: str = "") -> None:
    """Let the ranks of ``torchrun``, a pid, for the launch in ``folder`` write down what they do; a few seconds."""
    found: dict[str, psutil.Process] = {}
    with suppress(psutil.Error):
        for child in psutil.Process(torchrun).children(recursive=True):
            with suppress(psutil.Error):
                rank = _rank_of(child, folder)
                # Before a rank wrote this file it has no handler, and the signal would end it.
                if rank is not None and (folder / f"rank-{rank}.pid").exists():
                    found.setdefault(rank, child)  # a rank comes before its data workers, which look as it does
    ask(found, folder, node, signal.SIGUSR1)


def ask(ranks: Mapping[str, psutil.Process], folder: Path, node: str, by: int) -> None:
    """Let these, which have a handler for the signal ``by``, write down what they do. What is known of one that does
    not, on ``node``, is left in its place: it may be stopped, or sleep in the kernel."""
    for process in ranks.values():
        with suppress(psutil.Error):
            process.send_signal(by)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline and not all((folder / f"trace-rank-{rank}").exists() for rank in ranks):
        time.sleep(2 * _POLL_SECONDS)
    for rank, process in ranks.items():
        with suppress(OSError, psutil.Error):
            if not (folder / f"stacks-rank-{rank}.txt").stat().st_size:
                words = {"node": node, "status": process.status()}
                write_text(folder / f"silent-rank-{rank}.json", json.dumps(words), lasts=False)


def _rank_of(process: psutil.Process, folder: Path) -> str | None:
    words = process.cmdline()
    if _FORK_SERVER not in words:
        is_rank = words[-2:] == ["pytest_llmperf.worker", str(folder)]
        return process.environ().get("RANK") if is_rank else None
    # It has the command line and environment of its server. Pids that ranks wrote may be another node's.
    opened = (Path(file.path) for file in process.open_files())
    own = [path.stem for path in opened if path.parent == folder.resolve() and path.match("stacks-rank-*.txt")]
    return own[0].rpartition("-")[2] if own else None


if __name__ == "__main__":
    guarded = WholeTree(sys.argv[1])
    sys.stdin.buffer.read()
    guarded.end(set)
