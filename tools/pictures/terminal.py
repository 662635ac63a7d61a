"""What pytest prints of a run and of a failure, as pictures of a terminal."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

_COLUMNS = 118
_LADDER = "pytest perf_tests/test_ladder.py --gpus 0"
# Real work in every step: ten times a tiny model's own.
_SLOWED = {"LLMPERF_INJECT": "slow=10"}
# The pictures need no network: whoever looks has a monospaced font.
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def runs(work: Path) -> Mapping[str, tuple[str, str]]:
    """By picture the command as a user types it, and what it printed here."""
    stored = f"--perf-baselines={work / 'baselines'}"
    _printed(f"{_LADDER} -k llama {stored} --update-baselines=new --perf-reason first")
    one = f"{_LADDER} -k 'llama and liger'"
    return {
        "run": (f"{_LADDER} -k llama", _printed(f"{_LADDER} -k llama {stored}")),
        "failure": (f"LLMPERF_INJECT=slow=10 {one}", _printed(f"{one} {stored}", _SLOWED)),
    }


def _printed(command: str, environment: Mapping[str, str] | None = None) -> str:
    words = [sys.executable, "-m", *shlex.split(command), "--color=yes", "-p", "no:randomly", "-p", "no:benchmark"]
    values = {**os.environ, "COLUMNS": str(_COLUMNS), **(environment or {})}
    return subprocess.run(words, env=values, capture_output=True, text=True, check=False).stdout


def picture(command: str, printed: str) -> str:
    """SVG of a terminal in which ``command`` printed this."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text(f"$ {command}", style="bold"))
    for line in printed.splitlines():
        console.print(Text.from_ansi(line), soft_wrap=True)
    return _FONTS.sub("", console.export_svg(title=""))
