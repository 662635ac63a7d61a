"""What a terminal shows in the end of a run with a live line, by pyte's terminal."""

from __future__ import annotations

import os
import pty
import sys
from typing import Any

import pytest

from tests.plugin.conftest import Project

COLUMNS, ROWS = 90, 60


@pytest.fixture(autouse=True)
def _size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)


def shown(project: Project, *options: str) -> list[str]:
    """The lines of the screen once pytest has ended."""
    pyte: Any = pytest.importorskip("pyte")
    reads, writes = pty.openpty()
    words = [sys.executable, "-mpytest", "-p", "no:randomly", "--gpus", "0", "--no-header", *options]
    with os.fdopen(writes, "w", encoding="utf-8") as terminal:
        running = project.pytester.popen(words, stdout=terminal, stderr=terminal)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    try:
        while part := os.read(reads, 2**16):
            assert isinstance(part, bytes)
            stream.feed(part)
    except OSError:  # its other end was closed
        pass
    os.close(reads)
    running.wait()
    return [line.rstrip() for line in screen.display]


def test_letters_of_cases_stand_on_their_files_line(project: Project) -> None:
    project.record()
    lines = shown(project)
    (line,) = [line for line in lines if line.startswith("test_mine.py")]
    assert line.split() == ["test_mine.py", "..", "[100%]"]
    assert len(line) <= COLUMNS
    assert not [line for line in lines if "launch 1/" in line]


def test_verbose_words_stand_behind_their_test(project: Project) -> None:
    project.record()
    lines = [line.split() for line in shown(project, "-v") if line.startswith("test_mine.py")]
    assert lines == [
        ["test_mine.py::test_attention[eager]", "PASSED", "[", "50%]"],
        ["test_mine.py::test_attention[sdpa]", "PASSED", "[100%]"],
    ]


def test_what_is_said_meanwhile_has_a_line_of_its_own(project: Project) -> None:
    project.record()
    project.pytester.makepyfile(
        test_mine="""
        def test_one(perf, train_spec):
            perf._cases._caller.observer.say("waiting for the CPU")
            perf.check(train_spec)
        """
    )
    lines = shown(project, "--update-baselines=new")
    at = lines.index("llmperf: waiting for the CPU")
    assert lines[at - 1] == "test_mine.py"
    assert lines[at + 1].split() == [".", "[100%]"]


def test_no_line_of_the_summary_is_wider_than_the_terminal(project: Project) -> None:
    """It would be broken within a word."""
    project.record()
    words = [line.split() for line in shown(project, "-k", "eager")]
    told = " ".join(word for line in words for word in line)
    assert "(a case fails only when it is at least 4 times slower). Counts and losses" in told
