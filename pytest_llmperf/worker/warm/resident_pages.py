"""Resident pages of files: a fork begins without those that its parent has read, a fresh process has read them itself.

On the CPU a rank's memory is what becomes resident in it, so a fork reads them before that is counted.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

# Source: asm-generic/mman-common.h; Linux 5.14. An older one leaves the pages to be read when they are needed.
_MADV_POPULATE_READ = 22

# Source: Documentation/admin-guide/mm/pagemap.rst: one word a page, its top bit says that the page is there.
_WORD = 8
_PRESENT = 0x80

#: Addresses: where a run of pages begins, and where it ends.
Run = tuple[int, int]


def resident_runs() -> tuple[Run, ...]:
    """The pages of files that are resident in this process now."""
    try:
        with Path("/proc/self/pagemap").open("rb") as pagemap:
            found: list[Run] = []
            for start, end in _file_mappings():
                pagemap.seek(start // mmap.PAGESIZE * _WORD)
                words = pagemap.read((end - start) // mmap.PAGESIZE * _WORD)
                found += _runs(start, words[_WORD - 1 :: _WORD])  # of each its highest byte
            return tuple(found)
    except OSError:
        return ()


def read_pages(runs: Iterable[Run]) -> None:
    """Make them resident here too, where the same files are mapped in the same places: in a fork."""
    madvise = ctypes.CDLL(None).madvise
    for start, end in runs:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_READ)


def _file_mappings() -> Iterator[Run]:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/") and words[1].startswith("r"):  # noqa: PLR2004 - it has a name
            with suppress(ValueError):
                start, _, end = words[0].partition("-")
                yield int(start, 16), int(end, 16)


def _runs(start: int, flags: bytes) -> Iterator[Run]:
    begun: int | None = None
    for number, flag in enumerate(flags):
        if flag & _PRESENT and begun is None:
            begun = number
        elif not flag & _PRESENT and begun is not None:
            yield start + begun * mmap.PAGESIZE, start + number * mmap.PAGESIZE
            begun = None
    if begun is not None:
        yield start + begun * mmap.PAGESIZE, start + len(flags) * mmap.PAGESIZE
