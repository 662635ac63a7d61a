"""A user's project in which pytest really trains, in a process of its own as from a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RESULTS = "out.json"
# What these tests' own environment has besides costs each pytest a sixth of a second, or a third where much else runs.
PLAIN = "-p no:randomly -p no:hypothesispytest -p no:anyio"
#: First on the path of ranks that train a small network with plain PyTorch: for what becomes of them, not of a model.
LIGHT = REPOSITORY / "tests" / "slurm" / "light"
LIGHT_PATH = f"{LIGHT}:{REPOSITORY}"
#: First on the path of scripts that compile nothing: what they leave out of torch takes half of its import.
QUICK = REPOSITORY / "tests" / "worker" / "quick"
QUICK_PATH = f"{QUICK}:{REPOSITORY}"


def make(folder: Path, case: str) -> Path:
    """``folder`` with one test file."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_case.py").write_text(case)
    return folder


def start(folder: Path, *options: str, inject: str = "", path: str = str(REPOSITORY)) -> subprocess.Popen[bytes]:
    """pytest in ``folder`` on the CPU, its output in ``log``, its results in ``RESULTS``."""
    (folder / RESULTS).unlink(missing_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = ["-m", "pytest", "-v", *PLAIN.split(), "--gpus", "0", "--perf-json", RESULTS]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *words, *options],
            cwd=folder,
            env={**clean, "PYTHONPATH": path, "LLMPERF_INJECT": inject},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # One that was started in the background ignores it, and xdist ends its workers by it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
        )


def run(folder: Path, *options: str, seconds: float = 400, **given: str) -> dict[str, Any]:
    """What ``--perf-json`` says of a whole run, ``given`` as to ``start``."""
    with start(folder, *options, **given) as process:
        try:
            process.wait(seconds)
        finally:
            process.kill()
    assert (folder / RESULTS).exists(), (folder / "log").read_text()
    return dict(json.loads((folder / RESULTS).read_text()))


def run_one(folder: Path, *options: str, seconds: float = 400, **given: str) -> dict[str, Any]:
    """The one result of a run."""
    (result,) = run(folder, *options, seconds=seconds, **given)["results"]
    return dict(result)
