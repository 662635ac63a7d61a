"""Fingerprints: what files say, whatever they are called and wherever they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

_DIGITS = 16
_PIECE = 2**20


def of_files(files: Iterable[tuple[str, Path]]) -> str:
    """Of the contents of ``files`` in their order, each under the name that matters of it; 16 hex digits.

    Raises:
        OSError: one cannot be read.
    """
    whole = hashlib.sha256()
    for name, path in files:
        state = path.stat()
        whole.update(f"{name}\0{_of_file(path.absolute(), state.st_size, state.st_mtime_ns)}\0".encode())
    return whole.hexdigest()[:_DIGITS]


@lru_cache(maxsize=256)
def _of_file(path: Path, _size: int, _mtime_ns: int) -> str:
    """Read once; a file that was changed, or another one of its name, is read anew."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()
