"""How a test of ours fails: with its message, and without a traceback of ours."""

from __future__ import annotations

import pytest


class DidNotTrain(pytest.fail.Exception):  # type: ignore[misc, name-defined]  # pytest hides its class
    """A launch ended without a record: ``xfail(raises=DidNotTrain, strict=True)`` waits for the day it trains.

    A case that trains, and is then judged to have failed, is not meant by that.
    """


def failed(message: str) -> BaseException:
    """The outcome to raise; inside an ``except``, raise it ``from None``, or pytest shows both errors."""
    return pytest.fail.Exception(message, pytrace=False)


def did_not_train(message: str) -> BaseException:
    """The same where a launch failed."""
    return DidNotTrain(message, pytrace=False)
