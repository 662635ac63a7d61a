"""What `llmperf submit` looks at before the night, when somebody is there to mend it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_llmperf.cli import main, readiness
from pytest_llmperf.cli.night_tests import last_word
from pytest_llmperf.cli.readiness import ask
from tests.golden import Golden
from tests.unit.cli.test_cli_submit import MINIMAL, REPOSITORY, TESTED, planning

ALONE = "[sbatch]\nexclusive = yes\n" + MINIMAL


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "perf_tests").mkdir()
    (tmp_path / "bin").mkdir()
    program("sbatch", "echo 1")
    planning(monkeypatch)


def program(name: str, text: str, *, tested: str = TESTED) -> Path:
    path = Path("bin", name).absolute()
    path.write_text(f"#!/bin/sh\n{tested if name == 'sbatch' else ''}{text}\n")
    path.chmod(0o755)
    return path


def submit(text: str, *options: str) -> int:
    Path("mine.ini").write_text(text)
    return main(["submit", "mine.ini", *options])


class TestRefused:
    """Nothing was submitted, no folder is left, and one line says why."""

    def said(self, capsys: pytest.CaptureFixture[str], text: str) -> str:
        program("sbatch", "echo x >> asked; echo 1")
        assert submit(text) == 1
        out, error = capsys.readouterr()
        assert "submitted" not in out
        assert not Path(".llmperf").exists()
        assert not Path("asked").exists()
        (line,) = error.splitlines()
        return line

    def test_a_python_that_is_not_there(self, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
        line = self.said(capsys, ALONE + "python = /no/such/python\n")
        golden(line)

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            (
                "echo 'Traceback'; echo \"ModuleNotFoundError: No module named 'pytest_llmperf'\" >&2; exit 1",
                "No module",
            ),
            ("exit 3", "(exit code 3)"),
            ("printf '\\377\\n' >&2; exit 1", "(\N{REPLACEMENT CHARACTER})"),
        ],
    )
    def test_a_python_that_cannot_import_us(
        self, capsys: pytest.CaptureFixture[str], text: str, why: str, golden: Golden
    ) -> None:
        line = self.said(capsys, ALONE + f"python = {program('python', text)}\n")
        golden(line)
        assert why in line

    def test_a_real_one_without_us(self, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
        python = program("python", f'exec {sys.executable} -S -I "$@"')
        golden(self.said(capsys, ALONE + f"python = {python}\n"))

    def test_a_python_that_does_not_answer(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pytest_llmperf.cli.readiness._SECONDS", 0.2)
        assert "(not within 0.2 s)" in self.said(capsys, ALONE + f"python = {program('python', 'exec sleep 60')}\n")

    @pytest.mark.parametrize("options", ["perf_test --perf-strict", "perf_tests no/test_x.py::test_y[a] -q"])
    def test_tests_that_are_not_there(self, capsys: pytest.CaptureFixture[str], options: str, golden: Golden) -> None:
        line = self.said(capsys, ALONE + f"options = {options}\n")
        golden(line)

    def test_a_selection_that_the_environment_brings(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        monkeypatch.setenv("PYTEST_ADDOPTS", "-q -k batch")
        line = self.said(capsys, ALONE)
        golden(line)

    @pytest.mark.parametrize("text", [ALONE, ALONE + "mode = array\n"])
    def test_a_job_that_sbatch_refuses(self, capsys: pytest.CaptureFixture[str], golden: Golden, text: str) -> None:
        program("sbatch", "echo 'invalid account' >&2; exit 1")
        assert submit(text) == 1
        golden(capsys.readouterr().err)
        assert [*Path(".llmperf/nightly").glob("2*")] == []

    def test_a_job_that_sbatch_may_have_taken_keeps_its_folder(self) -> None:
        program("sbatch", "echo welcome")
        assert submit(ALONE) == 1
        assert len([*Path(".llmperf/nightly").glob("2*")]) == 1


@pytest.mark.processes
class TestTaken:
    def test_a_night_of_its_own_nodes_is_submitted_without_a_warning(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert submit(ALONE) == 0
        assert "warning" not in capsys.readouterr().out

    @pytest.mark.parametrize("dry", [[], ["--dry-run"]])
    def test_a_night_beside_others_is_warned_of(
        self, capsys: pytest.CaptureFixture[str], dry: list[str], golden: Golden
    ) -> None:
        assert submit(MINIMAL, *dry) == 0
        lines = capsys.readouterr().out.splitlines()
        golden(lines[0])

    def test_where_nobody_shares_nobody_is_warned(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert submit(MINIMAL + "[sbatch]\noptions = --exclusive=user\n", "--dry-run") == 0
        assert "warning" not in capsys.readouterr().out

    def test_a_python_of_the_nodes_alone_may_be_named(self) -> None:
        assert submit(ALONE + "python = /no/such/python\ncheck_python = no\n") == 0

    def test_a_python_in_the_checkout_is_found_there(self, tmp_path: Path) -> None:
        Path("suite", "perf_tests").mkdir(parents=True)
        program("python", "exit 0").rename(tmp_path / "suite" / "python")
        assert submit(ALONE + "checkout = suite\npython = ./python\n") == 0


@pytest.mark.processes
class TestAsked:
    """The dry run of pytest itself, before anything is submitted."""

    @pytest.mark.parametrize(
        ("more", "asked", "said"),
        [
            (
                "select = a (\n",
                (4, "Wrong expression passed to '-k': a ("),
                "[suite] select = a (: expected what pytest",
            ),
            (
                "select = b\n",
                (5, "1 deselected"),
                "[suite] select = b: expected tests that pytest can run (no test is sel",
            ),
            (
                "",
                (5, "no tests ran"),
                "[suite] options = perf_tests --perf-strict: expected tests that pytest can run (no",
            ),
            ("", (4, "unrecognized arguments: --x"), "what pytest takes here (unrecognized arguments: --x); where"),
            ("", (1, "ImportError: x"), "expected what pytest takes here (ImportError: x)"),
        ],
    )
    def test_what_pytest_refuses_submit_refuses(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        more: str,
        asked: tuple[int, str],
        said: str,
    ) -> None:
        program("sbatch", "echo x >> asked; echo 1")
        monkeypatch.setattr("pytest_llmperf.cli.readiness.ask", lambda _file: readiness.Asked(None, asked[1], asked[0]))
        assert submit(ALONE + more) == 1
        out, error = capsys.readouterr()
        assert "submitted" not in out
        assert not Path("asked").exists()
        (line,) = error.splitlines()
        assert line.startswith("llmperf: mine.ini: [suite] ")
        assert said in line

    def test_a_test_that_cannot_be_collected_is_named_with_its_error(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        monkeypatch.setattr("pytest_llmperf.cli.readiness.ask", ask)
        Path("perf_tests/test_b.py").write_text("import no_such_module\n")
        # Of launches in a job, and here is none.
        assert submit(ALONE + "options = perf_tests --perf-launcher slurm\n") == 1
        line = capsys.readouterr().err
        golden(line)


@pytest.mark.parametrize(
    "line",
    [
        *("python -m pytest: error: no", "python3.14 -m pytest: error: no", "pytest: error: no"),
        *("__main__.py: error: no", "/a/b/pytest: error: no"),
    ],
)
def test_the_line_of_pytest_that_says_what_it_does_not_take(line: str) -> None:
    assert last_word(f"ERROR: usage: x [options]\n{line}\n  inifile: None\n") == "no"


@pytest.mark.processes
class TestTested:
    """sbatch is asked about every job before one is submitted."""

    @pytest.mark.parametrize(
        ("site", "said", "where"),
        [
            (
                "partition = x\n",
                "sbatch: error: invalid partition specified: x",
                "mine.ini: sbatch refused: invalid partition specified: x",
            ),
            (
                "merge_options = --foo\n",
                "sbatch: unrecognized option",
                "mine.ini: sbatch refused: sbatch: unrecognized option",
            ),
            ("", "sbatch: error: no", "mine.ini: sbatch refused: no"),
        ],
    )
    def test_a_refusal_has_the_words_of_slurm(
        self, capsys: pytest.CaptureFixture[str], site: str, said: str, where: str
    ) -> None:
        program("sbatch", f"echo '{said}' >&2; exit 1", tested="")
        assert submit(ALONE.replace("[cluster]", f"{site}[cluster]")) == 1
        assert where in capsys.readouterr().err

    def test_where_no_node_is_free_of_maintenance_a_night_is_queued(self) -> None:
        refuse = "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"
        program("sbatch", f"echo 1; case $* in *--test-only*) {refuse};; esac", tested="")
        assert submit(ALONE.replace("[cluster]", "merge_options = --mem=1\n[cluster]")) == 0
