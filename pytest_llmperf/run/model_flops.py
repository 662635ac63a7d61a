"""ModelFlops: what a token costs in training, of the models of one run: by formula, or counted once and kept."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pytest_llmperf.analysis.formulas import peak_flops
from pytest_llmperf.launch.prediction import CountError, FlopCounts
from pytest_llmperf.settings.models import Model
from pytest_llmperf.settings.spec import Spec
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

    def prepare(self, specs: Iterable[Spec], gpu: str) -> None:
        """Let be counted, beside this process, what ``specs`` cost, where their use of the chip ``gpu`` can be told."""
        for spec in specs:
            if isinstance(spec, TrainSpec) and peak_flops(gpu, spec.compute_precision) is not None:
                self._ask(spec)

    def settle(self) -> None:
        """Wait for what is being counted, keep it, and end what counts."""
        counts = self._counts
        for key, (model, number) in self._asked.items():
            assert counts is not None  # noqa: S101 - who is asked is there
            try:
                flops = self._known[key] = counts.answer(number)
            except CountError as error:
                self._known[key] = error
                continue
            facts = _facts(model, key[1])
            document = {"flops_per_token": flops, **facts}
            with suppress(OSError):  # a home that cannot be written costs the next run a count
                write_text(_path(model, facts), json.dumps(document, indent=1) + "\n", lasts=False)
        self.close()

    def per_token(self, spec: TrainSpec) -> float | None:
        """Training FLOPs for one token of a full sequence of ``spec``; ``None``: not known, and ``note`` says why."""
        self._ask(spec)
        if _key(spec) not in self._known:
            self.settle()
        known = self._known[_key(spec)]
        return None if isinstance(known, CountError) else known

    def notes(self, *specs: Spec) -> Iterator[str]:
        """A line for each whose FLOPs were asked for in vain."""
        for spec in specs:
            known = self._known.get(_key(spec)) if isinstance(spec, TrainSpec) else None
            if isinstance(known, CountError):
                yield f"MFU is not told: the FLOPs of {spec.slug} cannot be counted: {known}"

    def close(self) -> None:
        """End what counts, and forget what it was asked."""
        if self._counts is not None:
            self._counts.close()
        self._counts, self._asked = None, {}

    def _ask(self, spec: TrainSpec) -> None:
        model, length, key = spec.architecture, spec.sequence_length, _key(spec)
        if key in self._known or key in self._asked:
            return
        known = model.flops_per_token(length) or _kept(_path(model, _facts(model, length)))
        if known is not None:
            self._known[key] = known
            return
        if self._counts is None:
            self._counts = FlopCounts()
        self._asked[key] = model, self._counts.ask(model, length)


def _key(spec: TrainSpec) -> _Key:
    return spec.architecture.fingerprint, spec.sequence_length


def _facts(model: Model, sequence_length: int) -> dict[str, Any]:
    """Return what decides a count."""
    return {"config": dict(model.config), "sequence_length": sequence_length, **_counted_by()}


@cache
def _counted_by() -> Mapping[str, Any]:
    """Whose code is run, and how it is counted."""
    found: dict[str, str] = {}
    for name in ("torch", "transformers"):
        found[name] = ""
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {**found, "counter": hashlib.sha256(_COUNTER.read_bytes()).hexdigest()[:16]}


def _path(model: Model, facts: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_folder("flops") / f"{model.slug}-{digest[:16]}.json"


def _kept(path: Path) -> float | None:
    try:
        flops = json.loads(path.read_text(encoding="utf-8"))["flops_per_token"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # whatever it is, it can be counted anew
        return None
    is_number = isinstance(flops, int | float) and not isinstance(flops, bool)
    return float(flops) if is_number and math.isfinite(flops) and flops > 0 else None
