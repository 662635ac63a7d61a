"""How a refused spec is told: the caller's line and the reason, without the frames between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmperf.spec.train_spec import SpecError


def line_of(excinfo: pytest.ExceptionInfo[BaseException] | None, source: Path) -> str | None:
    """``FILE:LINE: why``, where a SpecError went through ``source``; ``None`` for every other outcome.

    ``dataclasses.replace``, by which most specs are made, shows a page of its own source otherwise.
    """
    if excinfo is None or not isinstance(excinfo.value, SpecError):
        return None
    lines = [entry.lineno + 1 for entry in excinfo.traceback if Path(str(entry.path)) == source]
    where = f"{source.name}:{lines[-1]}" if lines else source.name
    return f"{where}: {excinfo.value}"
