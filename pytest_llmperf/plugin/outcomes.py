"""How a test of ours fails: with its message, and without a traceback of ours."""

from __future__ import annotations

import pytest


class DidNotTrain(pytest.fail.Exception):  # type: ignore[misc, name-defined]  # pytest hides its class
    """A launch ended without a record: ``xfail(raises=DidNotTrain, strict=True)`` waits for the day it trains.

    A case that trains, and is then judged to have failed, is not meant by that.
    """

    # The short summary begins with it, and has room for little: as pytest does with its own.
    __module__ = "builtins"


def failed(message: str) -> BaseException:
    """The outcome to raise; inside an ``except``, raise it ``from None``, or pytest shows both errors."""
    return pytest.fail.Exception(message, pytrace=False)


def did_not_train(message: str) -> BaseException:
    """The same where a launch failed."""
    return DidNotTrain(message, pytrace=False)


def cause(message: str, case: str) -> str:
    """What the short summary has room for, of a failure's first line: not the case, which the test's own id tells."""
    kind, of_case, why = message.partition(f": {case}: ")
    return why if of_case and kind in {"Failed", DidNotTrain.__name__} else message
