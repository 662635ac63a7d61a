"""Workers that fetch batches, for real: that they change no loss, and that nobody is left of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.exact import changes
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trace import Trace
from tests.fakes import trace_of
from tests.worker.launching import ENDLESS, launch, launched

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torchrun

SPEC = TrainSpec(model="llama-tiny", sequence_length=128, micro_batch_size=2, gpus=2, steps=6, min_steps=6)
WORKERS = {"dataloader_num_workers": 2}


def test_what_is_learnt_does_not_depend_on_who_fetches(tmp_path: Path) -> None:
    alone = launched(SPEC, tmp_path / "alone")
    spec = replace(SPEC, training_arguments=WORKERS)
    fetched = launched(spec, tmp_path / "fetched")
    assert fetched.losses == alone.losses
    assert troubles(spec, fetched) == ()
    assert (alone.evidence["data_workers"], fetched.evidence["data_workers"]) == (0, 2)
    assert {line.partition(":")[0] for line in changes([fetched], [alone])} <= {"data_workers", "data_prefetch"}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 2)), min_size=3, max_size=20), st.booleans())
def test_with_workers_a_trace_has_the_waits_of_timed_steps(steps: list[tuple[float, float]], on_host: bool) -> None:
    from pytest_llmperf.observe.tracer import with_timed_waits  # noqa: PLC0415 - it needs torch

    kind = "operator" if on_host else "kernel"
    trace = replace(trace_of({kind: {"gemm": 100}}), step_seconds=0.15, data_seconds=0.01)
    fetched, seconds = [fetch for fetch, _ in steps], [step for _, step in steps]
    waiting = with_timed_waits(trace, [*fetched, 9.0], seconds, warmup_steps=2)  # one of a step that is not timed
    expected = fmean(fetched[2:])
    if not on_host:  # a device that is busy waits for nothing
        expected = min(expected, max(0.0, fmean(seconds[2:]) - trace.busy_seconds))
    assert waiting.data_seconds == pytest.approx(expected)
    assert waiting.step_seconds - waiting.data_seconds == pytest.approx(0.14)
    assert with_timed_waits(trace, [], seconds, 2) is trace
    lost = Trace(none="lost")
    assert with_timed_waits(lost, fetched, seconds, 2) is lost


def ended_by(act: Callable[[psutil.Process, list[psutil.Process]], None], folder: Path, start: str) -> Failure:
    """An endless launch of two ranks with two workers each, once ``act`` was given a rank and its workers; all end."""
    everybody: list[psutil.Process] = []

    def watch(progress: Progress) -> None:
        if progress.step > 0 and not everybody:
            ranks = [psutil.Process(int((folder / f"rank-{number}.pid").read_text())) for number in (0, 1)]
            workers = [rank.children() for rank in ranks]
            assert list(map(len, workers)) == [2, 2]
            everybody.extend([*ranks, *workers[0], *workers[1]])
            act(ranks[1], workers[1])

    failure = launch(replace(ENDLESS, training_arguments=WORKERS), folder, watch, start=start)
    assert isinstance(failure, Failure)
    assert len(everybody) == 6
    assert [one.pid for one in everybody if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    return failure


@pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.wide)])
def test_workers_do_not_outlive_a_killed_rank(tmp_path: Path, start: str) -> None:
    def kill(rank: psutil.Process, workers: list[psutil.Process]) -> None:
        os.kill(rank.pid, signal.SIGKILL)
        # By themselves, at once, and before anybody reaps the launch.
        gone, alive = psutil.wait_procs(workers, timeout=4)
        left = [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
        assert (len(gone) + len(alive), left) == (2, [])

    failure = ended_by(kill, tmp_path / "run", start)
    assert (failure.kind, failure.rank) == ("killed", 1)
    assert "rank 1 was ended by SIGKILL" in failure.message


def test_a_worker_that_dies_ends_the_launch_with_one_line(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(_: psutil.Process, workers: list[psutil.Process]) -> None:
        killed.append(workers[0].pid)
        os.kill(killed[0], signal.SIGKILL)

    failure = ended_by(kill, tmp_path / "run", "warm")
    assert failure.kind == "error"
    # Where a rank reads of the worker's end before PyTorch looks at its workers, its pipe is at its end. On busy
    # cores the other rank may miss it before it has said so.
    assert any(one in failure.message for one in ("DataLoader worker", "EOFError", "Connection closed by peer"))


def test_a_launch_that_ends_well_leaves_no_worker(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    workers: set[psutil.Process] = set()

    def watch(_: Progress) -> None:
        with suppress(OSError, ValueError, psutil.Error):
            workers.update(psutil.Process(int((folder / "rank-0.pid").read_text())).children())

    spec = replace(SPEC, gpus=1, training_arguments=WORKERS, steps=30, min_steps=30)
    assert isinstance(launch(spec, folder, watch), Launch)
    assert len(workers) == 2
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in workers)
