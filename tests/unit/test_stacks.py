"""What a launch that came to its time limit was doing, from what faulthandler writes."""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.launch import outcome, stacks
from pytest_llmperf.launch.process import Ended
from pytest_llmperf.measurement import Failure, Progress
from pytest_llmperf.spec import TrainSpec

WAITING = ("/lib/torch/distributed/c10d.py", 40, "all_reduce")
LOST = ("/my/loader.py", 7, "next_batch")


def written(folder: Path, rank: int, frame: tuple[str, int, str]) -> None:
    beat = 'Thread 0x7f01 (most recent call first):\n  File "/heartbeat.py", line 3 in _beat\n'
    file, line, function = frame
    main = f'  File "{file}", line {line} in {function}\n  File "/train.py", line 9 in main\n'
    path = folder / f"stacks-rank-{rank}.txt"
    path.write_text(f"{beat}\nCurrent thread 0x7f02 (most recent call first):\n{main}")


def test_the_rank_that_is_elsewhere_comes_first(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        written(tmp_path, rank, WAITING)
    written(tmp_path, 2, LOST)
    hang = stacks.read(tmp_path)
    assert hang is not None
    assert hang.message == "rank 2 in next_batch (loader.py:7); ranks 0 to 1, 3 in all_reduce (c10d.py:40)"
    assert (hang.rank, hang.stack) == (2, ("/my/loader.py:7 in next_batch", "/train.py:9 in main"))


def test_of_two_the_one_that_waits_inside_torch_comes_last(tmp_path: Path) -> None:
    written(tmp_path, 0, WAITING)
    written(tmp_path, 1, LOST)
    hang = stacks.read(tmp_path)
    assert hang is not None
    assert hang.rank == 1


def test_many_places_fit_a_line(tmp_path: Path) -> None:
    for rank in range(9):
        written(tmp_path, rank, ("/a.py", rank, "f"))
    hang = stacks.read(tmp_path)
    assert hang is not None
    assert hang.message.endswith("; rank 2 in f (a.py:2); 6 other places")


def test_nobody_who_answered_is_no_hang(tmp_path: Path) -> None:
    assert stacks.read(tmp_path) is None
    (tmp_path / "stacks-rank-0.txt").write_text("")
    assert stacks.read(tmp_path) is None


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
    hang = stacks.read(tmp_path)
    assert hang is not None
    assert "in test_what_this_python_writes_is_read (test_stacks.py:" in hang.message


@given(text=st.text())
def test_whatever_is_in_the_file_nothing_raises(tmp_path_factory: object, text: str) -> None:
    folder = tmp_path_factory.mktemp("run")  # type: ignore[attr-defined]
    (folder / "stacks-rank-0.txt").write_text(text, encoding="utf-8", errors="replace")
    (folder / "stacks-rank-x.txt").write_text(text, encoding="utf-8", errors="replace")
    failure = outcome.read(
        folder, TrainSpec(model="llama-tiny"), Ended(1, timed_out=True, seconds=9.0), Progress(phase="a")
    )
    assert isinstance(failure, Failure)
    assert failure.message.startswith("no end after 9 s, in phase a, step 0 of 0")
