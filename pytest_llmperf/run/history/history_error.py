"""HistoryError: a source of history that cannot serve."""

from __future__ import annotations


class HistoryError(Exception):
    """One line with the file, what is wrong and what to do."""
