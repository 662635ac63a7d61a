"""What the command tells in a line each, and ends with exit code 1."""

from __future__ import annotations


class CommandError(Exception):
    """Who, what, what was expected and what to do, a line each."""


class CaseError(CommandError):
    """No baselines, or no such case: one line with who, what was expected, the nearest known name and what to do."""


class NotStoredError(CaseError):
    """Nothing of that name is stored, or nothing at all: what its settings name can do without."""


class ClusterError(CommandError):
    """A cluster file that cannot serve: one line with the file, what is wrong and what was expected."""
