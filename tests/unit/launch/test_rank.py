"""A rank by itself, before it trains."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_llmperf import TrainSpec
from pytest_llmperf.support.interpreter import uncollected
from tests.golden import Golden

_REPOSITORY = Path(__file__).parents[3]


def test_one_that_cannot_import_torch_leaves_its_reason(tmp_path: Path, golden: Golden) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    run = tmp_path / "run"
    run.mkdir()
    spec = TrainSpec(model="llama-tiny", sequence_length=16)
    (run / "request.json").write_text(json.dumps({"spec": spec.to_dict(), "model_config": {}}))
    environment = {**os.environ, "RANK": "0", "PYTHONPATH": f"{broken}:{_REPOSITORY}"}
    words = [sys.executable, "-m", "pytest_llmperf.worker", str(run)]
    ended = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    failure = json.loads((run / "failure-0.json").read_text())
    assert failure["kind"] == "error"
    golden(failure["message"])


def test_what_imports_made_is_old_and_collected_by_who_collects_all() -> None:
    made: list[list[int]] = []
    gc.collect()
    with uncollected():
        assert not gc.isenabled()
        made += [[number] for number in range(10_000)]
        waste: list[Any] = []
        waste.append(waste)
    assert gc.isenabled()
    assert gc.get_count()[0] < 1000, "or the next object is a reason to look through all of them"
    assert gc.get_freeze_count() == 0
    del waste
    assert gc.collect() >= 1
