"""What a command answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Lines to print."""

    lines: Iterable[str]
    troubles: Sequence[str] = ()
    """For standard error, a line each; one is enough for exit code 1. Lines that take their time may add to it."""
    for_programs: bool = False
    """Whether its lines are a format that no terminal's width may break."""
    acts: bool = False
    """Whether its lines tell of what is done meanwhile: that goes on to its end, read or not."""


# What the command tells in a line each, and ends with exit code 1.


class CommandError(Exception):
    """Who, what, what was expected and what to do, a line each."""


class CaseError(CommandError):
    """No baselines, or no such case: one line with who, what was expected, the nearest known name and what to do."""


class NotStoredError(CaseError):
    """Nothing of that name is stored, or nothing at all: what its settings name can do without."""


class ClusterError(CommandError):
    """A cluster file that cannot serve: one line with the file, what is wrong and what was expected."""
