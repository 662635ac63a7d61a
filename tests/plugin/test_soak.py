"""``perf.soak`` and ``--perf-soak``: what a test, a file and a page are told of minutes of steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes import ENVIRONMENT
from tests.golden import Golden
from tests.plugin.conftest import Project

CASE = "llama-tiny-bf16-sdpa-seq64-mbs1-gpus1-soak"
TEST = "def test_it(perf, train_spec):\n    perf.soak(train_spec, minutes={minutes})\n"


@pytest.fixture
def soak(project: Project) -> Project:
    project.pytester.makepyfile(test_mine=TEST.format(minutes=4))
    return project


def result(project: Project, *options: str) -> dict[str, Any]:
    project.run("--perf-json", "out.json", *options)
    (found,) = json.loads((project.path / "out.json").read_text())["results"]
    return dict(found)


def test_a_clean_soak_passes_and_leaves_what_it_saw(soak: Project) -> None:
    found = result(soak)
    assert (found["verdict"], found["soak"]["steps"], found["soak"]["findings"]) == ("pass", 4800, [])
    assert len(found["soak"]["series"]["step_seconds"]) == 120
    assert soak.baselines == []


def test_a_leak_fails_the_test_in_one_line(soak: Project, golden: Golden) -> None:
    soak.fake(leak_bytes=2**20)
    run = soak.run()
    run.assert_outcomes(failed=1)
    golden.lines(run.stdout.str(), CASE, "measured:")
    assert soak.launches[0].startswith(CASE.removesuffix("-soak"))


def test_the_page_has_its_pictures(soak: Project) -> None:
    for name in ("jinja2", "vl_convert"):
        pytest.importorskip(name, reason="a page takes the extra `page`")
    soak.run("--perf-report", "page.html")
    text = (soak.path / "page.html").read_text(encoding="utf-8")
    for title in ("Step time", "Memory", "Open files and threads"):
        assert title in text


def test_one_that_fails_is_told_with_what_was_seen_until_then(soak: Project, golden: Golden) -> None:
    """And as a check's: its last lines, where its logs are."""
    soak.fake(fail="oom", leak_bytes=2**20)
    run = soak.run("--perf-json", "out.json")
    golden.lines(run.stdout.str(), CASE, "  |")
    assert "logs: " in run.stdout.str()
    (found,) = json.loads((soak.path / "out.json").read_text())["results"]
    assert found["verdict"] == "regressed"
    assert f": {found['reason']}\n" in run.stdout.str()


def test_its_document_tells_what_ran(soak: Project) -> None:
    soak.run("--perf-json", "out.json")
    document = json.loads((soak.path / "out.json").read_text())
    assert document["versions"] == document["results"][0]["soak"]["environment"]["versions"] == ENVIRONMENT.versions
    assert "project" in document


def test_ctrl_c_keeps_what_was_seen(soak: Project, golden: Golden) -> None:
    soak.fake(fail="interrupt", leak_bytes=2**20)
    printed = soak.run("--perf-json", "out.json").stdout.str()
    (found,) = json.loads((soak.path / "out.json").read_text())["results"]
    assert found["verdict"] == "regressed"
    golden(found["reason"])
    assert found["soak"]["steps"] == 480
    assert f"llmperf: {CASE}: regressed: {found['reason']}" in printed


def test_the_option_makes_each_check_of_the_selected_tests_a_soak(project: Project) -> None:
    found = project.results("--perf-soak", "1", "-k", "sdpa")
    assert [*found] == [CASE]
    assert found[CASE]["soak"]["asked_seconds"] == 60
    assert found[CASE]["verdict"] == "pass"
    assert project.baselines == []


@pytest.mark.parametrize(
    "words",
    [
        ["--update-baselines"],
        ["--perf-against", "git:HEAD"],
        ["--perf-static"],
        ["--perf-parity"],
        ["--perf-launches", "2"],
        ["--perf-all-steps", "1"],
    ],
    ids=lambda words: words[0].strip("-"),
)
def test_what_it_does_not_go_with_is_refused(project: Project, golden: Golden, words: list[str]) -> None:
    run = project.run("--perf-soak", "1", *words)
    assert (run.ret, project.launches) == (4, [])
    golden.lines(run.stderr.str(), "--perf-soak")


def test_what_else_launches_is_skipped_under_it(project: Project) -> None:
    project.pytester.makepyfile(test_mine="def test_it(perf, train_spec):\n    perf.measure(train_spec)\n")
    project.run("--perf-soak", "1").assert_outcomes(skipped=1)
    assert project.launches == []


@pytest.mark.parametrize("minutes", ["0", "'30'", "1e9", "float('nan')"])
def test_minutes_are_a_number_above_0_of_a_week_at_most(project: Project, golden: Golden, minutes: str) -> None:
    project.pytester.makepyfile(test_mine=TEST.format(minutes=minutes))
    golden.lines(project.run().stdout.str(), "perf.soak")


def test_what_is_no_training_is_refused(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(test_mine="def test_it(perf):\n    perf.soak(None)\n")
    golden.lines(project.run().stdout.str(), "perf.soak: ")


def test_a_dry_run_plans_it(soak: Project, golden: Golden) -> None:
    run = soak.run("--perf-dry-run")
    golden.lines(run.stdout.str(), CASE)
    assert soak.launches == []
