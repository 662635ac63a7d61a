"""Nearest: which of the names that are known was meant by one that is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# Likenesses, from 0 to 1: below the first, names have little in common; from the second on, what differs is a slip of
# the fingers.
_ALIKE, _SLIP = 0.5, 0.8
# What begins alike was meant before what only shares letters: 'adamww' is an Adam.
_STEM = 3


def nearest(name: str, known: Iterable[str], at_least: float = _ALIKE) -> str | None:
    """The one of ``known`` that ``name``, in whatever case, is most like; ``None`` where all are less alike."""
    name, names = name.lower(), {each.lower(): each for each in known}
    matches = difflib.get_close_matches(name, names, n=max(1, len(names)), cutoff=at_least)
    if not matches:
        return None
    best = matches[0]
    if difflib.SequenceMatcher(None, best, name).ratio() < _SLIP:
        akin = max((each for each in names if each in matches), key=lambda each: _shared_start(name, each))
        best = akin if _shared_start(name, akin) >= _STEM else best
    return names[best]


def hint(name: str, known: Iterable[str]) -> str:
    """``, did you mean 'liger'?``, to go behind the name; empty where nobody can tell."""
    found = nearest(name, known)
    return f", did you mean {found!r}?" if found else ""


def first_few(names: Sequence[str], most: int = 8) -> str:
    """As many as a line bears."""
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")


def _shared_start(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
