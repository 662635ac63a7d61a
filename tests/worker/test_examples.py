"""The examples as their readers start them: recorded once, then judged, with nothing changed in their scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.user import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
FOLDERS = sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir())
SECONDS = 300


def _pytest(folder: Path, *words: str) -> Any:
    """The document of a run of one example's first test."""
    environment = {**os.environ, "LLMPERF_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpus", "0", "--perf-json=out.json"]
    done = subprocess.run(
        [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


@pytest.mark.torchrun
@pytest.mark.wide
@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_is_recorded_and_holds(name: str, tmp_path: Path) -> None:
    if name == "accelerate_loop" and shutil.which("accelerate") is None:
        pytest.skip("no accelerate program on the path")
    home = tmp_path / "examples" / name
    shutil.copytree(EXAMPLES / name, home)
    (tmp_path / "pytest.ini").touch()
    before = sorted(path.name for path in home.iterdir())
    chosen = [f"examples/{name}/test_speed.py", "-k", "not 16"]
    recorded = _pytest(tmp_path, *chosen, "--update-baselines=new")
    (result,) = recorded["results"]
    assert result["verdict"] == "new"
    assert result["updated"].startswith("recorded ")
    for launch in result["launches"]:
        assert launch["evidence"]["tokens"] == "counted"
        assert len(launch["losses"]) == len(launch["ranks"][0]["step_seconds"]) == 30
        assert "none" not in launch["trace"]
    (judged,) = _pytest(tmp_path, *chosen)["results"]
    assert judged["verdict"] == "pass"
    assert sorted(path.name for path in home.iterdir() if path.name != "__pycache__") == before  # nothing was left


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_knows_nothing_of_this_plugin_and_its_test_is_short(name: str) -> None:
    assert "llmperf" not in (EXAMPLES / name / "train.py").read_text(encoding="utf-8")
    lines = (EXAMPLES / name / "test_speed.py").read_text(encoding="utf-8").splitlines()
    body = [line for line in lines if line and not line.startswith("import")]
    assert len(body) <= 4
    assert f"]({name}/train.py)" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
