"""The real worker under the real torchrun, on the CPU with gloo."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import SpecError
from pytest_llmperf.support import codec
from tests.waiting import until
from tests.worker.conftest import ColdPair
from tests.worker.launching import ENDLESS, launch
from tests.worker.user import LIGHT_PATH

pytestmark = pytest.mark.torchrun


def rank_pids(folder: Path) -> list[int]:
    # One that has just been made is empty.
    return [int(text) for text in (path.read_text() for path in folder.glob("rank-*.pid")) if text]


def assert_nobody_alive(folder: Path) -> None:
    pids = rank_pids(folder)
    assert pids
    alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert alive == []


def test_two_ranks_leave_a_record_in_which_everything_adds_up(cold_pair: ColdPair) -> None:
    spec, record = cold_pair.spec, cold_pair.record
    assert troubles(spec, record) == ()
    assert "other_ranks" not in record.evidence
    assert record.canary.keys() == {"matmul_flops", "copy_bytes_per_second", "all_reduce_bytes_per_second"}
    assert (record.digest, record.spec_id) == (spec.digest, spec.id)
    assert [rank.rank for rank in record.ranks] == [0, 1]
    assert record.tokens_per_step == 2 * 2 * 2 * 32
    assert len(record.step_seconds) == len(record.losses) == 6
    # Random tokens over 512: a model that has learnt nothing is as good as chance.
    assert record.losses[0] == pytest.approx(math.log(512), rel=0.05)
    assert record.parameters == 125_248
    assert record.peak_reserved_bytes > 2**20
    assert 0 < record.train_seconds < record.wall_seconds
    assert {"python", "torch", "transformers", "accelerate"} <= record.environment.versions.keys()
    assert codec.read(Launch, json.loads(json.dumps(codec.plain(record)))) == record
    assert {progress.phase for progress in cold_pair.seen} >= {"starting", "importing"}
    # What of the chip is looked at afterwards is no part of the training.
    told = json.loads((cold_pair.folder / "progress.json").read_text())
    assert told["phase"] == "finishing"
    assert cold_pair.began < told["reached"]["finishing"] < (cold_pair.folder / "launch.json").stat().st_mtime


def test_what_a_spec_asks_for_is_what_ran(tmp_path: Path) -> None:
    config = tmp_path / "odd model" / "config.json"
    config.parent.mkdir()
    values = json.loads(json.dumps(dict(TrainSpec(model="opt-tiny").architecture.config))) | {"vocab_size": 509}
    config.write_text(json.dumps(values))
    spec = TrainSpec(
        model=str(config),
        model_precision="fp32",
        mixed_precision="no",
        attention="eager",
        optimizer="adamw_torch_fused",
        gradient_checkpointing=True,
        sequence_length=30,
        steps=5,
        warmup_steps=1,
    )
    record = launch(spec, tmp_path / "run")
    assert isinstance(record, Launch), record
    assert troubles(spec, record) == ()
    assert record.evidence["gradient_checkpointing"]
    assert record.evidence["optimizer_fused"]
    assert record.evidence["autocast_dtype"] is None


def test_weights_that_are_not_there_are_refused_before_a_launch(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="names no folder"):
        TrainSpec(model="llama-tiny", weights=str(tmp_path / "nothing here"), sequence_length=16)


def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "nothing in it").mkdir()
    spec = TrainSpec(model="llama-tiny", weights=str(tmp_path / "nothing in it"), sequence_length=16)
    failure = launch(spec, tmp_path / "run")
    assert isinstance(failure, Failure)
    assert failure.kind == "error"
    assert failure.message.startswith("rank 0: ")
    assert failure.tail
    assert failure.folder == str(tmp_path / "run")
    assert_nobody_alive(tmp_path / "run")


def test_a_launch_that_takes_too_long_is_reaped(tmp_path: Path) -> None:
    failure = launch(ENDLESS, tmp_path / "run", timeout_seconds=2.5)
    assert isinstance(failure, Failure)
    assert failure.kind == "timeout"
    assert "--perf-timeout" in failure.message
    assert_nobody_alive(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_is_named_and_its_peer_is_reaped(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    killed: list[int] = []

    def kill_rank_1(progress: Progress) -> None:
        if progress.step > 0 and not killed:
            killed.append(int((folder / "rank-1.pid").read_text()))
            os.kill(killed[0], number)

    failure = launch(ENDLESS, folder, kill_rank_1)
    assert killed
    assert isinstance(failure, Failure)
    assert failure.kind == "killed", failure
    assert failure.rank == 1
    assert f"rank 1 was ended by {number.name}" in failure.message
    assert_nobody_alive(folder)


def test_ctrl_c_reaps_everything(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(ENDLESS, tmp_path / "run", interrupt)
    assert_nobody_alive(tmp_path / "run")


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", LIGHT_PATH)
    folder = tmp_path / "run"
    script = f"""
from pathlib import Path
from tests.worker.launching import ENDLESS, launch
launch(ENDLESS, Path({str(folder)!r}), start="cold")
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    try:
        until(lambda: process.poll() or (len(rank_pids(folder)) == 2 and (folder / "progress.json").exists()), 120)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    until(lambda: not any(psutil.pid_exists(pid) for pid in rank_pids(folder)))


def processes_of(folder: Path) -> list[psutil.Process]:
    """torchrun and ranks of the launch in ``folder``: they alone have it on their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in process.cmdline()[-1:] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_a_launcher_killed_before_a_rank_began_leaves_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", LIGHT_PATH)
    folder = tmp_path / "run"
    # The folder is on the ranks' command line and on torchrun's, and not on this one's.
    script = """
import sys
from pathlib import Path
from tests.worker.launching import ENDLESS, launch
launch(ENDLESS, Path(sys.stdin.readline().strip()), start="cold")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None
        process.stdin.write(f"{folder}\n")
        process.stdin.close()
        until(lambda: process.poll() or processes_of(folder), 120)
        assert process.poll() is None
        time.sleep(1)  # torchrun imports torch; a rank that looks later finds no launcher
        process.kill()
        process.wait()
        until(lambda: not processes_of(folder), otherwise=lambda: processes_of(folder))
        assert len(rank_pids(folder)) > 0, "no rank began, so none could outlive its launcher"
    finally:
        process.kill()
        for left in processes_of(folder):
            left.kill()
