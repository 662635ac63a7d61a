"""Exact counts in a run: in the table, a failure's first line, the results for programs, and off by an option."""

from __future__ import annotations

import json
from typing import Any

from tests.golden import Golden
from tests.plugin.conftest import Project

BEFORE: dict[str, Any] = {"kernel": {"gemm": 200, "_rms_norm_kernel": 33}, "wait": {"cudaStreamSynchronize": 6}}
UNFUSED: dict[str, Any] = {**BEFORE, "kernel": {"gemm": 200, "elementwise": 66}}
WAITING: dict[str, Any] = {**BEFORE, "wait": {"cudaStreamSynchronize": 7}}
SAID = (
    "+33.0 ms of a traced step: fused kernels gone: _rms_norm_* 33; "
    "elementwise and others +66.0 ms (elementwise 66 new); "
    "normalisation and activation -33.0 ms (_rms_norm_kernel 33 gone); unexplained 0.00 ms"
)


def test_another_number_of_kernels_is_told_and_passes_unless_the_run_is_strict(project: Project) -> None:
    project.record(trace=BEFORE)
    project.fake(trace=UNFUSED)
    (result,) = project.results("-k", "sdpa").values()
    assert (result["verdict"], result["diagnosis"]) == ("changed", SAID)
    assert result["metrics"]["kernels_per_step"]["value"] == 266
    assert result["launches"][0]["trace"]["rows"]["kernel"]["elementwise"] == [66.0, 0.066]
    strict = project.run("--perf-strict", "-k", "sdpa")
    strict.assert_outcomes(failed=1, deselected=1)
    strict.stdout.fnmatch_lines(
        [f"*: changed, which --perf-strict fails: kernels_per_step 266, *; {SAID}", "accept it: *--perf-reason*"]
    )
    strict.stdout.fnmatch_lines(["1 changed · *"])


def test_a_wait_more_fails_by_one_launch_and_says_what_it_is(project: Project, golden: Golden) -> None:
    project.record(trace=BEFORE)
    project.fake(trace=WAITING)
    result = project.run("-k", "sdpa")
    result.assert_outcomes(failed=1, deselected=1)
    golden.lines(result.stdout, "; 0.00 ms", "synchronisations a step")
    assert len(project.launches) == 1


def test_a_run_may_leave_traces_out(project: Project) -> None:
    project.record(trace=BEFORE)
    project.fake()
    result = project.run("--perf-trace=no", "-k", "sdpa")
    result.assert_outcomes(passed=1, deselected=1)
    assert "no trace" not in result.stdout.str()
    (path, *_) = project.baselines
    assert json.loads(path.read_text())["trace"]["rows"]["kernel"]["gemm"][0] == 200
