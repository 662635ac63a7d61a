"""What `llmperf submit` and `llmperf merge` do, and say where something else says no."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.cli import main
from tests.examples import examples
from tests.golden import Golden
from tests.unit.cli.test_cli_submit import MINIMAL, REPOSITORY, TESTED, planning, result, write
from tests.waiting import until

SCRIPT = str(REPOSITORY / "slurm" / "nightly.sbatch")
ARRAY = MINIMAL + "mode = array\nresults = nights\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path / "sbatch", 'echo "$@" >> asked; wc -l < asked')
    (tmp_path / "perf_tests").mkdir()
    planning(monkeypatch)


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{TESTED if path.name == 'sbatch' else ''}{text}\n")
    path.chmod(0o755)


def submitting(text: str) -> subprocess.Popen[str]:
    """The command in a process of its own, as a terminal starts it: in a shell's background Ctrl-C would be ignored."""
    Path("mine.ini").write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest_llmperf.cli", "submit", "mine.ini", "--script", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - there are no threads
    )


def submit(text: str, *options: str) -> int:
    Path("mine.ini").write_text(text)
    return main(["submit", "mine.ini", "--script", SCRIPT, *options])


@pytest.mark.processes
class TestSubmit:
    def test_each_job_and_the_merge_are_submitted(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert submit(ARRAY) == 0
        out = capsys.readouterr().out
        assert re.findall(r"^submitted ([0-9]+): ", out, re.MULTILINE) == ["1", "2", "3", "4"]
        assert "--dependency=afterany:1:2:3" in (tmp_path / "asked").read_text()

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            ("echo 'QOSMaxSubmitJobPerUserLimit' >&2; exit 1", "sbatch refused: QOSMaxSubmitJobPerUserLimit"),
            ("exit 0", "sbatch said nothing, expected the number of a job"),
            (r"printf '\377\n'", "sbatch said \N{REPLACEMENT CHARACTER}, expected the number of a job"),
        ],
    )
    @pytest.mark.parametrize("jobs", [0, 1, 3])
    def test_what_is_submitted_before_sbatch_says_no_can_be_merged_or_ended(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: int, answer: str, said: str
    ) -> None:
        program(
            tmp_path / "sbatch", f"echo x >> asked; n=$(wc -l < asked); [ $n -gt {jobs} ] && {{ {answer}; }} || echo $n"
        )
        if answer == "exit 0":
            program(tmp_path / "sbatch", f"echo x >> asked; n=$(wc -l < asked); [ $n -gt {jobs} ] || echo $n")
        assert submit(ARRAY) == 1
        out, error = capsys.readouterr()
        assert said in error
        ids = " ".join(str(number) for number in range(1, jobs + 1))
        assert (f"with no job that merges: {ids}; end them with: scancel {ids}, or" in error) is (jobs > 0)
        assert (" -m pytest_llmperf.cli merge " in error) is (jobs > 0)
        assert len(re.findall("^submitted", out, re.MULTILINE)) == jobs

    def test_a_number_is_found_among_a_sites_own_words(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        program(tmp_path / "sbatch", "echo '* Welcome *'; echo '17;big'")
        assert submit(MINIMAL) == 0
        assert "submitted 17: " in capsys.readouterr().out

    def test_ctrl_c_between_two_jobs_tells_of_the_first(self, tmp_path: Path, golden: Golden) -> None:
        program(tmp_path / "sbatch", "[ -e asked ] && echo x > again && exec sleep 60; echo x > asked; echo 41")
        with submitting(ARRAY + "check_python = no\n") as command:
            assert command.stdout is not None
            lines = iter(command.stdout.readline, "")
            assert any(line.startswith("submitted 41: ") for line in lines)
            until((tmp_path / "again").exists)
            command.send_signal(signal.SIGINT)
            rest = "".join(lines)
        assert command.returncode == 130
        golden(rest)
        assert "scancel 41" in rest

    def test_who_reads_only_the_first_line_gets_a_whole_night(self, tmp_path: Path) -> None:
        (tmp_path / "mine.ini").write_text(ARRAY + "check_python = no\n")
        line = f"{sys.executable} -m pytest_llmperf.cli submit mine.ini --script {SCRIPT} | head -n 1"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        subprocess.run(["sh", "-c", line], env=environment, check=True, capture_output=True)
        assert len((tmp_path / "asked").read_text().splitlines()) == 4

    @pytest.mark.parametrize(
        ("script", "said"),
        [(b"", "no line begins with #SBATCH"), (b"echo hi\n", "no line begins with"), (b"\xff\xfe", "not read (")],
    )
    def test_what_is_no_nightly_script_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: bytes, said: str
    ) -> None:
        (tmp_path / "night.sh").write_bytes(script)
        (tmp_path / "mine.ini").write_text(MINIMAL)
        assert main(["submit", "mine.ini", "--script", "night.sh"]) == 1
        assert f"llmperf: night.sh: {said}" in capsys.readouterr().err

    def test_a_full_disk_is_named_and_leaves_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(_descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        assert submit(ARRAY) == 1
        assert re.search(r"nights/\S+/nightly-32.sbatch: not written \(No space", capsys.readouterr().err)
        assert list((tmp_path / "nights").glob("2*")) == []
        assert not (tmp_path / "asked").exists()


class TestMerge:
    def test_a_file_that_cannot_be_written_is_named_and_the_other_is_there(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        write(tmp_path, 1, result("a"))
        (tmp_path / "in the way").write_text("")
        assert main(["merge", str(tmp_path), "--json", "in the way/j.json", "--markdown", "s.md"]) == 1
        out, error = capsys.readouterr()
        golden(error)
        assert (tmp_path / "s.md").read_text() == out

    def test_what_changed_is_told_of_a_pass_too(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lines = [f"dropout {number}: none -> 0.3" for number in range(5)]
        write(tmp_path, 1, {**result("a"), "changed": lines})
        assert main(["merge", str(tmp_path)]) == 0
        said = "; changed since the baseline: " + ", ".join(lines[:3]) + " and 2 more"
        assert said in capsys.readouterr().out

    @examples(150)
    @given(data=st.data())
    def test_whatever_one_file_holds_the_others_are_told_and_only_whole_files_are_green(
        self, data: st.DataObject
    ) -> None:
        text, is_whole = data.draw(broken())
        with TemporaryDirectory() as name:
            folder = Path(name)
            write(folder, 1, result("first"))
            write(folder, 8, result("last"))
            (folder / "gpus-4.json").write_text(text, encoding="utf-8")
            files = {"json": folder / "j.json", "markdown": folder / "s.md"}
            out = io.StringIO()
            with redirect_stdout(out), redirect_stderr(io.StringIO()):
                code = main(["merge", name, *(f"--{option}={path}" for option, path in files.items())])
            assert code == (0 if is_whole else 1)
            assert files["markdown"].read_text().startswith("# green: " if is_whole else "# red: ")
            names = [
                each["id"] for each in json.loads(files["json"].read_text(), parse_constant=pytest.fail)["results"]
            ]
            assert {"first", "last"} <= {*names}


# What no place of a results file takes, and what some places take.
_NEVER = ("NaN", "-Infinity", "1e999", "1" + "0" * 400, "[" * 500 + "]" * 500, "[" * 99999)
_SOMETIMES = ("null", "[]", "{}", '"x"', r'"\ud800"', "7", "0.5", "true", "-1")
_SCHEMA = {
    "machine": {"{}"},
    "unfinished": set(),
    "exit_code": set(),
    "id": {'"x"', r'"\ud800"'},
    "digest": {'"x"', r'"\ud800"'},
    "reason": {'"x"', r'"\ud800"'},
    "nodeid": {'"x"', r'"\ud800"'},
    "launches": {"[]"},
    "skipped": {"[]"},
    "lost": {"true"},
    "planned": {"[]"},
    "width": {"7", "-1"},
    "perf_width": {"null", "7", "-1"},
    "strict": {"true"},
    **{
        name: {'"x"', r'"\ud800"'} for name in ("rootdir", "baselines", "one of digests", "one of parts", "one of gaps")
    },
    **{name: {"[]"} for name in ("digests", "nodes", "parts", "gaps")},
    "said": {"{}"},
    "one of launches": {"{}"},
    "changed": {"[]"},
    "one of changed": {'"x"', r'"\ud800"'},
    "metrics": {"{}"},
    "tokens_per_second_per_gpu": {"{}"},
    "value": {"null", "7", "0.5", "-1"},
    "change": {"null", "7", "0.5", "-1"},
    "evidence": {*_SOMETIMES},
    "liger": {*_SOMETIMES},
    "wall_seconds": {*_SOMETIMES},
}
"""By name, what it may be and be green; whatever is not here may be none of these."""


@st.composite
def broken(draw: st.DrawFn) -> tuple[str, bool]:
    """A results file of which one place is something else, or whose end is missing; and whether it is whole still."""
    launches = [{"evidence": {"liger": "yes"}, "wall_seconds": 3.0}]
    suite = {
        "perf_width": 4,
        "strict": True,
        "rootdir": "/suite",
        "baselines": "/suite/baselines",
        "digests": ["d"],
        "coverage": {"nodes": ["a"], "parts": ["p"], "gaps": ["g"], "said": {"a": "all"}},
    }
    values = {
        "schema": 1,
        "machine": {},
        "results": [{**result("a"), "launches": launches, "changed": ["a: b -> c"]}, result("b")],
        "exit_code": 0,
        "skipped": [{"id": "s", "nodeid": "a", "width": 4, "reason": "r", "lost": False, "elsewhere": ""}],
        "planned": [{"id": "s", "nodeid": "a", "width": 4}],
        "suite": suite,
    }
    places = list(_places(values))
    name, (holder, key) = draw(st.sampled_from(places))
    instead = draw(st.sampled_from([*_NEVER, *_SOMETIMES, None]))
    if instead is None:
        text = json.dumps(values)
        return text[: draw(st.integers(0, len(text) - 1))], False
    holder[key] = "HERE"
    return json.dumps(values).replace('"HERE"', instead), instead in _SCHEMA.get(name, set())


def _places(value: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Every place with its name; those of a list share one."""
    if isinstance(value, dict):
        for key in value:
            yield key, (value, key)
            yield from _places(value[key], key)
    elif isinstance(value, list):
        for key in range(len(value)):
            yield f"one of {name}", (value, key)
            yield from _places(value[key])
