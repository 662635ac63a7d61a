"""How a test of ours fails: with its message, and without a traceback of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmperf.report.text import leaving
from pytest_llmperf.settings.train_spec import SpecError


class DidNotTrain(pytest.fail.Exception):  # type: ignore[misc, name-defined]  # pytest hides its class
    """A launch ended without a record: ``xfail(raises=DidNotTrain, strict=True)`` waits for the day it trains.

    A case that trains, and is then judged to have failed, is not meant by that.
    """

    # The short summary begins with it, and has room for little: as pytest does with its own.
    __module__ = "builtins"


def failed(message: str) -> BaseException:
    """The outcome to raise; inside an ``except``, raise it ``from None``, or pytest shows both errors."""
    return pytest.fail.Exception(leaving(message), pytrace=False)


def did_not_train(message: str) -> BaseException:
    """The same where a launch failed."""
    return DidNotTrain(leaving(message), pytrace=False)


def cause(message: str, case: str) -> str:
    """What the short summary has room for, and JUnit's XML above the whole: a failure's first line.

    Without the case, which the test's own id tells.
    """
    kind, of_case, why = message.partition(f": {case}: ")
    return why.partition("\n")[0] if of_case and kind in {"Failed", DidNotTrain.__name__} else message


def refusal_line(excinfo: pytest.ExceptionInfo[BaseException] | None, source: Path) -> str | None:
    """How a refused spec is told: ``FILE:LINE: why``, where a SpecError went through ``source``, else ``None``.

    ``dataclasses.replace``, by which most specs are made, shows a page of its own source otherwise.
    """
    if excinfo is None or not isinstance(excinfo.value, SpecError):
        return None
    lines = [entry.lineno + 1 for entry in excinfo.traceback if Path(str(entry.path)) == source]
    where = f"{source.name}:{lines[-1]}" if lines else source.name
    return leaving(f"{where}: {excinfo.value}")
