"""Baseline: the accepted launches of one spec on one machine kind, their history, and their JSON. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pytest_llmperf.measurement import Launch
from pytest_llmperf.result import GIB, Check
from pytest_llmperf.spec import TrainSpec

SCHEMA = 1

# More would only slow reading: what a verdict can see is decided by the first dozen.
_MAX_LAUNCHES = 24


class BaselineError(Exception):
    """A baseline that cannot be read, written or accepted: one line with the file, what is wrong and what to do."""


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Figures somebody accepted, when and why."""

    recorded_at: str
    """UTC, ISO 8601."""
    reason: str
    launches: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a case is held against."""

    id: str
    digest: str
    machine: str
    spec: Mapping[str, Any]
    recorded_by: str
    """The test that recorded it; for people and for finding unused files, never an identity."""
    launches: tuple[Launch, ...]
    anchor: Accepted
    """The first accepted figures: against them slow creep shows."""
    history: tuple[Accepted, ...]
    """Every acceptance, newest last; the anchor is the first."""

    def to_json(self) -> str:
        """Sorted and stable; arrays of numbers on one line, environments once each."""
        environments: dict[str, Any] = {}
        launches = []
        for launch in self.launches:
            record = launch.to_dict()
            environment = record.pop("environment")
            key = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:8]
            environments[key] = environment
            launches.append({**record, "environment": key})
        document = {
            "schema": SCHEMA,
            "id": self.id,
            "digest": self.digest,
            "machine": self.machine,
            "spec": dict(self.spec),
            "recorded_by": self.recorded_by,
            "anchor": asdict(self.anchor),
            "history": [asdict(entry) for entry in self.history],
            "environments": environments,
            "launches": launches,
        }
        return _compact(json.dumps(_rounded(document), indent=1, sort_keys=True)) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> Baseline:
        """The baseline in ``text``; ``source`` names it in errors.

        Raises:
            BaselineError: empty, truncated, of a newer schema, or not a baseline.
        """
        document = _parse(text, source)
        try:
            environments = document["environments"]
            launches = tuple(
                Launch.from_dict({**launch, "environment": environments[launch["environment"]]})
                for launch in document["launches"]
            )
            if not launches:
                raise ValueError("it holds no launch")
            return cls(
                id=str(document["id"]),
                digest=str(document["digest"]),
                machine=str(document["machine"]),
                spec=document["spec"],
                recorded_by=str(document["recorded_by"]),
                launches=launches,
                anchor=Accepted(**document["anchor"]),
                history=tuple(Accepted(**entry) for entry in document["history"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BaselineError(f"{source}: not a baseline of schema {SCHEMA} ({error!r}); {_WHAT_TO_DO}") from error


_WHAT_TO_DO = "restore it from version control, or delete it and record anew with --update-baselines=new"


def _parse(text: str, source: str) -> dict[str, Any]:
    if not text.strip():
        raise BaselineError(f"{source}: the file is empty, expected a baseline; {_WHAT_TO_DO}")
    try:
        document = json.loads(text)
    except ValueError as error:
        raise BaselineError(f"{source}: not JSON, perhaps truncated ({error}); {_WHAT_TO_DO}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise BaselineError(f'{source}: not a baseline, it has no "schema"; {_WHAT_TO_DO}')
    schema = document["schema"]
    if isinstance(schema, int) and schema > SCHEMA:
        raise BaselineError(
            f"{source}: schema {schema} is newer than this version understands ({SCHEMA}); upgrade pytest-llmperf"
        )
    if schema != SCHEMA:
        raise BaselineError(f"{source}: unknown schema {schema!r}, expected {SCHEMA}; {_WHAT_TO_DO}")
    return document


def accept(
    old: Baseline | None,
    *,
    spec: TrainSpec,
    machine: str,
    launches: Sequence[Launch],
    verdict: str,
    checks: Sequence[Check],
    reason: str,
    recorded_at: str,
    recorded_by: str,
) -> Baseline:
    """The baseline after ``launches`` were accepted.

    Launches that pass join those that are there; ones beyond tolerance replace them, since two speeds are not one
    population. The anchor stays.

    Raises:
        BaselineError: the launches are invalid, or worse beyond tolerance and no reason was given.
    """
    if verdict == "invalid":
        raise BaselineError(f"{spec.id}: an invalid launch is never recorded")
    worse = [check for check in checks if check.verdict == "regressed"]
    if worse and not reason:
        figures = ", ".join(f"{check.metric} {check.baseline:,.0f} -> {check.value:,.0f}" for check in worse)
        raise BaselineError(f'{spec.id}: worse beyond tolerance ({figures}); accept it with --perf-reason "why"')
    entry = Accepted(
        recorded_at=recorded_at,
        reason=reason,
        launches=len(launches),
        metrics={check.metric: check.value for check in checks},
    )
    if old is None:
        return Baseline(
            id=spec.id,
            digest=spec.digest,
            machine=machine,
            spec=spec.to_dict(),
            recorded_by=recorded_by,
            launches=tuple(launches),
            anchor=entry,
            history=(entry,),
        )
    kept = old.launches if verdict == "pass" else ()
    return replace(
        old,
        spec=spec.to_dict(),
        recorded_by=recorded_by,
        launches=(*kept, *launches)[-_MAX_LAUNCHES:],
        history=(*old.history, entry),
    )


def describe(old: Baseline | None, new: Baseline) -> list[str]:
    """Old, new and anchor side by side, for people."""
    num = len(new.launches)
    lines = [f"recorded {new.id} ({num} {'launch' if num == 1 else 'launches'} in the baseline)"]
    for label, entry in (("old", old.history[-1] if old else None), ("new", new.history[-1]), ("anchor", new.anchor)):
        if entry is not None:
            rate, memory = (entry.metrics.get(name) for name in ("tokens_per_second_per_gpu", "peak_reserved_bytes"))
            figures = f"{rate or 0:10,.0f} tokens/s/GPU  {_size(memory or 0):>10}"
            why = f"  ({entry.reason})" if entry.reason else ""
            lines.append(f"  {label:6} {figures}  {entry.recorded_at[:10]}{why}")
    return lines


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def _rounded(value: Any) -> Any:
    # Six digits: a tenth of what a step's clock resolves, and half the bytes in version control.
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


_NUMBERS = re.compile(r"\[\s*((?:-?[\d.eE+-]+,\s*)*-?[\d.eE+-]+)\s*\]")


def _compact(text: str) -> str:
    return _NUMBERS.sub(lambda match: "[" + re.sub(r"\s+", "", match[1]).replace(",", ", ") + "]", text)
