"""The input pipeline, for real: who fetches and tokenises, that it changes no loss, and that nobody is left of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.analysis.waits import data_wait
from pytest_llmperf.judge.exact import changes
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.settings.registry import contradictions
from tests.fakes import trace_of
from tests.worker import slow_text
from tests.worker.import_patch import in_the_rank
from tests.worker.launching import ENDLESS, launch, launched

torch = pytest.importorskip("torch")
pytest.importorskip("datasets")

from pytest_llmperf.worker.settings.data import DataWorkerError, explained  # noqa: E402 - it needs torch

pytestmark = pytest.mark.torchrun

# Of 512 bytes some row of each batch has padding, so that each step runs the same operators.
SPEC = TrainSpec(
    model="llama-tiny", data="text", rows="padded", sequence_length=512, micro_batch_size=4, steps=6, min_steps=6
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launched(SPEC, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    ("settings", "by"),
    [
        ({"data_workers": 2}, "nobody, they were made ahead"),
        ({"tokenise": "on_the_fly"}, "rank"),
        ({"tokenise": "on_the_fly", "data_workers": 2, "data_prefetch": 3}, "workers"),
    ],
)
def test_what_is_learnt_does_not_depend_on_who_fetches_and_when(
    plain: Launch, tmp_path: Path, settings: dict[str, Any], by: str
) -> None:
    spec = replace(SPEC, **settings)
    record = launched(spec, tmp_path / "run")
    assert record.losses == plain.losses
    assert record.ranks[0].real_tokens == plain.ranks[0].real_tokens
    assert record.evidence["data"] == plain.evidence["data"]
    assert troubles(spec, record) == ()
    seen = {name: record.evidence[name] for name in ("data_workers", "data_prefetch", "data_pinned", "tokenised_by")}
    prefetch = spec.data_prefetch or (2 if spec.data_workers else None)
    assert seen == {
        "data_workers": spec.data_workers,
        "data_prefetch": prefetch,
        "data_pinned": False,
        "tokenised_by": by,
    }
    assert [*contradictions(SPEC, record.seen, frozenset())] != []
    assert {line.partition(":")[0] for line in changes([record], [plain])} <= {
        "data_workers",
        "data_prefetch",
        "tokenised_by",
    }


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


@pytest.mark.wide
def test_two_ranks_with_workers_share_each_epoch_as_two_without(tmp_path: Path) -> None:
    two = replace(SPEC, gpus=2, micro_batch_size=2, gradient_accumulation_steps=2, sequence_length=128)
    alone = launched(two, tmp_path / "alone")
    fetched = launched(replace(two, data_workers=2, tokenise="on_the_fly"), tmp_path / "fetched")
    assert fetched.losses == alone.losses
    assert [rank.real_tokens for rank in fetched.ranks] == [rank.real_tokens for rank in alone.ranks]
    assert troubles(replace(two, data_workers=2, tokenise="on_the_fly"), fetched) == ()


def test_workers_that_were_asked_for_and_are_not_there_make_a_launch_invalid(tmp_path: Path) -> None:
    # As a Trainer that would not pass them on.
    patch = (
        "own = module.training_arguments\n    module.training_arguments = lambda spec, *more: own(alone(spec), *more)"
    )
    alone = "from dataclasses import replace\n    alone = lambda spec: replace(spec, data_workers=0)\n    "
    variables = in_the_rank(tmp_path, "pytest_llmperf.worker.recipes.huggingface.trainer", alone + patch)
    spec = replace(SPEC, data_workers=2, tokenise="on_the_fly")
    record = launched(spec, tmp_path / "run", variables=variables)
    assert "asked for data workers 2, the run had 0" in troubles(spec, record)
    assert "asked for tokens on the fly by the workers, made by rank" in troubles(spec, record)


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

    failure = launch(replace(ENDLESS, data_workers=2), folder, watch, start=start)
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
    # PyTorch has the signal from the worker's end; where its own look at its workers comes first, only that it is gone.
    said = re.fullmatch(
        rf"rank 1: DataWorkerError: a data worker \(pid {killed[0]}\) has died(?: \(Killed\))?; .*"
        "take fewer data_workers, or a smaller data_prefetch",
        failure.message,
    )
    assert said, failure.message


def test_a_launch_that_ends_well_leaves_no_worker(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    workers: set[psutil.Process] = set()

    def watch(_: Progress) -> None:
        with suppress(OSError, ValueError, psutil.Error):
            workers.update(psutil.Process(int((folder / "rank-0.pid").read_text())).children())

    spec = replace(SPEC, data_workers=2, steps=30, min_steps=30)
    assert isinstance(launch(spec, folder, watch), Launch)
    assert len(workers) == 2
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in workers)


@pytest.mark.wide
def test_waiting_for_dear_tokens_ends_with_workers_or_tokens_made_ahead(tmp_path: Path) -> None:
    text = slow_text.write(tmp_path, documents=120, letters=20_000)
    # A step takes longer than its tokens: two workers have them in time, also where each has a third of a core.
    slow = replace(SPEC, **text, rows="padded_in_loss", sequence_length=128, tokenise="on_the_fly")
    slow = replace(slow, micro_batch_size=8, steps=12, min_steps=12)

    def share(spec: TrainSpec, name: str) -> float:
        record = launched(spec, tmp_path / name)
        assert troubles(spec, record) == ()
        wait = data_wait([record])
        assert wait is not None, record.trace.none
        return wait[1]

    alone = share(slow, "alone")
    assert alone > 0.2
    assert share(replace(slow, tokenise="ahead"), "ahead") < alone / 4
    # Whoever else wants these cores keeps workers from fetching ahead: the best of three says what they can.
    assert any(share(replace(slow, data_workers=2), f"workers-{turn}") < alone / 2 for turn in range(3))


def test_a_pipe_that_ends_with_its_worker_is_told_as_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank reads of the worker's end before it hears of it."""

    def fails() -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(torch._C, "_error_if_any_worker_fails", fails)
    try:
        with pytest.raises(DataWorkerError, match=r"a data worker \(pid 7\) has died \(Killed\)"), explained():
            raise EOFError
        monkeypatch.setattr(torch._C, "_error_if_any_worker_fails", lambda: None)
        with pytest.raises(EOFError), explained():  # nobody has died: it is what it is
            raise EOFError
    finally:
        signal.signal(signal.SIGCHLD, before)
