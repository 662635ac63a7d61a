"""Files of records that can be made anew: what cannot be read is not there, what cannot be written costs time alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text

T = TypeVar("T")


def load(kind: type[T], path: Path) -> T | None:
    """What ``path`` holds; ``None`` where it is nothing that can be used."""
    try:
        return codec.read(kind, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def keep(path: Path, record: object, *, lasts: bool = False) -> str:
    """Write it; why it could not be, where it could not. ``lasts``: it is on the disk when this returns."""
    try:
        write_text(path, json.dumps(codec.plain(record), indent=1) + "\n", lasts=lasts)
    except OSError as error:
        return error.strerror or str(error)
    return ""
