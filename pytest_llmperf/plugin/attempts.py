"""Attempts: a test that another plugin runs again (pytest-rerunfailures) counts once, as its last attempt ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

# What such a plugin makes of the outcome of an attempt that another one follows.
_RERUN = "rerun"
_TOLD = ("results", "planned", "skipped")


class Attempts:
    """Those before the last, of this run's tests."""

    def __init__(self) -> None:
        self._before: dict[str, list[str]] = {}

    def last_of(self, report: pytest.TestReport, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What counts of what a report brought: of an attempt before the last, what it cost.

        The last one's results say what came before: whatever it found, it is not all that was found.
        """
        if report.outcome == _RERUN:
            verdicts = [f"{result['id']} was {result['verdict']}" for result in values["results"]]
            self._before.setdefault(report.nodeid, []).extend(verdicts)
            return {**values, **dict.fromkeys(_TOLD, ()), "said": ""}
        before = self._before.get(report.nodeid)
        if not before:
            return values
        note = f"the test was run again: {', '.join(before)} before"
        return {**values, "results": [{**result, "notes": (*result["notes"], note)} for result in values["results"]]}
