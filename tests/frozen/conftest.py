"""Shared by the frozen tests."""

import pytest

from tests.plugin.conftest import project

__all__ = ["project"]


@pytest.fixture(autouse=True)
def _one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
