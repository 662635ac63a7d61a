"""What the ranks of a launch that came to its time limit were doing: asked before they are reaped, read after it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_ANSWER_SECONDS = 5.0
_SPY_SECONDS = 20.0
_POLL_SECONDS = 0.1

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Hang:
    """Where the ranks were."""

    message: str
    """``rank 1 in train (loop.py:7); ranks 0, 2, 3 in backward (graph.py:9)``: the odd ones come first."""
    rank: int
    """One of the first."""
    stack: tuple[str, ...]
    """Its main thread's, innermost frame first."""


def ask(folder: Path) -> None:
    """Let the ranks that this process started for the launch in ``folder`` write down what they do; a few seconds."""
    # Before a rank wrote this file it has no handler, and the signal would end it.
    ranks = {rank: process for rank, process in _ranks(folder).items() if (folder / f"rank-{rank}.pid").exists()}
    for process in ranks.values():
        with suppress(psutil.Error):
            process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline and not all((folder / f"trace-rank-{rank}").exists() for rank in ranks):
        time.sleep(_POLL_SECONDS)
    _spy(folder, ranks)


def read(folder: Path) -> Hang | None:
    """What they wrote; ``None`` where none did."""
    stacks = {}
    for path in folder.glob("stacks-rank-*.txt"):
        with suppress(OSError, ValueError):
            frames = _main_thread(path.read_text(encoding="utf-8", errors="replace"))
            if frames:
                stacks[int(path.stem.rpartition("-")[2])] = frames
    places: dict[str, list[int]] = {}
    for rank, frames in sorted(stacks.items()):
        places.setdefault(_place(frames[0]), []).append(rank)
    if not places:
        return None

    def odd_first(place: str) -> tuple[int, bool, int]:
        """Most ranks only wait for those that do not come, and they wait inside of torch."""
        ranks = places[place]
        return len(ranks), f"{os.sep}torch{os.sep}" in stacks[ranks[0]][0]["file"], ranks[0]

    order = sorted(places, key=odd_first)
    told = [f"rank{'s' * (len(places[place]) > 1)} {_listed(places[place])} in {place}" for place in order[:3]]
    told += [f"{len(order) - 3} other places"] if len(order) > 3 else []  # noqa: PLR2004 - what fits a line
    rank = places[order[0]][0]
    stack = tuple(f"{frame['file']}:{frame['line']} in {frame['function']}" for frame in stacks[rank])
    return Hang("; ".join(told), rank, stack)


def _main_thread(text: str) -> list[Mapping[str, str]]:
    """Frames of the thread that faulthandler writes last, innermost first."""
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


def _ranks(folder: Path) -> dict[str, psutil.Process]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            words = child.cmdline()
            if "RANK" in child.environ() and words[-2:] == ["pytest_llmperf.worker", str(folder)]:
                found[child.environ()["RANK"]] = child
    return found


def _spy(folder: Path, ranks: Mapping[str, psutil.Process]) -> None:
    """The frames of C code too, where py-spy is installed."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    for rank, process in ranks.items() if spy else ():
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [str(spy), "dump", "--native", "--pid", str(process.pid)],
                capture_output=True,
                check=False,
                timeout=_SPY_SECONDS,
            )
            (folder / f"py-spy-rank-{rank}.txt").write_bytes(done.stdout or done.stderr)
