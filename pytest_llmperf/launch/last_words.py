"""What the ranks of a launch left that tells how it went: where they hung, whether they lacked memory, and remarks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pytest_llmperf.records.memory_shortage import Room, said
from pytest_llmperf.support import codec
from pytest_llmperf.support.redaction import without_secrets

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
# How a process ends itself, or trips over memory that it was not given. No other signal is of a limit.
_ITS_OWN = frozenset({"SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGTRAP", ""})
_LAST_WORDS = 20
# Words of a line that tells of something slower than it could be.
_WORDS = re.compile(
    r"\bfall(s|ing|en)?[ -]?back|\bfell back|\bfallback|\bnot installed|\bslow(er|ly)?\b|\bnaive\b|\bunoptimi[sz]ed"
    r"|\bnot (be )?(available|supported|compiled)|\bcould not (import|load|find)|\bfailed to (import|load)"
    r"|\bfast path\b|\bwill be disabled\b",
    re.IGNORECASE,
)
# torchrun's rank, glog's time and place, logging's level, a warning's file and line: another in each launch.
_HEAD = re.compile(
    r"^(\[rank\d+\]:?)?\s*(\[?[WIE]\d{4} [\d:. ]+\S*\s+\S+?\]\s*)?(\[?\d{4}-\d\d-\d\d[ T][\d:,.]+\]?\s*)?"
    r"(\S+:\d+: \w*Warning: |(WARNING|INFO|ERROR)\S*\s+)?"
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MOST_LINES, _MOST, _WIDTH = 20_000, 5, 240


@dataclass(frozen=True)
class Hang:
    """Where the ranks were."""

    message: str
    """``rank 1 in train (loop.py:7); ranks 0, 2, 3 in backward (graph.py:9)``: the odd ones come first, and before
    them those that did not answer."""
    rank: int
    """One of the first."""
    stack: tuple[str, ...]
    """Of the first that answered, its main thread's, innermost frame first."""


def read(folder: Path) -> Hang | None:
    """Where the ranks of the launch in ``folder`` hung; ``None`` where none wrote anything."""
    stacks: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("stacks-rank-*.txt"):
        with suppress(OSError, ValueError):
            text = path.read_text(encoding="utf-8", errors="replace")
            # The main thread is the one that faulthandler writes last, unless it left threads out.
            frames = [match.groupdict() for match in _FRAME.finditer(_THREAD.split(text)[-1])]
            if frames and not text.rstrip().endswith("\n..."):
                stacks[int(path.stem.rpartition("-")[2])] = frames
    silent: dict[int, str] = {}
    for path in folder.glob("silent-rank-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            words, rank = json.loads(path.read_text(encoding="utf-8")), int(path.stem.rpartition("-")[2])
            where = f"on node {words['node']} " if words["node"] else ""
            if rank not in stacks:
                silent[rank] = f"{where}did not answer ({words['status']})"
    at = {rank: frames[0] for rank, frames in stacks.items()}
    places = _grouped({rank: f"in {f['function']} ({Path(f['file']).name}:{f['line']})" for rank, f in at.items()})

    def odd_first(place: str) -> tuple[int, bool, int]:
        """Most ranks only wait for those that do not come, and they wait inside of torch."""
        ranks = places[place]
        return len(ranks), f"{os.sep}torch{os.sep}" in at[ranks[0]]["file"], ranks[0]

    found = _grouped(silent) | {place: places[place] for place in sorted(places, key=odd_first)}
    if not found:
        return None
    lines = [f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)} {what}" for what, ranks in found.items()]
    more = [f"{len(lines) - 3} other places"] if len(lines) > 3 else []  # noqa: PLR2004 - what fits a line
    frames = next((stacks[ranks[0]] for ranks in found.values() if ranks[0] in stacks), [])
    stack = tuple(f"{frame['file']}:{frame['line']} in {frame['function']}" for frame in frames)
    return Hang("; ".join([*lines[:3], *more]), next(iter(found.values()))[0], stack)


def _grouped(words: Mapping[int, str]) -> dict[str, list[int]]:
    """Ranks by what is told of them."""
    found: dict[str, list[int]] = {}
    for rank in sorted(words):
        found.setdefault(words[rank], []).append(rank)
    return found


def _listed(ranks: list[int]) -> str:
    """``0 to 3, 7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)


def want_of_memory(folder: Path, rank: int, signal: str, words: Sequence[str], oom_kills: int) -> str | None:
    """How it is known that ``rank`` had no memory left when ``signal`` (empty: its own exit) ended it, or ``None``.

    ``words`` are its last lines, and ``oom_kills`` the processes that the kernel has ended for it meanwhile.
    """
    room = codec.load(Room, folder / f"room-{rank}.json")
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


def remarks_in(lines: Iterable[str]) -> tuple[str, ...]:
    """The first few of ``lines`` that tell of something slow, each once, without what differs between launches."""
    found: dict[str, None] = {}
    for line in (ANSI.sub("", line[: 10 * _WIDTH]) for line in islice(lines, _MOST_LINES)):
        if _WORDS.search(line):
            plain = "".join(c if c.isprintable() else " " for c in line).strip()
            plain = without_secrets(_HEAD.sub("", plain))
            found[plain if len(plain) <= _WIDTH else f"{plain[: _WIDTH - 3]}..."] = None
    return tuple(islice(filter(None, found), _MOST))
