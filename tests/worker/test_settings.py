"""Settings that leave the arithmetic alone train the same model, and the worker sees that they were on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.evidence_checks import contradictions
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.records.launch import Launch
from tests.worker.launching import launched

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(600)]

PLAIN = TrainSpec(
    model="llama-tiny",
    micro_batch_size=2,
    sequence_length=32,
    model_precision="fp32",
    mixed_precision="no",
    steps=5,
    min_steps=5,
    warmup_steps=1,
)


def launch(spec: TrainSpec, folder: Path) -> Launch:
    record = launched(spec, folder, timeout_seconds=400)
    assert troubles(spec, record) == ()
    return record


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch(PLAIN, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        ({"sdpa_backend": "math"}, {"attention_kernel": ""}),
        (
            {"gradient_checkpointing": True, "checkpointing_policy": "selective"},
            {"checkpointing_policy": "selective", "gradient_checkpointing": True},
        ),
        (
            {"torch_compile": True, "torch_compile_scope": "layers"},
            {"compiled_modules": ["LlamaDecoderLayer"], "torch_compile_scope": "layers", "compiled_graphs": 1}
            | {"graph_breaks": 0, "recompilations": 0},
        ),
        ({"torch_compile": True}, {"torch_compile_mode": "default", "torch_compile_scope": "model"}),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_the_same_model_is_trained(
    setting: dict[str, Any], seen: dict[str, Any], plain: Launch, tmp_path: Path
) -> None:
    record = launch(replace(PLAIN, **setting), tmp_path / "run")
    assert {name: record.evidence[name] for name in seen} == seen
    assert record.losses == pytest.approx(plain.losses, abs=1e-3)


class TestSharded:
    """FSDP needs GPUs in accelerate; the code that asks for it and looks at it is tried where it is told otherwise."""

    @staticmethod
    def train(folder: Path, spec: TrainSpec) -> dict[str, Any]:
        script = Path(__file__).with_name("sharded.py")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec.gpus}"]
        command = [*launcher, str(script), str(folder), json.dumps(spec.to_dict())]
        done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        values: dict[str, Any] = json.loads((folder / "trained.json").read_text(encoding="utf-8"))
        return values

    def test_over_all_ranks(self, tmp_path: Path) -> None:
        spec = replace(PLAIN, gpus=2, parallelism="fsdp")
        trained = self.train(tmp_path, spec)
        evidence = trained["evidence"]
        assert (evidence["parallelism"], evidence["mesh"]) == ("fsdp", [2])
        assert list(contradictions(spec, evidence, frozenset())) == []
        assert trained["parameters"] == 125_248
        together = launch(replace(spec, parallelism="ddp"), tmp_path / "ddp")
        assert trained["losses"] == pytest.approx(together.losses, abs=1e-3)

    def test_replicas_of_shards(self, tmp_path: Path) -> None:
        spec = replace(PLAIN, gpus=4, parallelism="fsdp_hybrid", model_precision="bf16")
        evidence = self.train(tmp_path, spec)["evidence"]
        assert (evidence["parallelism"], evidence["mesh"]) == ("fsdp_hybrid", [2, 2])

    def test_the_type_that_weights_are_gathered_in_is_seen(self, tmp_path: Path) -> None:
        spec = replace(PLAIN, gpus=2, parallelism="fsdp", mixed_precision="bf16")
        evidence = self.train(tmp_path, spec)["evidence"]
        assert (evidence["autocast_dtype"], evidence["gathered_dtype"]) == (None, "torch.bfloat16")
