"""The plugin is a good guest: fast to start, silent where it is not needed, and at peace with its neighbours."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.golden import Golden
from tests.plugin.conftest import FOUR_LINES, REPOSITORY, Project

HEAVY = ("torch", "transformers", "accelerate", "liger_kernel", "flash_attn", "datasets", "pyarrow")


class TestNothingHeavy:
    """Also where torch is installed, which is another environment."""

    def test_the_pytest_process_never_imports_torch(self, project: Project) -> None:
        # Fake packages that end the process when imported: absent or present, they must not be touched.
        for name in HEAVY:
            package = project.path / name
            package.mkdir()
            (package / "__init__.py").write_text(f"import os; print('imported {name}', flush=True); os._exit(99)")
        result = project.run("--update-baselines", "--perf-json", "out.json")
        assert "imported" not in result.stdout.str() + result.stderr.str()
        result.assert_outcomes(passed=2)

    def test_the_real_launcher_imports_no_torch_either(self, pytester: pytest.Pytester) -> None:
        script = f"""
import sys
import pytest_llmperf.plugin.hooks, pytest_llmperf.launch.local, pytest_llmperf.report.summary_table
import pytest_llmperf.plugin.collector, pytest_llmperf.plugin.perf, pytest_llmperf.run.cases, pytest_llmperf.run.run_end
print([name for name in {HEAVY!r} if name in sys.modules])
"""
        assert pytester.runpython_c(script).stdout.str().strip() == "[]"


#: Tells at its end which modules of ours nobody had imported before.
NEWLY = """
import sys
from tests.fakes import install

install()
before = {*sys.modules}

def pytest_unconfigure():
    print("\\nnew:", sorted(name for name in {*sys.modules} - before if name.startswith("pytest_llmperf.")))
"""


def test_a_pytest_that_tests_fork_has_imported_what_a_run_needs(project: Project) -> None:
    """Hundreds of tests fork one: what ``tests.template`` does not import, each of them would."""
    (project.path / "conftest.py").write_text(NEWLY)
    for options in (["--update-baselines"], ["--perf-json=out.json"]):
        project.run("-s", *options).stdout.fnmatch_lines(["new: [[]]"])


THIRD_PARTIES = ["numpy", "scipy", "rich", "pynvml", "torch", "psutil", "filelock"]

#: Tells at its end how many modules of ours were loaded, which others, and the CPU seconds that it took.
LOADED = f"""
import json, sys, time

def pytest_unconfigure():
    ours = [name for name in sys.modules if name.partition(".")[0] == "pytest_llmperf"]
    print()
    print(json.dumps([len(ours), [name for name in {THIRD_PARTIES} if name in sys.modules], time.process_time()]))
"""


def loaded(pytester: pytest.Pytester, *options: str) -> tuple[int, set[str], float]:
    """By an interpreter with no plugin but ours: how many modules of ours, which third parties, CPU seconds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "LLMPERF_"))}
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-q", *options],
        cwd=pytester.path,
        env={**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    number, others, seconds = json.loads(told.splitlines()[-1])
    return number, set(others), seconds


PLUGIN = ("-p", "pytest_llmperf.plugin.hooks")


@pytest.fixture
def alone(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project without a perf test."""
    pytester.makeconftest(LOADED)
    pytester.makepyfile("def test_other(): pass\n")
    return pytester


def test_a_session_without_a_perf_test_loads_little(alone: pytest.Pytester) -> None:
    number, others, _ = loaded(alone, *PLUGIN)
    assert number <= 16
    assert others == set()


def test_nor_does_one_whose_ini_file_names_its_machine(alone: pytest.Pytester) -> None:
    alone.makeini("[pytest]\nperf_machine = mine\n")
    number, others, _ = loaded(alone, *PLUGIN)
    assert number <= 28
    assert others == set()


def test_a_session_without_a_perf_test_pays_little_for_the_plugin(alone: pytest.Pytester) -> None:
    loaded(alone, *PLUGIN)  # writes what Python compiles
    # The least of three: whatever else runs here lengthens each.
    with_it = min(loaded(alone, *PLUGIN)[2] for _ in range(3))
    without = min(loaded(alone)[2] for _ in range(3))
    assert with_it - without < 0.15, "on an idle machine it is 0.02 s"


def test_collecting_perf_tests_loads_nothing_that_launches_or_judges(alone: pytest.Pytester) -> None:
    alone.makepyfile(test_mine=FOUR_LINES)
    number, others, _ = loaded(alone, *PLUGIN, "--collect-only")
    assert 16 < number < 100
    assert not {"numpy", "scipy", "rich", "torch"} & others


def test_a_log_says_at_once_what_is_running(project: Project) -> None:
    project.pytester.makeconftest(
        """
        from pathlib import Path
        from tests import fakes

        fakes.install()
        launch = fakes.FakeLauncher.launch

        def looking(self, request, watch):
            def watched(progress):
                watch(progress)
                Path("seen.log").write_text(Path("stdout").read_text())  # where pytester has stdout written

            return launch(self, request, watched)

        fakes.FakeLauncher.launch = looking
        """
    )
    assert project.run("-k", "sdpa", "--update-baselines").ret == 0
    assert (project.path / "seen.log").read_text().endswith("launch 1/1 started\n")


def test_silent_where_no_perf_test_is_collected(project: Project) -> None:
    project.pytester.makepyfile(test_mine="def test_other(): pass\n")
    result = project.run("-v")
    result.assert_outcomes(passed=1)
    assert "llmperf" not in "\n".join(
        line for line in result.outlines if not line.startswith(("plugins:", "rootdir:", "cachedir:"))
    )
    assert not (project.path / ".llmperf").exists()


def test_a_spec_that_is_refused_is_one_line(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(
        test_body="""
        from dataclasses import replace

        def test_it(perf, train_spec):
            perf.check(replace(train_spec, parallelism="fsdp"))
        """,
        test_head="""
        from pytest_llmperf import TrainSpec

        SPEC = TrainSpec(model="llama-tiny", fp8="e4m3")

        def test_it(perf):
            perf.check(SPEC)
        """,
    )
    lines = project.run("test_body.py", "test_head.py", "--continue-on-collection-errors").outlines
    golden.lines(lines, "nothing to shard", "test_head.py:3: TrainSpec: unknown")
    assert not any("dataclasses.py" in line or "Traceback" in line for line in lines)
    assert project.launches == []


def test_it_can_be_switched_off(project: Project) -> None:
    project.pytester.makepyfile(test_mine="def test_other(): pass\n")
    result = project.pytester.runpytest_subprocess("-p", "no:llmperf")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "options",
    [
        ("-q",),
        ("-qq",),
        ("-v",),
        ("-vv",),
        ("-s",),
        ("--capture=no",),
        ("--capture=sys",),
        ("--no-header",),
        ("--no-summary",),
        ("-p", "no:terminal"),
        ("-p", "no:capture"),
        ("-p", "no:cacheprovider"),
        ("--color=yes",),
    ],
    ids=" ".join,
)
def test_output_options_change_no_outcome(project: Project, options: tuple[str, ...]) -> None:
    project.record()
    result = project.run(*options)
    assert result.ret == 0
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


def test_a_log_gets_plain_lines_and_a_table(project: Project) -> None:
    project.record()
    out = project.run().stdout.str()
    assert "\x1b" not in out
    assert "\r" not in out
    assert "llama-tiny-bf16-eager-seq64-mbs1-gpus1" in out
    assert out.count("= llmperf =") == 1


def test_quiet_means_the_table_alone(project: Project) -> None:
    project.record()
    out = project.run("-q").stdout.str()
    assert "launch 1" not in out
    assert "= llmperf =" in out


def test_under_xdist_results_reach_the_controller(project: Project) -> None:
    pytest.importorskip("xdist")
    project.record()
    project.fake(step_seconds=10.0)
    result = project.run("-n", "2", "--perf-json", "out.json")
    result.assert_outcomes(failed=2)
    document = json.loads((project.path / "out.json").read_text())
    assert sorted(entry["verdict"] for entry in document["results"]) == ["regressed", "regressed"]
    assert len({line.split()[1] for line in project.launches}) == 2, "each worker launched one"
    assert "llama-tiny-bf16-sdpa-seq64-mbs1-gpus1" in result.stdout.str()


def test_under_xdist_too_few_gpus_is_a_usage_error(project: Project) -> None:
    pytest.importorskip("xdist")
    assert project.run("-n", "2", gpus="3").ret == pytest.ExitCode.USAGE_ERROR


def test_next_to_randomly_and_timeout(project: Project) -> None:
    project.record()
    result = project.pytester.runpytest_subprocess("--gpus", "0", "-p", "randomly", "--timeout", "60")
    result.assert_outcomes(passed=2)


def test_ctrl_c_keeps_what_was_finished(project: Project) -> None:
    project.pytester.makepyfile(
        test_mine="""
        import pathlib, pytest

        @pytest.mark.parametrize("micro_batch_size", [1, 2])
        def test_it(perf, train_spec, micro_batch_size):
            if micro_batch_size == 2:
                pathlib.Path("fake.json").write_text('{"fail": "interrupt"}')
            perf.check(train_spec)
        """
    )
    result = project.run("--update-baselines", "--perf-json", "out.json")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert [path.stem for path in project.baselines] == ["llama-tiny-bf16-sdpa-seq64-mbs1-gpus1"]
    assert len(json.loads((project.path / "out.json").read_text())["results"]) == 1


def test_a_read_only_project_still_judges(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.record()
    # A file where the folder would be: root may write anywhere, so a mode alone proves nothing.
    for path in sorted((project.path / ".llmperf").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (project.path / ".llmperf").rmdir()
    (project.path / ".llmperf").write_text("")
    project.run().assert_outcomes(passed=2)


class TestUnused:
    def test_a_strict_run_fails_for_a_baseline_that_no_case_asks_for(self, project: Project) -> None:
        project.record()
        project.pytester.makepyfile(test_mine="def test_one(perf, train_spec):\n    perf.check(train_spec)\n")
        result = project.run()
        assert result.ret == 0
        result.stdout.fnmatch_lines(["unused baseline: *eager*"])
        assert project.run("--perf-strict").ret == pytest.ExitCode.TESTS_FAILED

    def test_a_selection_says_nothing_about_the_rest(self, project: Project) -> None:
        project.record()
        result = project.run("-k", "sdpa", "--perf-strict")
        assert result.ret == 0
        assert "unused" not in result.stdout.str()

    def test_a_skipped_case_uses_its_baseline(self, project: Project) -> None:
        project.record()
        file = project.baselines[0]
        values = json.loads(file.read_text())
        project.pytester.makepyfile(
            test_mine="""
            import pytest

            @pytest.mark.parametrize("attention", ["eager", "sdpa"])
            def test_attention(perf, train_spec):
                perf.check(train_spec)

            @pytest.mark.parametrize("gpus", [64])
            def test_wide(perf, train_spec):
                perf.check(train_spec)
            """
        )
        assert values["recorded_by"].startswith("test_mine.py::")
        assert project.run("--perf-strict").ret == 0


class TestBenchmark:
    """pytest-benchmark gets our step times, and nothing depends on it."""

    def test_step_times_are_rounds(self, project: Project) -> None:
        project.record(step_seconds=0.125)
        assert project.run("--benchmark-json", "bench.json").ret == 0
        benchmarks = json.loads((project.path / "bench.json").read_text())["benchmarks"]
        assert len(benchmarks) == 2
        for entry in benchmarks:
            assert entry["stats"]["data"] == [0.125] * 16
            assert entry["stats"]["rounds"] == 16
            assert entry["extra_info"]["verdict"] == "pass"
            assert entry["extra_info"]["metrics"]["peak_reserved_bytes"] == 2**30

    def test_a_marker_that_is_there_is_kept(self, project: Project) -> None:
        project.pytester.makepyfile(
            test_mine="""
            import pytest

            @pytest.mark.benchmark(group="mine")
            def test_one(perf, train_spec):
                perf.check(train_spec)
            """
        )
        project.record(step_seconds=0.125)
        project.run("--benchmark-json", "bench.json")
        (entry,) = json.loads((project.path / "bench.json").read_text())["benchmarks"]
        assert entry["group"] == "mine"
        assert entry["stats"]["max"] == 0.125

    @pytest.mark.parametrize("options", [("--benchmark-disable",), ("-p", "no:benchmark"), ("--benchmark-only",)])
    def test_no_verdict_depends_on_it(self, project: Project, options: tuple[str, ...]) -> None:
        project.record(step_seconds=0.1)
        assert project.run(*options).ret == 0
        project.fake(step_seconds=10.0)
        project.run(*options).assert_outcomes(failed=2)

    def test_its_table_shows_only_what_is_not_ours(self, project: Project) -> None:
        project.record()
        mine = (project.path / "test_mine.py").read_text()
        (project.path / "test_mine.py").write_text(mine + "\ndef test_plain(benchmark):\n    benchmark(lambda: 1)\n")
        out = project.run().stdout.str()
        assert "test_plain" in out
        assert "benchmark: 1 tests" in out

    def test_compare_and_storage_work(self, project: Project) -> None:
        project.record(step_seconds=0.1)
        project.run("--benchmark-autosave")
        result = project.run("--benchmark-compare")
        assert result.ret == 0
        result.stdout.fnmatch_lines(["*test_attention*NOW*"])
