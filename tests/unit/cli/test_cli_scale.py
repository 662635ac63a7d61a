"""``llmperf scale``: what a step takes of each of many ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf.launch import prediction
from pytest_llmperf.launch.prediction import PredictionError
from pytest_llmperf.records.trace import StaticStep
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import STEP, FakeStaticSteps
from tests.golden import Golden
from tests.shelf import Run, baseline_at, keep, llmperf_on


class Steps(FakeStaticSteps):
    def __init__(self, ranks_per_node: int) -> None:
        super().__init__()
        self._shards = ranks_per_node

    def of(self, spec: TrainSpec) -> StaticStep | PredictionError:
        if spec.optimizer == "adafactor":
            return PredictionError(f"{spec.id}: optimizer adafactor is not modelled")
        exchanges = {"all_gather": (34, 2**32 + 8 * spec.gpus), "reduce_scatter": (17, 2**31 // self._shards)}
        is_sharded = spec.parallelism != "ddp"
        return StaticStep(**STEP, exchanges=exchanges, padding=2**20 * spec.gpus if is_sharded else 0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(prediction, "StaticSteps", Steps)
    return llmperf_on(tmp_path, capsys)


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp", "fsdp_hybrid"])
def test_each_number_of_ranks_is_a_row(run: Run, golden: Golden, parallelism: str) -> None:
    spec = ["model=llama-tiny", f"parallelism={parallelism}", "mixed_precision=no"]
    code, out, _ = run("scale", *spec, "--ranks", "8,1024", "--ranks-per-node", "4")
    assert code == 0
    golden(out)


def test_no_wider_training_than_was_asked_for_has_to_be_valid(run: Run) -> None:
    """Two ranks are all that may share its two heads of keys."""
    code, out, _ = run("scale", "model=llama-tiny", "parallelism=tensor", "mixed_precision=no", "--ranks", "2")
    assert (code, "tensor" in out) == (0, True)


def test_programs_get_a_document_a_line(run: Run) -> None:
    code, out, _ = run("scale", "model=llama-tiny", "--ranks", "2,64", "--json")
    first, last = map(json.loads, out.splitlines())
    assert (code, first["ranks"], last["ranks"]) == (0, 2, 64)
    assert last["collectives"]["all_gather"] == {"count": 34, "bytes": 2**32 + 512}
    assert last["peak_allocated_bytes"] == 3 * 2**30
    assert last["flops_per_step"] == 12_000_000


def test_a_steps_time_is_a_range_from_what_was_measured(run: Run, golden: Golden) -> None:
    spec = ["model=llama-tiny", "--ranks", "2,8,64", "--ranks-per-node", "4", "--measured", "1:0.5,2:0.51"]
    _, out, _ = run("scale", *spec, "--bandwidth", "300,25")
    golden(out)
    _, out, _ = run("scale", *spec, "--bandwidth", "300", "--json")
    assert [json.loads(line)["step_seconds"] for line in out.splitlines()] == [[0.51, 0.51], None, None]


def test_what_is_stored_of_narrower_widths_is_known(run: Run, tmp_path: Path) -> None:
    stored = baseline_at(TrainSpec(model="llama-tiny", gpus=2), 1024 / 0.25)
    (launch,) = stored.launches
    rates = {"all_reduce_bytes_per_second": 3e11}
    keep(tmp_path, replace(stored, launches=(replace(launch, canary=rates),)))
    _, out, _ = run("scale", "model=llama-tiny", "--ranks", "4", "--machine", "m", "--json")
    low, high = json.loads(out)["step_seconds"]
    assert low == 0.25 < high < 0.3
    code, out, err = run("scale", "model=llama-tiny", "--ranks", "4", "--machine", "n")
    assert (code, out) == (1, "")
    assert "has no baselines of this machine kind, expected one of m; the nearest is 'm'" in err


@pytest.mark.parametrize(
    "words",
    [
        ["model=llama-tiny", "--ranks", "2", "--measured", "1"],
        ["model=llama-tiny", "--ranks", "2", "--bandwidth", "0"],
        ["model=llama-tiny", "parallelism=fsdp_hybrid", "mixed_precision=no", "--ranks", "8", "--measured", "3:1"],
        ["model=llama-tiny", "--ranks", "8,x"],
        ["model=llama-tiny", "--ranks", "1"],
        ["model=llama-tiny", "--ranks", "8,12"],
        ["model=llama-tiny", "parallelism=fsdp_hybrid", "mixed_precision=no", "--ranks", "8,2"],
        ["model=llama-tiny", "optimizer=adafactor", "--ranks", "8"],
        ["command=python train.py", "--ranks", "8"],
    ],
    ids=[
        "no seconds",
        "no rate",
        "no such width",
        "no number",
        "one rank",
        "half a node",
        "too few",
        "not modelled",
        "a script",
    ],
)
def test_what_cannot_be_told_is_one_line(
    run: Run, golden: Golden, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code, out, err = run("scale", *words)
    except SystemExit as ended:
        code, (out, err) = int(str(ended.code)), capsys.readouterr()
    assert (code != 0, out) == (True, "")
    golden(err.splitlines()[-1])
