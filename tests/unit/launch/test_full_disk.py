"""A run folder that takes no more: told as what it is, whatever else its launch said."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from pytest_llmperf.launch import local, outcome, scratch
from pytest_llmperf.launch import request as requests
from pytest_llmperf.launch.process import Ended
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import write_text
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny")


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file grows beyond that: the errors of a full disk, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read(folder: Path, *, timed_out: bool = False) -> Failure:
    with room_for(100):
        found = outcome.read(folder, SPEC, Ended(1, timed_out=timed_out, seconds=9.0), Progress(phase="training"))
    assert isinstance(found, Failure)
    return found


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, "unwritable"), (errno.ENOENT, "never-started")])
def test_a_launch_that_cannot_begin_for_want_of_room_says_so(tmp_path: Path, number: int, kind: str) -> None:
    error = OSError(number, os.strerror(number), "request.json")
    request = LaunchRequest(spec=SPEC, folder=tmp_path / "run", gpus=(), timeout_seconds=9)
    with mock.patch.object(requests, "write_request", side_effect=error):
        failure = local.LocalLauncher().launch(request, lambda _: None)
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert os.strerror(number) in failure.message


def test_a_folder_with_room_has_nothing_to_tell_and_keeps_nothing(tmp_path: Path, golden: Golden) -> None:
    assert scratch.unwritable(tmp_path) == ""
    with room_for(100):
        golden(scratch.unwritable(tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_what_cannot_be_written_names_its_file_and_leaves_the_one_before(tmp_path: Path) -> None:
    write_text(tmp_path / "word.json", "before")
    with room_for(3), pytest.raises(OSError, match=r"File too large: '.*/word.json'"):
        write_text(tmp_path / "word.json", "after")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_full_disk_is_told_first_and_what_a_rank_said_after_it(tmp_path: Path, golden: Golden) -> None:
    reason = {"kind": "error", "message": "rank 1: Connection closed by peer", "tail": ["x"], "time": 1.0}
    (tmp_path / "failure-1.json").write_text(json.dumps(reason))
    failure = read(tmp_path)
    assert failure.kind == "unwritable"
    golden(failure.message)


def test_memory_and_the_time_limit_are_told_as_ever(tmp_path: Path, golden: Golden) -> None:
    assert read(tmp_path, timed_out=True).kind == "timeout"
    reason = {"kind": "oom", "message": "rank 0: out of memory", "tail": ["x"], "time": 1.0}
    (tmp_path / "failure-0.json").write_text(json.dumps(reason))
    assert read(tmp_path).kind == "oom"
    golden(read(tmp_path).message)
