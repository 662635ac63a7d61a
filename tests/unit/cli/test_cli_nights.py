"""Nights that never begin, or that nobody merges: who hears of them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pytest_llmperf.cli import main, night_log
from tests.golden import Golden
from tests.unit.cli.test_cli_submit import MINIMAL, TESTED, planning

FOLDER = Path(".llmperf/nightly")
MAILED = "mail = a@b\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr("pytest_llmperf.cli.night_log._WAITING_SECONDS", 0.0)
    monkeypatch.setattr(night_log, "_FIRST_LOOK_SECONDS", 0.0)
    (tmp_path / "perf_tests").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    program("sbatch", f"{TESTED}echo x >> asked; wc -l < asked")
    program("mail", 'echo "$@" >> mailed; cat >> mailed')
    planning(monkeypatch)


def program(name: str, text: str) -> None:
    path = Path("bin", name).absolute()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def queue(*lines: str) -> None:
    program("squeue", "\n".join(f"echo '{line}'" for line in lines) or "true")


def submit(*options: str, more: str = MAILED) -> int:
    Path("mine.ini").write_text(f"[sbatch]\nexclusive = yes\n{MINIMAL}python = ./python\n{more}")
    return main(["submit", "mine.ini", *options])


def log(*lines: tuple[float, str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    stamps = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - 3600 * hours)) for hours, _ in lines]
    text = "".join(f"{stamp}  {line}\n" for stamp, (_, line) in zip(stamps, lines, strict=True))
    (FOLDER / "nights.txt").write_text(text)


def noted() -> str:
    return (FOLDER / "nights.txt").read_text()


def mailed() -> str:
    return Path("mailed").read_text() if Path("mailed").exists() else ""


@pytest.mark.processes
class TestSubmit:
    @pytest.mark.parametrize(
        "reason",
        [
            *("PartitionDown", "PartitionNodeLimit", "ReqNodeNotAvail, UnavailableNodes:n[1-3]", "BadConstraints"),
            *("QOSMaxWallDurationPerJobLimit", "AssocGrpCPUMinutesLimit", "JobHeldAdmin", "InvalidAccount"),
        ],
    )
    def test_a_job_that_waits_for_help_is_told(self, capsys: pytest.CaptureFixture[str], reason: str) -> None:
        queue(f"1|PENDING|{reason}")
        assert submit() == 0
        line = f"waits: 1 PENDING ({reason}); it may never start"
        assert f"warning: {line}" in capsys.readouterr().out
        assert line in noted()
        assert line in mailed()

    @pytest.mark.parametrize(
        "state",
        [
            *("RUNNING|None", "PENDING|Resources", "PENDING|Priority", "PENDING|BeginTime", "PENDING|Prolog"),
            *("PENDING|QOSMaxJobsPerUserLimit", "PENDING|AssocMaxJobsLimit", "PENDING|JobArrayTaskLimit"),
            "PENDING|ReqNodeNotAvail, May be reserved for other job",
            "PENDING|Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
        ],
    )
    def test_a_job_that_waits_for_its_turn_is_shown(self, capsys: pytest.CaptureFixture[str], state: str) -> None:
        queue(f"1|{state}")
        assert submit() == 0
        out = capsys.readouterr().out
        assert f"squeue: 1 {state.partition('|')[0]}" in out
        assert "warning" not in out
        assert not mailed()

    def test_what_sbatch_refuses_is_mailed(self, golden: Golden) -> None:
        program("sbatch", f"{TESTED}echo no >&2; exit 1")
        assert submit() == 1
        golden(mailed())
        golden(mailed())

    def test_what_submit_refuses_is_mailed_and_a_dry_run_tells_nobody(self, golden: Golden) -> None:
        text = MAILED + "options = no_tests\n"
        assert submit("--dry-run", more=text) == 1
        assert not mailed()
        assert submit(more=text) == 1
        golden(mailed())

    def test_a_merging_job_that_is_refused_is_mailed(self, golden: Golden) -> None:
        program("sbatch", f"{TESTED}case $* in *afterany*) echo no >&2; exit 1;; esac; echo 1")
        assert submit() == 1
        golden(mailed())

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            ([], "not merged: job 2, which merges, is gone; jobs: 1 ended; see "),
            (
                ["1|RUNNING|None", "2|CANCELLED|Dependency"],
                "not merged: job 2, which merges, is CANCELLED; jobs: 1 RUN",
            ),
            (["1|PENDING|PartitionDown", "2|PENDING|Dependency"], "waits: 1 PENDING (PartitionDown) for 24 h; it may"),
            (
                ["1|PENDING|Priority", "2|PENDING|Dependency"],
                "waits: 1 PENDING (Priority) for 24 h; it may never start",
            ),
        ],
    )
    def test_an_earlier_night_that_needs_help_is_told_once(
        self, capsys: pytest.CaptureFixture[str], lines: list[str], said: str, golden: Golden
    ) -> None:
        log((24, "before  submitted as 1, to be merged by 2"))
        queue(*lines)
        assert submit() == 0
        golden(capsys.readouterr().out)
        assert f"before  {said}" in noted()
        assert f"before: {said}" in mailed()
        Path("mailed").unlink()
        submit()
        assert "before" not in mailed()

    def test_an_earlier_night_that_runs_is_no_alarm(self, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
        log(
            (24, "before  submitted as 1, to be merged by 2"),
            (24, "elder  submitted as 8, to be merged by 9"),
            (23, "elder  red: 1 new"),
        )
        queue("1|RUNNING|None", "2|PENDING|Dependency")
        assert submit() == 0
        out = capsys.readouterr().out
        golden(out)
        assert "elder" not in out
        assert not mailed()

    def test_where_slurm_does_not_answer_no_night_is_lost(
        self, capsys: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        log((24, "before  submitted as 1, to be merged by 2"))
        program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
        assert submit() == 0
        golden(capsys.readouterr().out)
        assert not mailed()

    @pytest.mark.parametrize("option", ["-M other", "--clusters=other", ""])
    def test_another_clusters_jobs_are_not_submitted(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, golden: Golden
    ) -> None:
        queue("")
        if not option:
            monkeypatch.setenv("SLURM_CLUSTERS", "other")
        Path("mine.ini").write_text(f"[sbatch]\noptions = {option}\n{MINIMAL}python = ./python\n")
        assert main(["submit", "mine.ini"]) == 1
        golden(capsys.readouterr().err)


@pytest.mark.processes
class TestWait:
    def merged(self, line: str, state: str) -> None:
        """The second time that it is asked, the night is over."""
        note = f'night=$(basename $(echo {FOLDER}/2*)); echo "$(date "+%F %T")  $night  {line}" >> {FOLDER}/nights.txt'
        program(
            "squeue",
            f"echo x >> looked; [ $(wc -l < looked) -gt 2 ] && {{ {note}; echo '2|{state}|None'; exit; }}\n"
            "echo '1|RUNNING|None'; echo '2|PENDING|Dependency'",
        )

    @pytest.mark.parametrize(
        ("line", "state", "code"),
        [
            ("green: 3 pass", "COMPLETED", 0),
            ("red: 1 regressed", "FAILED", 1),
            ("green: 1 pass; a@b: not mailed (x)", "FAILED", 1),
        ],
    )
    def test_it_ends_as_the_night_does(
        self, capsys: pytest.CaptureFixture[str], line: str, state: str, code: int
    ) -> None:
        self.merged(line, state)
        assert submit("--wait") == code
        out, error = capsys.readouterr()
        assert re.search(r"^[0-9:]{8} .*: 1 RUNNING$", out, re.MULTILINE)
        assert line in (error if code else out)

    def test_a_night_that_nobody_merges_is_told(self, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
        queue("1|COMPLETED|None", "2|CANCELLED|None")
        assert submit("--wait") == 1
        golden(capsys.readouterr().err)
        assert "not merged: job 2" in mailed()


class TestNights:
    def ask(self, *options: str) -> int:
        return main(["nights", str(FOLDER), *options])

    def test_each_night_is_listed_with_its_state(self, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
        log(
            (50, "a  submitted as 1, to be merged by 2"),
            (49, "a  green: 3 pass"),
            (3, "b  not submitted: why"),
            (1, "c  submitted as 3, to be merged by 4"),
        )
        queue("3|PENDING|Priority", "4|PENDING|Dependency")
        assert self.ask() == 0
        lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
        golden(lines)

    @pytest.mark.parametrize(("age", "code"), [(25, 0), (27, 1)])
    @pytest.mark.parametrize("line", ["green: 3 pass", "red: 1 new"])
    def test_a_night_that_is_missing_is_exit_code_1(
        self, capsys: pytest.CaptureFixture[str], age: int, code: int, line: str
    ) -> None:
        log((30, "a  submitted as 1, to be merged by 2"), (age, f"a  {line}"), (1, "b  not submitted: why"))
        assert self.ask("--newer-than", "26h") == code
        said = "llmperf: no night was merged within 26 h; the last was 27 h ago\n" if code else ""
        assert capsys.readouterr().err == said

    def test_a_missing_night_is_mailed(self) -> None:
        log((1, "b  not submitted: why"))
        assert self.ask("--newer-than", "26h", "--mail", "a@b") == 1
        assert mailed().startswith("-s llmperf nights: RED a@b\nno night was merged within 26 h; none was ever\n")
        assert "not submitted: why" in mailed()

    def test_a_folder_without_nights_is_missing_one_too(
        self, capsys: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        assert self.ask("--newer-than", "26h", "--mail", "a@b") == 1
        golden(capsys.readouterr().err)
        assert "nights.txt: not read" in mailed()
        assert self.ask() == 1

    def test_a_line_that_is_damaged_is_passed_over(self) -> None:
        log((1, "a  green: 1 pass"))
        (FOLDER / "nights.txt").write_bytes(b"\xff\n2026-99-99 00:00:00  x  green: 1\nnonsense\n" + noted().encode())
        assert self.ask("--newer-than", "26h") == 0
