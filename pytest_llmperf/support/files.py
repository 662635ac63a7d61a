"""Files that somebody else reads: whole, or not there; and the user's own folders, baselines above one, and locks.

What lies outside of the home, below ``/tmp`` say, may have been prepared by another user: it is opened by
descriptor, without following a link, and is looked at before it is used or its mode is set."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import BinaryIO

# File systems allow 255 bytes, and a number or an ending follows.
_LONGEST_NAME = 200
# Of what another host's process left.
_UNTOUCHED_SECONDS = 24 * 3600.0
_PART = re.compile(r"\.llmperf-(?:(?P<space>\w+)-)?(?P<pid>\d+)-\w+\.part")


def shipped(module: str, name: str) -> ConfigParser:
    """The sections of the file ``name``, which ships beside ``module``: data that nobody reads as code."""
    found = ConfigParser(interpolation=None, delimiters="=")
    found.optionxform = str  # type: ignore[assignment,method-assign] # letters as they are
    found.read_string(Path(module).with_name(name).read_text(encoding="utf-8"))
    return found


def text_of(path: Path) -> str:
    """What stands in a file, as far as it is text; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def boot_id() -> str:
    """This start of this host: who reads the same shares a kernel and its file locks. Empty: it does not tell."""
    return text_of(Path("/proc/sys/kernel/random/boot_id")).strip()


def cpu_name() -> str:
    """The model name of this host's CPU, or its architecture."""
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    if names := [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]:
        return names[0]
    return platform.processor() or platform.machine()  # the first of the two runs uname


def kernel_number(file: str, name: str) -> int:
    """The number that ``file`` of the kernel has behind ``name``; 0: this kernel has none."""
    with suppress(ValueError):
        for line in text_of(Path(file)).splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0


def hashed(text: str) -> str:
    """The 16 hex digits of a digest."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_name(name: str) -> str:
    """``name``, or as much of it as a file system takes, and a hash that keeps two long ones apart."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 17]}-{hashed(name)}"


@cache
def _space() -> str:
    """Within which a pid means one process: another host, or a container, has its own."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it points to nothing
    return hashed(f"{boot_id()} {namespace}")[:8]


def mark() -> str:
    """Name this process, in the name of a file or folder that it must not leave."""
    return f"{_space()}-{os.getpid()}"


def is_left(path: Path, space: str, pid: int) -> bool:
    """Whether the process that ``path`` is named after is gone; another host's is, a day after its last write."""
    if space == _space():
        import psutil  # noqa: PLC0415 - few runs leave anything

        return not psutil.pid_exists(pid)
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
            if found := _PART.fullmatch(entry.name):
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


def cache_folder(name: str) -> Path:
    """The folder ``name`` of the cache, which is kept between runs; ``LLMPERF_CACHE_DIR`` names another cache."""
    return _of_the_user("XDG_CACHE_HOME", "~/.cache") / name


def state_folder() -> Path:
    """Where runs leave what nothing could make again, unlike in a cache; ``LLMPERF_CACHE_DIR`` names both."""
    return _of_the_user("XDG_STATE_HOME", "~/.local/state")


def _of_the_user(variable: str, otherwise: str) -> Path:
    if named := os.environ.get("LLMPERF_CACHE_DIR"):
        return Path(named).absolute()
    # Unlike Path's, this expanduser raises nothing where nobody has a home.
    home = os.environ.get(variable) or os.path.expanduser(otherwise)  # noqa: PTH111
    return Path(home).absolute() / "pytest-llmperf"


def baselines_above(root: Path) -> Path | None:
    """Those that a folder above, in the git work tree, has under ``root``'s name; ``None``: ``root`` has some."""
    if _holds_baselines(root):
        return None
    found: list[Path] = []
    for each in (root.parent.resolve(), *root.parent.resolve().parents):
        found.append(each / root.name)
        if (each / ".git").exists():  # a folder, or a file where the work tree is a linked one or a submodule
            return next(filter(_holds_baselines, found[1:]), None)
    return None


def _holds_baselines(root: Path) -> bool:
    # Others may have folders of this name: in each file of ours stands which test recorded it.
    found = chain(root.glob("*/*/*.json"), root.glob("*/*/*/*.json"))
    return any(path.is_file() and '"recorded_by"' in text_of(path) for path in found)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A fifo is not waited for, and a terminal does not become ours.
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

_EVERYONES = 0o1777
_OTHERS_WRITE = stat.S_IWOTH
_STICKY = stat.S_ISVTX


def private_folder(path: Path) -> Path:
    """``path``, without links above it, as a folder of ours alone, made if need be; PermissionError: a link, others',
    open to others, or below what they may replace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name
    _refuse_replaceable(path)
    with _opened(path) as (folder, _):
        mode = os.fstat(folder).st_mode
        if mode & 0o022:
            raise _refused(path, "others may write there; remove it")
        if mode & 0o077:
            os.fchmod(folder, 0o700)
    return path


def _refuse_replaceable(path: Path) -> None:
    """PermissionError: somebody else may put another folder in the place of ``path``, or of one that it is in."""
    inner = path
    for outer in path.parents:
        mode = os.stat(outer).st_mode  # noqa: PTH116 - as it will be found
        if mode & _OTHERS_WRITE and not mode & _STICKY:
            raise _refused(path, f"everybody may replace it: {outer} is open to all without the sticky bit (chmod +t)")
        if mode & _OTHERS_WRITE and inner != path and (owner := inner.lstat().st_uid) not in (0, os.geteuid()):
            raise _refused(path, f"user {owner} may replace it: {inner} is theirs, in a folder that is open to all")
        inner = outer


def refuse_others_folder(path: Path) -> None:
    """Raise PermissionError where ``path``, from which something is run, is another user's or open to everybody."""
    try:
        found = os.stat(path)  # noqa: PTH116 - as the commands that run something there will find it
    except FileNotFoundError:
        return
    if found.st_uid not in (0, os.geteuid()):
        raise _refused(path, f"it belongs to user {found.st_uid}, expected ours ({os.geteuid()})")
    if found.st_mode & _OTHERS_WRITE:
        raise _refused(path, "everybody may write there; take that away with chmod o-w")
    _refuse_replaceable(path.resolve())


def refuse_planted(path: Path) -> None:
    """PermissionError: ``path``, where all may write, is another user's: a link that may name what is ours, a pipe that
    nobody reads, or a file that we may not replace."""
    try:
        found, folder = path.lstat(), path.parent.stat()
    except OSError:
        return
    if not folder.st_mode & _OTHERS_WRITE or found.st_uid in (0, os.geteuid(), folder.st_uid):
        return
    if stat.S_ISREG(found.st_mode):
        if folder.st_mode & _STICKY and os.geteuid():
            raise _refused(path, f"it is a file of user {found.st_uid}, which nobody else may replace there")
    else:
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "a pipe or the like"
        raise _refused(path, f"it is {kind} of user {found.st_uid}; somebody may have put it there")


@contextmanager
def shared_folder(path: Path, *, is_everyones: bool) -> Iterator[int]:
    """The descriptor of a folder in which users of this host meet; one that is made here is everyone's and sticky.
    ``is_everyones``: one of ours that is there already becomes so too. Otherwise only the sticky bit is added to one of
    ours that everybody may write. Whose it is does not matter: in a sticky folder nobody removes what others hold.
    Raises PermissionError where it is a link of somebody else, or everybody may remove what others have there."""
    with _opened(path, any_owner=True) as (folder, is_new):
        found = os.fstat(folder)
        is_ours, is_open = found.st_uid == os.geteuid(), found.st_mode & _OTHERS_WRITE
        if is_ours and (is_new or is_everyones):
            os.fchmod(folder, _EVERYONES)
        elif is_open and not found.st_mode & _STICKY:
            if not is_ours:
                raise _refused(
                    path, f"user {found.st_uid} left it open to everybody without the sticky bit; chmod 1777 by them"
                )
            os.fchmod(folder, stat.S_IMODE(found.st_mode) | _STICKY)
        yield folder


def open_shared(folder: int, name: str) -> int:
    """The file ``name`` in ``folder``, made if need be; others' to read alone. PermissionError: no plain file."""
    try:
        made = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o644, dir_fd=folder)
    except FileExistsError:
        pass
    else:
        os.fchmod(made, 0o644)  # whatever the umask
        return made
    # File systems that lock by ranges of bytes, as NFS does, want a file opened for writing: our own can be.
    is_ours = os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid == os.geteuid()
    try:
        opened = os.open(name, (os.O_RDWR if is_ours else os.O_RDONLY) | _FILE, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _refused(Path(name), "it is not a plain file; somebody may have put it there") from None
        raise
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(opened)
        raise _refused(Path(name), "it is not a plain file with one name; somebody may have put it there")
    return opened


def is_at(opened: int, folder: int, name: str) -> bool:
    """Whether ``opened`` still is the file ``name`` in ``folder``: its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(opened), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextmanager
def _opened(path: Path, *, any_owner: bool = False) -> Iterator[tuple[int, bool]]:
    """The folder's descriptor, and whether it was made here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if any_owner and path.is_symlink() and path.lstat().st_uid in (0, os.geteuid()):
        path = path.resolve()  # it is meant
    try:
        path.mkdir(mode=0o700)
        is_new = True
    except FileExistsError:
        is_new = False
    try:
        folder = os.open(path, _FOLDER)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise _refused(path, "it is a link; somebody may have put it there") from None
        raise
    try:
        owner = os.fstat(folder).st_uid
        if owner != os.geteuid() and not any_owner:
            raise _refused(path, f"it belongs to user {owner}, expected ours ({os.geteuid()})")
        yield folder, is_new
    finally:
        os.close(folder)


def _refused(path: Path, why: str) -> PermissionError:
    return PermissionError(errno.EPERM, why, str(path))
