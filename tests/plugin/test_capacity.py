"""``perf.max_micro_batch``: verdicts beside neighbours, what is recorded and how it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

CASE = "llama-tiny-bf16-sdpa-seq64-maxmbs-gpus1"
NEIGHBOUR = ["GPU 0: pid 7 (python) holds 40.0 GiB"]


class Capacity:
    """A project whose one test asks for the largest micro-batch."""

    def __init__(self, project: Project) -> None:
        self.project = project
        project.pytester.makepyfile(test_mine="def test_it(perf, train_spec):\n    perf.max_micro_batch(train_spec)\n")

    def run(self, *options: str) -> pytest.RunResult:
        return self.project.run("--perf-memory-limit", "2GiB", *options)

    def result(self, *options: str) -> dict[str, Any]:
        self.run("--perf-json", "out.json", *options)
        (found,) = json.loads((self.project.path / "out.json").read_text())["results"]
        return dict(found)

    def record(self, most: int) -> None:
        self.project.fake(most=most)
        assert self.run("--update-baselines", "--perf-reason", "start").ret == 0
        (self.project.path / "launches.txt").unlink()


@pytest.fixture
def capacity(project: Project) -> Capacity:
    return Capacity(project)


def test_one_sequence_less_is_a_loss(capacity: Capacity) -> None:
    capacity.record(12)
    assert capacity.result()["verdict"] == "pass"
    capacity.project.fake(most=11)
    assert capacity.result()["verdict"] == "regressed"


def test_all_that_was_launched_for_it_is_counted(capacity: Capacity) -> None:
    capacity.project.fake(most=2)  # of 1, 2, 6, 4 and 3 sequences
    capacity.run().stdout.fnmatch_lines(["* in 5 launches: 30 s*"])


class TestNeighbours:
    def test_what_fits_beside_one_is_no_answer(self, capacity: Capacity, golden: Golden) -> None:
        capacity.record(12)
        capacity.project.fake(most=8, foreign_processes=NEIGHBOUR)
        result = capacity.run("--update-baselines", "--perf-reason", "why")
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, ": invalid: another")
        result.stdout.no_fnmatch_line("*accept it*")
        assert len(capacity.project.launches) == 2  # a launch and its retry: the search ends there
        capacity.project.fake(most=12)
        assert capacity.result()["verdict"] == "pass"


class TestRecording:
    def test_what_an_injected_fault_left_is_never_recorded(self, capacity: Capacity, golden: Golden) -> None:
        capacity.project.fake(most=5, evidence={"injected": "hold=5"})
        result = capacity.run("--update-baselines", "--perf-reason", "why")
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, ": measured under")
        assert capacity.project.baselines == []
        assert "measured under LLMPERF_INJECT=hold=5" in capacity.result()["notes"]

    def test_a_loss_says_what_it_is_held_against(self, capacity: Capacity, golden: Golden) -> None:
        capacity.record(12)
        capacity.project.fake(most=8)
        golden.lines(capacity.run().stdout, "; baseline: 12")
        refused = capacity.run("--update-baselines")
        golden.lines(refused.stdout, ": worse (max_micro_batch_size")

    def test_old_new_and_anchor_stand_side_by_side(self, capacity: Capacity) -> None:
        for most in (12, 14):
            capacity.record(most)
        capacity.project.fake(most=8)
        capacity.run("--update-baselines", "--perf-reason", "a workspace").stdout.re_match_lines(
            [
                rf"recorded {CASE}$",
                r"  old +14 sequences    1.00 GiB  20\d\d-\d\d-\d\d  \(start\)",
                r"  new +8 sequences    1.00 GiB  20\d\d-\d\d-\d\d  \(a workspace\)",
                r"  anchor +12 sequences    1.00 GiB  20\d\d-\d\d-\d\d  \(start\)",
            ],
            consecutive=True,
        )
