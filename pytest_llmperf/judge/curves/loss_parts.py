"""Parts: the losses of a training as a few means, each over as many steps as all before it. Pure.

A single loss scatters with its batch. What is wrong with learning lasts or grows, so later parts may be longer; and
each part that is looked at takes from what the others can show, so there are four. The first step is left out: its loss
is that of the initial weights, which is held exactly elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

#: So that no part is empty.
FEWEST_STEPS = 16

_PARTS = 4


@dataclass(frozen=True)
class Span:
    """Steps, counted from 1."""

    first: int
    last: int


def spans(steps: int) -> tuple[Span, ...]:
    """Those of a training of so many steps: ``2 to 12, 13 to 25, 26 to 50, 51 to 100``.

    Raises:
        ValueError: there are fewer than ``FEWEST_STEPS``.
    """
    if steps < FEWEST_STEPS:
        raise ValueError(f"{steps} steps, expected {FEWEST_STEPS} or more")
    ends = [1, *(steps >> shift for shift in reversed(range(_PARTS)))]
    return tuple(Span(before + 1, end) for before, end in pairwise(ends))


def parts_of(losses: Sequence[float]) -> tuple[float, ...]:
    """The mean loss of each span, in nats a token.

    Raises:
        ValueError: there are fewer than ``FEWEST_STEPS``.
    """
    return tuple(fmean(losses[span.first - 1 : span.last]) for span in spans(len(losses)))
