"""PairStore: pairs of launches that were compared, kept in the user's cache, so that a bisection goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.errors import CaseFailedError
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.folders import cache_folder

# Of how they are made.
_PROCEDURE = 1

Pairs = tuple[tuple[Launch, Launch], ...]


class PairStore:
    """Of one case, one history and one good end on one machine: a file for each candidate beside it."""

    def __init__(self, key: Sequence[Any]) -> None:
        digest = hashlib.sha256(json.dumps([_PROCEDURE, *key], sort_keys=True).encode()).hexdigest()[:16]
        self._folder = cache_folder("bisections") / digest
        self._lock: FileLock | None = None
        self.unkept = ""
        """Why what is measured cannot be kept; empty where it can."""

    def take(self) -> None:
        """Alone, until this process ends.

        Raises:
            CaseFailedError: another process has it.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._folder / "lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise CaseFailedError(
                "the same bisection runs already, in another process: wait for it, or end it"
            ) from None
        except OSError as error:
            self.unkept = error.strerror or str(error)
            return
        self._lock = lock

    def release(self) -> None:
        """Others may have it."""
        if self._lock is not None:
            self._lock.release()

    def pairs(self, name: str) -> Pairs:
        """Those of the candidate ``name`` that were kept and can be read."""
        try:
            document = json.loads(self._path(name).read_text(encoding="utf-8"))
            return tuple((Launch.from_dict(a), Launch.from_dict(b)) for a, b in document["pairs"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # they can be made anew
            return ()

    def failure(self, name: str) -> str:
        """Why the candidate ``name`` did not train; empty where nothing is known of that."""
        try:
            return str(json.loads(self._path(name).read_text(encoding="utf-8"))["failure"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return ""

    def keep(self, name: str, pairs: Pairs, failure: str = "") -> None:
        """All that is known of it by now; a home that cannot be written costs the next bisection launches."""
        document = {"candidate": name, "failure": failure, "pairs": [[a.to_dict(), b.to_dict()] for a, b in pairs]}
        with suppress(OSError):
            write_text(self._path(name), json.dumps(document) + "\n", lasts=False)

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
