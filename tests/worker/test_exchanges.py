"""What ranks exchange in a step, counted without them, against PyTorch's own record of real ones on gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch.prediction import StaticSteps
from pytest_llmperf.records.trace import StaticStep
from tests.worker.launching import launched
from tests.worker.user import REPOSITORY

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

# Two layers of 0.1 MB and a vocabulary of 4 MB: DDP's first bucket is full before the last one begins.
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {"model_type": "llama", **SIZES, "vocab_size": 16_003, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return TrainSpec(
        model=str(path),
        sequence_length=32,
        micro_batch_size=1,
        gradient_accumulation_steps=3,
        model_precision="fp32",
        mixed_precision="no",
        steps=6,
        warmup_steps=2,
    )


def told(spec: TrainSpec) -> StaticStep:
    steps = StaticSteps()
    try:
        found = steps.of(spec)
    finally:
        steps.close()
    assert isinstance(found, StaticStep), found
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_under_the_trainer_exchanges_what_is_told_without_ranks(
    small: TrainSpec, tmp_path: Path, ranks: int
) -> None:
    spec = replace(small, gpus=ranks)
    trace = launched(spec, tmp_path / "launch").trace
    counts, sizes = (
        {row.name: row.count for row in trace.rows if row.kind == kind} for kind in ("exchange", "payload")
    )
    expected = told(spec).exchanges
    assert counts == {name: count for name, (count, _) in expected.items()}
    # A trace keeps six digits.
    assert sizes == {name: float(f"{size:.6g}") for name, (_, size) in expected.items()}


@pytest.mark.parametrize(("parallelism", "ranks"), [("fsdp", 2), ("fsdp", 4), ("fsdp_hybrid", 4)])
def test_shards_exchange_what_is_told_without_ranks(
    small: TrainSpec, tmp_path: Path, parallelism: str, ranks: int
) -> None:
    spec = replace(small, gpus=ranks, parallelism=parallelism)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words += ["-m", "tests.worker.sharded_ranks", json.dumps(spec.to_dict()), str(tmp_path / "found.json")]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    expected = dict[str, tuple[float, float]]()
    for name, (count, size) in told(spec).exchanges.items():
        own = name.replace("reduce_scatter", "all_reduce")  # gloo scatters so, and says so
        before = expected.get(own, (0, 0))
        expected[own] = before[0] + count, before[1] + size
    assert {name: tuple(each) for name, each in found.items()} == expected
