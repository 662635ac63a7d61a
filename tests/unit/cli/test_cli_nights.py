"""Where each night stands: what SLURM says of it once it is submitted, and the summary of the job that merges it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_llmperf.cli import main, sbatch
from pytest_llmperf.cli.sbatch import filled_merge
from tests.golden import Golden
from tests.unit.cli.test_cli_submit import MINIMAL, REPOSITORY, TESTED, cluster, planning, result, write

FOLDER = Path(".llmperf/nightly")
TEMPLATE = (REPOSITORY / "slurm" / "merge.sbatch").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr("pytest_llmperf.cli.commands.submit._WAITING_SECONDS", 0.0)
    monkeypatch.setattr(sbatch, "_FIRST_LOOK_SECONDS", 0.0)
    (tmp_path / "perf_tests").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    program("sbatch", f"{TESTED}echo x >> asked; wc -l < asked")
    planning(monkeypatch)


def program(name: str, text: str) -> Path:
    path = Path("bin", name).absolute()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def queue(*lines: str) -> None:
    program("squeue", "\n".join(f"echo '{line}'" for line in lines) or "true")


def submit(*options: str, more: str = "") -> int:
    Path("mine.ini").write_text(f"[sbatch]\nexclusive = yes\n{MINIMAL}python = ./python\n{more}")
    return main(["submit", "mine.ini", *options])


def night(name: str, began: float, jobs: str = "", *, merged: float = 0, said: str = "") -> None:
    """One that was submitted so many hours ago, and merged so many hours ago."""
    folder = FOLDER / name
    folder.mkdir(parents=True)
    files = [("merge.sbatch", "", began), *([("jobs.txt", jobs, began)] if jobs else [])]
    for file, text, hours in [*files, *([("summary.md", f"# {said}\n\nmore\n", merged)] if said else [])]:
        (folder / file).write_text(text)
        os.utime(folder / file, (time.time() - 3600 * hours,) * 2)


@pytest.mark.processes
class TestSubmit:
    @pytest.mark.parametrize(
        "state", ["RUNNING|None", "PENDING|PartitionDown", "PENDING|ReqNodeNotAvail, UnavailableNodes:n[1-3]"]
    )
    def test_why_a_job_waits_is_shown(self, capsys: pytest.CaptureFixture[str], state: str) -> None:
        queue(f"1|{state}")
        assert submit() == 0
        name, _, reason = state.partition("|")
        assert f"squeue: 1 {name}{f' ({reason})' if name == 'PENDING' else ''}\n" in capsys.readouterr().out

    def test_its_jobs_are_kept_beside_their_results(self) -> None:
        queue("1|RUNNING|None")
        assert submit(more="mode = array\n") == 0
        (folder,) = FOLDER.iterdir()
        assert (folder / "jobs.txt").read_text() == "1 2 3 4"

    def test_slurm_mails_of_the_job_that_merges(self) -> None:
        program("sbatch", f'{TESTED}echo "$@" >> asked; wc -l < asked')
        assert submit(more="mail = a@b,c@d\n") == 0
        first, merging = Path("asked").read_text().splitlines()
        assert "--mail" not in first
        assert "--mail-user=a@b,c@d --mail-type=END,FAIL" in merging

    @pytest.mark.parametrize(
        "lines",
        [
            [],
            ["1|RUNNING|None", "2|CANCELLED|Dependency"],
            ["1|PENDING|PartitionDown", "2|PENDING|Dependency"],
            ["1|RUNNING|None", "2|PENDING|Dependency"],
        ],
    )
    def test_an_earlier_night_that_is_not_merged_is_told(
        self, capsys: pytest.CaptureFixture[str], lines: list[str], golden: Golden
    ) -> None:
        night("elder", 48, "8 9", merged=47, said="red: 1 new")
        night("before", 24, "1 2")
        queue(*lines)
        assert submit() == 0
        golden(capsys.readouterr().out)

    def test_an_earlier_night_than_the_last_merged_one_is_none_of_todays(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        night("lost", 48, "8 9")
        night("before", 24, "1 2", merged=20, said="green: 1 pass")
        queue()
        assert submit() == 0
        assert "earlier night" not in capsys.readouterr().out

    def test_where_slurm_does_not_answer_no_night_is_lost(
        self, capsys: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        night("before", 24, "1 2")
        program("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
        assert submit() == 0
        golden(capsys.readouterr().out)

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
        note = f'echo "# {line}" > $(echo {FOLDER}/2*)/summary.md'
        program(
            "squeue",
            f"echo x >> looked; [ $(wc -l < looked) -gt 2 ] && {{ {note}; echo '2|{state}|None'; exit; }}\n"
            "echo '1|RUNNING|None'; echo '2|PENDING|Dependency'",
        )

    @pytest.mark.parametrize(
        ("line", "state", "code"), [("green: 3 pass", "COMPLETED", 0), ("red: 1 regressed", "FAILED", 1)]
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


class TestNights:
    def ask(self, *options: str) -> int:
        return main(["nights", str(FOLDER), *options])

    def test_each_night_is_listed_with_its_state(self, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
        night("a", 50, "1 2", merged=49, said="green: 3 pass")
        night("b", 3)
        night("c", 1.5, "3 4")
        (FOLDER / "no night").mkdir()
        queue("3|PENDING|Priority", "4|PENDING|Dependency")
        assert self.ask() == 0
        lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
        golden(lines)

    @pytest.mark.parametrize(("age", "code"), [(25, 0), (27, 1)])
    @pytest.mark.parametrize("said", ["green: 3 pass", "red: 1 new"])
    def test_a_night_that_is_missing_is_exit_code_1(
        self, capsys: pytest.CaptureFixture[str], age: int, code: int, said: str
    ) -> None:
        night("a", 30, "1 2", merged=age, said=said)
        assert self.ask("--newer-than", "26h") == code
        told = "llmperf: no night was merged within 26 h; the last was 27 h ago\n" if code else ""
        assert capsys.readouterr().err == told

    def test_a_folder_without_nights_is_missing_one_too(
        self, capsys: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        assert self.ask("--newer-than", "26h") == 1
        golden(capsys.readouterr().err)
        assert self.ask() == 1
        FOLDER.mkdir(parents=True)
        capsys.readouterr()
        assert (self.ask(), capsys.readouterr().out) == (0, f"no night in {FOLDER}\n")


@pytest.mark.processes
class TestScript:
    """slurm/merge.sbatch: what a night's folder and its last job say."""

    @pytest.fixture(autouse=True)
    def _in_a_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("night").mkdir()
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        program("scontrol", f'echo "$@" >> {Path.cwd()}/commented')

    def run(self, tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
        file = cluster(tmp_path, MINIMAL + f"checkout = {tmp_path}\nresults = .\npython = {python}\n")
        script = filled_merge(TEMPLATE, file, tmp_path / "night", ["night", "--markdown", "night/summary.md"])
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)

    @pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("regressed", 1)])
    def test_the_job_says_how_the_night_went(self, tmp_path: Path, verdict: str, code: int) -> None:
        write(Path("night"), 1, result("a", verdict), exit_code=code)
        assert self.run(tmp_path, sys.executable).returncode == code
        said = f"{'red' if code else 'green'}: 1 {verdict}"
        assert Path("night", "summary.md").read_text().startswith(f"# {said}")
        assert f"Comment=llmperf: {said}; {tmp_path}/night" in Path("commented").read_text()
        assert f"# {said}" in Path("night", "merge.log").read_text()

    def test_a_merge_that_cannot_run_leaves_a_summary_too(self, tmp_path: Path, golden: Golden) -> None:
        Path("night", "summary.md").write_text("# green: of a merge before\n")
        assert self.run(tmp_path, "false").returncode == 1
        golden(Path("night", "summary.md").read_text())
        golden(Path("commented").read_text())

    def test_a_merge_that_is_killed_is_told(self, tmp_path: Path, golden: Golden) -> None:
        python = program("python", '[ "$1" = -c ] || kill -9 $$')
        assert self.run(tmp_path, str(python)).returncode == 137
        said = Path("night", "summary.md").read_text()
        golden(said)
