"""What a whole night knows of its GPU fails the run, also where a test has passed by then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from pytest_llmperf.cli.night_results import gather
from pytest_llmperf.judge.verdict import AT_THE_END, WAITS
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from tests.golden import Golden
from tests.gpu_nights import Cases, World, baseline_of, case_log, spec_of, waiting_for_hosts
from tests.plugin.conftest import Project
from tests.shelf import keep

_CONFTEST = """
import json
from pathlib import Path
from unittest import mock

from pytest_llmperf.launch import local
from pytest_llmperf.launch import machine
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from tests import fakes, gpu_nights

fakes.install()
GPUS = tuple(Gpu(index=i, uuid=f"GPU-{i}", name="NVIDIA H200", memory_bytes=140 * 2**30) for i in range(2))
mock.patch.object(machine, "find_machine", return_value=Machine(gpus=GPUS, cpu_name="Fake CPU", cores=8)).start()

class NightLauncher(fakes.FakeLauncher):
    def launch(self, request, watch):
        super().launch(request, watch)
        asked = Path(f"{request.spec.digest}.txt")
        with asked.open("a") as count:
            count.write("x")
        at = f"{gpu_nights.TONIGHT}T12:00:{asked.stat().st_size:02d}Z"
        log = json.loads(Path("night.json").read_text())[request.spec.digest]
        return gpu_nights.launch_at(request.spec, [99], at, log)

mock.patch.object(local, "LocalLauncher", NightLauncher).start()
"""

_CASES = """
import pytest

from tests.gpu_nights import spec_of

@pytest.mark.parametrize("case", range(10))
def test_case(perf, case):
    perf.check(spec_of(case))
"""

# An unseen GPU that is somewhat faster than most.
_GPU = -0.012


@pytest.fixture
def night(project: Project) -> Project:
    """Ten cases with baselines of other GPUs."""
    project.pytester.makeconftest(_CONFTEST)
    project.pytester.makepyfile(test_mine=_CASES)
    store(project, World(seed=9).history())
    return project


def store(project: Project, stored: Cases) -> None:
    gpu = Gpu(index=0, uuid="GPU-0", name="NVIDIA H200", memory_bytes=140 * 2**30)
    kind = Machine(gpus=(gpu,), cpu_name="Fake CPU", cores=8).gpu_kind
    keep(project.path / "baselines", *(baseline_of(launches, case, kind) for case, launches in enumerate(stored)))


def run(night: Project, slower: float, *options: str, gpu: float = _GPU) -> tuple[pytest.RunResult, dict[str, Any]]:
    """The first case being ``slower`` by this logarithm, all by ``gpu``."""
    logs = {spec_of(case).digest: case_log(case) + gpu + slower * (case == 0) for case in range(10)}
    (night.path / "night.json").write_text(json.dumps(logs), encoding="utf-8")
    result = night.run("--perf-json", "out.json", "--junit-xml=out.xml", *options, gpus="2")
    return result, json.loads((night.path / "out.json").read_text())


def junit_errors(path: Path) -> list[tuple[str, str]]:
    cases = [(case, case.find("error")) for case in ET.parse(path).getroot()[0].iter("testcase")]
    return [(case.attrib["name"], error.attrib["message"]) for case, error in cases if error is not None]


# The one is less than what an unseen GPU may do, the other more, and less than what a bad one may.
@pytest.mark.parametrize(("slower", "workers"), [(0.034, ()), (0.07, ("-n", "2"))])
def test_a_case_that_its_test_let_pass_fails_the_run_once_its_gpu_is_known(
    night: Project, slower: float, workers: tuple[str, ...], golden: Golden
) -> None:
    result, document = run(night, slower, *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=10, errors=1)
    name = "regressed, by what the whole run knows"
    result.stdout.fnmatch_lines([f"*{spec_of(0).id}* regressed*", f"ERROR llmperf::{name} - test_mine.py*"])
    golden.lines(result.stdout, "ERROR at teardown", "ended as inconclusive", "run again, best")
    (first,) = (each for each in document["results"] if each["id"] == spec_of(0).id)
    assert (WAITS in first["notes"]) is (slower > 0.04)
    verdicts = {each["nodeid"]: each["verdict"] for each in document["results"]}
    assert verdicts.pop("test_mine.py::test_case[0]") == "regressed"
    assert set(verdicts.values()) == {"pass"}
    assert document["exit_code"] == pytest.ExitCode.TESTS_FAILED
    assert document["all_cases"]["verdict"] == "pass"
    assert (document["all_cases"]["cases"], document["all_cases"]["gpus"]) == (10, 1)
    ((told, message),) = junit_errors(night.path / "out.xml")
    assert told == name
    assert spec_of(0).id in message


_FAULT = """
from pytest_llmperf.run import whole_run

def broken(*_):
    raise ArithmeticError("no figure")

mock.patch.object(whole_run, "common_change", broken).start()
"""


def test_a_fault_in_it_costs_the_run_neither_its_json_nor_its_table(night: Project) -> None:
    night.pytester.makeconftest(_CONFTEST + _FAULT)
    result, document = run(night, 0.0)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=10, errors=1)
    line = "the whole run was not judged: ArithmeticError: no figure; each case stands by itself"
    result.stdout.fnmatch_lines(["* ERROR at teardown of the run: the whole run *", line, f"*{spec_of(0).id}* pass*"])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")
    assert {each["verdict"] for each in document["results"]} == {"pass"}
    assert (document["unjudged"], document["exit_code"]) == (line, pytest.ExitCode.TESTS_FAILED)
    ((told, message),) = junit_errors(night.path / "out.xml")
    assert told == "the whole run"
    assert line in message


def test_a_night_in_which_nothing_changed_passes(night: Project) -> None:
    result, document = run(night, 0.0, gpu=-0.005)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=10)
    result.stdout.no_fnmatch_line("*all cases*")
    assert {each["verdict"] for each in document["results"]} == {"pass"}
    assert document["all_cases"]["verdict"] == "pass"
    assert junit_errors(night.path / "out.xml") == []


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_all_lose_on_a_new_gpu_is_inconclusive_and_fails_a_strict_run_by_one_line(
    night: Project, is_strict: bool
) -> None:
    """With a new driver, say: nothing tells of that GPU but the cases themselves."""
    result, document = run(night, 0.0, *["--perf-strict"] * is_strict, gpu=0.035)
    line = "all cases slower, by *, by their software or by a GPU that nothing else tells of: 10 cases on 1 GPU, *"
    result.stdout.fnmatch_lines([line])
    assert document["all_cases"]["verdict"] == "inconclusive"
    assert {each["verdict"] for each in document["results"]} <= {"inconclusive", "regressed" if is_strict else ""}
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if is_strict else pytest.ExitCode.OK)
    errors = junit_errors(night.path / "out.xml")
    assert [name for name, _ in errors] == ["all cases"] * is_strict


@pytest.mark.parametrize(
    ("slower", "is_red", "workers"), [(0.06, False, ()), (0.12, True, ()), (0.12, True, ("-n", "2"))]
)
def test_a_strict_run_lets_a_case_do_what_it_does_by_itself_on_other_hosts_and_no_more(
    night: Project, slower: float, is_red: bool, workers: tuple[str, ...], golden: Golden
) -> None:
    store(night, waiting_for_hosts(World(seed=9).history(), 0.03))
    result, document = run(night, slower, "--perf-strict", *workers, gpu=-0.005)
    assert result.ret == document["exit_code"] == int(is_red)
    result.assert_outcomes(passed=10, errors=int(is_red))
    first = next(each for each in document["results"] if each["id"] == spec_of(0).id)
    assert {each["verdict"] for each in document["results"]} == {"pass", "inconclusive"}
    assert first["verdict"] == "inconclusive"
    rate = first["metrics"]["tokens_per_second_per_gpu"]
    assert (-rate["change"] > rate["by_itself"]) is is_red
    assert (AT_THE_END in first.get("notes", ())) is is_red
    name = "not shown to hold, by what the whole run knows"
    assert [told for told, _ in junit_errors(night.path / "out.xml")] == [name] * is_red
    golden.lines(result.stdout, f"{spec_of(0).id}: inconclusive: ")
    assert gather([night.path / "out.json"], []).headline.startswith("red" if is_red else "green")
