"""How many random examples a property tries."""

from __future__ import annotations

from hypothesis import settings

#: Of most properties, where no profile is asked for.
USUAL = 100


def examples(number: int) -> settings:
    """More of a property with more to try, fewer of one whose examples take long; few where all are to be few."""
    asked: int = settings().max_examples
    return settings(max_examples=number if asked == USUAL else min(number, asked))
