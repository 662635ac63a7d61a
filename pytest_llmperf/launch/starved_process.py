"""Starved: whether a rank that left no reason died for want of memory, by its last words and by what it left.

A library that gets no memory inside a thread aborts, OpenMP and the loader end the process, and the kernel kills it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pytest_llmperf.records.memory_shortage import Room, said

# How a process ends itself, or trips over memory that it was not given. No other signal is of a limit.
_ITS_OWN = frozenset({"SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGTRAP", ""})

_LAST_WORDS = 20


def want_of_memory(folder: Path, rank: int, signal: str, words: Sequence[str], oom_kills: int) -> str | None:
    """How it is known that ``rank`` had no memory left when ``signal`` (empty: its own exit) ended it, or ``None``.

    ``words`` are its last lines, and ``oom_kills`` the processes that the kernel has ended for it meanwhile.
    """
    room = _room(folder / f"room-{rank}.json")
    if signal == "SIGKILL":
        # A rank on a GPU leaves no file: the host's memory is none of its card's.
        return f"the kernel ended {oom_kills} for want of memory" if oom_kills and room else None
    if signal not in _ITS_OWN:
        return None
    last = [line for line in words if line.strip()][-_LAST_WORDS:]
    plain = next((line.strip() for line in last if said(line) == "plainly"), None)
    if plain is not None:
        return plain
    # A library that does not look whether it got the memory it asked for trips over it.
    hinted = bool(signal) or any(said(line) == "perhaps" for line in last)
    if room is not None and (room.is_full or (hinted and room.is_tight)):
        return str(room)
    return None


def _room(path: Path) -> Room | None:
    try:
        return Room.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
