"""Scripts that train for real and end in every way: nothing of them runs afterwards, and one line says why."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llmperf.launch import process
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.launch import Launch
from tests.golden import Golden
from tests.worker.scripted import launch, loop
from tests.worker.user import QUICK, REPOSITORY

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun]
WIDE = pytest.mark.wide

TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node 2 train.py"
# Whoever hears of the end would leave a word: a handler, what comes after training, what the shell does then.
HEARS = """
import atexit, subprocess
torch.distributed.init_process_group("gloo")
out = pathlib.Path({out!r})
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda *_: (out / "handled").touch())
atexit.register(lambda: (out / "at-exit").touch())
shared = torch.zeros(1000).share_memory_()
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
data = iter(torch.utils.data.DataLoader(range(10**6), batch_size=1, num_workers=1))
"""
# Its DataLoader's workers make generators.
WITH_GENERATORS = pytest.mark.usefixtures("_with_generators")


@pytest.fixture
def _with_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDS", "1")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No script here compiles anything."""
    monkeypatch.setenv("PYTHONPATH", str(QUICK))


@WITH_GENERATORS
def test_nothing_of_a_torchrun_in_a_shell_runs_after_its_record(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    before = {*Path("/dev/shm").iterdir()}
    project = loop(
        tmp_path / "project", before=HEARS.format(out=str(out)), each="next(data)", after="(out / 'saved').touch()"
    )
    record = launch(project, f"bash -c '{TORCHRUN} && touch {out}/uploaded'", gpus=2)
    assert isinstance(record, Launch), record
    assert len(record.ranks) == 2
    assert "exchange nothing" in str(record.evidence["remarks"])
    assert not [*out.iterdir()]
    assert not processes_of(tmp_path)
    until(lambda: {*Path("/dev/shm").iterdir()} <= before)  # other tests' semaphores come and go


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter():
        try:
            if one.environ().get("LLMPERF_SCRIPT", "").startswith(str(folder)):
                found.append(one)
        except psutil.Error:
            pass
    return found


# What a shell starts in the background ignores Ctrl-C, and so would what the tests start.
LAUNCHER = """
import signal, sys
from pathlib import Path
from tests.worker.scripted import launch
signal.signal(signal.SIGINT, signal.default_int_handler)
launch(Path(sys.argv[1]), sys.argv[2], gpus=int(sys.argv[3]))
"""
LOADS = "daemon = __import__('subprocess').Popen(['sleep', '100'], start_new_session=True)\n"


@WITH_GENERATORS
@pytest.mark.parametrize(
    ("phase", "by"),
    [
        ("loads", signal.SIGKILL),
        ("trains", signal.SIGINT),
        pytest.param("loads", signal.SIGINT, marks=WIDE),
        pytest.param("trains", signal.SIGKILL, marks=WIDE),
    ],
)
def test_nothing_is_left_where_the_launcher_is_ended(tmp_path: Path, by: signal.Signals, phase: str) -> None:
    before = {*Path("/dev/shm").iterdir()}
    slow: dict[str, Any] = {"before": HEARS.format(out=str(tmp_path)), "each": "time.sleep(0.5)"}
    project = loop(tmp_path / "project", **(slow if phase == "trains" else {"before": f"{LOADS}time.sleep(100)"}))
    command, gpus = (TORCHRUN, 2) if phase == "trains" else ("bash -c 'python train.py && true'", 1)
    words = [sys.executable, "-c", LAUNCHER, str(project), command, str(gpus)]
    launcher = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wanted, folder = ("steps-?.pid", tmp_path / "project-launch") if phase == "trains" else ("seen-*", tmp_path)
    until(lambda: len([*(tmp_path / "project-launch").glob(wanted)]) >= gpus and len(processes_of(folder)) > gpus)
    launcher.send_signal(by)
    launcher.wait(60)
    until(lambda: not processes_of(tmp_path))
    until(lambda: {*Path("/dev/shm").iterdir()} <= before)  # other tests' semaphores come and go
    assert not (tmp_path / "handled").exists()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


# It asks another Python for a package, has an alarm and a choice that is the name of a file, too.
ASKS_AROUND = """
import subprocess
subprocess.run([sys.executable, "-c", "import torch; raise ImportError('flash_attn')"])
def late(*_):
    raise TimeoutError("a step hangs")
signal.signal(signal.SIGALRM, late)
assert sys.argv[1:] == ["--mode", "fast"]
"""


@pytest.mark.wide
def test_what_a_script_does_beside_its_training_is_no_failure(tmp_path: Path) -> None:
    each = "step == 9 and signal.setitimer(signal.ITIMER_REAL, 0.1)"
    project = loop(tmp_path / "project", before=ASKS_AROUND, each=each)
    (project / "fast").touch()
    record = launch(project, "python train.py --mode fast")
    assert isinstance(record, Launch), record
    assert record.environment.variables["PYTHONPATH"] == str(QUICK), "the hooks' folder is none of the user's"


# A helper with another model: goes backward, makes three steps, or goes on for ever.
HELPER = """
import torch, time
weight = torch.nn.Parameter(torch.ones(3))
for step in range({steps}):
    weight.sum().backward()
    {each}
"""
# Until it was taken for the rank; a launch that waits in vain fails by what is asserted.
HELPER_BEGAN = """
for _ in range(600):
    if [*pathlib.Path(os.environ["LLMPERF_SCRIPT"]).glob("rank-0.pid")]:
        break
    time.sleep(0.1)
"""
HELPERS = {
    "goes backward": ("run", HELPER.format(steps=1, each="")),
    "ends early": ("run", HELPER.format(steps=3, each="torch.optim.SGD([weight]).step()")),
    "raises": ("run", HELPER.format(steps=1, each="1 / 0")),
    "goes on": ("Popen", HELPER.format(steps=10**6, each="torch.optim.SGD([weight]).step(); time.sleep(0.05)")),
}


@pytest.mark.parametrize("helper", [pytest.param(name, marks=WIDE if name != "goes on" else ()) for name in HELPERS])
def test_a_helper_that_goes_backward_first_is_no_rank(tmp_path: Path, helper: str) -> None:
    how, code = HELPERS[helper]
    before = f"import subprocess\nsubprocess.{how}([sys.executable, '-c', {code!r}])\n"
    project = loop(tmp_path / "project", before=before + (HELPER_BEGAN if how == "Popen" else ""))
    record = launch(project)
    assert isinstance(record, Launch), record
    assert record.parameters == 16 * 16 + 16 + 16 + 1
    assert not processes_of(tmp_path)


def test_a_helper_that_lives_on_tells_nothing_of_how_far_the_training_is(tmp_path: Path) -> None:
    code = HELPER.format(steps=1, each="time.sleep(100)")
    before = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {code!r}])\n{HELPER_BEGAN}"
    steps: list[int] = []
    project = loop(tmp_path / "project", before=before, each="time.sleep(0.3)")
    record = launch(project, steps=10, watch=lambda progress: steps.append(progress.step))
    assert isinstance(record, Launch), record
    assert steps == sorted(steps)
    assert max(steps) > 1


SPAWNS = """
def rank(_):
    torch.nn.Linear(4, 1)(torch.randn(2, 4)).mean().backward()
    raise ValueError("a bad row")
if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, nprocs=1)
"""
FAULTS: dict[str, dict[str, Any]] = {
    "it raised": {"each": "assert step < 4, 'no more of it'"},
    "it raised, and told of it itself": {
        "before": "sys.excepthook = lambda *_: print('see above')",
        "each": "assert step < 4, 'no more of it'",
    },
    "it ended, and shows an error that it had handled": {"steps": 5, "before": "sys.last_value = OSError('no cache')"},
    "no rank raised": {"command": "bash -c 'python train.py & wait $!; exit 5'", "before": "raise OSError('no data')"},
    "a rank that it spawned raised": {"steps": 0, "before": SPAWNS},
    "it ended": {"steps": 5, "after": "print('bye'); sys.exit(3)"},
    "it was killed": {"each": "step == 5 and (time.sleep(1.5), os.kill(os.getpid(), 9))"},
    "it has no optimizer": {"each": "loss.backward(); time.sleep(0.1); continue", "seconds": 25.0},
    "it hangs before it trains": {"before": "def load():\n    time.sleep(100)\nload()", "seconds": 20.0},
    "it hangs": {"each": "step == 10 and time.sleep(100)", "seconds": 25.0, "fields": {"steps": 20}},
    "torchrun finds no script": {"command": "bash -c '" + TORCHRUN.replace("train", "other") + "'"},
    "python -I": {"command": "python -I train.py", "steps": 2},
}
# tests/worker/test_script_loops.py has the one without an optimizer too.
RARE = {name for name in FAULTS if name not in ("it raised", "it ended", "it was killed")}


@pytest.mark.parametrize("fault", [pytest.param(name, marks=WIDE if name in RARE else ()) for name in FAULTS])
def test_a_script_without_a_record_says_why_in_a_line(
    tmp_path: Path, fault: str, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_ANSWER_SECONDS", 1.0)
    given = dict(FAULTS[fault])
    how = {name: given.pop(name) for name in ("command", "seconds") if name in given} | given.pop("fields", {})
    failure = launch(loop(tmp_path / "project", **given), **how)
    assert isinstance(failure, Failure)
    steady = re.sub(r"process \d+|\d+ s\b", "#", failure.message)
    golden([f"{failure.kind}: {steady}", *failure.tail[-1:]])
    assert not processes_of(tmp_path)


def test_of_ranks_the_one_that_was_killed_is_named_and_not_its_peer(tmp_path: Path) -> None:
    killed = "step == 5 and torch.distributed.get_rank() == 1 and os.kill(os.getpid(), 9)"
    each = f"torch.distributed.all_reduce(loss.detach()); {killed}"
    project = loop(tmp_path / "project", before="torch.distributed.init_process_group('gloo')", each=each)
    failure = launch(project, TORCHRUN, gpus=2)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.rank) == ("killed", 1)


def test_a_script_may_run_to_its_own_end(tmp_path: Path) -> None:
    project = loop(tmp_path / "project", steps=20, after="(pathlib.Path('saved')).touch(); sys.exit(4)")
    record = launch(project, end="script")
    assert isinstance(record, Launch), record
    assert record.evidence["remarks"] == ["the command ended with 4, after what was measured"]
    assert (tmp_path / "project-launch" / "work" / "saved").exists(), "what it writes is kept"
    assert not (project / "saved").exists()
