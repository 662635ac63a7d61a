"""How a test of ours fails: with its message, and without a traceback of ours."""

from __future__ import annotations

import pytest


def failed(message: str) -> BaseException:
    """The outcome to raise; inside an ``except``, raise it ``from None``, or pytest shows both errors."""
    return pytest.fail.Exception(message, pytrace=False)
