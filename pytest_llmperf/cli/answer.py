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
