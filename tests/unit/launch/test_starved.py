"""A rank that left no reason: whether it died for want of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_llmperf.launch import outcome
from pytest_llmperf.launch.process import Ended
from pytest_llmperf.records.failure import Failure, Progress, Room
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny")
MIB = 2**20

NOTHING, LITTLE, ENOUGH = (Room("its limit", 160 * MIB, left * MIB) for left in (1, 30, 100))
HOST = Room("the host", 2**34, 2**33)


def died(folder: Path, code: int, *, words: str = "", room: Room | None = None, oom_kills: int = 0) -> Failure:
    """What is told of a launch whose one rank ended with ``code`` and left no reason."""
    report = f"  rank      : 0 (local_rank: 0)\n  exitcode  : {code} (pid: 7)\n"
    (folder / "torchrun.log").write_text(f"Root Cause (first observed failure):\n{report}")
    (folder / "rank-0.pid").write_text("7")
    (folder / "logs" / "0").mkdir(parents=True)
    (folder / "logs" / "0" / "stderr.log").write_text(words)
    if room is not None:
        (folder / "room-0.json").write_text(json.dumps(codec.plain(room)).ljust(256))
    ended = Ended(1, timed_out=False, seconds=9.0, oom_kills=oom_kills)
    failure = outcome.read(folder, SPEC, ended, Progress(phase="training", step=2, steps=3))
    assert isinstance(failure, Failure)
    assert failure.rank in {0, None}
    return failure


@pytest.mark.parametrize(
    ("code", "words", "room", "oom_kills"),
    [
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", None, 0),
        (1, "\nlibgomp: Out of memory allocating 262144 bytes\n", None, 0),
        (127, "cannot allocate memory for thread-local data: ABORT\n", None, 0),
        (1, "libgomp: Thread creation failed: Resource temporarily unavailable", LITTLE, 0),
        (-6, "terminate called without an active exception", LITTLE, 0),
        (-11, "", LITTLE, 0),
        (-7, "", NOTHING, 0),
        (1, "", NOTHING, 0),
        (-9, "", HOST, 1),
    ],
)
def test_of_want_of_memory(
    tmp_path: Path, code: int, words: str, room: Room | None, oom_kills: int, golden: Golden
) -> None:
    failure = died(tmp_path, code, words=words, room=room, oom_kills=oom_kills)
    assert failure.kind == "oom"
    assert failure.message.startswith("rank 0 ")
    golden(failure.message)


@pytest.mark.parametrize(
    ("code", "words", "room", "oom_kills"),
    [
        (-6, "terminate called without an active exception", ENOUGH, 0),
        (-6, "terminate called without an active exception", None, 0),
        (-11, "", ENOUGH, 0),
        (1, "libgomp: Thread creation failed: Resource temporarily unavailable", ENOUGH, 0),
        (1, "", LITTLE, 0),
        (-9, "", HOST, 0),
        (-9, "", NOTHING, 0),  # a limit refuses, and kills nobody
        (-9, "", None, 1),  # of a rank on a GPU: its card's memory was not what ended
        (-15, "out of memory", NOTHING, 0),
        (-2, "out of memory", NOTHING, 0),
    ],
)
def test_of_something_else(tmp_path: Path, code: int, words: str, room: Room | None, oom_kills: int) -> None:
    assert died(tmp_path, code, words=words, room=room, oom_kills=oom_kills).kind == "killed"


def test_what_the_kernel_did_is_told(tmp_path: Path, golden: Golden) -> None:
    failure = died(tmp_path, -9, room=HOST, oom_kills=2)
    golden(failure.message)


def test_its_peers_only_saw_it_go(tmp_path: Path) -> None:
    reason = {"kind": "error", "message": "rank 1: connection reset", "tail": [], "time": 1.0}
    (tmp_path / "failure-1.json").write_text(json.dumps(reason))
    assert died(tmp_path, 1, words="libgomp: Out of memory allocating 262144 bytes").kind == "oom"


def test_a_rank_that_told_its_reason_is_believed(tmp_path: Path) -> None:
    reason = {"kind": "error", "message": "rank 0: ValueError: no", "tail": [], "time": 1.0}
    (tmp_path / "failure-0.json").write_text(json.dumps(reason))
    failure = died(tmp_path, 1, words="out of memory", room=NOTHING)
    assert (failure.kind, failure.message) == ("error", "rank 0: ValueError: no")
