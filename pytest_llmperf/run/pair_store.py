"""PairStore: pairs of launches that were compared, kept in the user's cache, so that a bisection goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.errors import CaseFailedError
from pytest_llmperf.support import codec
from pytest_llmperf.support.folders import cache_folder

# Of how they are made.
_PROCEDURE = 1

Pairs = tuple[tuple[Launch, Launch], ...]


@dataclass(frozen=True)
class KeptPairs:
    """Of one candidate."""

    candidate: str
    failure: str = ""
    """Why it did not train; empty where nothing is known of that."""
    pairs: Pairs = ()


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

    def known(self, name: str) -> KeptPairs:
        """What was kept of the candidate ``name`` and can be read."""
        return codec.load(KeptPairs, self._path(name)) or KeptPairs(name)

    def keep(self, name: str, pairs: Pairs, failure: str = "") -> None:
        """All that is known of it by now; a home that cannot be written costs the next bisection launches."""
        codec.keep(self._path(name), KeptPairs(name, failure, pairs))

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
