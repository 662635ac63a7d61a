"""Notes of several cases in few lines: those that differ by a figure alone are one, with its range. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# What was measured stands alone, and has a unit or is a part of a count. Any other number is a name: a rank, a version.
_FIGURE = re.compile(r"(?<![\w.,/:-])[+-]?\d[\d,]*(?:\.\d+)?(?= %| of \d| (?:s|ms|MiB|GiB|tensors)\b)")

# A note that tells a range itself has no figure that another's could be put beside.
_RANGE = re.compile(r"\d(?: \S+)? to [+-]?\d")

_MOST_NAMED = 2


@dataclass(frozen=True)
class _Noted:
    """A note of one case."""

    id: str
    note: str

    @property
    def figures(self) -> list[str]:
        return _FIGURE.findall(self.note)

    @property
    def sizes(self) -> list[float]:
        return [abs(_number(figure)) for figure in self.figures]


def merged_notes(notes: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """A line for each of ``notes``, which are by case; one that several cases have once, with how many these are."""
    cases = list(notes)
    return _merged(cases, len(cases))


def merged_reasons(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """The same of why each of these cases was not run: one that several share once, with some of their names."""
    return _merged([(name, [without_name(name, why)]) for name, why in reasons], 0)


def without_name(name: str, why: str) -> str:
    """A reason says whose it is where it stands alone."""
    return why.removeprefix(f"{name}: ")


def _merged(cases: Iterable[tuple[str, Sequence[str]]], total: int) -> list[str]:
    alike: dict[str, list[_Noted]] = {}
    for name, told in cases:
        for note in dict.fromkeys(told):
            words = note if _RANGE.search(note) else _FIGURE.sub("\0", note)
            alike.setdefault(words, []).append(_Noted(name, note))
    return [_line(group, total) for group in alike.values()]


def of_cases(ids: Sequence[str], total: int) -> str:
    """``a, b and 3 more``; that it is all of them where it is."""
    if len(ids) == total > 1:
        return f"all {total} cases"
    return ", ".join(ids[:_MOST_NAMED]) + (f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else "")


def _line(group: Sequence[_Noted], total: int) -> str:
    note = _with_ranges(group)
    if note == group[0].note:
        ids = list(dict.fromkeys(each.id for each in group))
        return f"{ids[0]}: {note}" if len(ids) == 1 else f"{len(ids)} cases: {note} ({of_cases(ids, total)})"
    # Whoever looks at one of them looks at the one that has most of it.
    ids = list(dict.fromkeys(each.id for each in sorted(group, key=lambda each: each.sizes, reverse=True)))
    if len(ids) == 1:
        return f"{ids[0]}: {note}"
    return f"{len(ids)} cases: {note} (most: {', '.join(ids[:_MOST_NAMED])})"


def _with_ranges(group: Sequence[_Noted]) -> str:
    ranges = iter([_range(figures) for figures in zip(*(each.figures for each in group), strict=True)])
    return _FIGURE.sub(lambda _: next(ranges), group[0].note)


def _range(figures: Sequence[str]) -> str:
    low, high = min(figures, key=_number), max(figures, key=_number)
    return low if _number(low) == _number(high) else f"{low} to {high}"


def _number(figure: str) -> float:
    return float(figure.replace(",", ""))
