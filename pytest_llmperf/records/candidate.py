"""Candidate: a revision, or a version, with which a training can be launched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One of a history; its good end has no parents there."""

    name: str
    """What names it alone: a commit's full hash, or a version."""
    parents: tuple[str, ...] = ()
    """Names of those that it follows; some may be before the history's beginning."""
    subject: str = ""
    """Of the commit; empty of a version."""
    author: str = ""
    date: str = ""
    is_commit: bool = False

    @property
    def shown(self) -> str:
        """As people call it."""
        return self.name[:12] if self.is_commit else self.name

    @property
    def told(self) -> str:
        """The same with what a reader recognises it by."""
        who = ", ".join(filter(None, [self.author, self.date]))
        return " ".join(filter(None, [self.shown, self.subject, f"({who})" if who else ""]))
