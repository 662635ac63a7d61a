"""The gate without a GPU, as pytest shows it: table, exit codes, commands, results for programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes import write_static
from tests.golden import Golden
from tests.plugin.conftest import Project

STATIC = """
import pytest
from dataclasses import replace
from pytest_llmperf import DidNotTrain, TrainSpec, on_cpu

WIDE = TrainSpec(model="llama-3.2-1b", gpus=8, liger=True, micro_batch_size=14)


@pytest.mark.parametrize("spec", [WIDE, replace(WIDE, micro_batch_size=37)], ids=lambda spec: spec.id)
def test_wide(perf, request, spec):
    assert not on_cpu(request.config)
    perf.check(spec)


@pytest.mark.xfail(raises=DidNotTrain, strict=True)
def test_known_to_fail(perf):
    perf.check(replace(WIDE, torch_compile=True))


def test_gain(perf):
    perf.compare(WIDE, replace(WIDE, micro_batch_size=37))
"""


def run(project: Project, *options: str) -> pytest.RunResult:
    return project.pytester.runpytest_subprocess("-p", "no:randomly", "--perf-static", *options)


@pytest.fixture
def wide(project: Project) -> Project:
    project.pytester.makepyfile(test_mine=STATIC)
    assert run(project, "--update-baselines=new").ret == 0
    return project


def test_every_case_is_judged_whatever_gpus_it_asks_for_and_nothing_is_launched(wide: Project, golden: Golden) -> None:
    result = run(wide)
    result.assert_outcomes(passed=3, skipped=1)
    golden.lines(result.stdout, "llmperf: 4 case(s)", "case", "12 MFLOP", "a ratio takes")
    assert wide.launches == []
    assert result.ret == 0


def test_a_copy_more_fails_the_run_and_offers_the_commands(wide: Project, golden: Golden) -> None:
    write_static(wide.path, operators={"aten::_to_copy": 58})
    result = run(wide, "-k", "mbs37", "--perf-json", "out.json")
    result.assert_outcomes(failed=1, deselected=3)
    assert result.ret == 1
    golden.lines(
        result.stdout,
        "llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus8: regressed: copies",
        "copies a step",
        "run it again:",
        "--perf-static --update-baselines --perf-reason",
    )
    (case,) = json.loads((wide.path / "out.json").read_text())["results"]
    assert case["verdict"] == "regressed"
    assert case["metrics"]["copies_per_step"]["baseline"] == 26
    assert case["launches"] == []


def test_an_upgrade_is_told_in_a_line_a_case(wide: Project, golden: Golden) -> None:
    write_static(wide.path, operators={"aten::_to_copy": 58}, versions={"transformers": "5.24.0"})
    result = run(wide)
    result.assert_outcomes(passed=3, skipped=1)
    golden.lines(result.stdout, "mbs14-gpus8: changed: other")
    assert run(wide, "--perf-strict").ret == 1


def test_what_changed_is_recorded_with_a_reason(wide: Project) -> None:
    write_static(wide.path, operators={"aten::mm": 40})
    assert run(wide, "--update-baselines").ret == 1
    assert run(wide, "--update-baselines", "--perf-reason", "fewer products").ret == 0
    assert run(wide, "--perf-strict").ret == 0


def test_a_case_without_figures_fails_as_new_with_the_command_that_records_it(project: Project) -> None:
    result = run(project, "-k", "sdpa")
    result.assert_outcomes(failed=1, deselected=1)
    lines = ["*: new: no static figures yet", "record it: *--perf-static --update-baselines=new"]
    result.stdout.fnmatch_lines([*lines, "* no static figures yet; record * with --perf-static --update-baselines=new"])


@pytest.mark.parametrize(
    "options",
    [("--perf-dry-run",), ("--perf-against", "python")],
    ids=lambda options: options[0],
)
def test_what_is_about_launches_goes_with_none(project: Project, options: Any, golden: Golden) -> None:
    result = run(project, *options)
    assert result.ret == 4
    golden.lines(result.stderr, "ERROR: --perf-static launches")


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_python_that_cannot_train_judges_nothing_in_one_line(project: Project, options: Any, golden: Golden) -> None:
    write_static(project.path, missing="python has no torch")
    result = run(project, *options)
    assert result.ret == 4
    lines = [line for line in [*result.outlines, *result.errlines] if "torch" in line]
    golden(lines)
    result.stdout.no_fnmatch_line("*skipped*")


def test_where_what_tells_of_steps_has_ended_no_new_case_is_skipped(project: Project, golden: Golden) -> None:
    write_static(project.path, error="cannot open libcudart.so.13", is_lost=True)
    result = run(project, "-k", "sdpa")
    result.assert_outcomes(failed=1, deselected=1)
    golden.lines(result.stdout, ": invalid: its")
    write_static(project.path, error="optimizer x is not modelled")
    result = run(project, "-k", "sdpa")
    result.assert_outcomes(skipped=1, deselected=1)
    golden.lines(result.stdout, "nothing was judged")
    result = run(project)
    result.assert_outcomes(skipped=2)
    golden.lines(result.stdout, "nothing was judged")


ON_A_GPU = """
from unittest import mock
from pytest_llmperf.launch import machine
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from tests.fakes import install

install()
gpu = Gpu(index=0, uuid="a", name="Fake GPU", memory_bytes=2**40)
mock.patch.object(machine, "find_machine", return_value=Machine(gpus=(gpu,), cpu_name="Fake CPU", cores=8)).start()
"""

RECORDED = """
import pathlib, pytest

@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_it(perf, train_spec, micro_batch_size):
    if micro_batch_size == 2 and pathlib.Path("end").exists():
        raise KeyboardInterrupt
    perf.check(train_spec)
"""


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["ended", "ctrl-c"])
def test_a_run_that_recorded_tells_steps_at_its_end_unless_somebody_waits_for_it(
    project: Project, is_interrupted: bool
) -> None:
    project.pytester.makeconftest(ON_A_GPU)
    project.pytester.makepyfile(test_mine=RECORDED)
    if is_interrupted:
        (project.path / "end").touch()
    result = project.run("--update-baselines", gpus="1")
    assert result.ret == (pytest.ExitCode.INTERRUPTED if is_interrupted else pytest.ExitCode.OK)
    stored = [json.loads(path.read_text()) for path in project.baselines]
    assert ["static" in document for document in stored] == ([False] if is_interrupted else [True, True])


def test_on_the_cpu_the_cases_are_the_cpus(project: Project) -> None:
    result = run(project, "--gpus", "0", "-k", "sdpa", "--update-baselines=new")
    result.assert_outcomes(passed=1, deselected=1)
    assert [path.stem for path in project.baselines] == ["llama-tiny-bf16-sdpa-seq64-mbs1-gpus1"]


def test_options_about_launches_are_told_to_have_no_effect(wide: Project) -> None:
    line = "llmperf: --perf-trace, --perf-launches: without effect, since nothing is launched"
    assert line in run(wide, "--perf-launches", "3", "--perf-trace", "no").outlines
    assert "without effect" not in run(wide).stdout.str()
