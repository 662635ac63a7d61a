"""Who is told of a night, and that a merge which could tell nobody is not green."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.cli.night_log import Notice
from pytest_llmperf.cli.sbatch import filled_merge
from tests.golden import Golden
from tests.unit.cli.test_cli_submit import MINIMAL, REPOSITORY, cluster, result, write

TEMPLATE = (REPOSITORY / "slurm" / "merge.sbatch").read_text(encoding="utf-8")
STAMP = r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mail program but a test's own, and a scontrol that keeps what it is told."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "night").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    program("scontrol", f'echo "$@" >> {tmp_path}/commented')


def program(name: str, text: str) -> Path:
    path = Path("bin", name).absolute()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def mailing(code: int = 0) -> None:
    program(
        "mail",
        f'for word; do echo "$word"; done > mailed; while read -r line; do echo "$line"; done >> mailed; exit {code}',
    )


def merge(*options: str) -> int:
    return main(["merge", "night", "--markdown", "night/summary.md", "--nights", "nights.txt", *options])


class TestMerge:
    def test_a_green_night_is_told_everywhere(self, golden: Golden) -> None:
        mailing()
        write(Path("night"), 1, result("a"))
        assert merge("--name", "big", "--mail", "a@b") == 0
        lines = Path("mailed").read_text().splitlines()
        assert lines[:4] == ["-s", "big: green", "a@b", "# green: 1 pass"]
        assert re.fullmatch(rf"{STAMP}  night  green: 1 pass\n", Path("nights.txt").read_text())
        golden(Path("commented").read_text())

    @pytest.mark.parametrize(
        ("code", "why"), [(None, "mail: No such file or directory"), (3, "mail ended with exit code 3")]
    )
    def test_a_green_night_that_could_not_be_mailed_is_not_green(
        self, capsys: pytest.CaptureFixture[str], code: int | None, why: str
    ) -> None:
        if code is not None:
            mailing(code)
        write(Path("night"), 1, result("a"))
        assert merge("--mail", "a@b") == 1
        said = f"a@b: not mailed ({why})"
        assert capsys.readouterr().err == f"llmperf: {said}\n"
        assert Path("nights.txt").read_text().endswith(f"  night  green: 1 pass; {said}\n")
        assert f"Comment=llmperf: green: 1 pass; {said}" in Path("commented").read_text()

    def test_what_was_not_written_is_mailed(self, capsys: pytest.CaptureFixture[str]) -> None:
        mailing()
        write(Path("night"), 1, result("a"))
        Path("night", "summary.md").mkdir()  # so that no file can have its place
        assert merge("--mail", "a@b") == 1
        mailed = Path("mailed").read_text()
        assert "llmperf-nightly: RED\n" in mailed
        assert "# green: 1 pass\n" in mailed
        assert "night/summary.md: not written (" in mailed
        assert "night/summary.md: not written (" in Path("nights.txt").read_text()
        assert "night/summary.md: not written (" in capsys.readouterr().err

    def test_a_line_that_nobody_can_read_is_told_to_the_job(
        self, capsys: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        write(Path("night"), 1, result("a"))
        Path("nights.txt").mkdir()
        assert merge() == 1
        golden(capsys.readouterr().err)
        golden(Path("commented").read_text())

    def test_why_a_night_is_red_is_told_and_not_at_any_length(self) -> None:
        assert merge(*(f"--expect=gpus-{width}.json" for width in range(1, 20))) == 1
        line = Path("nights.txt").read_text()
        assert "  night  red: no case; gpus-1.json: missing, " in line
        assert line.endswith(" ...\n")
        assert len(line) < 450

    def test_by_hand_nobody_is_told(self) -> None:
        mailing()
        write(Path("night"), 1, result("a"))
        assert main(["merge", "night"]) == 0
        assert {path.name for path in Path().iterdir()} == {"bin", "night"}

    def test_a_mail_that_is_never_handed_over_is_given_up(
        self, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        monkeypatch.setattr("pytest_llmperf.cli.night_log._MAIL_SECONDS", 0.2)
        program("mail", "exec /bin/sleep 60")
        (said,) = Notice("night", mail="a@b").tell("green: 1 pass", ["#"], [], [])
        golden(said)


class TestUnreadClusterFile:
    """`llmperf submit` from cron: the file that says whom to mail is the one that cannot serve."""

    def submit(self, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        mailing()
        assert main(["submit", "site.ini", *words]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    def test_it_is_mailed_to_the_address_that_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = self.submit(capsys, "--mail", "a@b")
        assert line.startswith("llmperf: site.ini: not")
        assert line.endswith("; mailed to a@b")
        assert Path("mailed").read_text().startswith("-s\nllmperf submit: RED\na@b\n")

    @pytest.mark.parametrize("text", ["[suite]\nmail = c@d, e@f\nwrong = 1\n", "[cluster\nmail: c@d, e@f\n"])
    def test_to_the_one_that_the_file_says(self, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        Path("site.ini").write_text(text)
        assert self.submit(capsys).endswith("; mailed to c@d, e@f")

    def test_to_the_one_of_the_last_night(self, capsys: pytest.CaptureFixture[str]) -> None:
        for night, address in (("20260101-000000-1", "old@b"), ("20260102-000000-1", "new@b")):
            folder = Path(".llmperf/nightly", night)
            folder.mkdir(parents=True)
            (folder / "merge.sbatch").write_text(f"llmperf merge night --mail={address} || true\n")
        assert self.submit(capsys).endswith("; mailed to new@b")

    def test_where_none_is_known_it_says_so(self, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
        golden(self.submit(capsys))
        assert not Path("mailed").exists()

    def test_a_dry_run_mails_nobody(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "mailed" not in self.submit(capsys, "--dry-run", "--mail", "a@b")
        assert not Path("mailed").exists()


@pytest.mark.processes
class TestScript:
    """slurm/merge.sbatch: what is told where `llmperf merge` cannot be run."""

    def run(
        self, tmp_path: Path, python: str, *, mail: str = "", log: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}/bin:/usr/bin:/bin"
        file = cluster(tmp_path, MINIMAL + f"checkout = {tmp_path}\nresults = .\npython = {python}\n")
        suite = {**file.values["suite"], "mail": mail}
        values = {**file.values, "suite": suite, "cluster": {**file.values["cluster"], "name": "x$(touch${IFS}y) 'z'"}}
        script = filled_merge(
            TEMPLATE, replace(file, values=values), tmp_path / "night", ["night", "--nights", "nights.txt"]
        )
        if log is not None:
            script = re.sub("^log=.*", f"log={log}", script, flags=re.MULTILINE)
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)

    def test_a_subject_is_text_and_a_night_without_a_summary_is_told_too(self, tmp_path: Path, golden: Golden) -> None:
        mailing()
        assert self.run(tmp_path, "false", mail="a b@c").returncode == 1
        said = f"red: not merged, false cannot run llmperf merge in {tmp_path} (exit code 1)"
        golden(Path("mailed").read_text().splitlines())
        assert re.fullmatch(rf"{STAMP}  night  {re.escape(said)}\n", Path("nights.txt").read_text())
        golden(Path("commented").read_text().splitlines())
        assert said in Path("night", "merge.log").read_text()

    @pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("regressed", 1)])
    def test_what_the_merge_has_told_is_not_told_again(self, tmp_path: Path, verdict: str, code: int) -> None:
        write(Path("night"), 1, result("a", verdict), exit_code=code)
        assert self.run(tmp_path, sys.executable).returncode == code
        assert len(Path("nights.txt").read_text().splitlines()) == 1
        assert f"# {'red' if code else 'green'}: 1 {verdict}" in Path("night", "merge.log").read_text()

    def test_a_merge_that_is_killed_is_told(self, tmp_path: Path) -> None:
        python = program("python", '[ "$1" = -c ] || kill -9 $$')
        assert self.run(tmp_path, str(python)).returncode == 137
        assert "  night  red: not merged, " in Path("nights.txt").read_text()

    def test_a_folder_that_became_read_only_costs_the_log_and_no_word(self, tmp_path: Path) -> None:
        write(Path("night"), 1, result("a"))
        done = self.run(tmp_path, sys.executable, log="/proc/self/merge.log")
        assert done.returncode == 0
        assert "# green: 1 pass" in done.stdout
        assert "  night  green: 1 pass" in Path("nights.txt").read_text()
