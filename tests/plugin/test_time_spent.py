"""Where the time of a run went: the footer and the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.conftest import Project

PHASES = {"start": 4.0, "imports": 8.0, "model": 1.0, "first_step": 2.0, "steps": 14.0, "end": 1.0}


def document(path: Path) -> Any:
    return json.loads((path / "out.json").read_text())


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_the_footer_and_the_json_say_where_it_went(project: Project, workers: tuple[str, ...]) -> None:
    project.record(phases=PHASES)
    project.fake(phases=PHASES, by={"eager": {"fail": "error"}})
    result = project.run("--perf-json=out.json", *workers)
    result.stdout.fnmatch_lines(
        ["1 pass, 1 invalid · 60* s in 2 launches: 30 s failed launches, 14 s training, 13 s start-up, 2 s first*"]
    )
    values = document(project.path)
    (launch,) = next(each for each in values["results"] if each["verdict"] == "pass")["launches"]
    assert list(launch["phases"]) == ["waiting_for_hardware", *PHASES]
    spent = values["spent"]
    waited = spent["phases"].pop("waiting_for_hardware")
    assert spent["phases"] == {**PHASES, "failed_launches": 30.0}
    assert (spent["launches"], spent["seconds"]) == (2, pytest.approx(60.0 + waited, abs=0.01))


def test_a_run_that_only_measures_says_it_too(project: Project) -> None:
    project.pytester.makepyfile(test_mine="def test_it(perf, train_spec):\n    perf.measure(train_spec)\n")
    project.fake(phases=PHASES)
    result = project.run("--perf-json=out.json")
    result.stdout.fnmatch_lines(["30* s in 1 launch: 14 s training, 13 s start-up, 2 s first steps, 1 s ending*"])
    assert document(project.path)["spent"]["launches"] == 1


def test_a_dry_run_has_spent_nothing(project: Project) -> None:
    project.record(phases=PHASES)
    project.run("--perf-dry-run", "--perf-json=out.json")
    assert "spent" not in document(project.path)
