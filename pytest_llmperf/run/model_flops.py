"""ModelFlops: what a token costs in training, of the models of one run: by formula, or counted once and kept."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pytest_llmperf.analysis.formulas import peak_flops
from pytest_llmperf.launch.prediction import CountError, FlopCounts
from pytest_llmperf.settings.models import Model
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.folders import cache_folder

_COUNTER = Path(__file__).parents[1] / "worker" / "estimate" / "arithmetic.py"

_Key = tuple[str, int]
"""A model's fingerprint and a length of sequences."""


class ModelFlops:
    """Counted ahead of the launches: a count takes a core for some seconds, and none may be timed meanwhile."""

    def __init__(self) -> None:
        self._known: dict[_Key, float | CountError] = {}
        self._asked: dict[_Key, tuple[Model, int]] = {}
        self._counts: FlopCounts | None = None

    def prepare(self, specs: Iterable[TrainSpec], gpu: str) -> None:
        """Let be counted, beside this process, what ``specs`` cost, where their use of the chip ``gpu`` can be told."""
        for spec in specs:
            if peak_flops(gpu, spec.compute_precision) is not None:
                self._ask(spec)

    def settle(self) -> None:
        """Wait for what is being counted, and end what counts."""
        if self._counts is not None:
            for key, (model, number) in self._asked.items():
                self._known[key] = _counted(self._counts, number, model, key[1])
        self.close()

    def per_token(self, spec: TrainSpec) -> float | None:
        """Training FLOPs for one token of a full sequence of ``spec``; ``None``: not known, and ``note`` says why."""
        self._ask(spec)
        if _key(spec) not in self._known:
            self.settle()
        known = self._known[_key(spec)]
        return None if isinstance(known, CountError) else known

    def note(self, spec: TrainSpec) -> str:
        """A line where the FLOPs of ``spec`` were asked for in vain."""
        known = self._known.get(_key(spec))
        if not isinstance(known, CountError):
            return ""
        return f"MFU is not told: the FLOPs of {spec.architecture.slug} cannot be counted: {known}"

    def close(self) -> None:
        """End what counts, and forget what it was asked."""
        if self._counts is not None:
            self._counts.close()
        self._counts, self._asked = None, {}

    def _ask(self, spec: TrainSpec) -> None:
        model, key = spec.architecture, _key(spec)
        if key in self._known or key in self._asked:
            return
        known = model.flops_per_token(spec.sequence_length) or _kept(_path(model, spec.sequence_length))
        if known is not None:
            self._known[key] = known
            return
        if self._counts is None:
            self._counts = FlopCounts()
        self._asked[key] = model, self._counts.ask(model, spec.sequence_length)


def _key(spec: TrainSpec) -> _Key:
    return spec.architecture.fingerprint, spec.sequence_length


def _counted(counts: FlopCounts, number: int, model: Model, sequence_length: int) -> float | CountError:
    """The answer, which is kept."""
    try:
        flops = counts.answer(number)
    except CountError as error:
        return error
    document = {"flops_per_token": flops, **_counted_of(model, sequence_length)}
    with suppress(OSError):  # a home that cannot be written costs the next run a count
        write_text(_path(model, sequence_length), json.dumps(document, indent=1) + "\n", lasts=False)
    return flops


def _counted_of(model: Model, sequence_length: int) -> dict[str, Any]:
    return {"config": dict(model.config), "sequence_length": sequence_length, **_counted_by()}


def _path(model: Model, sequence_length: int) -> Path:
    """Of the file that keeps its count."""
    of = json.dumps(_counted_of(model, sequence_length), sort_keys=True)
    return cache_folder("flops") / f"{model.slug}-{hashlib.sha256(of.encode()).hexdigest()[:16]}.json"


def _kept(path: Path) -> float | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        flops = document["flops_per_token"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # whatever it is, it can be counted anew
        return None
    is_number = isinstance(flops, int | float) and not isinstance(flops, bool)
    return float(flops) if is_number and math.isfinite(flops) and flops > 0 else None


@cache
def _counted_by() -> Mapping[str, Any]:
    """What else may change a count: whose code is run, and how it is counted."""
    found = {name: _version(name) for name in ("torch", "transformers")}
    return {**found, "counter": hashlib.sha256(_COUNTER.read_bytes()).hexdigest()[:16]}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
