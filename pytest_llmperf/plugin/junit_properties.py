"""What a test found, as properties of its report: pytest's ``--junit-xml`` writes them, and other reporters may."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.consumers.documents import PREFIX, properties
from pytest_llmperf.report.consumers.exported_run import ExportedCase


def add(item: pytest.Item, report: pytest.TestReport, results: Iterable[CaseResult]) -> None:
    """To this report of ``item`` and those that follow, of which JUnit's reporter takes the last one's."""
    for result in results:
        item.user_properties += properties(ExportedCase.of(result))
    report.user_properties = list(item.user_properties)


def forget(item: pytest.Item) -> None:
    """What an attempt before this one found."""
    item.user_properties[:] = [each for each in item.user_properties if not each[0].startswith(PREFIX)]
