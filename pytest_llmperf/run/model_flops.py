"""ModelFlops: what a token costs in training, of the models of one run: by formula, or counted once and kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pytest_llmperf.launch.flop_count import CountError, counted_flops
from pytest_llmperf.spec.models import Model
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support.files import write_text

_COUNTER = [
    Path(__file__).parents[1] / "worker" / "estimate" / f"{name}.py" for name in ("arithmetic", "operator_flops")
]


class ModelFlops:
    """Asked between launches: a count takes a core for some seconds, and none may be timed meanwhile."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], float | CountError] = {}

    def per_token(self, spec: TrainSpec) -> float | None:
        """Training FLOPs for one token of a full sequence of ``spec``; ``None``: not known, and ``note`` says why."""
        model, key = spec.architecture, _key(spec)
        if key not in self._known:
            self._known[key] = model.flops_per_token(spec.sequence_length) or _kept_or_counted(model, key[1])
        known = self._known[key]
        return None if isinstance(known, CountError) else known

    def note(self, spec: TrainSpec) -> str:
        """A line where the FLOPs of ``spec`` were asked for in vain."""
        known = self._known.get(_key(spec))
        if not isinstance(known, CountError):
            return ""
        return f"MFU is not told: the FLOPs of {spec.architecture.slug} cannot be counted: {known}"


def _key(spec: TrainSpec) -> tuple[str, int]:
    return spec.architecture.fingerprint, spec.sequence_length


def _kept_or_counted(model: Model, sequence_length: int) -> float | CountError:
    of = {"config": dict(model.config), "sequence_length": sequence_length, **_counted_by()}
    path = _folder() / f"{model.slug}-{hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]}.json"
    kept = _kept(path)
    if kept is not None:
        return kept
    try:
        flops = counted_flops(model, sequence_length)
    except CountError as error:
        return error
    with suppress(OSError):  # a home that cannot be written costs the next run a count
        write_text(path, json.dumps({"flops_per_token": flops, **of}, indent=1) + "\n", lasts=False)
    return flops


def _kept(path: Path) -> float | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        flops = document["flops_per_token"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # whatever it is, it can be counted anew
        return None
    is_number = isinstance(flops, int | float) and not isinstance(flops, bool)
    return float(flops) if is_number and math.isfinite(flops) and flops > 0 else None


def _folder() -> Path:
    """The user's cache, as the XDG base directories have it; ``LLMPERF_CACHE_DIR`` names another."""
    named, cache_home = os.environ.get("LLMPERF_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named) / "flops"
    # Unlike Path's, this one raises nothing where nobody has a home.
    home = cache_home or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(home) / "pytest-llmperf" / "flops"


@cache
def _counted_by() -> Mapping[str, Any]:
    """What else may change a count: whose code is run, and how it is counted."""
    found = {name: _version(name) for name in ("torch", "transformers")}
    return {**found, "counter": hashlib.sha256(b"".join(path.read_bytes() for path in _COUNTER)).hexdigest()[:16]}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
