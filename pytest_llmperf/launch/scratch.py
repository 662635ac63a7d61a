"""A host's own folders: one for each launch on it, and the caches that launches share there.

``python -m pytest_llmperf.launch.scratch`` removes those of a SLURM job from the node that it runs on."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_llmperf.support.files import is_left, mark, private_folder

#: Names the folder that each node has for itself.
SCRATCH = "LLMPERF_SCRATCH"

#: Exit code of a node's agent that could not leave its word in the folder: the only other way to tell.
UNWRITABLE = 74

_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
# Compilers keep what they made here: on a shared file system every rank of every node would fight for it.
_CACHES = {"TRITON_CACHE_DIR": "triton", _INDUCTOR: "inductor"}

_STEP = re.compile(r"step-(?P<space>\w+)-(?P<pid>\d+)-(?P<began>\d+)-\w+")
_UNTOUCHED_SECONDS = 2 * 24 * 3600.0
# Each is written under its last name, and taken for whole once it is there. What Triton makes gets its name when it is.
_SUFFIXES = (".so", ".o", ".gch", ".pch")
# Where torch builds extensions from source, DeepSpeed's say: for whose lock is left there it waits for ever.
_EXTENSIONS, _LOCK = "TORCH_EXTENSIONS_DIR", ("lock",)
_OF_A_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "afs", "fuse", "9p", "wekafs", "panfs")
_TRITONS = "triton"
# Records and logs of a launch need more than this: with less left, it is what broke it.
_NEEDED_BYTES = 64 * 1024
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


@dataclass
class Scratch:
    variables: Mapping[str, str]
    """That name its folders; empty where none can be made."""
    is_whole: bool = False
    """Whether what the launch compiled is: said by whoever saw it end well."""


@contextmanager
def scratch(*, of_job: bool = False) -> Iterator[Scratch]:
    """A folder of the launch's own, and caches: ``of_job``, of all launches of this SLURM job on its node, else ours.
    Where somebody else has prepared the place of the caches, the launch has its own, and stderr says so."""
    wanted = _job_folder() if of_job else _base() / f"llmperf-{os.getuid()}"
    home: Path | None = None
    try:
        home = private_folder(wanted)
    except OSError as error:
        sys.stderr.write(f"llmperf: {wanted} is not used ({error.strerror or error}): this launch compiles anew\n")
    try:
        if home is None:
            step = caches = Path(tempfile.mkdtemp(prefix="llmperf-"))
        else:
            step = Path(tempfile.mkdtemp(prefix=f"step-{mark()}-{time.time():.0f}-", dir=home))
            caches = home
    except OSError:
        yield Scratch({})
        return
    # Triton's own cache is in the user's home, and whole: only nodes, which share that home, need another.
    named = _CACHES if of_job or home is None else {_INDUCTOR: _CACHES[_INDUCTOR]}
    mine = {name: str(caches / folder) for name, folder in named.items() if name not in os.environ}
    inductor, began = Path(os.environ.get(_INDUCTOR) or mine[_INDUCTOR]), time.time()
    users = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '')}/.cache"
    extensions = Path(os.environ.get(_EXTENSIONS) or f"{users}/torch_extensions")
    if _is_of_many_hosts(extensions):  # one of them may hold a lock of it now
        extensions = step
    place = Scratch({"TMPDIR": str(step)} | mine)
    try:
        if home is not None:
            _sweep(home, inductor, extensions)
        yield place
    finally:
        if not place.is_whole:
            drop_unfinished(inductor, began)
            drop_unfinished(extensions, began, _LOCK)
        shutil.rmtree(step, ignore_errors=True)


def _is_of_many_hosts(path: Path) -> bool:
    """Whether it may lie on a network's file system."""
    real = Path(os.path.realpath(path))
    mounts = [one for one in psutil.disk_partitions(all=True) if real.is_relative_to(one.mountpoint)]
    kind = max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else ""
    return kind.startswith(_OF_A_NETWORK)


def remove_of_job() -> None:
    """Remove what this SLURM job has on this node, if it is ours."""
    home = _job_folder()
    with suppress(OSError):
        # rmtree follows no link, and neither does what it is shown through.
        if not home.is_symlink() and home.stat().st_uid == os.geteuid():
            shutil.rmtree(home)


def _job_folder() -> Path:
    # Clusters that share a node count their jobs each for itself.
    cluster = re.sub(r"[^\w.-]", "_", os.environ.get("SLURM_CLUSTER_NAME", ""))
    words = ("llmperf", str(os.getuid()), cluster, os.environ.get("SLURM_JOB_ID", ""))
    return _base() / "-".join(filter(None, words))


def _base() -> Path:
    wanted = os.environ.get(SCRATCH) or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - node-local by its nature
    return Path(os.path.expandvars(wanted))


def _sweep(home: Path, inductor: Path, extensions: Path) -> None:
    """Remove what launches left whose launcher was killed, and whole jobs of ours that were."""
    with suppress(OSError):
        for step in home.iterdir():
            found = _STEP.fullmatch(step.name)
            if found and is_left(step, found["space"], int(found["pid"])):
                drop_unfinished(inductor, float(found["began"]))
                drop_unfinished(extensions, float(found["began"]), _LOCK)
                shutil.rmtree(step, ignore_errors=True)
        for other in home.parent.glob(f"llmperf-{os.getuid()}-*"):
            found_at = other.lstat()
            is_old = time.time() - found_at.st_mtime > _UNTOUCHED_SECONDS
            if other != home and is_old and found_at.st_uid == os.geteuid():
                shutil.rmtree(other, ignore_errors=True)  # of a link it removes nothing


def drop_unfinished(cache: Path, since: float, suffixes: tuple[str, ...] = _SUFFIXES) -> None:
    """Remove what was compiled after ``since``, in epoch seconds, by processes that were ended; what is open stays."""
    found, open_elsewhere = list[Path](), set[str]()
    for folder, folders, files in os.walk(cache):
        folders[:] = [name for name in folders if name != _TRITONS]
        for path in (Path(folder, name) for name in files if name.endswith(suffixes)):
            with suppress(OSError):  # another launch removed it just now
                if path.lstat().st_mtime >= since - 1:
                    found.append(path)
    for link in Path("/proc").glob("[0-9]*/fd/*") if found else ():
        with suppress(OSError):
            open_elsewhere.add(str(link.readlink()))
    for path in found:
        with suppress(OSError):
            if os.path.realpath(path) not in open_elsewhere:
                path.unlink()


def means_no_room(error: OSError) -> bool:
    """Whether it was for the disk: full, or the quota, or read-only."""
    return error.errno in _NO_ROOM


def unwritable(folder: Path) -> str:
    """Why nothing more can be written there: the disk is full, or the quota, or it is read-only; empty where it can."""
    probe = folder / f".room-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(b"\0" * _NEEDED_BYTES)
            file.flush()
            os.fsync(file.fileno())  # a network's file system may say so only now
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror or error})"
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return ""


if __name__ == "__main__":
    remove_of_job()
