"""The package that reads texts, for launches that are faked and read none."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def offer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one in ``folder``, where none is installed; whoever runs there, or in this process, finds it."""
    if find_spec("pyarrow") is None:
        (folder / "pyarrow.py").touch()
        monkeypatch.syspath_prepend(folder)
