"""TrialStore: trials that were made, kept in the user's cache, so that a search that was ended goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pytest_llmperf.launch.device import PREFIXES, driver_version
from pytest_llmperf.launch.request import lasting_environment
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import write_text
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
        try:
            paths = sorted(self._folder.glob("*.json"))
        except OSError:
            return {}
        return dict(filter(None, map(_read, paths)))

    def keep(self, spec: TrainSpec, trial: Trial) -> None:
        """What came of ``spec`` as it was launched; a home that cannot be written costs the next search a launch."""
        document = {"spec": spec.to_dict(), "trial": trial.to_dict()}
        path = self._folder / f"{spec.digest}-{spec.steps}.json"
        try:
            write_text(path, json.dumps(document, indent=1) + "\n", lasts=False)
        except OSError as error:
            self.unkept = f"{self._folder}: {error.strerror or error}"


def surroundings() -> list[Any]:
    """What else a training's speed depends on: what is installed, and what the shell sets; for a key."""
    around = {name: value for name, value in lasting_environment(os.environ, {}).items() if _is_cause(name)}
    return [_versions(), sorted(redacted(around).items())]


def _read(path: Path) -> tuple[TrainSpec, Trial] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        spec, trial = TrainSpec.from_dict(document["spec"]), Trial.from_dict(document["trial"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # whatever it is, it can be made anew
        return None
    return (spec, trial) if trial.digest == spec.digest else None


def _is_cause(name: str) -> bool:
    return name.startswith(_PREFIXES) and not name.endswith(("_DIR", "_HOME"))


def _versions() -> Mapping[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
