"""The cases of a ``--perf-json`` document as its history keeps them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from statistics import median
from typing import Any

from pytest_llmperf.engine.run_page.run_document import Result, RunDocument, items, mapping, number, text
from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.launch import Launch, Place
from pytest_llmperf.records.metrics import MEMORY
from pytest_llmperf.records.past_result import PastLaunch, PastResult
from pytest_llmperf.records.trace import COUNTED

#: Exact ones, of a traced step.
COUNTS = tuple(COUNTED)

#: A launch that misbehaved on purpose is no history.
_FAULT = "LLMPERF_INJECT"

# What of an environment may move a figure, in the order in which it is told.
_VERSIONS = ("torch", "cuda", "driver", "transformers", "accelerate", "liger-kernel", "triton", "python")
_OTHERS = ("cudnn", "nccl", "flash-attn", "torchao", "bitsandbytes", "nvidia-cudnn-cu13")


def past_results(document: RunDocument, run: str) -> list[PastResult]:
    """Those of ``document`` that have a time: of a dry run, or of fake tensors alone, none has.

    What took turns with another environment is left out, as its launches are cut to those pairs; so is a case that
    tells of another test's launches.
    """
    return [found for result in document.results if (found := _past(result, document, run)) is not None]


def revision_of(document: RunDocument) -> str:
    """``0123456789ab``, with a ``+`` where files differed from that commit; empty where nobody told."""
    values = mapping(document.values.get("revision"))
    commit = text(values.get("commit"))
    return commit + "+" if commit and number(values.get("changed")) else commit


def _past(result: Result, document: RunDocument, run: str) -> PastResult | None:
    if result.values.get("shares") or items(result.values.get("launches_before")):
        return None
    records = [mapping(record) for record in items(result.values.get("launches"))]
    whole = result.launches if not result.num_unread else ()
    launches = sorted(map(_whole, whole) if whole else _parts(records), key=lambda launch: launch.started_at)
    if not launches or not result.text("digest") or _is_faulty(records):
        return None
    ranks = [mapping(rank) for rank in items(records[0].get("ranks"))]
    counted = {name: result.figure(name).value for name in COUNTS}
    return PastResult(
        run=run,
        machine=result.machine,
        id=result.id,
        digest=result.text("digest"),
        nodeid=result.text("nodeid"),
        verdict=result.verdict,
        launches=tuple(launches),
        tokens_per_step=int(sum(number(rank.get("tokens_per_step")) or 0.0 for rank in ranks)),
        ranks=max(1, len(ranks)),
        peak_reserved_bytes=result.figure(MEMORY).value,
        versions=_versions(mapping(records[0].get("environment"))),
        revision=revision_of(document),
        project=text(document.values.get("project")),
        counts={name: count for name, count in counted.items() if count is not None},
        unfinished=text(document.values.get("unfinished")),
        calibrations=dict(_calibrations(records)),
    )


def _is_faulty(records: list[Mapping[str, Any]]) -> bool:
    return any(mapping(mapping(one.get("environment")).get("variables")).get(_FAULT) for one in records)


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


def _parts(records: list[Mapping[str, Any]]) -> Iterator[PastLaunch]:
    """Of records that this version does not read whole, those that have a time and steps."""
    for record in records:
        ranks = [mapping(rank) for rank in items(record.get("ranks"))]
        steps = [[number(step) for step in items(rank.get("step_seconds"))] for rank in ranks]
        started_at, warmup = text(record.get("started_at")), number(record.get("warmup_steps")) or 1.0
        slowest = [max(step or 0.0 for step in each) for each in zip(*steps, strict=False) if None not in each]
        steady = [step for step in slowest[int(warmup) :] if step > 0]
        if started_at and steady:
            places = (Place(*(text(rank.get(name)) for name in ("host", "device", "boot"))) for rank in ranks)
            yield PastLaunch(started_at, median(steady), places=tuple(places))


def _calibrations(records: list[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for rank in (mapping(rank) for record in records for rank in items(record.get("ranks"))):
        with suppress(ValueError):  # one that this version does not know is shown nowhere
            made = Calibration.from_dict(rank.get("calibration"))
            if not made.trouble:
                yield text(rank.get("device")), made.to_dict()


def _versions(environment: Mapping[str, Any]) -> dict[str, str]:
    packages = mapping(environment.get("versions"))
    found = {**packages, "driver": environment.get("driver")}
    return {name: text(found.get(name)) for name in (*_VERSIONS, *_OTHERS) if text(found.get(name))}
