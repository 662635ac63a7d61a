"""Histories for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pytest_llmperf.judge.history.histories import CaseHistory, Segment
from pytest_llmperf.records.past_result import PastResult

SCHEMA = 1


def history_document(histories: Sequence[CaseHistory]) -> dict[str, Any]:
    """Plain data; ``rate`` is tokens/s per GPU, and null where tokens were not told."""
    return {"schema": SCHEMA, "cases": [_case(one) for one in histories]}


def _case(history: CaseHistory) -> dict[str, Any]:
    return {
        "id": history.id,
        "digest": history.digest,
        "machine": history.machine,
        "runs": [_run(result) for result in history.results],
        "segments": [_segment(segment) for segment in history.segments],
        "with_another_host": [
            {"at": one.began, "rate": one.rate, "different": list(one.different)} for one in history.steps
        ],
    }


def _run(result: PastResult) -> dict[str, Any]:
    return {
        "began": result.began,
        "verdict": result.verdict,
        "step_seconds": result.step_seconds,
        "rate": result.tokens_per_second_per_gpu,
        "peak_reserved_bytes": result.peak_reserved_bytes,
        "hosts": sorted({launch.host for launch in result.launches}),
        "revision": result.revision,
        "versions": dict(result.versions),
        "counts": dict(result.counts),
        "calibrations": {device: dict(made) for device, made in result.calibrations.items()},
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "from": segment.results[0].began,
        "to": segment.results[-1].began,
        "runs": len(segment.results),
        "step_seconds": segment.step_seconds,
        "step_seconds_interval": [segment.low, segment.high],
        "rate": segment.rate(segment.step_seconds),
        "change": asdict(segment.change) if segment.change else None,
        "different": list(segment.different),
    }
