"""How many random examples a property tries."""

from __future__ import annotations

from hypothesis import settings

#: Of most properties, where no profile is asked for.
USUAL = 100


def examples(number: int) -> settings:
    """More of a property with more to try, fewer of one whose examples take long; in proportion where many are asked."""
    asked: int = settings().max_examples
    return settings(max_examples=min(number, asked) if asked < USUAL else number * asked // USUAL)
