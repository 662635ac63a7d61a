"""TrialStore: trials that were made, kept in the user's cache, so that a search that was ended goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pytest_llmperf.launch.device import PREFIXES, driver_version
from pytest_llmperf.launch.request import lasting_environment
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec
from pytest_llmperf.support import codec
from pytest_llmperf.support.folders import cache_folder
from pytest_llmperf.support.redaction import redacted

# Of how a trial is made: what was made otherwise is none of today's.
_PROCEDURE = 1

_PACKAGES = "torch transformers accelerate triton liger-kernel flash-attn torchao bitsandbytes".split()

# What changes the speed of a training, of all that a shell may set.
_PREFIXES = (*PREFIXES, "OMP_", "MKL_", "PYTORCH_", "TORCH", "TRITON_", "LIGER_", "LLMPERF_INJECT")


class TrialStore:
    """Of one machine kind with what is installed now; a file for each trial, which several processes may write."""

    def __init__(self, machine_kind: str, gpu_uuids: tuple[str, ...] = ()) -> None:
        """``gpu_uuids``: a trial of other GPUs is one of a machine a per cent faster or slower."""
        driver = driver_version() if gpu_uuids else ""
        key = [_PROCEDURE, *surroundings(), sorted(gpu_uuids), driver]
        self.unkept = ""
        """Why what was made is not kept; empty where it is."""
        self._folder = cache_folder("trials") / machine_kind / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def all(self) -> Mapping[TrainSpec, Trial]:
        """Every trial that was kept and can be read, by what was launched."""
        found = {}
        with suppress(OSError):
            for kept in (codec.load(_Kept, path) for path in sorted(self._folder.glob("*.json"))):
                with suppress(SpecError):  # whatever is wrong with it, it can be made anew
                    if kept is not None and kept.trial.digest == (spec := TrainSpec.from_dict(kept.spec)).digest:
                        found[spec] = kept.trial
        return found

    def keep(self, spec: TrainSpec, trial: Trial) -> None:
        """What came of ``spec`` as it was launched; a home that cannot be written costs the next search a launch."""
        why = codec.keep(self._folder / f"{spec.digest}-{spec.steps}.json", _Kept(spec.to_dict(), trial))
        self.unkept = f"{self._folder}: {why}" if why else self.unkept


@dataclass(frozen=True)
class _Kept:
    spec: Mapping[str, Any]
    trial: Trial


def surroundings() -> list[Any]:
    """What else a training's speed depends on: what is installed, and what the shell sets; for a key."""
    around = {name: value for name, value in lasting_environment(os.environ, {}).items() if _is_cause(name)}
    return [_versions(), sorted(redacted(around).items())]


def _is_cause(name: str) -> bool:
    return name.startswith(_PREFIXES) and not name.endswith(("_DIR", "_HOME"))


def _versions() -> Mapping[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
