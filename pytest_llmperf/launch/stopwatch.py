"""Meter: for how long a launch held its hardware, without the wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Meter:
    """Counts the seconds between the start and the end of what runs under it, failed attempts too."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count for as long as this lasts, however it ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - start
