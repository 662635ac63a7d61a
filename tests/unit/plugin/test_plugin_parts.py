"""The plugin's parts alone: markers, fixtures, the run folder, leases and what is said."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.judge.policy import StoredOfKind
from pytest_llmperf.launch import local, machine
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.launch.site import SlurmOptions, Wanted
from pytest_llmperf.plugin.console import Console
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.baseline_comparison import BaselineComparison
from pytest_llmperf.run.case import Caller, CaseTerms
from pytest_llmperf.run.derived_metrics import ModelFlops
from pytest_llmperf.run.findings import CaseFailedError, Findings
from pytest_llmperf.run.hardware import Hardware, Job, prune
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.runner import Runner
from tests.fakes import launch_of
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny")
DAY = 24 * 3600.0
NOBODY = 999_999_999
"""A pid that no Linux gives."""


def errors_of(pytester: pytest.Pytester, body: str) -> list[str]:
    """What is said of a test file whose one test ends at setup."""
    pytester.makepyfile(test_mine=f"import pytest\n\n{body}")
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", "--gpus", "0", "--tb=short")
    result.assert_outcomes(errors=1)
    lines = result.outlines
    start = next(i for i, line in enumerate(lines) if "ERROR at setup" in line)
    end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith("==="))
    return [line for line in lines[start + 1 : end] if line.strip()]


class TestMarks:
    @pytest.mark.parametrize(
        ("marker", "said"),
        [
            ("perf_tolerance(throughput=-1)", "perf_tolerance(throughput=-1): must be a positive fraction"),
            (
                "perf_tolerance(throughput=3)",
                "perf_tolerance(throughput=3): must be a positive fraction of at most 1, e.g. 0.03",
            ),
            (
                "perf_scaling(tolerance=2)",
                "perf_scaling(tolerance=2): must be a positive fraction of at most 1, e.g. 0.03",
            ),
            ("perf_tolerance(memory=0)", "perf_tolerance(memory=0): must be a positive fraction"),
            ("perf_tolerance(throughput=float('nan'))", "perf_tolerance(throughput=nan): must be a positive fraction"),
            ("perf_tolerance(throughput='3%')", "perf_tolerance(throughput='3%'): must be a positive fraction"),
            ("perf_tolerance(throughput=True)", "perf_tolerance(throughput=True): must be a positive fraction"),
            ("perf_tolerance(troughput=0.1)", "perf_tolerance(troughput=0.1): unknown (did you mean 'throughput'?)"),
            ("rung('15.9')", "rung('15.9'): must be given by name: number=…"),
            ("perf_tolerance(0.1)", "perf_tolerance(0.1): must be given by name: throughput=…, memory=…"),
            (
                "reference(tokens_per_second_per_gpu='10k')",
                "reference(tokens_per_second_per_gpu='10k'): must be a positive number, or None",
            ),
            ("reference(peak_reserved_gib=-1)", "reference(peak_reserved_gib=-1): must be a positive number, or None"),
            ("reference(tokens_per_second=1)", "unknown (did you mean 'tokens_per_second_per_gpu'?)"),
            (
                "expects_inactive('ligr')",
                "expects_inactive('ligr'): must be a setting that evidence tells of (did you",
            ),
            (
                "expects_inactive('x')",
                "expects_inactive('x'): must be a setting that evidence tells of, e.g. 'liger'",
            ),
            (
                "perf_scaling(efficiency_at_least=85)",
                "efficiency_at_least=85): must be a positive fraction of at most 2",
            ),
            ("expects_inactive(['liger'])", "expects_inactive(['liger']): must be a setting that evidence tells of"),
            ("expects_oom(below_gib='64')", "expects_oom(below_gib='64'): must be a positive number of GiB"),
            ("expects_oom(gib=64)", "expects_oom(gib=64): unknown (did you mean 'below_gib'?)"),
        ],
    )
    def test_one_that_is_misused_is_one_line_at_setup(self, pytester: pytest.Pytester, marker: str, said: str) -> None:
        lines = errors_of(pytester, f"@pytest.mark.{marker}\ndef test_one(perf):\n    pass\n")
        assert len(lines) == 1
        assert lines[0].startswith("test_mine.py::test_one: marker ")
        assert said in lines[0]

    def test_one_that_is_used_well_says_nothing(self, pytester: pytest.Pytester) -> None:
        pytester.makepyfile(
            """
            import pytest

            @pytest.mark.perf_tolerance(throughput=0.1, memory=1)
            @pytest.mark.reference(source="a paper", tokens_per_second_per_gpu=None, peak_reserved_gib=61.9)
            @pytest.mark.expects_inactive("liger", "tf32")
            @pytest.mark.expects_oom(below_gib=64)
            def test_one(perf):
                marks = perf._cases._caller.terms
                assert marks.tolerances == {"tokens_per_second_per_gpu": 0.1, "peak_reserved_bytes": 1}
                assert marks.reference.tokens_per_second_per_gpu is None
                assert marks.reference.peak_reserved_bytes == 61.9 * 2**30
                assert marks.inactive == {"liger", "tf32"}
                assert marks.oom_below_gib == 64
            """
        )
        pytester.runpytest_inprocess("-p", "no:randomly", "--gpus", "0").assert_outcomes(passed=1)


@pytest.mark.parametrize("value", ["['fp32']", "None", "{}"])
def test_a_precision_that_is_no_word_is_one_line(pytester: pytest.Pytester, value: str) -> None:
    body = f"@pytest.mark.parametrize('precision', [{value}])\ndef test_one(train_spec):\n    pass\n"
    (line,) = errors_of(pytester, body)
    assert line.startswith(f"unknown precision {value}")


class TestPruning:
    @staticmethod
    def runs(home: Path) -> set[str]:
        return {path.name for path in home.iterdir()}

    @staticmethod
    def make(home: Path, number: int, pid: int = NOBODY, age: float = 3 * DAY) -> Path:
        """The ``number``-th run, with a launch in it, both last written ``age`` seconds ago."""
        folder = home / f"20250101-{number:06}-{pid}"
        (folder / "launch").mkdir(parents=True)
        for path in (folder / "launch", folder):
            os.utime(path, (time.time() - age,) * 2)
        return folder

    def test_old_runs_beyond_the_newest_ten_go(self, tmp_path: Path) -> None:
        folders = [self.make(tmp_path, number) for number in range(12)]
        prune(tmp_path)
        # One of the ten is the run that is about to begin.
        assert self.runs(tmp_path) == {folder.name for folder in folders[3:]}

    def test_a_run_that_goes_on_stays(self, tmp_path: Path) -> None:
        mine = self.make(tmp_path, 0, pid=os.getpid())
        fresh = self.make(tmp_path, 1, age=DAY / 2)
        busy = self.make(tmp_path, 2)
        os.utime(busy / "launch")  # its launch writes; another host's pid says nothing
        over = self.make(tmp_path, 3)
        for number in range(4, 20):
            self.make(tmp_path, number)
        prune(tmp_path)
        assert {mine.name, fresh.name, busy.name} <= self.runs(tmp_path)
        assert over.name not in self.runs(tmp_path)

    def test_what_is_no_run_stays(self, tmp_path: Path) -> None:
        notes = tmp_path / "00-my-notes"
        notes.mkdir()
        os.utime(notes, (0, 0))
        for number in range(12):
            self.make(tmp_path, number)
        prune(tmp_path)
        assert notes.exists()


@pytest.mark.parametrize(
    ("name", "gpus", "kind"),
    [("mysite", 0, "mysite-cpu"), ("mysite", 1, "mysite"), ("", 0, "cpu-epyc-2c"), ("", 1, "h200-140gib")],
)
def test_a_sites_name_keeps_cpu_and_gpu_apart(name: str, gpus: int, kind: str) -> None:
    settings: Any = SimpleNamespace(
        machine=name, gpus=gpus, memory_limit_bytes=0, launcher="local", static=False, width=None
    )
    context = Run(settings, rootdir=Path())
    gpu = Gpu(index=0, uuid="GPU-0", name="H200", memory_bytes=150 * 10**9)
    vars(context)["_found"] = Machine(gpus=(gpu,), cpu_name="EPYC", cores=2), ""
    assert context.machine_kind == kind


class Saying:
    """A ``Show`` that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def ended_from_outside(self, error: BaseException) -> str:
        return ""

    @contextmanager
    def launch(self, *_: Any) -> Iterator[Any]:
        yield SimpleNamespace(update=lambda _: None, clear=lambda: None, finished=lambda _: None)


class TestRunner:
    @pytest.fixture(autouse=True)
    def _leases(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLMPERF_LEASE_DIR", str(tmp_path / "leases"))

    @staticmethod
    def runner(home: Path, show: Saying, launch: Callable[[LaunchRequest], Launch]) -> Runner:
        class Site(local.LocalSite):
            def launch(self, request: LaunchRequest, *_: object) -> Launch:
                return launch(request)

        wanted = Wanted(
            gpus=0,
            start="cold",
            overlap=False,
            slurm=SlurmOptions(),
            folder=lambda: home,
        )

        session: Any = SimpleNamespace(
            run_folder=home,
            on_cpu=True,
            site=Site(wanted),
            job=Job(Path(), "", ()),
            rootdir=Path(),
            settings=SimpleNamespace(launches=1, memory_limit_bytes=0, trace=True, timeout_seconds=1.0),
            launch_seconds=1.0,
            settle=lambda _spec: None,
        )
        session.launch_folder = partial(Hardware.launch_folder, session)
        shown: Any = show
        caller = Caller(run=session, terms=CaseTerms(), findings=Findings(), observer=shown, nodeid="t.py::t")
        return Runner(caller)

    def test_a_long_model_name_is_shortened_to_what_a_file_system_takes(self, tmp_path: Path) -> None:
        folders = []

        def launch(request: LaunchRequest) -> Launch:
            request.folder.mkdir()
            folders.append(request.folder.name)
            return launch_of(request.spec)

        runner = self.runner(tmp_path, Saying(), launch)
        for end in ("a", "b"):
            folder = tmp_path / ("x" * 240 + end)
            folder.mkdir()
            (folder / "config.json").write_text(f'{{"model_type": "{end}"}}')
            spec = TrainSpec(model=str(folder))
            runner.launch(spec, 1)
            runner.launch(spec, 2)
        assert len(set(folders)) == 4
        assert {re.sub(r".*-", "", name) for name in folders} == {"1", "2"}

    def test_ctrl_c_says_which_case_it_was_and_where_its_logs_are(self, tmp_path: Path, golden: Golden) -> None:
        def launch(request: LaunchRequest) -> Launch:
            raise KeyboardInterrupt

        show = Saying()
        with pytest.raises(KeyboardInterrupt):
            self.runner(tmp_path, show, launch).launch(SPEC, 1)
        golden(show.said)

    def test_leases_that_cannot_be_kept_fail_in_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("LLMPERF_LEASE_DIR", str(tmp_path / "file"))
        with pytest.raises(CaseFailedError) as failure:
            self.runner(tmp_path, Saying(), lambda request: launch_of(request.spec)).launch(SPEC, 1)
        golden(failure)
        assert "\n" not in str(failure.value)

    def test_an_error_of_the_launch_is_none_of_the_leases(self, tmp_path: Path) -> None:
        def launch(request: LaunchRequest) -> Launch:
            raise OSError("of the launch")

        with pytest.raises(OSError, match="of the launch"):
            self.runner(tmp_path, Saying(), launch).launch(SPEC, 1)

    def test_a_lease_ends_with_its_launch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        events = []

        @contextmanager
        def lease(say: Callable[[str], None], **_: bool) -> Iterator[tuple[()]]:
            events.append("leased")
            yield ()
            events.append("released")

        def launch(request: LaunchRequest) -> Launch:
            events.append("launched")
            return launch_of(request.spec)

        monkeypatch.setattr(machine, "lease_cpu", lease)
        self.runner(tmp_path, Saying(), launch).launch(SPEC, 1)
        assert events == ["leased", "launched", "released"]


class TestShow:
    @staticmethod
    def show(**more: Any) -> Console:
        plugins = SimpleNamespace(getplugin=lambda name: None)
        config: Any = SimpleNamespace(pluginmanager=plugins, get_verbosity=lambda: 0, stash=pytest.Stash(), **more)
        return Console(config)

    def test_a_worker_of_xdist_says_why_it_waits_on_its_stderr(
        self, capfd: pytest.CaptureFixture[str], golden: Golden
    ) -> None:
        self.show(workerinput={"workerid": "gw1"}).say("waiting for the CPU")
        golden(capfd.readouterr().err)

    def test_without_a_reporter_nothing_is_said(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.show().say("waiting for the CPU")
        assert capfd.readouterr() == ("", "")

    def test_it_reaches_the_controllers_stderr_past_the_capture(
        self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        pytest.importorskip("xdist")
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
            monkeypatch.delenv(name, raising=False)  # they tell the inner pytest that it is a worker
        pytester.makepyfile(
            "def test_one(perf):\n    print('captured')\n    perf._cases._caller.observer.say('waiting for the CPU')\n"
        )
        result = pytester.runpytest_subprocess("-p", "no:randomly", "-n", "1", "--gpus", "0")
        result.assert_outcomes(passed=1)
        golden(result.stderr.str())
        assert "waiting" not in result.stdout.str()


@pytest.mark.parametrize("steps", [(0.0,) * 20, (math.nan,) * 20, (1e-320,) * 20, None])
def test_figures_that_are_none_are_invalid_on_a_known_chip_too(steps: tuple[float, ...] | None) -> None:
    spec = TrainSpec(model="llama-3.2-1b", steps=20)
    made = launch_of(spec)
    ranks = tuple(
        replace(rank, tokens_per_step=0) if steps is None else replace(rank, step_seconds=steps) for rank in made.ranks
    )
    made = replace(made, ranks=ranks, environment=replace(made.environment, gpu="NVIDIA H200"))
    session: Any = SimpleNamespace(
        settings=SimpleNamespace(
            launches=1,
            max_launches=1,
            tolerances={},
            calibration=True,
            all_steps=10,
            parity=False,
            alarms_a_month=1.0,
        ),
        stored=StoredOfKind(BaselineStore(Path("none")), "m", on_cpu=False),
        judges_later=False,
        result_cache=SimpleNamespace(launches=[]),
        on_cpu=False,
        machine_kind="m",
        job=Job(Path(), "", ()),
        num_gates=1,
        model_flops=ModelFlops(),
    )
    observer: Any = Saying()
    caller = Caller(run=session, terms=CaseTerms(), findings=Findings(), observer=observer, nodeid="t.py::t")
    runner: Any = SimpleNamespace(launch=lambda _spec, _number, **_: made)
    comparison = BaselineComparison(caller, runner, spec)
    assert comparison.run(None).verdict == "invalid"
