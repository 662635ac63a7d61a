"""``llmperf bisect``: what it refuses before it launches, what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.cli.answer import Screen
from pytest_llmperf.cli.commands.bisect import page
from pytest_llmperf.judge.pairs import Yardstick
from pytest_llmperf.launch import histories
from pytest_llmperf.records.result import Candidate
from pytest_llmperf.run.bisection import Bisection
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.run import Run
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import install
from tests.golden import Golden

SPEC = ("model=llama-tiny", "sequence_length=64", "steps=20")
ID = "llama-tiny-bf16-sdpa-seq64-mbs1-gpus1"
COMMAND = ("--python", "/envs/{version}/bin/python", "--versions", "1,2,3,4")
ENDS = ("--good", "1", "--bad", "4")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMPERF_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    install()
    # The fake launcher knows sides by their interpreter, which has its version in its name.
    monkeypatch.setattr(histories.CommandHistory, "python", lambda _, candidate: f"python-{candidate.name}")
    yield
    mock.patch.stopall()


def bisect(*words: str) -> int:
    return main(["bisect", *SPEC, "--gpus", "0", *words])


def fake(**values: object) -> None:
    Path("fake.json").write_text(json.dumps(values))


def more_from(first: int) -> dict[str, object]:
    def operators(count: int) -> dict[str, object]:
        return {"trace": {"operator": {"aten::mm": count}}}

    return {**operators(10), "by": {f"python-{number}": operators(12) for number in range(first, 5)}}


def test_the_first_bad_version_is_printed_with_what_changed(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    fake(**more_from(3))
    assert bisect(*COMMAND, *ENDS) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == f"{ID}: 3 candidates after 1"
    assert "first bad: 3" in lines
    assert "  last good      2" in lines
    golden(lines)
    assert "  operators: 10 -> 12" in lines
    assert lines[-1] == "cost: 6 launches, 60 s"
    golden(err)
    assert bisect(*COMMAND, "--good", "2", "--bad", "3") == 0
    assert f"{ID}: 1 candidate after 2" in capsys.readouterr().out


def test_a_document_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    fake(**more_from(3))
    assert bisect(*COMMAND, *ENDS, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["first_bad"]["name"], found["last_good"]["name"], found["by"]) == ("3", "2", "counts")
    assert [(step["candidate"]["name"], step["side"], step["pairs"]) for step in found["steps"]] == [
        ("4", "bad", 1),
        ("2", "good", 1),
        ("3", "bad", 1),
    ]
    assert (found["launches"], found["confidence"], found["ended"]) == (6, 1.0, "")
    assert bisect(*COMMAND, *ENDS, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["launches"] == 0
    assert all(step["kept"] for step in again["steps"])


def test_ends_that_do_not_differ_are_one_line(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert bisect(*COMMAND, *ENDS, "--by", "counts") == 1
    told = capsys.readouterr().err
    golden(told)
    golden(told.splitlines()[-1])


def test_a_range_is_told_with_the_reason_of_each_that_was_skipped(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    values = more_from(3)
    by = dict(values["by"])  # type: ignore[call-overload]
    fake(**{**values, "by": {**by, "python-3": {"fail": "error"}}})
    assert bisect(*COMMAND, *ENDS) == 1
    out, err = capsys.readouterr()
    golden(out)
    golden(err.splitlines()[-1])


def test_a_launch_that_ended_with_an_error_after_its_record_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "bad_ends", property(lambda _: ["a launch: ended with 1"]))
    fake(**more_from(3))
    assert bisect(*COMMAND, *ENDS) == 1
    assert "ended with 1" in capsys.readouterr().err


def test_ctrl_c_prints_what_is_known_and_exits_as_shells_expect(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    values = more_from(3)
    by = dict(values["by"])  # type: ignore[call-overload]
    fake(**{**values, "by": {**by, "python-2": {"fail": "interrupt"}}})
    assert bisect(*COMMAND, *ENDS) == 130
    out, err = capsys.readouterr()
    golden(out)
    golden(err.splitlines()[-1])


def test_ctrl_c_before_anything_is_known_prints_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    values = more_from(3)
    by = dict(values["by"])  # type: ignore[call-overload]
    fake(**{**values, "by": {**by, "python-4": {"fail": "interrupt"}}})
    assert bisect(*COMMAND, *ENDS) == 130
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"{ID}: 3 candidates after 1"
    assert [line.partition(":")[0] for line in others] == ["cost"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*COMMAND, "--good", "1", "--bad", "5"), "--bad 5: none of --versions 1,2,3,4"),
        ((*COMMAND, *ENDS, "--build", "make"), "--python and --build are of different histories"),
        (("--versions", "1,2", *ENDS), "--versions 1,2 needs --python COMMAND"),
        (ENDS, "is in no git repository"),
        (("--project", "none", *ENDS), "/none: no such folder"),
        ((*COMMAND, *ENDS, "model=opt-tiny"), "model= is given twice"),
        ((*COMMAND, *ENDS, "no-such-case"), "no baselines here"),
        ((*COMMAND, *ENDS, "liger=true"), "Liger's Triton kernels need a GPU"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line_before_a_launch(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bisect(*words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert not Path("launches.txt").exists()
    assert not Path("cache").exists()


def test_a_checkout_that_is_not_as_committed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    who = ["git", "-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
    Path("project").mkdir()
    subprocess.run([*who, "init", "-q"], cwd="project", check=True)
    for text in ("one", "two"):
        subprocess.run([*who, "commit", "-q", "--allow-empty", "-m", text], cwd="project", check=True)
    Path("project/mine.py").write_text("")
    with mock.patch("pytest_llmperf.launch.histories.GitHistory.python", lambda _, one: one.name):
        assert bisect("--project", "project", "--good", "HEAD~1", "--bad", "HEAD", "--by", "counts") == 1
    assert "1 files of " in capsys.readouterr().err


def test_confidence_in_speed_says_what_it_supposes(golden: Golden) -> None:
    good, bad = Candidate("1"), Candidate("2", ("1",))
    found = Bisection(
        good=good, bad=bad, num_candidates=1, yardstick=Yardstick("speed", 0.02), suspects=(bad,), confidence=0.97
    )
    lines = list(page(TrainSpec(model="llama-tiny"), found, Findings().spent, "git show 2", Screen(None)))
    golden.lines(lines, "at least 97")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--good", "1"), "the following arguments are required: --bad"),
        ((*COMMAND, *ENDS, "--minutes", "0"), "expected a number of minutes above 0"),
        ((*COMMAND[:2], "--versions", "1,1", *ENDS), "expected versions, each once"),
        ((*COMMAND, *ENDS, "--by", "feeling"), "invalid choice"),
        ((*COMMAND, *ENDS, "--max-pairs", "0"), "expected a number of pairs, 1 or more"),
    ],
)
def test_words_that_argparse_refuses(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bisect(*words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
