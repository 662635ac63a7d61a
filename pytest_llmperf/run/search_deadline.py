"""The deadline of a search: how long a search may take, and what is said meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from pytest_llmperf.records.batch_size_search import Search

_REMIND_SECONDS = 60.0


class SearchDeadline:
    """Of one search for the largest micro-batch: a tiny model in much memory has thousands of sequences to train.

    ``spent`` counts the seconds in which something ran, without the wait for hardware.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        say: Callable[[str], None],
        spent: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self.seconds, self._say, self._spent, self._clock = name, seconds, say, spent, clock
        self._start, self._said = spent(), clock()

    @property
    def is_over(self) -> bool:
        """Whether nothing more should be started."""
        return self._spent() - self._start >= self.seconds

    def told(self, search: Search) -> None:
        """Say once a minute how far ``search`` is."""
        now = self._clock()
        if now - self._said >= _REMIND_SECONDS:
            self._said = now
            limit = f"at most {self.seconds:.0f} s of launches (--perf-timeout)"
            self._say(f"{self._name}: {bounds(search.fits, search.fails)} so far; {limit}")


def bounds(fits: int, fails: int | None) -> str:
    """``12 sequences fit, 16 do not``."""
    return f"{fits} sequences fit, " + ("more were not tried" if fails is None else f"{fails} do not")
