"""Real runs that are watched: they end as they would, and leave a row of history, also where they are killed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.cli.answer import CaseError
from pytest_llmperf.cli.commands import script as hook
from pytest_llmperf.launch.script import HOOKS
from pytest_llmperf.run.history import History
from tests.worker.import_patch import QUICK_TOO
from tests.worker.user import QUICK, REPOSITORY

pytest.importorskip("torch")

pytestmark = pytest.mark.torchrun

# Own output, an own exit code, a handler of its own; every step is a hundredth of a second at least.
TRAINING = """
import os, sys, time, torch
print("HERE", os.getcwd(), flush=True)
embedding, head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
optimizer = torch.optim.AdamW([*embedding.parameters(), *head.parameters()])
for step in range(int(sys.argv[1])):
    ids = torch.randint(50, (2, 16))
    torch.nn.functional.cross_entropy(head(embedding(ids)).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if step == 100:
        print("MIDDLE", flush=True)
sys.exit(7)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path


def _environment(here: Path, **more: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(QUICK), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "LLMPERF_CACHE_DIR": str(here / "state"), "PYTHONPATH": paths, **more}


def _row(folder: Path) -> dict[str, object]:
    (file,) = folder.rglob("observed-*.json")
    return dict(json.loads(file.read_text()))


def test_a_watched_run_keeps_its_output_and_exit_code_and_leaves_a_row(here: Path) -> None:
    observe = [sys.executable, "-m", "pytest_llmperf.cli", "script", "--observe", "--trace-at", "150", "--"]
    command = [*observe, sys.executable, "train.py", "300"]
    before = {path.name for path in here.iterdir()}
    done = subprocess.run(
        command, cwd=here, env=_environment(here), capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (7, f"HERE {here}\nMIDDLE\n"), done.stderr
    assert {path.name for path in here.iterdir()} == before | {"state"}
    (result,) = History.read([here / "state" / "observed"]).results
    assert (result.id, result.verdict, result.tokens_per_step, result.ranks) == ("train-300-gpus1", "observed", 32, 1)
    assert result.observed["steps"] == 300
    assert "drift" in result.observed
    assert result.machine.startswith("cpu-")
    assert 0.01 < result.step_seconds < 1
    assert result.counts["operators_per_step"] > 0
    assert not result.unfinished
    shown = subprocess.run(
        [sys.executable, "-m", "pytest_llmperf.cli", "history", "train-300-gpus1"],
        env=_environment(here),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "a real run of 300 steps, watched; its last quarter against its first: " in shown.stdout


def test_a_command_without_torch_says_that_it_left_no_row(here: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest_llmperf.cli",
        "script",
        "--observe",
        "--",
        sys.executable,
        "-c",
        "print(1)",
    ]
    done = subprocess.run(
        command, cwd=here, env=_environment(here), capture_output=True, text=True, check=True, timeout=120
    )
    assert (done.stdout, "no row: " in done.stderr) == ("1\n", True)


@pytest.mark.parametrize(
    ("steps", "trace_at", "told"),
    [
        ("5", "400", "llmperf: no row: fewer than 8 steps were timed\n"),
        pytest.param("40", "400", "llmperf: step 400 was not reached: nothing was traced\n", marks=pytest.mark.wide),
        ("40", "3", ""),
    ],
)
def test_what_a_watched_run_cannot_leave_is_told_at_its_end(here: Path, steps: str, trace_at: str, told: str) -> None:
    observe = [sys.executable, "-m", "pytest_llmperf.cli", "script", "--observe", "--trace-at", trace_at, "--"]
    command = [*observe, sys.executable, "train.py", steps]
    done = subprocess.run(
        command, cwd=here, env=_environment(here), capture_output=True, text=True, check=False, timeout=120
    )
    said = [line for line in done.stderr.splitlines(keepends=True) if "is watched" not in line and "USDT" not in line]
    assert (done.returncode, "".join(said)) == (7, told)
    if not told:  # steps are known after the eighth: those that follow are traced
        assert _row(here / "state")["observed"]["counts"]["operators_per_step"] > 0  # type: ignore[index]


def test_a_killed_run_leaves_a_row_too(here: Path) -> None:
    (here / "sitecustomize.py").write_text(
        f"{QUICK_TOO}import time; time.monotonic = lambda real=time.monotonic: 1000 * real()"
    )
    paths = os.pathsep.join([str(HOOKS), str(here), str(REPOSITORY)])
    environment = _environment(here, PYTHONPATH=paths, LLMPERF_OBSERVE=str(here / "rows"))
    run = subprocess.Popen(
        [sys.executable, "train.py", "100000"], cwd=here, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    for line in run.stdout:
        if line == "MIDDLE\n":
            break
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    row = _row(here / "rows")
    assert row["observed"]["unfinished"] == "still running, or ended from outside"  # type: ignore[index]
    assert row["observed"]["observed"]["steps"] >= 8  # type: ignore[index]


def test_an_installed_hook_is_inert_without_its_variable_and_can_be_removed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(here / "env", with_pip=False, symlinks=True)
    python = here / "env" / "bin" / "python"
    (site,) = (here / "env" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(here / "nowhere"))
    with pytest.raises(CaseError, match="not written"):
        hook.install_hook()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(site))
    line = hook.install_hook()
    assert "without LLMPERF_OBSERVE=FOLDER it does nothing" in line
    environment = _environment(here)
    asks = "import sys; print([type(one).__name__ for one in sys.meta_path], 'runpy' in sys.modules)"
    inert = subprocess.run([python, "-c", asks], env=environment, capture_output=True, text=True, check=True)
    assert "_WaitsForTorch" not in inert.stdout
    assert not inert.stderr
    watched = {**environment, "LLMPERF_OBSERVE": str(here / "rows")}
    done = subprocess.run(
        [python, "train.py", "40"], cwd=here, env=watched, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert _row(here / "rows")["observed"]["observed"]["steps"] == 40  # type: ignore[index]
    assert hook.remove_hook().endswith("llmperf_hook.pth")
    assert not (site / "llmperf_hook.pth").exists()
    with pytest.raises(CaseError, match="no hook is installed"):
        hook.remove_hook()


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=3000), st.integers(1, 4))
def test_a_ring_stays_small_and_keeps_the_middle(values: list[float], each: int) -> None:
    from pytest_llmperf.worker.script.production import _MOST, Ring  # noqa: PLC0415 - it imports torch

    ring = Ring(each)
    full = [ring.add(value) for value in values]
    assert len(ring.windows) < _MOST
    assert sum(full) == 0 or ring.windows
    assert min(values) <= ring.middle <= max(values)
    if len(values) < each:
        assert ring.middle == median(values)
    if ring.ends:
        assert all(min(values) <= end <= max(values) and math.isfinite(end) for end in ring.ends)
