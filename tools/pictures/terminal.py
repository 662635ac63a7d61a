"""What pytest prints of a run and of a failure, as pictures of a terminal."""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

_COLUMNS, _ROWS = 118, 200
_LADDER = "pytest perf_tests/test_ladder.py --gpus 0"
# Real work in every step, ten times a tiny model's own.
_SLOWED, _ONE = "LLMPERF_INJECT=slow=10", "-k llama-tiny-bf16-sdpa-seq64-mbs14"
# The pictures need no network: whoever looks has a monospaced font.
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
# As pyte names it, and as rich does.
_COLOURS = {"brown": "yellow"}
_OTHERS = "-p no:randomly -p no:benchmark -p no:xdist -p no:timeout --no-header"


def runs(work: Path) -> Mapping[str, tuple[str, str]]:
    """By picture the command as a user types it, and what it printed here; baselines go to ``work`` meanwhile."""
    stored = f"--perf-baselines={work / 'baselines'}"
    _printed(f"{_LADDER} -k llama {stored} --update-baselines=new --perf-reason first")
    name, _, value = _SLOWED.partition("=")

    def shown(command: str, environment: Mapping[str, str] | None = None) -> str:
        """With the baselines where they usually are."""
        printed = _printed(f"{command} {stored}", environment)
        return printed.replace(f" {stored}", "").replace(os.path.relpath(work / "baselines"), "baselines")

    return {
        "run": (f"{_LADDER} -k llama", shown(f"{_LADDER} -k llama")),
        "failure": (f"{_SLOWED} {_LADDER} {_ONE}", shown(f"{_LADDER} {_ONE}", {name: value})),
    }


def _printed(command: str, environment: Mapping[str, str] | None = None) -> str:
    """By ``command`` in a terminal of its own."""
    words = [sys.executable, "-m", *shlex.split(f"{command} {_OTHERS}")]
    values = (
        os.environ | {"COLUMNS": str(_COLUMNS), "LINES": str(_ROWS), "TERM": "xterm-256color"} | dict(environment or {})
    )
    reads, writes = pty.openpty()
    with subprocess.Popen(words, env=values, stdin=subprocess.DEVNULL, stdout=writes, stderr=writes):
        os.close(writes)
        printed = b""
        try:
            while part := os.read(reads, 2**16):
                printed += part
        except OSError:  # its other end was closed
            pass
    os.close(reads)
    return printed.decode(errors="replace")


def picture(command: str, printed: str) -> str:
    """SVG of a terminal in which ``command`` printed this; no path of this machine is in it."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text(f"$ {command}", style="bold"))
    for line in screen_of(printed.replace(str(Path.cwd()), "~/pytest-llmperf")):
        console.print(line, soft_wrap=True)
    return _FONTS.sub("", console.export_svg(title=""))


def screen_of(printed: str) -> list[Text]:
    """The lines as they stand in the end, by a terminal that is never scrolled."""
    screen = pyte.Screen(_COLUMNS, _ROWS)
    pyte.Stream(screen).feed(printed)
    lines = [_line([screen.buffer[row][column] for column in range(_COLUMNS)]) for row in range(_ROWS)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return lines


def _line(cells: Sequence[Any]) -> Text:
    line = Text(no_wrap=True)
    for (colour, bold), alike in itertools.groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
        style = Style(color=None if colour == "default" else _COLOURS.get(colour, colour), bold=bold)
        line.append("".join(cell.data for cell in alike), style)
    line.rstrip()
    return line
