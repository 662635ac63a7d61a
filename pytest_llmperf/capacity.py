"""Capacity: the largest micro-batch that trains, and which one to try next. Pure; worker and plugin search by it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

# No card of today holds a batch near this; a search that passes it has been told of no limit.
LARGEST = 2**20


@dataclass
class Search:
    """Finds the largest size that fits, to the unit.

    It begins at ``guess``, gallops away from it until one size fits and a larger one does not, and closes in between:
    in the middle, or, once the peaks of two sizes are known, where a straight line through them meets ``limit_bytes``,
    since what a step keeps grows evenly with its batch.
    """

    guess: int = 1
    limit_bytes: int = 0
    peaks: dict[int, int] = field(default_factory=dict)
    """Peak bytes of each size that fitted."""
    too_large: set[int] = field(default_factory=set)

    def to_dict(self) -> dict[str, Any]:
        """Where it begins; what it found is told size by size."""
        return {"guess": self.guess, "limit_bytes": self.limit_bytes}

    @property
    def fits(self) -> int:
        """The largest size seen to fit; 0 where none was."""
        return max(self.peaks, default=0)

    @property
    def fails(self) -> int | None:
        """The smallest size seen not to fit."""
        return min(self.too_large, default=None)

    @property
    def found(self) -> bool:
        """Whether the size after the largest that fits is known not to."""
        return self.fails is not None and self.fails <= self.fits + 1

    def note(self, size: int, peak_bytes: int | None) -> None:
        """That ``size`` fitted with this peak, or did not (``None``). What contradicts it is forgotten."""
        if peak_bytes is None:
            self.too_large.add(size)
            self.peaks = {known: peak for known, peak in self.peaks.items() if known < size}
        else:
            self.peaks[size] = peak_bytes
            self.too_large = {known for known in self.too_large if known > size}

    def keep(self, sizes: Collection[int]) -> None:
        """Forget what was found of any other size: where one was told wrong, so may its neighbours be."""
        self.peaks = {size: peak for size, peak in self.peaks.items() if size in sizes}
        self.too_large = {size for size in self.too_large if size in sizes}

    def next(self) -> int | None:
        """The size to try; ``None`` where the answer is known."""
        if self.found or self.fits >= LARGEST:
            return None
        low, high, expected = self.fits, self.fails, self._expected()
        if high is None:
            # One more is what a good guess needs; then the line tells, which is not believed further than twice as far.
            further = low + 2 ** (len(self.peaks) - 1) if self.peaks else self.guess
            beyond = min(expected + 1, 2 * low) if expected is not None and expected >= low else further
            return max(1, min(beyond, LARGEST))
        if not self.peaks:
            return max(1, high - 1 - high // 64 if len(self.too_large) == 1 else high // 2)
        middle = (low + high) // 2
        if expected is None or low < expected < high:
            return expected or middle
        # The line is off: its end is near if it is off by little, and that is asked once.
        if expected >= high:
            return high - 1 if high + 1 not in self.too_large else middle
        return low + 1 if low - 1 not in self.peaks else middle

    def _expected(self) -> int | None:
        """The largest size that a line through the two largest that fitted lets in."""
        if len(self.peaks) < 2 or not self.limit_bytes:  # noqa: PLR2004 - a line needs two
            return None
        a, b = sorted(self.peaks)[-2:]
        slope = (self.peaks[b] - self.peaks[a]) / (b - a)
        return b + int((self.limit_bytes - self.peaks[b]) // slope) if slope > 0 else None
