"""What a launch that came to its time limit was doing, from what faulthandler writes."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.launch import outcome, process
from pytest_llmperf.launch.process import Ended
from pytest_llmperf.observe.vital_signs import Objects, grown
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.golden import Golden
from tests.waiting import until

WAITING = ("/lib/torch/distributed/c10d.py", 40, "all_reduce")
TIMED_OUT = Ended(1, timed_out=True, seconds=9.0)
LOST = ("/my/loader.py", 7, "next_batch")


def written(folder: Path, rank: int, frame: tuple[str, int, str]) -> None:
    beat = 'Thread 0x7f01 (most recent call first):\n  File "/heartbeat.py", line 3 in _beat\n'
    file, line, function = frame
    main = f'  File "{file}", line {line} in {function}\n  File "/train.py", line 9 in main\n'
    path = folder / f"stacks-rank-{rank}.txt"
    path.write_text(f"{beat}\nCurrent thread 0x7f02 (most recent call first):\n{main}")


def test_the_rank_that_is_elsewhere_comes_first(tmp_path: Path, golden: Golden) -> None:
    for rank in (0, 1, 3):
        written(tmp_path, rank, WAITING)
    written(tmp_path, 2, LOST)
    hang = outcome.hang_in(tmp_path)
    assert hang is not None
    golden(hang.message)
    assert (hang.rank, hang.stack) == (2, ("/my/loader.py:7 in next_batch", "/train.py:9 in main"))


def test_of_two_the_one_that_waits_inside_torch_comes_last(tmp_path: Path) -> None:
    written(tmp_path, 0, WAITING)
    written(tmp_path, 1, LOST)
    hang = outcome.hang_in(tmp_path)
    assert hang is not None
    assert hang.rank == 1


@pytest.mark.parametrize("function", ["now", "_agreed"])
def test_a_host_that_waits_for_the_last_step_comes_last_too(function: str, tmp_path: Path) -> None:
    file = Path(outcome.__file__).parents[1] / "observe" / "training.py"
    assert f"def {function}(self" in file.read_text()
    written(tmp_path, 0, (str(file), 252, function))
    path = tmp_path / "stacks-rank-0.txt"
    asks = '  File "/lib/torch/cuda/streams.py", line 5 in query\n'  # where its device is
    path.write_text(
        path.read_text().replace("0x7f02 (most recent call first):\n", f"0x7f02 (most recent call first):\n{asks}")
    )
    written(tmp_path, 1, LOST)
    hang = outcome.hang_in(tmp_path)
    assert hang is not None
    assert (hang.rank, f"rank 0 in {function} (training.py:252)" in hang.message) == (1, True)


def silent(folder: Path, rank: int, node: str, status: str = "stopped") -> None:
    (folder / f"stacks-rank-{rank}.txt").write_text("")
    (folder / f"silent-rank-{rank}.json").write_text(json.dumps({"node": node, "status": status}))


def test_ranks_that_did_not_answer_come_before_all_that_did(tmp_path: Path, golden: Golden) -> None:
    written(tmp_path, 0, WAITING)
    written(tmp_path, 1, LOST)
    for rank in (2, 3):
        silent(tmp_path, rank, "n2", "disk-sleep")
    hang = outcome.hang_in(tmp_path)
    assert hang is not None
    golden(hang.message)
    assert (hang.rank, hang.stack[0]) == (2, "/my/loader.py:7 in next_batch"), "a stack is of one that answered"


def test_where_nobody_answered_the_last_lines_are_the_ranks(tmp_path: Path, golden: Golden) -> None:
    silent(tmp_path, 0, "")
    (tmp_path / "logs" / "0").mkdir(parents=True)
    (tmp_path / "logs" / "0" / "stderr.log").write_text("its last line\n")
    failure = outcome.read(tmp_path, TrainSpec(model="llama-tiny"), TIMED_OUT, Progress(phase="a"))
    assert isinstance(failure, Failure)
    golden(failure.message)
    assert failure.tail == ("its last line",)


def test_a_stopped_rank_is_told_with_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    """Two processes that take themselves for ranks, each with a data worker, which looks as it does; one is stopped."""
    monkeypatch.setattr(process, "_ANSWER_SECONDS", 1.0)
    processes = []
    with ExitStack() as started:
        for rank in ("0", "1"):
            code = (
                f"import faulthandler, os, pathlib, signal, time; folder = pathlib.Path({str(tmp_path)!r})\n"
                f"file = (folder / 'stacks-rank-{rank}.txt').open('w')\n"
                "faulthandler.register(signal.SIGUSR1, file=file)\n"
                "def fetch(rank):\n    while os.getppid() == rank:\n        time.sleep(0.05)\n    os._exit(0)\n"
                "rank = os.getpid()\nos.fork() or fetch(rank)\n"
                f"(folder / 'rank-{rank}.pid').touch()\ntime.sleep(60)"
            )
            words = [sys.executable, "-c", code, "pytest_llmperf.worker", str(tmp_path)]
            processes.append(started.enter_context(subprocess.Popen(words, env={**os.environ, "RANK": rank})))
            started.callback(processes[-1].kill)
        until(lambda: len([*tmp_path.glob("rank-*.pid")]) == 2)
        processes[1].send_signal(signal.SIGSTOP)
        process.ask_ranks(tmp_path, os.getpid(), "n2")
    hang = outcome.hang_in(tmp_path)
    assert hang is not None
    golden(hang.message)


def test_many_places_fit_a_line(tmp_path: Path, golden: Golden) -> None:
    for rank in range(9):
        written(tmp_path, rank, ("/a.py", rank, "f"))
    hang = outcome.hang_in(tmp_path)
    assert hang is not None
    golden(hang.message)


def test_nobody_who_answered_is_no_hang(tmp_path: Path) -> None:
    assert outcome.hang_in(tmp_path) is None
    (tmp_path / "stacks-rank-0.txt").write_text("")
    assert outcome.hang_in(tmp_path) is None


def test_of_more_threads_than_are_written_none_is_taken_for_the_main_one(tmp_path: Path) -> None:
    written(tmp_path, 0, LOST)
    with (tmp_path / "stacks-rank-0.txt").open("a") as file:
        file.write("  ...\n")
    assert outcome.hang_in(tmp_path) is not None, "a deep stack is cut like this, a line further in"
    with (tmp_path / "stacks-rank-0.txt").open("a") as file:
        file.write("...\n")
    assert outcome.hang_in(tmp_path) is None


def test_what_this_python_writes_is_read(tmp_path: Path) -> None:
    """Its form has changed before: 3.14 names the threads."""
    leave = threading.Event()
    other = threading.Thread(target=leave.wait)
    other.start()
    try:
        with (tmp_path / "stacks-rank-0.txt").open("w") as file:
            faulthandler.dump_traceback(file)
    finally:
        leave.set()
        other.join()
    hang = outcome.hang_in(tmp_path)
    assert hang is not None
    assert "in test_what_this_python_writes_is_read (test_stacks.py:" in hang.message


@given(text=st.text())
def test_whatever_is_in_the_file_nothing_raises(tmp_path_factory: object, text: str) -> None:
    folder = tmp_path_factory.mktemp("run")  # type: ignore[attr-defined]
    (folder / "stacks-rank-0.txt").write_text(text, encoding="utf-8", errors="replace")
    (folder / "stacks-rank-x.txt").write_text(text, encoding="utf-8", errors="replace")
    (folder / "silent-rank-0.json").write_text(text, encoding="utf-8", errors="replace")
    failure = outcome.read(folder, TrainSpec(model="llama-tiny"), TIMED_OUT, Progress(phase="a"))
    assert isinstance(failure, Failure)
    assert failure.message.startswith("no end after 9 s, in phase a")


def test_a_rank_says_that_it_has_told_all_only_once_its_main_threads_stack_is_there(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys, types
from pathlib import Path
from pytest_llmperf.observe import vital_signs
sys.modules["pytest_llmperf.observe.places"] = types.SimpleNamespace(recorded=lambda _: b"recorded")
words = vital_signs.LastWords(Path({str(tmp_path)!r}), 1)
def answered():
    words.poll()
    return Path({str(tmp_path / "trace-rank-1")!r}).exists()
written = []
os.write(words._file.fileno(), b"Thread 0x0000000000000001 (most recent call first):\\n  File \\"a\\", line 1 in b\\n")
written += [answered(), answered(), answered()]
os.kill(os.getpid(), signal.SIGUSR1)
written += [answered(), answered()]
print(*written)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False", "False", "False", "True"]


class Kept:
    """What a training forgets to let go."""


@pytest.fixture
def _young() -> Iterator[None]:
    """What other tests have left is not looked through: seconds of a worker that has run thousands."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_young")
def test_objects_that_became_more_have_their_kind_and_the_variable_that_leads_to_them() -> None:
    before = Objects().look()
    mine = SimpleNamespace(history=[Kept() for _ in range(200)])
    with ThreadPoolExecutor(1) as pool:  # as a diary asks, of the thread that trains
        found = pool.submit(grown, before, 100).result()
    name = "test_objects_that_became_more_have_their_kind_and_the_variable_that_leads_to_them"
    assert found[f"Kept in 'mine' of {name}() in test_stacks.py"] == 2.0
    assert len(mine.history) == 200
    assert not any(kind.startswith("Kept") for kind in grown(Objects().look(), 1))


@pytest.mark.usefixtures("_young")
def test_what_is_kept_is_found_among_more_that_is_as_new_and_that_no_container_has() -> None:
    old, history = [Kept() for _ in range(1000)], [Kept() for _ in range(40)]
    before = Objects().look()
    history += [Kept(), Kept()]
    gradients = [SimpleNamespace(of=Kept()) for _ in range(300)]  # each by itself, and newer than what is kept
    found = grown(before, 2)
    name = "test_what_is_kept_is_found_among_more_that_is_as_new_and_that_no_container_has"
    assert any(kind.startswith(f"Kept in 'history' of {name}()") for kind in found), found
    assert (len(old), len(gradients)) == (1000, 300)


@pytest.mark.usefixtures("_young")
@pytest.mark.parametrize("kept", [lambda one: (1, one), lambda one: {"loss": one}, lambda one: [one]])
def test_what_is_kept_beside_the_number_of_its_step_is_found_too(kept: Callable[[Kept], object]) -> None:
    old, history = [Kept() for _ in range(1000)], list[object]()
    before = Objects().look()
    history += [kept(Kept()) for _ in range(3)]
    found = grown(before, 2, among={Kept})
    name = "test_what_is_kept_beside_the_number_of_its_step_is_found_too"
    assert any(kind.startswith(f"Kept in 'history' of {name}()") for kind in found), found
    assert len(old) == 1000
