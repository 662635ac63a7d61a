"""ReplayedUpdate: an inspected update beside what its optimizer makes, by formula, of what was asked for; its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.support.codec import sparse

#: Why a record of before such replays has none.
OLDER = "recorded before updates were replayed"


@sparse()
@dataclass(frozen=True, kw_only=True)
class ReplayedUpdate:
    """Of a sample of each tensor, on one rank or the worst of all."""

    tensors: int = 0
    """Of which it was made."""
    asked: str = ""
    """The optimizer and its settings, as the arguments have them."""
    roundings: float = 0.0
    """The largest difference, in what rounding once does to that element."""
    tensor: str = ""
    """Where that is."""
    figure: str = ""
    """Of what: the ``weight``, or one of the optimizer's averages."""
    found: float = 0.0
    """By how much the step changed that element of it."""
    expected: float = 0.0
    """By how much the formula does."""
    miscounted: tuple[str, ...] = ()
    """Names of tensors of which the optimizer has counted another number of steps than the Trainer."""
    counts: tuple[int, int] = (0, 0)
    """The least and the most of the optimizer's counts."""
    none: str = ""
    """Why none was made, if none was."""

    def __bool__(self) -> bool:
        return not self.none


def worst(replays: Sequence[ReplayedUpdate]) -> ReplayedUpdate:
    """Of all ranks; none where any rank has none."""
    for each in replays:
        if each.none:
            return each
    found = max(replays, key=lambda each: each.roundings)
    made = [each for each in replays if each.tensors]  # a shard may be empty
    counts = [count for each in made for count in each.counts] or [0]
    return ReplayedUpdate(
        tensors=max(each.tensors for each in replays),
        asked=found.asked,
        roundings=found.roundings,
        tensor=found.tensor,
        figure=found.figure,
        found=found.found,
        expected=found.expected,
        miscounted=tuple(dict.fromkeys(name for each in replays for name in each.miscounted)),
        counts=(min(counts), max(counts)),
    )
