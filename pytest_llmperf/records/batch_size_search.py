"""Capacity: the largest micro-batch that trains, and which one to try next. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

# No card of today holds a batch near this; a search that passes it has been told of no limit.
LARGEST = 2**20

# Beyond a guess that was too small by more than one the first step is this part of it, and each further one four times
# the last: what a guess is off by grows with it, and a launch for every few sequences is too dear.
_STRIDE, _GROWTH = 64, 4

# Peaks that tell where to look have told it by then; those that mislead may cost no more than every other try.
_TRUSTED = 3


@dataclass
class Search:
    """Finds the largest size that fits, to the unit.

    It begins at ``guess``, asks for one more, since a good guess is the answer, and strides away from it until one size
    fits and a larger one does not. Then it closes in between: in the middle, or, once peaks are known, where a straight
    line through them meets ``limit_bytes``, since what a step keeps grows evenly with its batch.
    """

    guess: int = 1
    limit_bytes: int = 0
    peaks: dict[int, int] = field(default_factory=dict)
    """Peak bytes of each size that fitted."""
    too_large: set[int] = field(default_factory=set)
    closing: int = 0
    """Sizes that were tried between one that fits and one that does not."""

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
        self.closing += bool(self.peaks and self.too_large)
        if peak_bytes is None:
            self.too_large.add(size)
            self.peaks = {known: peak for known, peak in self.peaks.items() if known < size}
        else:
            self.peaks[size] = peak_bytes
            self.too_large = {known for known in self.too_large if known > size}

    def next(self) -> int | None:
        """The size to try; ``None`` where the answer is known."""
        if self.found or self.fits >= LARGEST:
            return None
        if not self.peaks:
            if self.fails is None:
                return self.guess
            # The size after the smallest that does not fit says no more than it.
            is_first = len(self.too_large - {self.fails + 1}) == 1
            return max(1, self.fails - 1 - self.fails // _STRIDE if is_first else self.fails // 2)
        high = self.fails
        return self._beyond(self.fits) if high is None else self._between(self.fits, high)

    def _beyond(self, low: int) -> int:
        """Where nothing was too large yet."""
        below, expected = max((size for size in self.peaks if size < low), default=low), self._expected()
        if low in {self.guess, below}:
            further = low + 1
        elif expected is not None and expected >= low:
            # A line is not believed further than twice as far; and lines that each let one more in, not for long.
            further = max(min(expected + 1, 2 * low), low + 2 ** (len(self.peaks) - 1) // 2**_TRUSTED)
        elif expected is not None:
            # The line ends below: it is off by little, and what is beyond it is looked for in small steps first.
            further = low + 2 ** (len(self.peaks) - 1)
        else:
            further = low + max(_GROWTH * (low - below), low // _STRIDE)
        return min(max(further, low + 1), LARGEST)

    def _between(self, low: int, high: int) -> int:
        """Where the answer lies: ``low`` fits, ``high`` does not."""
        middle, expected = (low + high) // 2, self._expected()
        if expected is None or (self.closing >= _TRUSTED and self.closing % 2):
            return middle
        if low < expected < high:
            return expected
        # Where the line ends at what fits, one more is what is left to ask; where beyond what does not, it is off.
        return low + 1 if expected <= low else middle

    def _expected(self) -> int | None:
        """The largest size that a line through the two largest that fitted lets in; of one alone, through nothing."""
        if not self.limit_bytes:
            return None
        b, a = [*sorted(self.peaks, reverse=True), 0][:2]
        slope = (self.peaks[b] - self.peaks.get(a, 0)) / (b - a)
        return b + int((self.limit_bytes - self.peaks[b]) // slope) if slope > 0 else None
