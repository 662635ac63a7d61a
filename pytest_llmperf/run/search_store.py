"""What searches have launched, trials and pairs, kept in the user's cache, so that one that was ended goes on. A home
that cannot be written costs the next search launches, and no more."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pytest_llmperf.launch.device import PREFIXES, driver_version
from pytest_llmperf.launch.request import lasting_environment
from pytest_llmperf.run.findings import CaseFailedError
from pytest_llmperf.run.paired_comparison import Pairs
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import cache_folder, hashed
from pytest_llmperf.support.redaction import redacted

# Of how launches are made: what was made otherwise is none of today's.
_PROCEDURE = 1

_PACKAGES = "torch transformers accelerate triton liger-kernel flash-attn torchao bitsandbytes".split()

# What changes the speed of a training, of all that a shell may set.
_PREFIXES = (*PREFIXES, "OMP_", "MKL_", "PYTORCH_", "TORCH", "TRITON_", "LIGER_", "LLMPERF_INJECT")


def surroundings() -> list[Any]:
    """Return, for a key, what else a training's speed depends on: what is installed, and what the shell sets."""
    around = {
        name: value
        for name, value in lasting_environment(os.environ, {}).items()
        if name.startswith(_PREFIXES) and not name.endswith(("_DIR", "_HOME"))
    }
    versions = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return [versions, sorted(redacted(around).items())]


def driven(gpus: Sequence[str]) -> list[Any]:
    """Return, for a key, ``gpus`` and their driver."""
    return [gpus, driver_version() if gpus else ""]


def search_folder(name: str, key: Sequence[Any]) -> Path:
    """Below ``name`` in the cache, for what was found under ``key``."""
    return cache_folder(name) / hashed(json.dumps([_PROCEDURE, *key], sort_keys=True))


@dataclass(frozen=True)
class KeptPairs:
    candidate: str
    failure: str = ""
    """Why it did not train; empty where nothing is known of that."""
    pairs: Pairs = ()


class PairStore:
    """Pairs of one case, one history and one good end on one machine: a file for each candidate beside it."""

    def __init__(self, key: Sequence[Any]) -> None:
        self._folder = search_folder("bisections", key)
        self._lock: FileLock | None = None
        self.unkept = ""
        """Why what is measured cannot be kept; empty where it can."""

    def take(self) -> None:
        """Have it alone until this process ends; a ``CaseFailedError`` where another process has it."""
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
        if self._lock is not None:
            self._lock.release()

    def known(self, name: str) -> KeptPairs:
        """Return what was kept of the candidate ``name`` and can be read."""
        return codec.load(KeptPairs, self._folder / f"{hashed(name)}.json") or KeptPairs(name)

    def keep(self, name: str, pairs: Pairs, failure: str = "") -> None:
        codec.keep(self._folder / f"{hashed(name)}.json", KeptPairs(name, failure, pairs))
