"""What pytest itself shows of a perf test has no secret, wherever it is read."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Project

SECRET = "correct-horse-battery-staple"

FAILS = """
import os, sys, warnings

def test_one(perf, train_spec):
    password = os.environ["DB_PASSWORD"]
    print("stdout has", password)
    print("stderr has", password, file=sys.stderr)
    try:
        raise OSError(f"refused: {password}")
    except OSError as error:
        assert password == "other", f"told {password}"

def test_of_others():
    assert os.environ["DB_PASSWORD"] == ""
"""


@pytest.mark.parametrize("words", [("--tb=long", "-l"), ("--tb=native",), ("-n", "1"), ("--tb=line",)], ids=str)
def test_a_failing_perf_test_shows_none(
    project: Project, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("DB_PASSWORD", SECRET)
    project.pytester.makepyfile(test_mine=FAILS)
    result = project.run(
        "-k", "test_one", "--junit-xml=out.xml", "-ojunit_logging=all", "-rA", "--perf-json=out.json", *words
    )
    result.assert_outcomes(failed=1)
    files = [(project.path / name).read_text() for name in ("out.xml", "out.json")]
    for text in (result.stdout.str(), result.stderr.str(), *files):
        assert "horse" not in text
    assert "told <set>" in result.stdout.str()
    assert "stdout has &lt;set&gt;" in files[0]


def test_what_other_tests_say_is_left_as_it_is(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", SECRET)
    project.pytester.makepyfile(test_mine=FAILS)
    result = project.run("-k", "test_of_others")
    assert SECRET in result.stdout.str()


def test_a_plan_shows_none_of_a_test_that_ends_early(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", SECRET)
    ask = "    assert perf.check(train_spec).launches, os.environ['DB_PASSWORD']"
    code = f"import os\ndef test_one(perf, train_spec):\n{ask}\n"
    project.pytester.makepyfile(test_mine=code)
    result = project.run("-k", "test_one", "--perf-dry-run", "-rs")
    result.assert_outcomes(skipped=1)
    assert "it ended early" in result.stdout.str()
    assert "horse" not in result.stdout.str()
