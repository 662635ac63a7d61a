"""The largest micro-batch, sought by real torchrun under a real limit of memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch import prediction
from pytest_llmperf.launch.prediction import predictions
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.result import CaseResult, Check
from tests.worker import engine
from tests.worker.engine import checks
from tests.worker.launching import launch

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")]

LIMIT_BYTES = 150 * 2**20
# What any CPU multiplies fast, and few sequences fill.
SPEC = replace(engine.SPEC, model_precision="fp32", mixed_precision="no", attention="eager", sequence_length=512)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.timeout(900)
def test_it_is_found_recorded_and_its_loss_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted: list[Any] = []  # by one process for both

    def kept(specs: Sequence[TrainSpec]) -> Iterator[Any]:
        predicted.extend(predictions(specs))
        return iter(predicted)

    monkeypatch.setattr(prediction, "predictions", kept)
    first = checks(tmp_path, memory_limit_bytes=LIMIT_BYTES, update="new").max_micro_batch(SPEC).result
    size = largest(first).value
    assert first.verdict == "new"
    assert size >= 2
    (path,) = tmp_path.rglob("baselines/*-limit-0.146484gib/*/capacity/*.json")
    assert json.loads(path.read_text())["history"][-1]["metrics"]["max_micro_batch_size"] == size
    # A third of the limit is held by something else: fewer sequences fit, and that is a loss.
    monkeypatch.setattr(prediction, "predictions", lambda _: iter(predicted))
    monkeypatch.setenv("LLMPERF_INJECT", "hold=60000000")
    second = checks(tmp_path, memory_limit_bytes=LIMIT_BYTES).max_micro_batch(SPEC).result
    assert largest(second).value < size
    assert (second.verdict, largest(second).baseline) == ("regressed", size)


def largest(result: CaseResult) -> Check:
    (found,) = [check for check in result.checks if check.metric == "max_micro_batch_size"]
    return found


def test_a_launch_beyond_the_limit_runs_out_of_memory(tmp_path: Path) -> None:
    spec = TrainSpec(model="llama-tiny", sequence_length=512, micro_batch_size=64, steps=3, min_steps=3, warmup_steps=1)
    failure = launch(spec, tmp_path / "run", memory_limit_bytes=100 * 2**20)
    assert isinstance(failure, Failure)
    assert failure.kind == "oom"
