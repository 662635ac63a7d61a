"""``llmperf bisect`` with real training over revisions of a real package: killed in the middle, and started again."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.wide, pytest.mark.filterwarnings("ignore")]

_CASE = ("model=llama-tiny", "sequence_length=32", "steps=6", "min_steps=3", "warmup_steps=2")
_BEFORE = "    def backward(self, loss, **kwargs):\n"
# Real work: thirty sums in each step, whatever the clock makes of them.
_WORK = "        sum((loss.detach() * 1.0).sum() for _ in range(30))\n"


def _git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def _project(folder: Path) -> str:
    """A checkout of accelerate with four commits, of which the third adds work; that one's hash."""
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "accelerate", ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "accelerate" / "accelerator.py"
    _git(folder, "init", "-q", "-b", "main")
    hashes = []
    for number in range(4):
        (folder / "notes.txt").write_text(f"{number}\n")
        if number == 2:
            text = source.read_text()
            assert text.count(_BEFORE) == 1
            source.write_text(text.replace(_BEFORE, _BEFORE + _WORK))
        _git(folder, "add", "-A")
        _git(folder, "commit", "-q", "-m", f"Change {number}")
        hashes.append(_git(folder, "rev-parse", "HEAD"))
    return hashes[2]


def _bisect(folder: Path) -> subprocess.Popen[str]:
    ends = ["--project", "project", "--good", "main~3", "--bad", "main", "--by", "counts"]
    environment = os.environ | {"LLMPERF_CACHE_DIR": str(folder / "cache"), "LLMPERF_LEASE_DIR": str(folder / "leases")}
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest_llmperf.cli",
            "bisect",
            *_CASE,
            "--gpus",
            "0",
            *ends,
            "--by",
            "counts",
            "--json",
        ],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_bisection_goes_on_and_names_the_commit_that_added_work(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    guilty = _project(tmp_path / "project")
    before = _git(tmp_path / "project", "status", "--porcelain", "--ignored")

    first = _bisect(tmp_path)
    assert first.stderr is not None
    assert any("step 1, " in line for line in first.stderr)
    first.send_signal(signal.SIGKILL)
    first.communicate()

    second = _bisect(tmp_path)
    out, err = second.communicate(timeout=240)
    assert second.returncode == 0, err
    found = json.loads(out)
    assert [step["kept"] for step in found["steps"]] == [True, False, False]
    assert (found["first_bad"]["name"], found["first_bad"]["subject"]) == (guilty, "Change 2")
    assert found["last_good"]["subject"] == "Change 1"
    (counted,) = (line for line in found["exact"] if line.startswith("operators: "))
    then, now = (float(word) for word in counted.removeprefix("operators: ").split(" -> "))
    assert now - then > 60  # a product and a sum, thirty times, at least
    assert found["diagnosis"].startswith("a traced step on a CPU, whose times are noise: ")
    assert _git(tmp_path / "project", "status", "--porcelain", "--ignored") == before
