"""``llmperf tune`` with real training: killed in the middle, started again, and its winner held by the suite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_llmperf.cli.tune_pages import winners_test
from pytest_llmperf.settings.train_spec import TrainSpec

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.wide, pytest.mark.filterwarnings("ignore")]

_SPACE = "[axes]\nmicro_batch_size = [1, 4]\ngradient_checkpointing = [true]\n"


def _tune(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest_llmperf.cli", "tune", "llama-tiny", "sequence_length=32", "--gpus", "0"]
    environment = os.environ | {"LLMPERF_CACHE_DIR": str(folder / "cache"), "LLMPERF_LEASE_DIR": str(folder / "leases")}
    return subprocess.Popen(
        [*command, "--space", "space.toml", "--minutes", "4", "--record", *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_search_goes_on_and_its_winner_is_held_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(_SPACE)
    first = _tune(tmp_path)
    assert first.stderr is not None
    told = next(line for line in first.stderr if " tokens/s/GPU, " in line)
    first.send_signal(signal.SIGKILL)
    first.communicate()

    second = _tune(tmp_path, "--json")
    out, err = second.communicate(timeout=240)
    assert second.returncode == 0, err
    found = json.loads(out)
    assert [one["kept"] for one in found["trials"]] == [True, False]
    assert found["trials"][0]["id"] in told
    rates = {one["id"]: one["tokens_per_step"] / one["step_seconds"] for one in found["trials"]}
    if max(rates.values()) > 1.1 * min(rates.values()):  # else turns may say so, or a tie
        assert found["winner"]["id"] == max(rates, key=lambda name: rates[name])
    assert found["parity"]["verdict"] == "pass"
    assert found["case"]["updated"]

    (tmp_path / "test_tuned.py").write_text("\n".join(winners_test(TrainSpec(**found["winner"]["spec"]), 0)))
    words = "-m pytest test_tuned.py --gpus 0 --perf-max-launches 1 -p no:randomly --rootdir . -q".split()
    suite = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"LLMPERF_LEASE_DIR": str(tmp_path / "leases")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert suite.returncode == 0, suite.stdout + suite.stderr
    assert found["winner"]["id"] in suite.stdout
    assert " pass " in suite.stdout or "inconclusive" in suite.stdout
