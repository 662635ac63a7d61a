"""In a sub-folder without an ini file pytest's rootdir is that folder, and the baselines lie further up."""

from __future__ import annotations

import subprocess

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project


@pytest.fixture
def below(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with baselines at its top, and no ini file, from one of its sub-folders."""
    subprocess.run(["git", "init", "-q"], cwd=project.path, check=True)
    project.record()
    (project.path / "tox.ini").unlink()
    folder = project.path / "sub"
    folder.mkdir()
    for name in ("test_mine.py", "conftest.py"):
        (project.path / name).rename(folder / name)
    monkeypatch.chdir(folder)
    return project


@pytest.mark.parametrize("update", ["--update-baselines", "--update-baselines=new"])
def test_no_second_one_is_recorded_in_silence(below: Project, update: str, golden: Golden) -> None:
    result = below.run(update)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    top = below.path
    (line,) = (line for line in result.errlines if line.strip())
    golden(line)
    assert not (top / "sub/baselines").exists()


def test_a_run_that_sees_none_says_where_they_are(below: Project, golden: Golden) -> None:
    result = below.run("-k", "sdpa")
    result.assert_outcomes(failed=1, deselected=1)
    golden.lines(result.stdout, "/baselines has some:")


@pytest.mark.parametrize("option", ["--rootdir={top}", "--perf-baselines={top}/baselines"])
def test_either_option_uses_them(below: Project, option: str) -> None:
    result = below.run("-k", "sdpa", option.format(top=below.path))
    result.assert_outcomes(passed=1, deselected=1)
    assert "has some" not in result.stdout.str()


@pytest.mark.parametrize(
    "own",
    ["an ini file", "its own baselines", "another work tree", "no work tree", "the option", "no baselines of ours"],
)
def test_one_of_its_own_is_recorded(below: Project, own: str) -> None:
    sub, options = below.path / "sub", ["--perf-reason", "why"]
    if own == "an ini file":
        (sub / "pytest.ini").write_text("[pytest]\n")
    elif own == "its own baselines":
        below.run("--update-baselines", "--perf-baselines=baselines", *options).assert_outcomes(passed=2)
    elif own == "another work tree":
        subprocess.run(["git", "init", "-q"], cwd=sub, check=True)
    elif own == "no work tree":
        (below.path / ".git").rename(below.path / "git")
    elif own == "the option":
        options.append("--perf-baselines=baselines")
    else:
        for path in below.baselines:
            path.write_text("{}")
    below.run("--update-baselines", *options).assert_outcomes(passed=2)
    assert len(list((sub / "baselines").rglob("*.json"))) == 2


def test_a_run_without_a_perf_test_hears_nothing_of_it(below: Project) -> None:
    below.pytester.path.joinpath("sub/test_mine.py").write_text("def test_it():\n    pass\n")
    result = below.run()
    result.assert_outcomes(passed=1)
    assert "baselines" not in result.stdout.str()
