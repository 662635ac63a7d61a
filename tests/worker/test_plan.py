"""Predicted memory against what was measured on H200, and what cannot be predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.cli.plan import predict
from pytest_llmperf.cli.shelf import CaseError
from pytest_llmperf.judge.baseline import Baseline

pytest.importorskip("torch")

from pytest_llmperf.worker.plan import plan

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

REPOSITORY = Path(__file__).parents[2]


def stored() -> list[Baseline]:
    paths = sorted((REPOSITORY / "baselines" / "nvidia-h200-140gib").rglob("*.json"))
    return [Baseline.from_json(path.read_text(encoding="utf-8"), str(path)) for path in paths]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stored_rung_is_predicted() -> None:
    pytest.importorskip("liger_kernel")
    specs = {TrainSpec.from_dict(baseline.spec): baseline.launches[-1] for baseline in stored()}
    with ThreadPoolExecutor(2) as pool:  # a process each: Liger patches classes for good
        predictions = dict(zip(specs, pool.map(predict, specs), strict=True))
    errors = {
        spec.id: predictions[spec].peak_allocated_bytes / launch.peak_allocated_bytes - 1
        for spec, launch in specs.items()
    }
    assert len(errors) >= 19
    assert median(map(abs, errors.values())) < 0.03, errors
    assert max(map(abs, errors.values())) < 0.08, errors


SMALL = TrainSpec(model="llama-tiny", sequence_length=64, micro_batch_size=8)


def parts(**values: Any) -> dict[str, int]:
    spec = TrainSpec(**{**SMALL.to_dict(), **values})
    return plan(spec, spec.architecture.config)


def test_what_each_setting_does_to_the_parts() -> None:
    base = parts()
    assert base["weights"] == pytest.approx(125_248 * 2, rel=0.1)
    assert base["optimizer"] == pytest.approx(2 * 125_248 * 2, rel=0.15)
    assert parts(micro_batch_size=16)["activations"] > 1.8 * base["activations"]
    assert parts(gradient_checkpointing=True)["activations"] < 0.7 * base["activations"]
    assert parts(attention="eager")["activations"] > base["activations"]
    assert parts(model_precision="fp32")["weights"] > 1.9 * base["weights"]
    assert parts(gpus=2)["buckets"] == base["weights"]
    assert "optimizer" not in parts(optimizer="sgd")
    accumulated = parts(gradient_accumulation_steps=2)
    assert accumulated["gradients"] >= base.get("gradients", 0) + 125_248


def test_the_command_predicts_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "pytest_llmperf.cli", "plan", "model=opt-tiny", "sequence_length=64", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120, check=True)
    document = json.loads(done.stdout)
    assert document["peak_allocated_bytes"] == sum(document["parts"].values()) > 2**20
    assert document["digest"] == TrainSpec(model="opt-tiny", sequence_length=64).digest


def test_what_is_not_modelled_is_one_line() -> None:
    expected = r"adafactor.*cannot be predicted: optimizer adafactor is not modelled"
    with pytest.raises(CaseError, match=expected) as caught:
        predict(TrainSpec(model="llama-tiny", sequence_length=64, optimizer="adafactor"))
    assert "\n" not in str(caught.value)
