"""The command line: what it means, what it refuses, and that it stays what others rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

OPTIONS = [
    "--gpus=N",
    "--update-baselines",
    "--update-baselines=all",
    "--update-baselines=new",
    "--perf-reason=TEXT",
    "--perf-baselines=DIR",
    "--perf-json=FILE",
    "--perf-report=FILE.html",
    "--perf-dry-run",
    "--perf-parity",
    "--perf-soak=MINUTES",
    "--perf-strict",
    "--perf-against=PYTHON|git:REVISION",
    "--perf-start={auto,warm,cold}",
    "--perf-overlap={auto,no}",
    "--perf-trace={yes,no}",
    "--perf-calibration={auto,no}",
    "--perf-all-steps=NIGHTS",
    "--perf-launcher={auto,local,slurm}",
    "--perf-resume",
    "--perf-width=N",
    "--perf-plan=FILE",
    "--perf-static",
    "--perf-markdown=FILE",
    "--perf-history=FILE|off",
    "--perf-timeout=SECONDS",
    "--perf-launches=N",
    "--perf-max-launches=N",
    "--perf-memory-limit=SIZE",
]


def test_the_options_are_the_documented_ones(project: Project) -> None:
    lines = project.pytester.runpytest_subprocess("--help").outlines
    start = next(i for i, line in enumerate(lines) if line.startswith("LLM training performance"))
    block = []
    for line in lines[start + 1 :]:
        if not line.startswith("  "):
            break
        block.append(line)
    assert [line.split("  ")[1].replace(" ", "=") for line in block if line.startswith("  --")] == OPTIONS


@pytest.mark.parametrize("value", ["-1", "x", "", "1.5", "²"])
def test_a_number_of_gpus_that_is_none_is_a_usage_error(project: Project, value: str, golden: Golden) -> None:
    result = project.pytester.runpytest_subprocess(f"--gpus={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "expected a number")


def test_more_gpus_than_visible_is_a_usage_error_and_nothing_runs(project: Project, golden: Golden) -> None:
    result = project.run(gpus="9")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "--gpus 9: only")
    assert project.launches == []


@pytest.mark.parametrize("option", ["--perf-json", "--perf-report", "--perf-markdown", "--perf-baselines"])
def test_a_path_that_is_empty_is_a_usage_error(project: Project, option: str) -> None:
    result = project.run(f"{option}=")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{option} '': expected a path"])


def test_a_fault_that_nobody_knows_is_a_usage_error(
    project: Project, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", "slwo=5")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "(did you")
    assert project.launches == []


@pytest.mark.parametrize("value", ["0", "-3", "soon", "nan", "inf"])
def test_a_timeout_that_is_none_is_a_usage_error(project: Project, value: str) -> None:
    assert project.run(f"--perf-timeout={value}").ret == pytest.ExitCode.USAGE_ERROR


def test_more_launches_at_least_than_at_most_is_a_usage_error(project: Project, golden: Golden) -> None:
    result = project.run("--perf-launches", "3", "--perf-max-launches", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "ERROR: --perf-launches 3")
    assert project.launches == []


@pytest.mark.parametrize("options", [["--perf-launches=5"], ["--perf-launches=5", "--perf-max-launches=5"]])
def test_launches_at_least_raise_the_usual_most(project: Project, options: list[str]) -> None:
    project.run("--update-baselines=new", *options, "-k", "sdpa").assert_outcomes(passed=1, deselected=1)
    assert len(project.launches) == 5


def test_a_json_file_that_cannot_be_written_is_told_before_anything_runs(project: Project) -> None:
    result = project.run("--perf-json", "missing/out.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert project.launches == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nwe", "nwe: expected new, all (did you mean 'new'?)"),
        ("prune", "prune: expected new, all (removed; unused baselines are listed; delete their files)"),
        ("", ": expected new, all"),
        ("x", "x: exp*"),
    ],
)
def test_an_update_that_is_none_lists_those_that_are(project: Project, value: str, said: str) -> None:
    result = project.run(f"--update-baselines={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --update-baselines={said}"])


def test_a_reason_goes_with_an_update(project: Project, golden: Golden) -> None:
    result = project.run("--perf-reason", "why")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "ERROR: --perf-reason says")
    assert project.launches == []


def test_baselines_that_are_not_there_are_told_before_anything_runs(project: Project, golden: Golden) -> None:
    project.record()
    before = len(project.launches)
    result = project.run("--perf-baselines=of-ci", "-k", "eager")
    assert (result.ret, len(project.launches)) == (pytest.ExitCode.USAGE_ERROR, before)
    golden.lines(result.stderr, "no such folder")
    result = project.run("--perf-baselines=of-ci", "-k", "eager", "--update-baselines")
    result.assert_outcomes(passed=1, deselected=1)
    assert "no such folder" not in project.run("--perf-baselines=of-ci", "-k", "eager").stdout.str()


def test_baselines_in_a_file_are_told_before_anything_runs(project: Project, golden: Golden) -> None:
    result = project.run("--perf-baselines", "test_mine.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "test_mine.py: it is")
    assert project.launches == []


@pytest.mark.parametrize("value", ["0", "-1", "much", "nan"])
def test_an_ini_tolerance_that_is_none_is_a_usage_error(project: Project, value: str) -> None:
    project.pytester.makeini(f"[pytest]\nperf_memory_tolerance = {value}\n")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*perf_memory_tolerance*positive fraction*"])


@pytest.mark.parametrize("name", ["perf_throughput_tolerance", "perf_memory_tolerance"])
@pytest.mark.parametrize("value", ["3", "1.01"])
def test_an_ini_tolerance_in_per_cent_is_a_usage_error(project: Project, name: str, value: str) -> None:
    result = project.run("-o", f"{name}={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    expected = "a positive fraction of at most 1, e.g. 0.03 for 3 %, or per cent with their sign, e.g. 3 %"
    said = f"ERROR: ini {name} = {value}: expected {expected}"
    assert [line for line in result.stderr.lines if line.strip()] == [said]
    assert project.launches == []


def test_on_a_gpu_a_tolerance_of_one_is_refused_too(project: Project, golden: Golden) -> None:
    gpu = "Gpu(index=0, uuid='GPU-0', name='NVIDIA H200', memory_bytes=2**36)"
    project.pytester.makeconftest(
        "from tests.fakes import install\nfrom tests import fakes\nfrom dataclasses import replace\n"
        "from pytest_llmperf.launch.device import Gpu\n"
        f"fakes.MACHINE = replace(fakes.MACHINE, gpus=({gpu},))\ninstall()\n"
    )
    result = project.run("-k", "sdpa", "-o", "perf_memory_tolerance=1", gpus="1")
    result.assert_outcomes(failed=1, deselected=1)
    golden.lines(result.stdout, ": tolerance peak_reserved_bytes=1:")
    assert project.launches == []


def test_a_site_may_name_its_machine(project: Project) -> None:
    project.pytester.makeini("[pytest]\nperf_machine = marenostrum5-acc\n")
    project.run("--update-baselines").assert_outcomes(passed=2)
    assert {path.relative_to(project.path).parts[1] for path in project.baselines} == {"marenostrum5-acc-cpu"}


@pytest.mark.parametrize("name", ["site/h100", ".h100"])
def test_a_machine_whose_name_is_a_folders_is_refused(project: Project, name: str) -> None:
    result = project.run("-o", f"perf_machine={name}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*perf_machine = {name}: it names a folder*"])


def test_a_dry_run_shows_order_and_cost_and_launches_nothing(project: Project) -> None:
    project.record()
    result = project.run("--perf-dry-run", "--perf-launches", "2")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(
        ["*1. llama-tiny-bf16-eager*", "*2. llama-tiny-bf16-sdpa*", "*2 case(s), 4 launch(es)*"]
    )
    assert project.launches == []


def test_an_impossible_case_is_one_line(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(
        test_mine="""
        import pytest

        @pytest.mark.parametrize("precision", ["fp23"])
        def test_precision(perf, train_spec):
            perf.check(train_spec)

        @pytest.mark.parametrize("micro_batch_size", [0])
        def test_batch(perf, train_spec):
            perf.check(train_spec)
        """
    )
    result = project.run("-rE")
    result.assert_outcomes(errors=2)
    golden.lines(result.stdout, "unknown precision 'fp23' (", "micro_batch_size=0 must be")
    assert "Traceback" not in result.stdout.str()
    assert "During handling" not in result.stdout.str()


def test_what_cannot_run_here_is_skipped_with_the_reason(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(
        test_mine="""
        import pytest

        @pytest.mark.parametrize("liger", [True])
        def test_kernels(perf, train_spec):
            perf.check(train_spec)

        @pytest.mark.parametrize("gpus", [64])
        def test_wide(perf, train_spec):
            perf.check(train_spec)
        """
    )
    result = project.run("-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*needs 64 ranks*"])
    golden.lines(result.stdout, "Triton kernels need")


@pytest.mark.parametrize("value", ["64", "GiB", "-1GiB", "0GiB", "many", "64 apples", "nanGiB"])
def test_a_limit_that_is_no_size_is_a_usage_error(project: Project, value: str, golden: Golden) -> None:
    result = project.run(f"--perf-memory-limit={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "expected a size")


def test_a_limit_makes_another_machine_of_it(project: Project) -> None:
    project.record()
    result = project.run("--perf-memory-limit=1.5GiB")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*-limit-1.5gib*", "*--perf-memory-limit=1.5GiB --update-baselines=new*"])


def test_a_limit_above_the_card_is_a_usage_error(project: Project, golden: Golden) -> None:
    gpu = "Gpu(index=0, uuid='GPU-0', name='NVIDIA H200', memory_bytes=2**36)"
    project.pytester.makeconftest(
        "from tests.fakes import install\nfrom tests import fakes\nfrom dataclasses import replace\n"
        "from pytest_llmperf.launch.device import Gpu\n"
        f"fakes.MACHINE = replace(fakes.MACHINE, gpus=({gpu},))\ninstall()\n"
    )
    result = project.run("--perf-memory-limit=65GiB", gpus="1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    golden.lines(result.stderr, "--perf-memory-limit 65.0 GiB:")
    assert project.launches == []


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another project, with a pytest.ini and a conftest of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (folder / "conftest.py").write_text("raise RuntimeError('another project was imported')\n")
    (folder / "baselines").mkdir()
    for name in ("out.json", "python", "why"):
        (folder / name).touch()
    return folder


class TestValuesThatAreTakenForTests:
    """pytest looks for its rootdir before it knows our options, and takes what follows them for tests."""

    @pytest.mark.parametrize("has_ini", [True, False])
    @pytest.mark.parametrize(
        ("option", "name"),
        [
            ("--perf-json", "out.json"),
            ("--perf-baselines", "baselines"),
            ("--perf-against", "python"),
            ("--perf-reason", "why"),
        ],
    )
    def test_one_that_moved_rootdir_into_another_project_is_refused(
        self, project: Project, elsewhere: Path, option: str, name: str, has_ini: bool
    ) -> None:
        if not has_ini:
            (project.path / "tox.ini").unlink()
        result = project.run(option, str(elsewhere / name))
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        ini = " (tox.ini)" if has_ini else ""
        went = f"pytest takes this path for a test's and went to rootdir {elsewhere} (pytest.ini)"
        said = f"{went}, *, expected rootdir {project.path}{ini}; write {option}={elsewhere / name}"
        result.stderr.fnmatch_lines([f"ERROR: {option} *{name}: {said}"])
        assert len([line for line in result.stderr.lines if line.strip()]) == 1
        assert project.launches == []
        assert not (elsewhere / ".llmperf").exists()

    def test_with_an_equals_sign_it_is_taken_as_it_is_meant(self, project: Project, elsewhere: Path) -> None:
        result = project.run("-k", "sdpa", f"--perf-json={elsewhere / 'out.json'}")
        result.assert_outcomes(failed=1, deselected=1)
        assert json.loads((elsewhere / "out.json").read_text())["results"]

    def test_one_that_moved_nothing_but_rootdir_is_refused(
        self, project: Project, tmp_path: Path, golden: Golden
    ) -> None:
        (project.path / "tox.ini").unlink()
        (tmp_path / "out.json").touch()
        result = project.run("--perf-json", str(tmp_path / "out.json"))
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        golden.lines(result.stderr, "out.json: pytest takes")

    def test_it_is_refused_from_the_environment_too(
        self, project: Project, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        monkeypatch.setenv("PYTEST_ADDOPTS", f"--perf-json {elsewhere}/out.json")
        result = project.run()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        golden.lines(result.stderr, ": pytest takes")

    @pytest.mark.parametrize("options", [[], ["test_mine.py"]])
    def test_one_inside_the_project_moves_nothing_and_is_taken(self, project: Project, options: list[str]) -> None:
        (project.path / "out.json").touch()
        (project.path / "figures").mkdir()
        more = ["--perf-json", "out.json", "--perf-baselines", "figures", "--update-baselines=new", "-k", "sdpa"]
        project.run(*options, *more).assert_outcomes(passed=1, deselected=1)
        assert list((project.path / "figures").rglob("*.json"))

    def test_one_beside_the_named_tests_of_another_root_moves_nothing(self, project: Project, tmp_path: Path) -> None:
        (tmp_path / "out.json").touch()
        result = project.run("test_mine.py", "-k", "sdpa", "--perf-json", str(tmp_path / "out.json"))
        result.assert_outcomes(failed=1, deselected=1)
        result.stdout.fnmatch_lines([f"rootdir: {project.path}"])

    def test_a_rootdir_that_was_asked_for_stays(self, project: Project, elsewhere: Path) -> None:
        where = ["--rootdir", str(project.path), "-c", str(project.path / "tox.ini")]
        result = project.run(*where, "-k", "sdpa", "--perf-json", str(elsewhere / "out.json"), "test_mine.py")
        result.assert_outcomes(failed=1, deselected=1)


def test_the_command_that_is_offered_decides_the_same(project: Project, golden: Golden) -> None:
    result = project.run("--perf-launches", "2", "--perf-timeout=99", "--strict-markers", "-o", "perf_machine=mine")
    golden.lines(result.stdout, "--gpus 0 --perf-timeout=99.0")


_HARDWARE = """
from unittest import mock

from pytest_llmperf.launch import machine
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from tests.fakes import install

install()
GPUS = tuple(Gpu(index=i, uuid=f"GPU-{{i}}", name=name, memory_bytes=80 * 2**30) for i, name in enumerate("AB"))
MACHINE = Machine(gpus=GPUS, cpu_name="Fake CPU", cores=8)
mock.patch.object(machine, "find_machine", {found}).start()
"""
_MIXED = "return_value=MACHINE"
_MIG = "side_effect=ValueError('MIG slices are not supported')"


@pytest.mark.parametrize("parallel", [[], ["-n", "2"]])
@pytest.mark.parametrize(
    ("found", "options", "said"),
    [
        (_MIXED, [], "GPUs of different kinds are visible (a-80gib, b-80gib)*"),
        (_MIXED, ["--gpus", "1", "--perf-json", "out.json"], "GPUs of different kinds are visible (a-80gib, b-80gib)*"),
        (_MIXED, ["--perf-memory-limit", "90GiB"], "--perf-memory-limit 90.0 GiB: the GPU has 80.0 GiB*"),
        (_MIG, [], "*MIG slices are not supported"),
    ],
)
def test_hardware_that_cannot_serve_is_one_line_from_workers_too(
    project: Project, parallel: list[str], found: str, options: list[str], said: str
) -> None:
    if parallel:
        pytest.importorskip("xdist")
    project.pytester.makeconftest(_HARDWARE.format(found=found))
    result = project.pytester.runpytest_subprocess("-p", "no:randomly", *parallel, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {said}"])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert project.launches == []


def test_hardware_that_cannot_serve_hinders_no_other_tests(project: Project) -> None:
    pytest.importorskip("xdist")
    project.pytester.makeconftest(_HARDWARE.format(found=_MIG))
    project.pytester.makepyfile(test_mine="def test_it():\n    pass\n")
    project.pytester.runpytest_subprocess("-p", "no:randomly", "-n", "2").assert_outcomes(passed=1)


@pytest.fixture
def prepared(project: Project) -> Path:
    """Is there once a run has let its fork server begin to import."""
    project.pytester.makeconftest("""
from pathlib import Path
from unittest import mock
from tests.fakes import install
from pytest_llmperf.launch.local import LocalSite

install()
mock.patch.object(LocalSite, "prepare", lambda *_, **__: Path("prepared").touch()).start()
""")
    return project.path / "prepared"


@pytest.mark.parametrize(("options", "prepares"), [((), True), (("--collect-only",), False), (("-k", "other"), False)])
def test_imports_begin_once_perf_tests_are_collected_to_be_run(
    project: Project, prepared: Path, options: tuple[str, ...], prepares: bool
) -> None:
    project.run(*options)
    assert prepared.exists() == prepares


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("perf_start = warmm", "auto, warm, cold (did you mean 'warm'?)"),
        ("perf_calibration = never", "auto, no"),
        ("perf_all_steps = often", "a number of nights, 0 or more"),
    ],
)
def test_an_unknown_word_in_the_ini_file_is_a_usage_error(project: Project, line: str, expected: str) -> None:
    project.pytester.makeini(f"[pytest]\n{line}\n")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*ini {line}: expected {expected}*"])
