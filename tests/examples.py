"""How many random examples a property tries."""

from __future__ import annotations

from hypothesis import settings

#: Of most properties, where no profile is asked for.
USUAL = 100


def examples(number: int) -> settings:
    """More for a property with more to try, fewer where one takes long; in proportion where many are tried."""
    asked: int = settings().max_examples
    return settings(max_examples=min(number, asked) if asked < USUAL else number * asked // USUAL)
