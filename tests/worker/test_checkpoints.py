"""A checkpoint that a spec asks for: the Trainer's own, after what is timed, counted and removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.exact import changes
from pytest_llmperf.records.failure import Failure
from tests.worker.import_patch import in_the_rank
from tests.worker.launching import launch, launched

pytestmark = pytest.mark.torchrun

PLAIN = TrainSpec(
    model="llama-tiny", gpus=2, sequence_length=16, micro_batch_size=2, warmup_steps=2, min_steps=6, steps=8
)
SPEC = replace(PLAIN, save_checkpoint=True)


def test_it_is_written_after_what_is_timed_and_removed(tmp_path: Path) -> None:
    plain, saved = launched(PLAIN, tmp_path / "plain"), launched(SPEC, tmp_path / "saved")
    # The weights and AdamW's two states of each.
    assert saved.evidence["checkpoint_bytes"] > 3 * 2 * saved.parameters
    begun = ["start", "imports", "model", "first_step", "steps"]
    assert list(saved.phases) == [*begun, "checkpoint", "trace", "inspection", "end"]
    assert saved.phases["checkpoint"] > 0
    assert "checkpoint" not in plain.phases
    assert not list((tmp_path / "saved").rglob("checkpoint-*"))
    assert not list((tmp_path / "saved").rglob("*.safetensors"))
    shared = min(len(plain.losses), len(saved.losses))
    assert saved.losses[:shared] == plain.losses[:shared]
    assert changes([saved], [plain]) == ()
    assert saved.trace.counts == plain.trace.counts


def test_where_there_is_no_room_it_is_refused_in_one_line(tmp_path: Path) -> None:
    full = in_the_rank(
        tmp_path, "pytest_llmperf.worker.recipes.huggingface.trainer", "module.free_bytes = lambda folder: 5000"
    )
    failure = launch(replace(SPEC, gpus=1), tmp_path / "run", variables=full)
    assert isinstance(failure, Failure)
    assert failure.kind == "refused"
    assert failure.message.startswith(f"{replace(SPEC, gpus=1).id}: save_checkpoint writes at least ")
    assert failure.message.endswith(f"and {tmp_path}/run has 4.9 KiB left; make room there, or leave it out")
