"""What cannot be had of a history, in one line for people."""

from __future__ import annotations


class HistoryError(Exception):
    """No candidates can be told from what was given."""


class NotMadeError(Exception):
    """This candidate has no interpreter: it could not be checked out, installed or asked."""


class NoRoomError(NotMadeError):
    """The same for a disk that is full: no other candidate would be made either."""
