"""The cases of a ``--perf-json`` document as its history keeps them, and the row that a real run leaves. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.launch import Launch, Place
from pytest_llmperf.records.metrics import MEMORY
from pytest_llmperf.records.past_result import OBSERVED, PastLaunch, PastResult
from pytest_llmperf.records.trace import COUNTED
from pytest_llmperf.report.run_document import Result, RunDocument
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import codec

#: A launch that misbehaved on purpose is no history.
_FAULT = "LLMPERF_INJECT"

# What of an environment may move a figure, in the order in which it is told.
_VERSIONS = ("torch", "cuda", "driver", "transformers", "accelerate", "liger-kernel", "triton", "python")
_OTHERS = ("cudnn", "nccl", "flash-attn", "torchao", "bitsandbytes", "nvidia-cudnn-cu13")


class HistoryError(Exception):
    """A source of history that cannot serve: one line with the file, what is wrong and what to do."""


def past_results(document: RunDocument, run: str) -> list[PastResult]:
    """Those of ``document`` that have a time: of a dry run, or of fake tensors alone, none has.

    What took turns with another environment is left out, as its launches are cut to those pairs; so is a case that
    tells of another test's launches.
    """
    return [found for result in document.results if (found := _past(result, document, run)) is not None]


def _past(result: Result, document: RunDocument, run: str) -> PastResult | None:
    told = result.record
    if told.shares or told.launches_before:
        return None
    records = [found for each in told.launches if (found := codec.read_lenient(_Record, each)) is not None]
    whole = result.launches if not result.num_unread else ()
    launches = sorted(map(_whole, whole) if whole else _parts(records), key=lambda launch: launch.started_at)
    if not launches or not told.digest or any(record.environment.variables.get(_FAULT) for record in records):
        return None
    commit = document.record.revision
    # ``0123456789ab+`` where files differed from that commit; empty where nobody told.
    revision = commit.commit + "+" * (commit.changed > 0) if commit and commit.commit else ""
    counted = {name: result.figure(name).value for name in COUNTED}
    return PastResult(
        run=run,
        machine=result.machine,
        id=result.id,
        digest=told.digest,
        nodeid=told.nodeid,
        verdict=result.verdict,
        launches=tuple(launches),
        tokens_per_step=sum(rank.tokens_per_step for rank in records[0].ranks) if told.has_tokens else 0,
        ranks=max(1, len(records[0].ranks)),
        peak_reserved_bytes=result.figure(MEMORY).value,
        versions=_versions(records[0].environment),
        revision=revision,
        project=document.record.project,
        counts={name: count for name, count in counted.items() if count is not None},
        unfinished=document.record.unfinished,
        calibrations=dict(_calibrations(records)),
    )


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """As much of a record as every version has had."""

    host: str = ""
    device: str = ""
    boot: str = ""
    tokens_per_step: int = 0
    step_seconds: tuple[float | None, ...] = ()
    calibration: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Environment:
    driver: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Record:
    started_at: str = ""
    warmup_steps: int = 1
    ranks: tuple[_Rank, ...] = ()
    environment: _Environment = _Environment()


def _whole(launch: Launch) -> PastLaunch:
    places = tuple(rank.place for rank in launch.ranks)
    error = launch.median_error
    return PastLaunch(
        launch.started_at,
        launch.median_step_seconds,
        error if math.isfinite(error) else 0.0,
        launch.health.sm_clock_mhz,
        places,
    )


def _parts(records: Sequence[_Record]) -> Iterator[PastLaunch]:
    """Read, of records that are not of this version, those that have a time and steps."""
    for record in records:
        steps = zip(*(rank.step_seconds for rank in record.ranks), strict=False)
        slowest = [max(step or 0.0 for step in each) for each in steps if None not in each]
        steady = [step for step in slowest[record.warmup_steps :] if 0 < step < math.inf]
        if record.started_at and steady:
            places = (Place(one_line(rank.host), one_line(rank.device), rank.boot) for rank in record.ranks)
            yield PastLaunch(one_line(record.started_at), median(steady), places=tuple(places))


def _calibrations(records: Sequence[_Record]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for rank in (rank for record in records for rank in record.ranks if rank.calibration):
        with suppress(ValueError):  # one that this version does not know is shown nowhere
            made = codec.read(Calibration, rank.calibration)
            if not made.trouble:
                yield one_line(rank.device), codec.plain(made)


def _versions(environment: _Environment) -> dict[str, str]:
    found = {**environment.versions, "driver": environment.driver}
    return {name: one_line(found[name]) for name in (*_VERSIONS, *_OTHERS) if found.get(name)}


def observed_result(text: str, source: str) -> PastResult:
    """The row of a real run that was watched; where it ran is named as runs name the kind of their machine.

    Raises:
        HistoryError: it cannot serve.
    """
    try:
        values = json.loads(text)
        result = codec.read(PastResult, values[OBSERVED], newer=True)
        name, num_bytes, cores = (values["device"][each] for each in ("name", "memory_bytes", "cores"))
        gpus = (Gpu(index=0, uuid="", name=name, memory_bytes=num_bytes),) if num_bytes else ()
        machine = Machine(gpus=gpus, cpu_name=name, cores=cores)
        return replace(result, machine=machine.gpu_kind if gpus else machine.cpu_kind)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise HistoryError(f"{source}: no row of a run that was watched ({error}); delete it") from error
