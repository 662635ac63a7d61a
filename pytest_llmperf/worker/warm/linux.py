"""What Linux knows of a fork: what becomes of it when its parent ends, who takes orphans, and which pages it lacks.

A fork begins without the pages of files that its parent has read, a fresh process has read them itself. On the CPU a
rank's memory is what becomes resident in it, so a fork reads them before that is counted.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from signal import Signals

# Source: linux/prctl.h.
_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36


def die_with(parent: int, signal: Signals) -> None:
    """Get ``signal`` as soon as the thread of ``parent`` that forked this process ends; at once where it has."""
    _prctl(_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal)


def outlive_parent() -> None:
    """Take ``die_with`` back."""
    _prctl(_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of what descends from here and has lost its own: whoever reaps them is known then."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


# Source: asm-generic/mman-common.h; Linux 5.14. An older one leaves the pages to be read when they are needed.
_MADV_POPULATE_READ = 22

# Source: Documentation/admin-guide/mm/pagemap.rst: one word a page, its top bit says that the page is there.
_WORD = 8
_PRESENT = re.compile(rb"[\x80-\xff]+")

#: Addresses: where a run of pages begins, and where it ends.
Run = tuple[int, int]


def resident_runs() -> tuple[Run, ...]:
    """The pages of files that are resident in this process now."""
    found: list[Run] = []
    with suppress(OSError), Path("/proc/self/pagemap").open("rb") as pagemap:
        for start, end in _file_mappings():
            pagemap.seek(start // mmap.PAGESIZE * _WORD)
            words = pagemap.read((end - start) // mmap.PAGESIZE * _WORD)
            runs = _PRESENT.finditer(words[_WORD - 1 :: _WORD])  # of each its highest byte
            found += [(start + run.start() * mmap.PAGESIZE, start + run.end() * mmap.PAGESIZE) for run in runs]
        return tuple(found)
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
