"""What a SLURM job keeps for its next start, and when launches go through srun."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.records.result import CaseResult
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

    def test_old_jobs_are_forgotten(self, tmp_path: Path) -> None:
        Job(tmp_path, "6", [], resume=True).keep(concluded())
        for path in ((tmp_path / "6"), *(tmp_path / "6").iterdir()):
            os.utime(path, (0, 0))
        for name in ("0-notes", "9-notes"):  # whichever comes first in the listing, a file of somebody's stays
            (tmp_path / name).write_text("mine")
            os.utime(tmp_path / name, (0, 0))
        Job(tmp_path, "7", [], resume=True)
        assert {path.name for path in tmp_path.iterdir()} == {"0-notes", "9-notes"}


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
