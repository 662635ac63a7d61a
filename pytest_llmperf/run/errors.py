"""What ends a case or a run without a conclusion, as whoever asked has to be told: each is one line for people.

The plugin makes pytest's outcomes of them, the command line its exit codes.
"""

from __future__ import annotations


class UsageError(Exception):
    """What was asked for cannot be had here: an option, the hardware, the allocation."""


class CannotRunError(Exception):
    """This case cannot run here: hardware or a package that it needs is not there."""


class CaseFailedError(Exception):
    """The case fails, and its message is all there is to say."""


class DidNotTrainError(CaseFailedError):
    """The same where a launch ended without a record."""

    def __init__(self, message: str, *, may_train_again: bool = False) -> None:
        """``may_train_again``: something else may come of another run."""
        super().__init__(message)
        self.may_train_again = may_train_again


class RunEndedError(Exception):
    """The run ends before its end: what is known is written, and nothing more is launched."""

    def __init__(self, why: str, exit_code: int) -> None:
        super().__init__(why)
        self.exit_code = exit_code


__all__ = ["CannotRunError", "CaseFailedError", "DidNotTrainError", "RunEndedError", "UsageError"]
