"""A split of a text, and the slice of it that is read, in the words of ``datasets``: ``train[:10%]``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORDS = re.compile(r"(?P<name>\w+)(?:\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?", re.ASCII)

_EXPECTED = "expected a split, or a slice of one as datasets has them: train, train[:10%], train[100:200], test[-5%:]"
_WHOLE = 100


@dataclass(frozen=True)
class Split:
    """Which rows of which files."""

    name: str
    """``train``, ``validation``, ``test`` or another."""
    words: str
    """All of it, as ``datasets`` reads it."""

    @classmethod
    def parse(cls, words: str) -> Split:
        """What ``words`` say.

        Raises:
            ValueError: they are no split, or of a slice that is empty whatever the text holds; in one line.
        """
        found = _WORDS.fullmatch(words)
        if found is None:
            raise ValueError(f"split={words!r} is none; {_EXPECTED}")
        bounds = [bound for bound in (found["first"], found["last"]) if bound is not None]
        for bound in bounds:
            if bound.endswith("%") and abs(int(bound[:-1])) > _WHOLE:
                raise ValueError(f"split={words!r} goes beyond 100 %; {_EXPECTED}")
        if _is_empty(found["first"] or "0", found["last"]):
            raise ValueError(f"split={words!r} is empty; {_EXPECTED}")
        return cls(found["name"], words)

    @property
    def slug(self) -> str:
        """For an id, where neither brackets nor a percent sign can be selected by ``-k``: ``train-to10pct``."""
        text = self.words.replace("-", "minus").replace("%", "pct").replace(":", "to")
        return text.replace("[", "-").replace("]", "")


def _is_empty(first: str, last: str | None) -> bool:
    """As far as that can be told without the number of rows: bounds that count from one end, in one unit."""
    if last is None:
        return False
    if int(last.rstrip("%")) == 0:
        return True
    like = first.endswith("%") == last.endswith("%") or first == "0"
    a, b = (int(bound.rstrip("%")) for bound in (first, last))
    return like and (a < 0) == (b < 0) and a >= b
