"""What Inductor's C++ compiler leaves in its cache: where it is killed, half a file that the next launch would load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Each is written under its last name, and taken for whole once it is there. What Triton makes gets its name when it is.
_SUFFIXES = (".so", ".o", ".gch", ".pch")
_TRITONS = "triton"

_ELF = b"\x7fELF"
# Source: elf(5), Elf64_Ehdr: where the section headers begin, which stand last; their size and number.
_SECTIONS = 40, 8
_SECTION_SIZES = 58, 2


def drop_half_files(cache: Path) -> None:
    """Remove what is empty or cut from ``cache``, unless somebody writes it."""
    _drop([path for path in _compiled(cache) if _is_half(path)])


def drop_unfinished(cache: Path, since: float) -> None:
    """Remove what was compiled after ``since``, a time of the clock, by processes that were ended."""
    _drop([path for path in _compiled(cache) if _changed(path) >= since - 1])


def _compiled(cache: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(cache):
        folders[:] = [name for name in folders if name != _TRITONS]
        yield from (Path(folder, name) for name in files if name.endswith(_SUFFIXES))


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # another launch removed it just now
        return 0.0


def _is_half(path: Path) -> bool:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
    except OSError:
        return False
    if head[:4] != _ELF or len(head) < 64:  # noqa: PLR2004 - that header's own size
        return head[:4] == _ELF[: len(head)] if path.suffix in (".so", ".o") else not size
    number = {at: int.from_bytes(head[at : at + length], "little") for at, length in (_SECTIONS, _SECTION_SIZES)}
    sections = int.from_bytes(head[60:62], "little")
    return size < number[_SECTIONS[0]] + number[_SECTION_SIZES[0]] * sections


def _drop(paths: list[Path]) -> None:
    open_elsewhere = _open_files() if paths else set()
    for path in paths:
        with suppress(OSError):
            if os.path.realpath(path) not in open_elsewhere:
                path.unlink()


def _open_files() -> set[str]:
    """Those that processes of ours have open: a compiler at work has its result."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(str(link.readlink()))
    return found
