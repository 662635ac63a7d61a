"""What the ranks of a launch that came to its time limit were doing: asked before they are reaped, read after it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_llmperf.support.files import write_text

_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.1

_FORK_SERVER = "pytest_llmperf.worker.warm.fork_server"

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


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


def ask(folder: Path, torchrun: int, node: str = "") -> None:
    """Let the ranks of ``torchrun``, a pid, for the launch in ``folder`` write down what they do; a few seconds.

    What is known of one that does not, on ``node``, is left in its place: it may be stopped, or sleep in the kernel.
    """
    # Before a rank wrote this file it has no handler, and the signal would end it.
    ranks = {
        rank: process for rank, process in _ranks(folder, torchrun).items() if (folder / f"rank-{rank}.pid").exists()
    }
    for process in ranks.values():
        with suppress(psutil.Error):
            process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline and not all((folder / f"trace-rank-{rank}").exists() for rank in ranks):
        time.sleep(_POLL_SECONDS)
    for rank, process in ranks.items():
        with suppress(OSError, psutil.Error):
            if not (folder / f"stacks-rank-{rank}.txt").stat().st_size:
                words = {"node": node, "status": process.status()}
                write_text(folder / f"silent-rank-{rank}.json", json.dumps(words), lasts=False)


def read(folder: Path) -> Hang | None:
    """What they wrote; ``None`` where none did."""
    stacks = {}
    for path in folder.glob("stacks-rank-*.txt"):
        with suppress(OSError, ValueError):
            frames = _main_thread(path.read_text(encoding="utf-8", errors="replace"))
            if frames:
                stacks[int(path.stem.rpartition("-")[2])] = frames
    places = _grouped({rank: f"in {_place(frames[0])}" for rank, frames in stacks.items()})
    silent = _grouped({rank: words for rank, words in _silent(folder).items() if rank not in stacks})
    if not places and not silent:
        return None

    def odd_first(place: str) -> tuple[int, bool, int]:
        """Most ranks only wait for those that do not come, and they wait inside of torch."""
        ranks = places[place]
        return len(ranks), f"{os.sep}torch{os.sep}" in stacks[ranks[0]][0]["file"], ranks[0]

    found = silent | {place: places[place] for place in sorted(places, key=odd_first)}
    told = [f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)} {what}" for what, ranks in found.items()]
    more = [f"{len(told) - 3} other places"] if len(told) > 3 else []  # noqa: PLR2004 - what fits a line
    frames = next((stacks[ranks[0]] for ranks in found.values() if ranks[0] in stacks), [])
    stack = tuple(f"{frame['file']}:{frame['line']} in {frame['function']}" for frame in frames)
    return Hang("; ".join([*told[:3], *more]), next(iter(found.values()))[0], stack)


def _silent(folder: Path) -> dict[int, str]:
    """What is told of the ranks that did not answer."""
    found = {}
    for path in folder.glob("silent-rank-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            words = json.loads(path.read_text(encoding="utf-8"))
            where = f"on node {words['node']} " if words["node"] else ""
            found[int(path.stem.rpartition("-")[2])] = f"{where}did not answer ({words['status']})"
    return found


def _grouped(words: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks of which the same is told."""
    found: dict[str, list[int]] = {}
    for rank in sorted(words):
        found.setdefault(words[rank], []).append(rank)
    return found


def _main_thread(text: str) -> list[Mapping[str, str]]:
    """Frames of the thread that faulthandler writes last, innermost first; none where it left threads out."""
    if text.rstrip().endswith("\n..."):
        return []
    return [match.groupdict() for match in _FRAME.finditer(_THREAD.split(text)[-1])]


def _place(frame: Mapping[str, str]) -> str:
    return f"{frame['function']} ({Path(frame['file']).name}:{frame['line']})"


def _listed(ranks: list[int]) -> str:
    """``0 to 3, 7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)


def _ranks(folder: Path, torchrun: int) -> dict[str, psutil.Process]:
    found: dict[str, psutil.Process] = {}
    with suppress(psutil.Error):
        for child in psutil.Process(torchrun).children(recursive=True):
            with suppress(psutil.Error):
                rank = _rank_of(child, folder)
                if rank is not None:
                    found.setdefault(rank, child)  # a rank comes before its data workers, which look as it does
    return found


def _rank_of(process: psutil.Process, folder: Path) -> str | None:
    words = process.cmdline()
    if _FORK_SERVER not in words:
        is_rank = words[-2:] == ["pytest_llmperf.worker", str(folder)]
        return process.environ().get("RANK") if is_rank else None
    # It has the command line and environment of its server. Pids that ranks wrote may be another node's.
    opened = (Path(file.path) for file in process.open_files())
    own = [path.stem for path in opened if path.parent == folder.resolve() and path.match("stacks-rank-*.txt")]
    return own[0].rpartition("-")[2] if own else None
