"""What a SLURM job keeps for its next start, and when launches go through srun."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.slurm.slurm_site import SlurmSite
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run import hardware
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.run.hardware import Job
from pytest_llmperf.support import interpreter
from tests.fakes import Fake, launch_of
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny", sequence_length=16)


def concluded(loss: float = 6.0) -> Concluded:
    launches = (launch_of(SPEC, Fake(loss=loss)),)
    result = CaseResult(
        id=SPEC.id, digest=SPEC.digest, nodeid="t.py::t", machine="m", verdict="pass", reason="", launches=launches
    )
    return Concluded(result=result, held_against="2 launches")


NO_NOTES = [
    *("6.0", "{", "[1]", '["a", "b"]', "null", '"12"', "[NaN, 7]", "[1e999, 7]", "[-5, 7]", "[5, -7]", "[5, Infinity]"),
    *(f"[1{'0' * 400}, 7]", "[" * 99999, '{"1": 1, "2": 2}'),
]


class TestJournal:
    def test_a_requeued_job_finds_what_it_concluded(self, tmp_path: Path) -> None:
        assert Job(tmp_path, "7", ["-k", "x"], resume=True).keep(concluded()) == ""
        assert Job(tmp_path, "7", ["-k", "x"], resume=True).find("t.py::t", SPEC.digest) == concluded()

    @pytest.mark.parametrize(
        ("key", "arguments", "resume"), [("8", ["a"], True), ("7", ["b"], True), ("7", ["a"], False)]
    )
    def test_another_job_another_run_of_it_or_one_that_starts_anew_does_not(
        self, tmp_path: Path, key: str, arguments: list[str], resume: bool
    ) -> None:
        Job(tmp_path, "7", ["a"], resume=True).keep(concluded())
        assert Job(tmp_path, key, arguments, resume=resume).find("t.py::t", SPEC.digest) is None

    def test_launches_that_decided_nothing_are_another_starts(self, tmp_path: Path) -> None:
        journal, launches = Job(tmp_path, "7", [], resume=True), concluded().result.launches
        again = Job(tmp_path, "7", [], resume=True, restarts=1)
        assert journal.begun("t.py::t", SPEC.digest) == ()
        journal.begin("t.py::t", SPEC.digest, launches)
        assert again.begun("t.py::t", SPEC.digest) == launches
        assert journal.begun("t.py::t", SPEC.digest) == (), "a test that is run again begins again"
        assert Job(tmp_path, "7", [], resume=False, restarts=1).begun("t.py::t", SPEC.digest) == ()
        assert journal.find("t.py::t", SPEC.digest) is None, "nothing is concluded"
        (path,) = (tmp_path / "7").iterdir()
        path.write_text('{"restarts": 0, "launches": [1]}')
        assert again.begun("t.py::t", SPEC.digest) == ()

    def test_a_loss_that_is_no_number_survives(self, tmp_path: Path) -> None:
        journal = Job(tmp_path, "7", [], resume=True)
        journal.keep(concluded(math.nan))
        found = journal.find("t.py::t", SPEC.digest)
        assert found is not None
        assert math.isnan(found.result.launches[0].losses[0])

    @pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"result": 1}'], ids=["cut", "deep", "list", "number"])
    def test_a_broken_entry_is_run_again(self, tmp_path: Path, text: str) -> None:
        journal = Job(tmp_path, "7", [], resume=True)
        journal.keep(concluded())
        for path in (tmp_path / "7").iterdir():
            path.write_text(text)
        assert journal.find("t.py::t", SPEC.digest) is None

    def test_what_cannot_be_kept_is_told(self, tmp_path: Path, golden: Golden) -> None:
        (tmp_path / "7").write_text("in the way")
        golden(Job(tmp_path, "7", [], resume=True).keep(concluded()))

    def test_what_it_spent_is_on_the_disk_when_it_is_noted(self, tmp_path: Path) -> None:
        """Of a node that dies just then an empty file would say that the budget is used up."""
        with mock.patch.object(os, "fsync", wraps=os.fsync) as synced:
            Job(tmp_path, "7", []).note(1.5, 100.0)
        assert synced.called
        assert Job(tmp_path, "7", []).noted() == (1.5, 100.0)

    def test_the_budget_counts_earlier_starts(self, tmp_path: Path) -> None:
        starts = [Job(tmp_path, "7", [], resume=True, restarts=restarts) for restarts in range(3)]
        for restarts, hours in ((0, 1.5), (1, 2.0), (1, 2.5)):
            starts[restarts].note(hours, 7.0)
        assert (starts[2].spent_before(), starts[1].spent_before()) == (4.0, 1.5)
        assert (starts[1].noted(), starts[2].noted()) == ((2.5, 7.0), None)

    @pytest.mark.parametrize("text", [*NO_NOTES, ""])
    def test_a_note_that_makes_no_sense_leaves_nothing_of_a_budget(self, tmp_path: Path, text: str) -> None:
        first, second, third = (Job(tmp_path, "7", [], resume=True, restarts=number) for number in range(3))
        first.note(1.5, 7.0)
        (tmp_path / "7" / "spent-1.json").write_text(text)
        assert (third.spent_before(), second.spent_before()) == (math.inf, 1.5)

    def test_old_jobs_are_forgotten(self, tmp_path: Path) -> None:
        Job(tmp_path, "6", [], resume=True).keep(concluded())
        for path in ((tmp_path / "6"), *(tmp_path / "6").iterdir()):
            os.utime(path, (0, 0))
        for name in ("0-notes", "9-notes"):  # whichever comes first in the listing, a file of somebody's stays
            (tmp_path / name).write_text("mine")
            os.utime(tmp_path / name, (0, 0))
        Job(tmp_path, "7", [], resume=True)
        assert {path.name for path in tmp_path.iterdir()} == {"0-notes", "9-notes"}


@dataclass
class Clock:
    """What the machine's clock, and SLURM of the job's start, would say."""

    now: float = 1_000_000.0
    start: float = 1_000_000.0

    def time(self) -> float:
        return self.now


@contextmanager
def clock() -> Iterator[Clock]:
    told = Clock()

    def start_time(_job: str) -> float:
        return told.start

    with (
        mock.patch.object(hardware, "time", told),
        mock.patch.object(controller, "start_time", start_time),
    ):
        yield told


def job_of(folder: Path, gpus: int, restarts: int = 0) -> Job:
    wanted: Any = None
    site = SlurmSite(wanted, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)})
    vars(site)["cluster"] = SimpleNamespace(
        allocation=SimpleNamespace(job_id="7"), machine=SimpleNamespace(gpus=range(gpus))
    )
    job = Job(folder / "jobs", site.key, (f"gpus{gpus}",), resume=True, restarts=site.restarts, site=site)
    job.charge()
    return job


def budget_ends(job: Job, budget: float) -> float:
    """In hours since the epoch."""
    return cast("float", job.budget_ends(budget, lambda _: None)) / 3600


class TestSpent:
    def test_a_job_that_shrinks_remembers_what_its_wide_phases_cost(self, tmp_path: Path) -> None:
        with clock() as told:
            wide = job_of(tmp_path, 32)
            assert budget_ends(wide, 40) == pytest.approx(told.start / 3600 + 40 / 32)
            told.now += 3600
            wide.note_spent()
            narrow = job_of(tmp_path, 4)
            assert budget_ends(narrow, 40) == pytest.approx(told.now / 3600 + 8 / 4)
            told.now += 1800
            narrow.note_spent()
            assert job_of(tmp_path, 4, restarts=1).spent_before() == pytest.approx(34)

    def test_a_start_that_ended_without_a_word_is_known_by_its_last_case(self, tmp_path: Path) -> None:
        with clock() as told:
            first = job_of(tmp_path, 8)
            told.now += 3600
            first.keep(concluded())
            told.now = told.start = told.now + 7200
            again = job_of(tmp_path, 8, restarts=1)
            assert budget_ends(again, 20) == pytest.approx(told.now / 3600 + 12 / 8)

    def test_a_note_that_cannot_be_read_just_now_is_not_written_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with clock() as told:
            job = job_of(tmp_path, 8)
            told.now += 3600
            job.note_spent()
            note = tmp_path / "jobs" / "7" / "spent-0.json"
            good = note.read_text()
            with monkeypatch.context() as stale:
                stale.setattr(Path, "read_text", mock.Mock(side_effect=OSError(116, "Stale file handle")))
                job.note_spent()
            assert note.read_text() == good

    @pytest.mark.parametrize("restarts", [0, 1])
    @pytest.mark.parametrize("text", NO_NOTES)
    def test_a_note_that_makes_no_sense_starts_nothing_more(self, tmp_path: Path, text: str, restarts: int) -> None:
        with clock() as told:
            job_of(tmp_path, 8).note_spent()
            (tmp_path / "jobs" / "7" / "spent-0.json").write_text(text)
            told.now += 60
            again = job_of(tmp_path, 8, restarts=restarts)
            assert budget_ends(again, 20) == pytest.approx(told.start / 3600)
            again.note_spent()
            assert budget_ends(job_of(tmp_path, 8, restarts=restarts + 1), 20) == pytest.approx(told.start / 3600)

    @given(
        starts=st.lists(
            st.lists(
                st.tuples(st.integers(1, 64), st.lists(st.floats(0, 9e4), min_size=1, max_size=4)),
                min_size=1,
                max_size=4,
            ),
            min_size=1,
            max_size=3,
        ),
        workers=st.integers(1, 3),
    )
    def test_however_often_and_by_whomever_it_is_noted_the_sum_is_what_was_charged(
        self, starts: list[list[tuple[int, list[float]]]], workers: int
    ) -> None:
        charged = 0.0
        with TemporaryDirectory() as folder, clock() as told:
            for restarts, phases in enumerate(starts):
                told.start = told.now = told.now + 600  # in the queue it costs nothing
                for gpus, notes in phases:
                    processes = [job_of(Path(folder), gpus, restarts) for _ in range(workers)]
                    for number, seconds in enumerate(notes):
                        told.now += seconds
                        charged += gpus * seconds / 3600
                        processes[number % workers].note_spent()
            after = job_of(Path(folder), 1, len(starts))
            # A clock of seconds since 1970 has seven digits behind the point.
            assert after.spent_before() == pytest.approx(charged, abs=1e-6)


@pytest.mark.parametrize(
    ("launcher", "variables", "found"),
    [
        ("auto", {}, False),
        ("auto", {"SLURM_JOB_ID": "7"}, True),
        ("auto", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, False),
        ("auto", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290"}, True),
        ("local", {"SLURM_JOB_ID": "7"}, False),
        ("slurm", {}, True),
    ],
)
def test_a_job_launches_by_srun_and_a_step_of_it_does_not(
    monkeypatch: pytest.MonkeyPatch, launcher: str, variables: dict[str, str], found: bool
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/srun")
    assert controller.uses_slurm(launcher, variables) is found


@contextmanager
def ending() -> Iterator[list[str]]:
    told: list[str] = []
    restore = interpreter.end_on(interpreter.OF_A_JOB, told.append)
    try:
        yield told
    finally:
        restore()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_once_and_says_which(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with ending() as told:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # SLURM repeats itself
    assert told == [number.name]
    assert signal.getsignal(number) == before
