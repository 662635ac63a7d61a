"""What commands print today, beside what a page says that they print."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from pytest_llmperf.cli import main
from tools.documentation.blocks import REPOSITORY, Block, steps

#: In what a page shows: on a line of its own any lines, or none; at a line's end the rest of that line.
ELLIPSIS = "…"


def folder_for_commands(folder: Path) -> Path:
    """Where a page's commands run: what is stored and the suite are there, and nothing that they write is kept."""
    for name in ("baselines", "perf_tests", "docs/data"):
        shutil.copytree(REPOSITORY / name, folder / name)
    return folder


def printed_by(command: str, folder: Path, columns: int = 400) -> str:
    """What ``llmperf`` prints in ``folder``, as a wide terminal shows it; its standard output may go to a file there.

    Raises:
        ValueError: it is another program's command, and not sed's, by which an example is filled in.
    """
    words = shlex.split(command, comments=True)
    if words[:2] == ["sed", "-i"]:
        subprocess.run(words, cwd=folder, check=True)
        return ""
    if not words or words[0] != "llmperf":
        raise ValueError(f"{command}: from: run is for commands of llmperf, which need no torch")
    target = words[words.index(">") + 1] if ">" in words else ""
    words = words[1 : words.index(">")] if target else words[1:]
    printed = io.StringIO()
    before, environment = Path.cwd(), os.environ.get("COLUMNS")
    os.chdir(folder)
    os.environ["COLUMNS"] = str(columns)
    try:
        with contextlib.redirect_stdout(printed):
            main(words)
    finally:
        os.chdir(before)
        os.environ.pop("COLUMNS") if environment is None else os.environ.update(COLUMNS=environment)
    if target:
        (folder / target).write_text(printed.getvalue(), encoding="utf-8")
        return ""
    return "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())


def differences(shown: str, printed: str, alike: Callable[[str], str] = str.rstrip) -> str:
    """The first line of ``shown`` that ``printed`` has not in its place, both as ``alike`` makes them; empty: none."""
    lines = [alike(line) for line in printed.splitlines()]
    at, free = 0, False
    for is_gap, group in groupby(shown.splitlines(), key=lambda line: line.strip() == ELLIPSIS):
        if is_gap:
            free = True
            continue
        wanted = list(group)
        at = _place([alike(line) for line in wanted], lines, at, free=free)
        if at < 0:
            return "\n".join(wanted)
        free = False
    return "" if free or at == len(lines) else lines[at]


def _place(wanted: Sequence[str], lines: Sequence[str], at: int, *, free: bool) -> int:
    """The line after ``wanted`` in ``lines``, from ``at`` on or, if ``free``, later; -1: they are not there."""
    for begin in range(at, len(lines) + 1 if free else at + 1):
        there = lines[begin : begin + len(wanted)]
        if len(there) == len(wanted) and all(map(_is, there, wanted)):
            return begin + len(wanted)
    return -1


def _is(line: str, wanted: str) -> bool:
    return line.startswith(wanted[:-1]) if wanted.endswith(ELLIPSIS) else line == wanted


def without_figures(line: str) -> str:
    """A line's words alone: numbers, digests and dates differ from run to run, and so does a table's width."""
    line = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12}\b", "#", line)
    line = re.sub(r"[+-]?\d[\d,.]*(?:-\d\d-\d\d)?", "#", line)
    line = re.sub(r"# to #", "#", line)
    return re.sub(r"\s+", " ", line).strip()


def refreshed(block: Block, folder: Path) -> str:
    """The block's text with what its commands print now; what it leaves out by an ellipsis stays left out."""
    text = []
    for command, shown in steps(block):
        printed = printed_by(command, folder)
        text.append(f"$ {command}")
        if shown and ELLIPSIS in shown.splitlines():
            text.append(shown)
        elif printed:
            text.append(printed)
    return "\n".join(text) + "\n"
