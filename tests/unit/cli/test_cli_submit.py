"""What `llmperf submit` makes of a cluster file, and `llmperf merge` of a night's results."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.cli import night_results, readiness
from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.cluster_file import ClusterFile
from pytest_llmperf.cli.sbatch import check_budget, cost, filled, jobs
from pytest_llmperf.launch.slurm.controller import place
from pytest_llmperf.records.results_document import document_of
from pytest_llmperf.support import formats
from tests.golden import Golden

SUITE = {"rootdir": "", "baselines": "", "digests": [], "strict": False}

REPOSITORY = Path(__file__).parents[3]
TEMPLATE = (REPOSITORY / "slurm" / "nightly.sbatch").read_text(encoding="utf-8")
EXAMPLES = sorted((REPOSITORY / "slurm" / "clusters").glob("*.ini"))

MINIMAL = "[cluster]\ngpus_per_node = 4\n[suite]\ngpus = 1 2 4 8 32\n"


#: A line of an sbatch of a test's own: it would take any job.
TESTED = 'case " $* " in *" --test-only "*) exit 0;; esac\n'


def planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest is not asked for the tests of a night: each width has one."""

    def ask(file: ClusterFile) -> readiness.Asked:
        planned = [{"id": "a", "nodeid": f"t.py::t[{width}]", "width": width} for width in file.widths]
        coverage = {"nodes": [case["nodeid"] for case in planned], "parts": [], "gaps": [], "said": {}}
        return readiness.Asked(
            document_of({"results": [], "planned": planned, "suite": SUITE | {"coverage": coverage}}), "", 0
        )

    monkeypatch.setattr("pytest_llmperf.cli.readiness.ask", ask)


def cluster(tmp_path: Path, text: str = MINIMAL) -> ClusterFile:
    path = tmp_path / "mine.ini"
    path.write_text(text)
    return ClusterFile.read(path)


def script_of(tmp_path: Path, text: str = MINIMAL) -> str:
    file = cluster(tmp_path, text)
    return filled(TEMPLATE, file, jobs(file)[0], tmp_path / "results")


def headers(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


class TestClusterFile:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (
                "[cluster]\ngpu_per_node = 4\n",
                "unknown key in [cluster]: 'gpu_per_node' (did you mean 'gpus_per_node'?)",
            ),
            ("[sbach]\n", "unknown section: 'sbach' (did you mean 'sbatch'?)"),
            ("[cluster]\ngpus_per_node = 4\n", "[suite] gpus is missing"),
            ("[cluster]\ngpus_per_node = 0\n[suite]\ngpus = 1", "gpus_per_node = 0: expected a whole number"),
            (MINIMAL + "[sbatch]\ntime = soon", "time = soon: expected a time above 0 as sbatch takes it"),
            (MINIMAL + "[sbatch]\ntime = 0", "time = 0: expected a time above 0"),
            (MINIMAL + "[sbatch]\ntime = 0-00:00:00", "expected a time above 0"),
            (MINIMAL + "[sbatch]\ntime = " + "9" * 5000, "expected a time above 0"),
            (
                MINIMAL.replace("[suite]", "scheduler = local\n[suite]"),
                "unknown key in [cluster]: 'scheduler' (removed; leave it out: without SLURM pytest",
            ),
            (MINIMAL + "[sbatch]\naccount = CHANGE-ME", "account = CHANGE-ME: expected your site's own value"),
            (MINIMAL + "mode = both", "mode = both: expected packed or array"),
            (MINIMAL + "budget_gpu_hours = lots", "expected a number of GPU-hours above 0"),
            (
                MINIMAL + "[sbatch]\naccount = proj\n  touch x",
                "account = 'proj touch x': expected one line of printable text",
            ),
            (MINIMAL + "[sbatch]\nqos = a\0b", "expected one line of printable text"),
            (MINIMAL.replace("[suite]", "name = x$(touch y)\n[suite]"), "name = x$(touch y): expected letters, digits"),
            (MINIMAL.replace("[suite]", "name = a/b\n[suite]"), "name = a/b: expected letters, digits"),
            (MINIMAL + "results = a\\b", "results = a\\b: expected a folder whose path"),
            (MINIMAL + "checkout = /no/such", "checkout = /no/such: expected a folder that is there"),
            (MINIMAL + f"checkout = {__file__}", "expected a folder that is there"),
            (MINIMAL + "checkout = ~nobody-here/x", "expected a folder, in the home folder of a user that is known"),
            (MINIMAL + '[launch]\nprefix = "abc', 'prefix = "abc: expected words as in a shell'),
            (
                MINIMAL.replace("32", "6 5"),
                "[suite] gpus = 1 2 4 8 6 5: expected the same number on each node, of which",
            ),
            (MINIMAL.replace("32", "5"), "each has 4 (gpus_per_node); not 5, but 4 or 6"),
            ("[cluster]\ngpus_per_node = 2\n[suite]\ngpus = 1 2 3\n", "not 3, but 2 or 4"),
            *(
                (f"[sbatch]\noptions = {options}\n{MINIMAL}", f"[sbatch] options = {options}: expected no {option}, ")
                for options, option in (
                    *((words, "--time") for words in ("--time 5", "--time=5", "-t 5", "-t5", "--mem=1 -Ht5")),
                    *((words, "--nodes") for words in ("--nodes 2", "-N2", "--nod=2", "-N 2")),
                    *(("-J x", "--job-name"), ("--job-n=x", "--job-name"), ("-a 1", "--array"), ("-oX", "--output")),
                    *(("--wrap ls", "--wrap"), ("-W", "--wait"), ("-n 4", "--ntasks"), ("--requeue", "--requeue")),
                    *(("-V", "--version"), ("--signal=USR2", "--signal"), ("-e x", "--error"), ("-h", "--help")),
                    ("-D /tmp", "--chdir"),
                )
            ),
            (f"[sbatch]\noptions = -p y\npartition = x\n{MINIMAL}", "no --partition, of which [sbatch] partition has"),
            (f"[sbatch]\noptions = main --mem=1\n{MINIMAL}", "expected options of sbatch, and main is none"),
            (f"[sbatch]\nmerge_options = -d 5\n{MINIMAL}", "merge_options = -d 5: expected no --dependency"),
            *(
                (f"{MINIMAL}mail = {words}\n", f"mail = {words}: expected an add")
                for words in ("-v", "a@b,-s", "--x=y")
            ),
            (f"[sbatch 1]\ntime = 5\n{MINIMAL}", "[sbatch 1]: expected mode = array, where widths have jobs"),
            (f"{MINIMAL}mode = array\n[sbatch 3]\n", "[sbatch 3]: expected a width of [suite] gpus = 1 2 4 8 32, as"),
            (f"{MINIMAL}mode = array\n[sbatch 1-x]\n", "[sbatch 1-x]: expected a width of [suite] gpus"),
            (
                f"{MINIMAL}mode = array\n[sbatch 1-4]\n[sbatch 2+]\n",
                "[sbatch 1-4]: expected 4 GPU(s) in one section, not",
            ),
            (
                f"{MINIMAL}mode = array\n[sbatch 2]\ntme = 5\n",
                "unknown key in [sbatch 2]: 'tme' (did you mean 'time'?)",
            ),
            (f"{MINIMAL}mode = array\n[sbatch 2]\ntime = x\n", "[sbatch 2] time = x: expected a time above 0"),
            (f"{MINIMAL}mode = array\n[sbatch 2]\nmerge_options = -v\n", "expected merge_options in [sbatch]"),
            ("gpus = 1", "not an ini file"),
            (MINIMAL + "gpus = 2", "not an ini file"),
        ],
    )
    def test_what_cannot_serve_is_refused_in_one_line(self, tmp_path: Path, text: str, said: str) -> None:
        with pytest.raises(ClusterError) as raised:
            cluster(tmp_path, text)
        assert said in str(raised.value)
        assert str(raised.value).startswith(str(tmp_path / "mine.ini"))
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize(
        ("options", "option"),
        [
            *((f"perf {written} batch", "-k") for written in ("-k", "-vk", "-xqk", "-k=a")),
            *(
                (f"perf {written}", "-k")
                for written in ("-kbatch", '"-k batch"', "-lkbatch", "-m slow -p no:x -kbatch")
            ),
            *((f"perf {written}", "--gpus") for written in ("--gpus 2", "--gpus=2")),
            *((f"perf {written}", "-k") for written in ("-o addopts='-k x'", "--override-ini=addopts=-kx")),
            ("perf --perf-json=x.json", "--perf-json"),
            ("--perf-width=1", "--perf-width"),
            ("--perf-resume perf", "--perf-resume"),
            ("--perf-strict --perf-dry-run", "--perf-dry-run"),
            ("--perf-strict --collect-only", "--collect-only"),
            ("--setup-plan", "--setup-plan"),
            ("-qh", "-h"),
            ("--perf-static", "--perf-static"),
            ("--lf", "--lf"),
            ("-o addopts=--stepwise", "--stepwise"),
        ],
    )
    def test_what_the_job_gives_pytest_itself_is_refused(
        self, tmp_path: Path, options: str, option: str, golden: Golden
    ) -> None:
        with pytest.raises(ClusterError) as raised:
            cluster(tmp_path, MINIMAL + f"options = {options}")
        said = str(raised.value)
        golden(said)
        assert ("[suite] select" in said) is (option == "-k")

    @pytest.mark.parametrize(
        "options",
        [
            *("perf -m kernels", "perf -mk", "perf -rk -pk -ok=k", "perf --keep", "perf --gpus-per-node=2"),
            *("perf -vx -m 'not k'", "perf -- -k", "perf-k k", "--perf-json-indent 2"),
        ],
    )
    def test_what_only_looks_like_it_is_left_alone(self, tmp_path: Path, options: str) -> None:
        cluster(tmp_path, MINIMAL + f"options = {options}")

    @pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8])
    def test_widths_that_are_taken_are_those_that_a_launch_can_place(self, tmp_path: Path, per_node: int) -> None:
        for width in range(1, 26):
            text = f"[cluster]\ngpus_per_node = {per_node}\n[suite]\ngpus = {width}\n"
            if place(width, per_node, -(-width // per_node)) is not None:
                assert cluster(tmp_path, text).widths == [width]
                continue
            with pytest.raises(ClusterError) as raised:
                cluster(tmp_path, text)
            for other in re.findall(r"but (\d+) or (\d+)$", str(raised.value))[0]:
                cluster(tmp_path, text.replace(f"gpus = {width}", f"gpus = {other}"))

    def test_a_byte_order_mark_is_none_of_the_text(self, tmp_path: Path) -> None:
        assert cluster(tmp_path, "\N{BYTE ORDER MARK}" + MINIMAL).widths == [32, 8, 4, 2, 1]

    def test_words_may_go_on_in_further_lines(self, tmp_path: Path) -> None:
        assert cluster(tmp_path, MINIMAL + "options = perf_tests\n  --perf-strict").words("suite", "options") == [
            *("perf_tests", "--perf-strict")
        ]

    def test_a_file_that_is_not_there_says_how_to_get_one(self, tmp_path: Path) -> None:
        with pytest.raises(ClusterError, match="llmperf submit --example"):
            ClusterFile.read(tmp_path / "nothing.ini")

    @pytest.mark.parametrize(
        ("text", "hours"),
        [("90", 1.5), ("30:00", 0.5), ("02:00:00", 2), ("1-12", 36), ("1-00:30", 24.5), ("2-1:0:36", 49.01)],
    )
    def test_times_are_those_of_sbatch(self, tmp_path: Path, text: str, hours: float) -> None:
        assert cluster(tmp_path, MINIMAL + f"[sbatch]\ntime = {text}").value("sbatch", "time") == pytest.approx(hours)

    @pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
    def test_each_example_serves_once_it_is_changed(self, tmp_path: Path, example: Path) -> None:
        file = cluster(tmp_path, example.read_text().replace("CHANGE-ME", "abc"))
        planned = jobs(file)
        check_budget(file, planned)
        for job in planned:
            script = filled(TEMPLATE, file, job, tmp_path)
            assert re.findall(r"@[a-z_]+@", script.replace("@node@", "")) == []
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)


class TestJobs:
    def test_packed_is_one_job_as_wide_as_the_widest(self, tmp_path: Path) -> None:
        (job,) = jobs(cluster(tmp_path))
        assert (job.widths, job.nodes, job.gpu_hours) == ((32, 8, 4, 2, 1), 8, 32.0)

    def test_an_array_for_each_number_of_nodes(self, tmp_path: Path) -> None:
        planned = jobs(cluster(tmp_path, MINIMAL + "mode = array"))
        assert [(job.widths, job.nodes, job.gpu_hours) for job in planned] == [
            ((32,), 8, 32.0),
            ((8,), 2, 8.0),
            ((4, 2, 1), 1, 12.0),
        ]

    def test_more_than_the_budget_is_not_submitted(self, tmp_path: Path, golden: Golden) -> None:
        file = cluster(tmp_path, MINIMAL + "budget_gpu_hours = 31")
        with pytest.raises(ClusterError) as raised:
            check_budget(file, jobs(file))
        golden(raised)

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (
                "",
                "at most 32.0 GPU-hours a start, 96.0 in all starts (max_restarts = 2)",
            ),
            ("max_restarts = 0\n", "at most 32.0 GPU-hours"),
            ("[cluster]\non_cpu = yes\n", "no GPU-hours"),
        ],
    )
    def test_a_bound_is_told_for_what_it_bounds(self, tmp_path: Path, more: str, said: str) -> None:
        suite, _, site = more.partition("[cluster]\n")
        file = cluster(tmp_path, MINIMAL.replace("[suite]", f"{site}[suite]") + suite)
        assert cost(file, jobs(file)).startswith(said)


class TestSectionsOfWidths:
    TEXT = (
        MINIMAL + "mode = array\n[sbatch]\npartition = main\ntime = 60\n"
        "[sbatch 1-2]\npartition = small\ntime = 30\n[sbatch 8, 32+]\nqos = big\n"
    )

    def test_each_width_is_in_a_job_of_its_values(self, tmp_path: Path) -> None:
        file = cluster(tmp_path, self.TEXT)
        planned = jobs(file)
        assert [job.widths for job in planned] == [(32,), (8,), (4,), (2, 1)]
        scripts = [{*headers(filled(TEMPLATE, file, job, tmp_path))} for job in planned]
        assert all({"--qos=big", "--partition=main", "--time=60"} <= lines for lines in scripts[:2])
        assert {"--partition=main", "--time=60"} <= scripts[2]
        assert {"--partition=small", "--time=30", "--array=2,1"} <= scripts[3]
        assert [job.gpu_hours for job in planned] == [32, 8, 4, 4]


class TestScript:
    def test_what_a_site_does_not_need_is_left_out(self, tmp_path: Path) -> None:
        lines = headers(script_of(tmp_path))
        assert {"--nodes=8", "--ntasks-per-node=1", "--gres=gpu:4", "--requeue"} <= {*lines}
        assert not any(line.startswith(("--account", "--qos", "--array", "--exclusive")) for line in lines)

    def test_what_it_needs_is_there(self, tmp_path: Path) -> None:
        more = "[sbatch]\naccount = abc\nexclusive = yes\noptions = --mail-type=FAIL --switches=1\n"
        lines = headers(script_of(tmp_path, MINIMAL + "mode = array\n" + more))
        assert {"--account=abc", "--exclusive", "--mail-type=FAIL --switches=1", "--array=32"} <= {*lines}

    def test_only_exclusive_is_a_switch(self, tmp_path: Path) -> None:
        lines = headers(script_of(tmp_path, MINIMAL + "[sbatch]\naccount = yes\npartition = no\nexclusive = no\n"))
        assert {"--account=yes", "--partition=no"} <= {*lines}
        assert not any(line.startswith("--exclusive") for line in lines)

    @pytest.mark.parametrize(
        ("site", "each"),
        [
            ("on_cpu = yes\n", {"--ntasks-per-node=4", "--cpus-per-task=1"}),
            ("on_cpu = yes\ncpus_per_node = 48\n", {"--ntasks-per-node=4", "--cpus-per-task=12"}),
            ("on_cpu = yes\ncpus_per_node = 2\n", {"--ntasks-per-node=4", "--cpus-per-task=1"}),
            ("cpus_per_node = 48\n", {"--ntasks-per-node=1", "--cpus-per-task=48"}),
        ],
    )
    def test_the_cores_of_a_node_are_shared_among_its_ranks(self, tmp_path: Path, site: str, each: set[str]) -> None:
        assert each <= {*headers(script_of(tmp_path, MINIMAL.replace("[suite]", f"{site}[suite]")))}

    def test_an_option_and_its_value_are_one_line_that_sbatch_reads_as_it_was_written(
        self, tmp_path: Path, golden: Golden
    ) -> None:
        text = MINIMAL + """[sbatch]\noptions = --mem 100 --comment "a #b" --nice=-5 -C 'x"y\\z'\n"""
        golden(headers(script_of(tmp_path, text)))

    def test_a_folder_may_have_any_name(self, tmp_path: Path) -> None:
        file = cluster(tmp_path)
        script = filled(TEMPLATE, file, jobs(file)[0], Path("/a b/re%j#"))
        assert '--output="/a b/re%%j#/%x-%j.log"' in headers(script)

    def test_values_arrive_as_they_were_written(self, tmp_path: Path, golden: Golden) -> None:
        text = (
            MINIMAL + 'select = o\'b "b" $c } `d` \\ ~\noptions = perf_tests -o "x=a b"\n[launch]\nprefix = run "a b"\n'
        )
        script = script_of(tmp_path, text)
        shown = subprocess.run(
            ["bash", "-c", f"{_assignments(script)}\nprintf '%s\\n' \"$select\" \"${{options[@]}}\""],
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        golden(shown)

    @pytest.mark.parametrize(
        ("started", "requeued", "said"),
        [
            ("3", "3", "not started again, 2 time(s) were enough"),
            ("0", "1", ""),
            ("1", "1", "ran\n"),
            ("0", None, "ran\n"),
        ],
        ids=["once too often", "another start has begun", "in its turn", "nobody knows"],
    )
    def test_a_start_runs_only_in_its_turn(self, tmp_path: Path, started: str, requeued: str | None, said: str) -> None:
        for name, does in (("scontrol", "cat ../shown"), ("python", "echo ran; exit 75")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o755)
        if requeued is not None:
            shown = f"JobId=8 ArrayJobId=7 Restarts=9 \nJobId=7 Name=x Restarts={requeued} BatchFlag=1\n"
            (tmp_path / "shown").write_text(shown)
        (tmp_path / "checkout").mkdir()
        variables = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": started,
            "LLMPERF_CHECKOUT": str(tmp_path / "checkout"),
            "LLMPERF_PYTHON": "python",
            "LLMPERF_WIDTHS": "1",
        }
        script = script_of(tmp_path).replace("sleep 60", ":")
        done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 75
        assert said in done.stdout
        assert ("ran" in done.stdout) == ("ran" in said)

    def test_where_nothing_can_be_written_nothing_is_run(self, tmp_path: Path, golden: Golden) -> None:
        (tmp_path / "python").write_text("#!/bin/sh\necho ran\n")
        (tmp_path / "python").chmod(0o755)
        variables = {
            "PATH": os.environ["PATH"],
            "LLMPERF_CHECKOUT": str(tmp_path),
            "LLMPERF_PYTHON": str(tmp_path / "python"),
            "LLMPERF_RESULTS": "/proc/self",  # a folder, where root cannot write either
        }
        words = ["bash", "-c", script_of(tmp_path)]
        done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        golden(done.stdout)

    def test_a_template_that_asks_for_more_is_refused(self, tmp_path: Path) -> None:
        file = cluster(tmp_path)
        with pytest.raises(ClusterError, match="@colour@"):
            filled("#SBATCH --x=@colour@\n", file, jobs(file)[0], tmp_path)


def _assignments(script: str) -> str:
    return "\n".join(line for line in script.splitlines() if re.match(r"(select|options)=", line))


def result(name: str, verdict: str = "pass", change: float = 0.0) -> dict[str, Any]:
    metrics = {"tokens_per_second_per_gpu": {"value": 71000.0, "change": change}}
    return {"id": name, "digest": name, "nodeid": name, "verdict": verdict, "reason": "why | so", "metrics": metrics}


def write(folder: Path, width: int, *results: dict[str, Any], **more: Any) -> None:
    document = {"schema": 1, "machine": {"kind": "h100"}, "results": list(results), "exit_code": 0, **more}
    (folder / f"gpus-{width}.json").write_text(json.dumps(document))


class TestMerge:
    def test_a_green_night(self, tmp_path: Path) -> None:
        write(tmp_path, 1, result("a"))
        write(tmp_path, 8, result("b"), result("c"))
        night = night_results.gather([tmp_path], ["gpus-1.json", "gpus-8.json"])
        assert (night.headline, night.troubles) == ("green: 3 pass", ())
        assert night.document()["machine"] == {"kind": "h100"}

    def test_what_all_cases_of_a_run_share_is_told_and_kept(self, tmp_path: Path, golden: Golden) -> None:
        slower = {"verdict": "regressed", "told": "all cases slower, by 3.0 %", "slower_by": 0.03}
        faster = {"verdict": "pass", "told": "all cases faster, by 1.4 %"}
        write(tmp_path, 1, result("a"), exit_code=1, all_cases=slower)
        write(tmp_path, 2, result("b"), all_cases=faster)
        write(tmp_path, 4, result("c"), all_cases={"verdict": "pass", "told": ""})
        write(tmp_path, 8, result("d"), exit_code=1, unjudged="the whole run was not judged: why")
        night = night_results.gather([tmp_path], [])
        golden(night.troubles)
        golden(night.notes)
        assert night.document()["all_cases"]["gpus-1.json"] == slower
        assert set(night.document()["all_cases"]) == {"gpus-1.json", "gpus-2.json", "gpus-4.json"}

    @pytest.mark.parametrize("is_strict", [False, True])
    def test_what_may_be_a_gpus_is_a_trouble_of_a_strict_night_and_a_note_of_another(
        self, tmp_path: Path, is_strict: bool
    ) -> None:
        coverage: dict[str, Any] = {"nodes": [], "parts": [], "gaps": [], "said": {}}
        suite = {"rootdir": "", "baselines": "", "digests": [], "strict": is_strict, "coverage": coverage}
        common = {"verdict": "inconclusive", "told": "all cases slower, by 4.0 %"}
        write(tmp_path, 1, result("a", "inconclusive"), exit_code=int(is_strict), all_cases=common, suite=suite)
        night = night_results.gather([tmp_path], [])
        line = "gpus-1.json: all cases slower, by 4.0 %"
        assert (line in night.troubles, line in night.notes) == (is_strict, not is_strict)

    def test_of_a_run_that_did_not_tell_of_all_cases_the_verdict_is_told(self, tmp_path: Path, golden: Golden) -> None:
        write(tmp_path, 1, result("a"), all_cases={"verdict": "regressed"})
        golden(night_results.gather([tmp_path], []).troubles)

    @pytest.mark.parametrize("wrong", [7, {"verdict": "so"}, {"verdict": []}, {"verdict": "pass", "told": 1}])
    def test_all_cases_that_are_no_verdict_are_refused(self, tmp_path: Path, wrong: Any, golden: Golden) -> None:
        write(tmp_path, 1, result("a"), all_cases=wrong)
        (trouble, *_) = night_results.gather([tmp_path], []).troubles
        assert re.search("gpus-1.json: (all|verdict|told)", trouble)
        golden(trouble)

    def test_the_page_says_what_was_judged_where(self, tmp_path: Path, golden: Golden) -> None:
        revision, suite = {"commit": "abc123", "changed": 2}, self.suite("x")
        write(tmp_path, 1, result("a"), revision=revision, slurm={"job": "17_1", "starts": 2}, suite=suite)
        write(tmp_path, 2, result("b"), revision=revision, slurm={"job": "17_2", "starts": 1}, suite=suite)
        (tmp_path / "llmperf-17_1.log").write_text(
            "unfinished: node n2, n3 failed, and a was not judged\nsrun: error: Node failure on n4\n"
        )
        (tmp_path / "llmperf-9.log").write_text("node n9 failed\n")
        night = night_results.gather([tmp_path], [])
        golden(night.page()[2])
        assert not any("differ" in note for note in night.notes)

    def test_widths_that_judged_other_sources_are_told(self, tmp_path: Path, golden: Golden) -> None:
        write(tmp_path, 1, result("a"), revision={"commit": "abc", "changed": 0}, suite=self.suite("x"))
        write(tmp_path, 2, result("b"), revision={"commit": "def", "changed": 1}, suite=self.suite("y"))
        night = night_results.gather([tmp_path], [])
        golden(night.notes[:2])
        assert night.headline.startswith("green")

    def test_a_skip_is_told_with_its_reason(self, tmp_path: Path, golden: Golden) -> None:
        case = {"id": "liger", "nodeid": "n", "width": 1, "reason": "liger: no package liger_kernel", "lost": False}
        write(tmp_path, 1, result("a"), skipped=[{**case, "elsewhere": ""}])
        golden(night_results.gather([tmp_path], []).notes)

    def suite(self, digest: str) -> dict[str, Any]:
        coverage: dict[str, Any] = {"nodes": [], "parts": [], "gaps": [], "said": {}}
        places = {"rootdir": "/r", "baselines": "/r/b", "baselines_digest": digest}
        return {**places, "perf_width": 1, "strict": False, "digests": [], "coverage": coverage, "stopped": False}

    def test_a_red_case_comes_first(self, tmp_path: Path, golden: Golden) -> None:
        write(tmp_path, 1, result("a"))
        write(tmp_path, 8, result("b"), result("c", "regressed", -0.1), exit_code=1)
        night = night_results.gather([tmp_path], [])
        assert night.headline == "red: 1 regressed, 2 pass"
        assert [each.id for each, *_ in night.results] == ["c", "a", "b"]
        page = "\n".join(night.page())
        golden(page)
        assert "-10.0 %" in page
        assert r"why \| so" in page

    def test_a_case_of_several_runs_says_which_figure_is_shown(self, tmp_path: Path) -> None:
        for night, verdict in (("monday", "pass"), ("tuesday", "regressed"), ("wednesday", "pass")):
            (tmp_path / night).mkdir()
            write(tmp_path / night, 1, result("a", verdict), *([result("b")] if night == "monday" else []))
        paths = sorted(tmp_path.glob("*/gpus-1.json"))
        worst, other = night_results.gather(paths, []).cases
        assert worst.explanation.endswith(f"; the worst of 3 runs, in {paths[1]}")
        assert "runs" not in other.explanation

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (None, "gpus-8.json: missing"),
            *((text, "expected a file of --perf-json") for text in ("{", '{"schema": 1}', "[" * 99999)),
            ('{"schema": 1, "results": [], "exit_code": []}', "exit_code is [], expected a whole number"),
            ('{"schema": true, "results": []}', "schema is True, expected 1"),
        ],
    )
    def test_a_part_without_results_is_red(self, tmp_path: Path, text: str | None, said: str) -> None:
        write(tmp_path, 1, result("a"))
        if text is not None:
            (tmp_path / "gpus-8.json").write_text(text)
        assert said in night_results.gather([tmp_path], ["gpus-1.json", "gpus-8.json"]).troubles[0]

    @pytest.mark.parametrize("widths", [(1, 8), (8, 1)])
    def test_a_case_that_two_parts_ran_is_told_by_its_worst_verdict(
        self, tmp_path: Path, widths: tuple[int, int]
    ) -> None:
        red, green = widths
        write(tmp_path, red, result("a", "regressed", -0.1), exit_code=1)
        write(tmp_path, green, result("a"), result("b"))
        assert night_results.gather([tmp_path], []).headline == "red: 1 regressed, 1 pass"

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"metrics": [1]}, "metrics is [1], expected an object"),
            ({"metrics": {"tokens_per_second_per_gpu": 3}}, "is 3, expected an object"),
            ({"digest": ["x"]}, 'results[0].digest is ["x"], expected text'),
            ({"verdict": None}, "results[0].verdict is null, expected text"),
            ({"verdict": "excellent"}, "a: verdict 'excellent', expected one of invalid, "),
            ({"reason": None}, "results[0].reason is null, expected text"),
        ],
    )
    def test_a_part_of_other_types_is_red(
        self, tmp_path: Path, change: dict[str, Any], said: str, golden: Golden
    ) -> None:
        write(tmp_path, 1, {**result("a"), **change})
        (trouble,) = night_results.gather([tmp_path], []).troubles
        assert "gpus-1.json: " in trouble
        golden(trouble)
        assert said in trouble

    @pytest.mark.parametrize("value", ["1" + "0" * 400, "1e999", "-Infinity", "NaN", '"fast"', "true"])
    def test_a_figure_that_is_no_number_is_red(self, tmp_path: Path, value: str) -> None:
        night = night_results.gather([self.with_figure(tmp_path, value)], [])
        assert night.headline == "red: no case"
        (trouble,) = night.troubles
        assert "gpus-1.json: " in trouble
        assert re.search(r"is no finite number|value is .*, expected a whole number or a number", trouble)

    def test_a_figure_that_is_absent_is_a_dash(self, tmp_path: Path) -> None:
        """Beside one that is there: a column without any is left out."""
        self.with_figure(tmp_path, "null")
        write(tmp_path, 2, {**result("b"), "metrics": {"tokens_per_second_per_gpu": {"value": 5e4}}})
        night = night_results.gather([tmp_path], [])
        assert night.headline == "green: 2 pass"
        _heading, _rule, *cells = [row.split(" | ")[2].strip() for row in night.page() if row.startswith("| ")]
        assert cells == [formats.ABSENT, "50,000"]

    def with_figure(self, folder: Path, value: str) -> Path:
        write(folder, 1, {**result("a"), "metrics": {"tokens_per_second_per_gpu": {"value": "HERE"}}})
        path = folder / "gpus-1.json"
        path.write_text(path.read_text().replace('"HERE"', value))
        return folder

    def test_a_width_of_which_nothing_was_measured_is_red(self, tmp_path: Path, golden: Golden) -> None:
        """All its cases were skipped: a package is missing, or GPUs are."""
        write(tmp_path, 1, result("a"))
        write(tmp_path, 8)
        night = night_results.gather([tmp_path], [])
        assert night.headline == "red: 1 pass"
        golden(night.troubles)

    def test_an_unfinished_part_is_red(self, tmp_path: Path, golden: Golden) -> None:
        write(tmp_path, 1, result("a"), unfinished="SIGTERM", exit_code=75)
        golden(night_results.gather([tmp_path], []).troubles)

    def test_an_empty_folder_is_red(self, tmp_path: Path) -> None:
        assert night_results.gather([tmp_path], []).headline == "red: no case"
