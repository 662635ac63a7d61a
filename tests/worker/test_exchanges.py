"""What ranks exchange in a step, counted without them, against PyTorch's own record of real ones on gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.store import parse
from pytest_llmperf.launch.prediction import PredictionError, StaticSteps
from pytest_llmperf.records.trace import StaticStep, Trace
from tests.golden import Golden, sections
from tests.worker.launching import launched
from tests.worker.user import REPOSITORY

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.wide, pytest.mark.filterwarnings("ignore")]

# Two layers of 0.1 MB and a vocabulary of 4 MB: DDP's first bucket is full before the last one begins.
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {"model_type": "llama", **SIZES, "vocab_size": 16_003, "max_position_embeddings": 256}


SMALL: dict[str, Any] = {
    "sequence_length": 32,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 3,
    "model_precision": "fp32",
    "mixed_precision": "no",
    "steps": 6,
    "warmup_steps": 2,
}
CASES = [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("fsdp_hybrid", 4), ("tensor", 2), ("tensor", 4)]
CASES += [("context", 2), ("context", 4)]
Told: TypeAlias = Mapping[tuple[str, int], tuple[TrainSpec, Mapping[str, tuple[float, float]]]]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, int], tuple[TrainSpec, StaticStep]]:
    """Each case's spec, and what a step of its fullest rank takes, counted by one process without the others."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    specs = [TrainSpec(model=str(path), gpus=ranks, parallelism=kind, **SMALL) for kind, ranks in CASES]
    with closing(StaticSteps()) as steps:
        steps.ask(specs)
        found = [steps.of(spec) for spec in specs]
    assert not [each for each in found if isinstance(each, PredictionError)], found
    known = [each for each in found if isinstance(each, StaticStep)]
    return dict(zip(CASES, zip(specs, known, strict=True), strict=True))


@pytest.fixture(scope="module")
def told(counted: Mapping[tuple[str, int], tuple[TrainSpec, StaticStep]]) -> Told:
    """What each case's ranks exchange."""
    return {case: (spec, step.exchanges) for case, (spec, step) in counted.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_a_sequence_share_its_arithmetic(
    counted: Mapping[tuple[str, int], tuple[TrainSpec, StaticStep]], ranks: int
) -> None:
    """Tensor: all but the vocabulary's product. Context: all; of the causal attention, whose ring is balanced, a rank
    does its own part whole and half of each other."""
    attention, others = _flops(counted["fsdp", 2][1])
    vocabulary = 3 * 2 * 16_003 * 64 * 32 * 3  # forward and backward, of each token of three micro-batches
    shared = attention / ranks, vocabulary + (others - vocabulary) / ranks
    assert _flops(counted["tensor", ranks][1]) == pytest.approx(shared)
    turns = 1 + (ranks - 1) / 2
    assert _flops(counted["context", ranks][1]) == pytest.approx((attention * turns / ranks**2, others / ranks))


def _flops(step: StaticStep) -> tuple[float, float]:
    """Of attention, and of all else."""
    attention = sum(flops for name, flops in step.flops.items() if "attention" in name)
    return attention, sum(step.flops.values()) - attention


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_ddp_under_the_trainer_exchanges_what_is_told_without_ranks(
    told: Told, tmp_path: Path, case: tuple[str, int]
) -> None:
    spec, expected = told[case]
    found = rows_of(launched(spec, tmp_path / "launch").trace)
    assert found["exchange"]["all_reduce"] > 1
    assert found == as_rows(expected)


def rows_of(trace: Trace) -> dict[str, dict[str, float]]:
    """Its exchanges and their bytes, by kind of row."""
    kinds = ("exchange", "payload")
    return {kind: {row.name: row.count for row in trace.rows if row.kind == kind} for kind in kinds}


def as_rows(told: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    """The same of what was told; a trace keeps six digits."""
    counts = {name: count for name, (count, _) in told.items()}
    return {"exchange": counts, "payload": {name: float(f"{size:.6g}") for name, (_, size) in told.items()}}


@pytest.mark.parametrize("case", [("zero2", 2), ("zero2", 4), ("zero3", 2), ("zero3", 4)], ids=str)
def test_deepspeed_exchanges_what_is_told_without_ranks(tmp_path: Path, case: tuple[str, int]) -> None:
    pytest.importorskip("deepspeed")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    kind, ranks = case
    spec = TrainSpec(model=str(path), gpus=ranks, parallelism=kind, **{**SMALL, "mixed_precision": "bf16"})
    with closing(StaticSteps()) as steps:
        step = steps.of(spec)
    assert isinstance(step, StaticStep), step
    assert "deepspeed" in step.versions
    told, scattered = dict(step.exchanges), step.exchanges.get("reduce_scatter", (0, 0))
    told.pop("reduce_scatter", None)  # gloo scatters by reducing for all, and says so
    told["all_reduce"] = (told["all_reduce"][0] + scattered[0], told["all_reduce"][1] + scattered[1])
    assert rows_of(launched(spec, tmp_path / "launch").trace) == as_rows(told)


@pytest.fixture(scope="module")
def exchanged(told: Told, tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, int], Any]:
    """What real ranks of shards did, all forked from one process."""
    file = tmp_path_factory.mktemp("ranks") / "found.jsonl"
    specs = [json.dumps(told[case][0].to_dict()) for case in CASES[2:]]
    words = [sys.executable, "-m", "tests.worker.sharded_ranks", str(file), *specs]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(zip(CASES[2:], map(json.loads, file.read_text(encoding="utf-8").splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[2:], ids=str)
def test_shards_exchange_what_is_told_without_ranks(
    told: Told, exchanged: Mapping[tuple[str, int], Any], case: tuple[str, int]
) -> None:
    (spec, counted), expected = told[case], dict[str, tuple[float, float]]()
    for name, (count, size) in counted.items():
        own = name.replace("reduce_scatter", "all_reduce")  # gloo scatters so, and says so
        # Of one among several tensors gloo records what one rank has given: of keys and values here.
        given = size / spec.gpus if name == "all_gather_into_tensor" else size
        before = expected.get(own := own.removesuffix("_into_tensor"), (0, 0))
        expected[own] = before[0] + count, before[1] + given
    assert {name: tuple(each) for name, each in exchanged[case].items()} == expected


def test_two_h100_exchanged_and_kept_what_is_told_without_them() -> None:
    pytest.importorskip("liger_kernel")
    folder = REPOSITORY / "baselines" / "nvidia-h100-80gb-hbm3-80gib" / "llama-3.2-1b"
    off = {"fsdp": 0.001, "tensor": 0.01, "context": 0.0001}
    paths = [folder / f"llama-3.2-1b-bf16-pure-sdpa-liger-mbs37-{kind}-gpus2.json" for kind in off]
    stored = [parse(Baseline, path.read_text(encoding="utf-8"), str(path)) for path in paths]
    specs = [TrainSpec.from_dict(one.spec) for one in stored]
    with closing(StaticSteps()) as steps:
        steps.ask(specs)
        for one, spec in zip(stored, specs, strict=True):
            step = steps.of(spec)
            assert isinstance(step, StaticStep), step
            assert one.trace is not None
            assert rows_of(one.trace.trace) == as_rows(step.exchanges)
            peak = one.launches[-1].peak_allocated_bytes
            assert step.peak_bytes == pytest.approx(peak, rel=off[spec.parallelism])


STORED = REPOSITORY / "baselines"


def zero_baselines() -> list[Baseline]:
    paths = sorted(STORED.glob("*/llama-3.2-1b/*-zero?-gpus2.json"))
    return [parse(Baseline, path.read_text(encoding="utf-8"), str(path)) for path in paths]


def zero_figures(step: StaticStep | PredictionError) -> list[object]:
    assert isinstance(step, StaticStep), step
    return [step.exchanges, step.peak_bytes, step.padding]


@pytest.mark.timeout(900)
def test_deepspeed_is_told_what_it_was_told(golden: Golden) -> None:
    """Of two ranks, of seven, which nothing divides, and of a thousand; by DeepSpeed 0.19.8."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("liger_kernel")
    stages = {one.spec["parallelism"]: TrainSpec.from_dict(one.spec) for one in zero_baselines()}
    specs = [replace(spec, gpus=ranks) for spec in stages.values() for ranks in (2, 7, 1024)]
    with closing(StaticSteps()) as steps:
        steps.ask(specs)
        found = {spec: steps.of(spec) for spec in specs}
    lines = {f"{spec.parallelism} {spec.gpus}": zero_figures(step) for spec, step in found.items()}
    golden("\n".join(f"{name} {json.dumps(figures)}" for name, figures in lines.items()))


def test_two_gpus_exchanged_and_kept_what_deepspeed_was_told() -> None:
    """By what is kept of the test before: DeepSpeed need not be installed."""
    kept = sections(Path(__file__).parent / "golden" / "test_exchanges.txt")
    lines = kept[test_deepspeed_is_told_what_it_was_told.__name__].splitlines()
    compared = 0
    for one in zero_baselines():
        spec = TrainSpec.from_dict(one.spec)
        (line,) = (each for each in lines if each.startswith(f"{spec.parallelism} {spec.gpus} "))
        exchanges, peak, _ = json.loads(line.split(" ", 2)[2])
        assert peak == pytest.approx(one.launches[-1].peak_allocated_bytes, rel=0.001)
        if one.trace is not None and (seen := rows_of(one.trace.trace))["exchange"]:
            assert seen == as_rows(exchanges)
            compared += 1
    assert compared == 2
