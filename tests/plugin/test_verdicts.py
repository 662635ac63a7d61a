"""From launches to an outcome of pytest, and to baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project


def test_no_baseline_fails_as_new_with_the_command_that_records_it(project: Project) -> None:
    result = project.run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*new*", "*--update-baselines*"])
    assert project.baselines == []


def test_recorded_then_judged_green(project: Project) -> None:
    project.record()
    assert len(project.baselines) == 2
    project.run().assert_outcomes(passed=2)


def test_a_slowdown_beyond_the_tolerance_fails(project: Project) -> None:
    project.record(step_seconds=0.1)
    project.fake(step_seconds=0.12)
    project.run().assert_outcomes(passed=2)
    project.fake(step_seconds=0.9)
    result = project.run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*tokens_per_second_per_gpu*", "*run it again*pytest*test_mine.py*", "*accept it*--perf-reason*"]
    )


def test_a_failure_message_is_at_most_30_lines(project: Project) -> None:
    project.record(versions={f"package{i}": "1" for i in range(40)})
    project.fake(step_seconds=10.0, versions={f"package{i}": "2" for i in range(40)})
    result = project.run("-k", "eager")
    lines = result.outlines
    start = next(i for i, line in enumerate(lines) if line.startswith("____"))
    end = next(i for i, line in enumerate(lines) if i > start and line.startswith("==="))
    assert end - start - 1 <= 25


def test_an_improvement_passes_and_fails_only_a_strict_run(project: Project) -> None:
    project.record(step_seconds=1.0)
    project.fake(step_seconds=0.1)
    project.run().assert_outcomes(passed=2)
    project.run("--perf-strict").assert_outcomes(failed=2)


def test_what_a_verdict_does_not_say_is_a_note(project: Project) -> None:
    project.record()
    project.fake(evidence={"injected": "hold=5", "graph_breaks": 4})
    result = project.run("-k", "sdpa")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["*measured under LLMPERF_INJECT=hold=5*"])
    assert "broke the graph" not in result.stdout.str()


def test_what_a_fault_did_is_not_offered_to_be_accepted(project: Project) -> None:
    project.record()
    project.fake(reserved_bytes=2**31, evidence={"injected": "hold=1073741824"})
    result = project.run("-k", "sdpa")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*regressed: peak_reserved_bytes*", "run it again: *"])
    assert "--update-baselines" not in result.stdout.str()


@pytest.mark.parametrize("method", ["check", "measure"])
def test_a_case_that_does_not_train_is_told_from_one_that_fails(project: Project, method: str) -> None:
    project.pytester.makepyfile(
        test_mine=f"""
        import pytest
        from pytest_llmperf.plugin.reports import DidNotTrain

        @pytest.mark.xfail(raises=DidNotTrain, strict=True, reason="known")
        def test_it(perf, train_spec):
            perf.{method}(train_spec)
        """
    )
    project.fake(fail="error")
    project.run().assert_outcomes(xfailed=1)
    # The day it trains, it fails: as new, or because the mark is strict.
    project.fake()
    project.run().assert_outcomes(failed=1)


def test_another_process_on_the_hardware_is_invalid(project: Project) -> None:
    project.record()
    project.fake(foreign_processes=["GPU 0: pid 7 (python) holds 3.2 GiB"])
    result = project.run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*pid 7*"])


SMALL_GPU = """
from unittest import mock

from pytest_llmperf.launch import machine
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from tests.fakes import install

install()
gpu = Gpu(index=0, uuid="GPU-0", name="Fake GPU", memory_bytes=64 * 2**30)
mock.patch.object(machine, "find_machine", return_value=Machine(gpus=(gpu,), cpu_name="Fake CPU", cores=8)).start()
"""


@pytest.mark.parametrize(
    ("launches", "outcome"),
    [
        ([{"fail": "oom"}], "passed"),
        ([{}], "failed"),
    ],
)
def test_a_case_that_must_run_out_of_memory_does_so_alone(
    project: Project, launches: list[dict[str, Any]], outcome: str
) -> None:
    project.pytester.makeconftest(SMALL_GPU)
    project.pytester.makepyfile(
        test_mine="""
        import pytest

        @pytest.mark.expects_oom(below_gib=65)
        def test_it(perf, train_spec):
            perf.check(train_spec)
        """
    )
    project.fake(sequence=launches)
    project.run(gpus="1").assert_outcomes(**{outcome: 1})


def test_a_failed_launch_fails_and_names_its_folder(project: Project, golden: Golden) -> None:
    project.fake(fail="error")
    result = project.run("-k", "eager")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*last line*", "*logs: *.llmperf*", "*run it again*"])
    golden.lines(result.stdout, "launch failed (error)")
    assert result.stdout.str().count("it broke") == 1


def test_a_refusal_is_one_line_without_logs_and_nothing_to_run_again(project: Project, golden: Golden) -> None:
    project.fake(fail="refused")
    result = project.run("-k", "eager")
    result.assert_outcomes(failed=1, deselected=1)
    golden.lines(result.stdout, ": refused:")
    for line in ("*launch failed*", "*logs: *", "*run it again*"):
        result.stdout.no_fnmatch_line(line)
    assert next(iter(project.results().values()))["reason"].startswith("refused: ")


def test_one_that_measure_made_is_told_alike(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(test_mine="def test_it(perf, train_spec):\n    perf.measure(train_spec)\n")
    project.fake(fail="error")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*last line*", "*run it again*"])
    golden.lines(result.stdout, "launch failed (error)")
    result.stdout.no_fnmatch_line("*runner.py*")
    ((name, told),) = project.results().items()
    assert (name, told["verdict"]) == ("llama-tiny-bf16-sdpa-seq64-mbs1-gpus1", "invalid")


def test_out_of_memory_passes_only_where_it_is_declared(project: Project) -> None:
    # On the CPU nothing is declared to run out: the marker speaks of a GPU's memory.
    project.pytester.makepyfile(
        test_mine="""
        import pytest

        @pytest.mark.expects_oom(below_gib=65)
        def test_it(perf, train_spec):
            perf.check(train_spec)
        """
    )
    project.fake(fail="oom")
    project.run().assert_outcomes(failed=1)


@pytest.mark.parametrize(("ini", "is_told"), [("", True), ("perf_throughput_tolerance = 0.5", False)])
def test_a_cpus_wide_gate_is_told_once(project: Project, ini: str, is_told: bool) -> None:
    project.pytester.makeini(f"[pytest]\n{ini}\n")
    project.record()
    lines = [line for line in project.run().outlines if line.startswith("CPU: ")]
    said = (
        "CPU: speed is not gated (a case fails only when it is at least 4 times slower). Counts and losses are exact: "
    )
    said += "more copies, waits or collectives fail, another difference fails with --perf-strict"
    assert lines == [said] * is_told


def test_tolerances_come_from_ini_spec_and_marker_in_that_order(project: Project) -> None:
    project.pytester.makeini("[pytest]\nperf_memory_tolerance = 0.01\n")
    project.pytester.makepyfile(
        test_mine="""
        from dataclasses import replace
        import pytest

        def test_ini(perf, train_spec):
            perf.check(train_spec)

        @pytest.mark.parametrize("micro_batch_size", [2])
        def test_spec(perf, train_spec):
            perf.check(replace(train_spec, memory_tolerance=0.2))

        @pytest.mark.perf_tolerance(memory=0.02)
        @pytest.mark.parametrize("micro_batch_size", [3])
        def test_marker(perf, train_spec):
            perf.check(replace(train_spec, memory_tolerance=0.2))
        """
    )
    project.record(reserved_bytes=1000 * 2**20)
    project.fake(reserved_bytes=1015 * 2**20)
    assert {i.split("-")[-2]: r["verdict"] for i, r in project.results().items()} == {
        "mbs1": "regressed",
        "mbs2": "pass",
        "mbs3": "pass",
    }
    project.fake(reserved_bytes=1100 * 2**20)
    assert {i.split("-")[-2]: r["verdict"] for i, r in project.results().items()} == {
        "mbs1": "regressed",
        "mbs2": "pass",
        "mbs3": "regressed",
    }


class TestUpdating:
    def test_new_records_only_what_has_no_baseline(self, project: Project) -> None:
        project.record(step_seconds=0.1)
        kept = project.baselines[0]
        text = kept.read_text()
        project.baselines[1].unlink()
        project.fake(step_seconds=0.11)
        project.run("--update-baselines=new").assert_outcomes(passed=2)
        assert kept.read_text() == text
        assert len(project.baselines) == 2

    def test_a_worse_figure_needs_a_reason(self, project: Project, golden: Golden) -> None:
        project.record(step_seconds=0.1)
        before = [path.read_text() for path in project.baselines]
        project.fake(step_seconds=10.0)
        result = project.run("--update-baselines")
        result.assert_outcomes(failed=2)
        result.stdout.fnmatch_lines(["*--perf-reason*"])
        assert [path.read_text() for path in project.baselines] == before
        result = project.run("--update-baselines", "--perf-reason", "the new optimizer is worth it")
        result.assert_outcomes(passed=2)
        result.stdout.fnmatch_lines(["*anchor*"])
        golden.lines(project.baselines[0].read_text(), "the new optimizer")
        project.run().assert_outcomes(passed=2)

    def test_the_flag_does_not_eat_the_path_that_follows(self, project: Project) -> None:
        result = project.run("--update-baselines", "test_mine.py", "--perf-reason", "start")
        result.assert_outcomes(passed=2)
        assert len(project.baselines) == 2

    def test_an_unknown_value_is_a_usage_error(self, project: Project) -> None:
        result = project.run("--update-baselines=some")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert project.launches == []

    @pytest.mark.parametrize(("text", "said"), [("", "empty"), ('{"schema": 99}', "*newer*")])
    def test_a_broken_file_is_named_before_anything_is_launched_and_kept(
        self, project: Project, text: str, said: str
    ) -> None:
        project.record()
        broken = project.baselines[0]
        broken.write_text(text)
        for options in ((), ("--update-baselines", "--perf-reason", "why")):
            result = project.run("-k", "eager", *options)
            result.assert_outcomes(failed=1, deselected=1)
            result.stdout.fnmatch_lines([f"*{broken.name}*"])
            assert said.strip("*") in result.stdout.str()
            assert broken.read_text() == text
        assert project.launches == []

    def test_a_broken_file_costs_no_other_case_its_verdict(self, project: Project, golden: Golden) -> None:
        project.record()
        broken = next(path for path in project.baselines if "eager" in path.name)
        document = json.loads(broken.read_text())
        document["launches"][0]["canary"] = {"matmul_flops": None}
        broken.write_text(json.dumps(document))
        result = project.run()
        result.assert_outcomes(failed=1, passed=1)
        golden.lines(result.stdout, "canary 'matmul_flops' is")
        assert "Traceback" not in result.stdout.str()


def test_the_json_holds_the_designs_names(project: Project) -> None:
    project.record()
    outcome = next(iter(project.results().values()))
    assert set(outcome) >= {"id", "digest", "nodeid", "verdict", "reason", "metrics", "launches"}
    rate = outcome["metrics"]["tokens_per_second_per_gpu"]
    assert set(rate) >= {"value", "unit", "baseline", "limit", "change", "detectable"}
    assert rate["value"] == pytest.approx(64 / 0.1)
    document = json.loads((project.path / "out.json").read_text())
    assert document["schema"] == 1
    assert document["machine"]["kind"] == "cpu-fake-8c"


def test_baselines_can_live_elsewhere(project: Project, tmp_path: Path) -> None:
    elsewhere = tmp_path / "with space"
    project.run("--update-baselines", f"--perf-baselines={elsewhere}").assert_outcomes(passed=2)
    assert len(list(elsewhere.rglob("*.json"))) == 2
    project.run(f"--perf-baselines={elsewhere}").assert_outcomes(passed=2)


def test_a_case_that_is_held_beside_its_plain_form_is_repeated_so(project: Project, golden: Golden) -> None:
    project.pytester.makeconftest(
        """
        from pytest_llmperf.records.failure import Failure
        from tests.fakes import FakeLauncher, install

        FakeLauncher.training_errors = lambda *_: Failure(kind="error", message="it broke", tail=(), folder="run")
        install()
        """
    )
    result = project.run("-k", "sdpa", "--perf-parity")
    result.stdout.fnmatch_lines(["*it broke*"])
    golden.lines(result.stdout, "run it again:")
