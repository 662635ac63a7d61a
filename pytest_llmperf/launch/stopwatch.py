"""Meter: for how long a launch waited for its hardware, and for how long it held it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Lap:
    """One attempt at a launch."""

    began: float
    """In seconds since 1970, as other hosts tell their times."""
    seconds: float = 0.0
    """From its start to its end; 0 while it runs."""


class Meter:
    """Counts the seconds between the start and the end of what runs under it, failed attempts too."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waited_seconds = 0.0
        """Before, until there was hardware for it."""

    @contextmanager
    def running(self) -> Iterator[Lap]:
        """Count for as long as this lasts, however it ends."""
        lap, start = Lap(time.time()), time.monotonic()
        try:
            yield lap
        finally:
            lap.seconds = time.monotonic() - start
            self.seconds += lap.seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count for as long as this lasts as the wait for hardware, however it ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.waited_seconds += time.monotonic() - start
