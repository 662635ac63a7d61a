"""The tokens of a text, kept in the user's cache: what two launches share is made once."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from pytest_llmperf.support.cache_folder import cache_folder
from pytest_llmperf.support.files import replacing


@dataclass(frozen=True)
class Tokens:
    """Those of all documents, one after the other."""

    ids: np.ndarray
    lengths: np.ndarray
    """Of each document; none of an empty one that nothing stands for."""

    @property
    def num_documents(self) -> int:
        return len(self.lengths)


def path_of(facts: dict[str, Any]) -> Path:
    """Of the file that keeps the tokens that ``facts`` are all about, under today's versions."""
    by = {name: _version(name) for name in ("datasets", "tokenizers", "transformers")}
    key = hashlib.sha256(json.dumps({**facts, **by}, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("tokens") / f"{key}.npz"


def kept(path: Path) -> Tokens | None:
    """What ``path`` holds; ``None`` where it is not there, or none of ours: it can be made anew."""
    try:
        with np.load(path) as arrays:
            found = Tokens(arrays["ids"], arrays["lengths"])
    except (OSError, ValueError, LookupError, EOFError, BadZipFile):
        return None
    return found if len(found.ids) == int(found.lengths.sum()) else None


def keep(path: Path, tokens: Tokens) -> None:
    """Leave ``tokens`` whole or not at all; a cache that cannot be written costs the next launch their making."""
    with suppress(OSError), replacing(path, lasts=False) as file:
        np.savez(file, ids=tokens.ids, lengths=tokens.lengths)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
