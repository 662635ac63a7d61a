"""Offer: what a launch's agents are told of the servers of their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Offer:
    """From what the nodes of a launch may fork their parts of it."""

    name: str
    """By which they find their servers."""
    needs: tuple[str, ...]
    """See ``LaunchOrder``."""
    is_required: bool
    """Whether a node that has to begin cold must not begin."""

    def words(self) -> list[str]:
        """For a command line."""
        return ["warm" if self.is_required else "auto", self.name, *self.needs]

    @classmethod
    def of(cls, words: Sequence[str]) -> Offer | None:
        """What ``words`` were made from; of none there is none."""
        if not words:
            return None
        start, name, *needs = words
        return cls(name=name, needs=tuple(needs), is_required=start == "warm")
