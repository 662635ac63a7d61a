"""Files that somebody else reads: whole, or not there; what processes that were killed left goes."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import BinaryIO

from pytest_llmperf.support.folders import refuse_planted

# Of what another host's process left.
_UNTOUCHED_SECONDS = 24 * 3600.0
_PART = re.compile(r"\.llmperf-(?:(?P<space>\w+)-)?(?P<pid>\d+)-\w+\.part")


def boot_id() -> str:
    """This start of this host: who reads the same shares a kernel and its file locks. Empty: it does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


@cache
def _space() -> str:
    """Within which a pid means one process: another host, or a container, has its own."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it points to nothing
    return hashlib.sha256(f"{boot_id()} {namespace}".encode()).hexdigest()[:8]


def mark() -> str:
    """Name this process, in the name of a file or folder that it must not leave."""
    return f"{_space()}-{os.getpid()}"


def is_left(path: Path, space: str, pid: int) -> bool:
    """Whether the process that ``path`` is named after is gone; another host's is, a day after its last write."""
    if space == _space():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False
    return time.time() - path.lstat().st_mtime > _UNTOUCHED_SECONDS


def write_text(path: Path, text: str, *, lasts: bool = True) -> None:
    """Whole, or as it was before, and OSError; what UTF-8 cannot hold is escaped. ``lasts``: on the disk at return."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"), lasts=lasts)


def write_bytes(path: Path, data: bytes, *, lasts: bool = True) -> None:
    """As ``write_text``, of what is no text."""
    try:
        refuse_planted(path)
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.exists() and not target.is_file():
            # /dev/stdout, a pipe: replacing it would put a file in its place. A folder raises here, which is right too.
            target.write_bytes(data)
            return
        with replacing(target, lasts=lasts) as file:
            file.write(data)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error  # a full disk names no file


def refused_at(path: Path) -> str:
    """Why ``write_text`` could not write there, found by trying; empty where it could. What is there stays as it is."""
    try:
        refuse_planted(path)
    except PermissionError as error:
        return str(error.strerror)
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        return "" if os.access(target, os.W_OK) else "it may not be written"
    part = _part_of(target)
    try:
        part.touch(exist_ok=False)
        part.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _part_of(target: Path) -> Path:
    # In the same folder, since only within one file system is replacing atomic; not tempfile, whose files only their
    # owner can read, and this one is for a CI job to collect.
    return target.with_name(f".llmperf-{mark()}-{secrets.token_hex(4)}.part")


@contextmanager
def replacing(target: Path, *, lasts: bool = True) -> Iterator[BinaryIO]:
    """A file that takes the place of ``target`` once all is written; OSError, and ``target`` stays, if it is not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    (_sweep if lasts else _sweep_once)(target.parent)
    part = _part_of(target)
    try:
        with part.open("xb") as file:
            yield file
            if lasts:
                file.flush()
                os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _PART.fullmatch(entry.name)
            if found:
                with suppress(OSError):  # another process sweeps too
                    if is_left(Path(entry.path), found["space"] or "", int(found["pid"])):
                        os.unlink(entry.path)  # noqa: PTH108 - a link is not followed


# What a launch tells of itself is written often, and must cost little.
_sweep_once = cache(_sweep)


def files_digest(folder: Path, pattern: str) -> str:
    """Digest the names and contents of all files below ``folder`` that match; empty where there is none."""
    whole = hashlib.sha256()
    found = sorted(folder.rglob(pattern))
    for path in found:
        try:
            whole.update(f"{path.relative_to(folder)}\0".encode("utf-8", "surrogateescape") + path.read_bytes())
        except OSError:
            continue
    return whole.hexdigest()[:12] if found else ""


def of_files(files: Iterable[tuple[str, Path]]) -> str:
    """Digest ``files`` in their order, each under the name that matters of it; 16 digits. OSError if unreadable."""
    whole = hashlib.sha256()
    for name, path in files:
        state = path.stat()
        whole.update(f"{name}\0{_of_file(path.absolute(), state.st_size, state.st_mtime_ns)}\0".encode())
    return whole.hexdigest()[:16]


@lru_cache(maxsize=256)
def _of_file(path: Path, _size: int, _mtime_ns: int) -> str:
    """Read once; a file that was changed, or another one of its name, is read anew."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()
