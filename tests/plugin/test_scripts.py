"""``perf.script``: what of a script is exact is found out by its recording, and every way to judge works on it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf.judge.case_histories import differences
from pytest_llmperf.records.result import is_choice
from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.run.history_store import past_results
from tests.golden import Golden
from tests.plugin.conftest import Project

SCRIPT = """
import pytest

@pytest.mark.parametrize("size", [1, 2])
def test_train(perf, size):
    perf.script("python train.py --batch {micro_batch_size}", micro_batch_size=size, steps=8)
"""
COUNTS = {"operator": {"aten::mm": 100}, "wait": {}, "copy": {"aten::copy_": 2}}
WAITING = {**COUNTS, "wait": {"aten::_local_scalar_dense": 30}}


def evidence(digest: str = "aaaa", **more: Any) -> dict[str, Any]:
    return {"tokens": "counted", "setup": {"sources": {"train.py": digest}}, **more}


@pytest.fixture
def scripts(project: Project) -> Project:
    project.pytester.makepyfile(test_mine=SCRIPT)
    project.fake(trace=COUNTS, evidence=evidence())
    return project


def test_two_launches_record_a_script_and_say_what_is_held(scripts: Project, golden: Golden) -> None:
    result = scripts.run("--update-baselines=new", "-k", "1")
    result.assert_outcomes(passed=1)
    golden.lines(result.stdout, "recorded", "held exactly", "new ")
    assert len(scripts.launches) == 2
    assert json.loads(scripts.baselines[0].read_text())["repeats"] == {
        "counts": ["operators_per_step", "copies_per_step", "synchronisations_per_step"],
        "launches": 2,
        "losses": 8,
        "tokens": True,
    }


def test_two_commands_of_one_id_are_refused_before_one_is_launched_for_the_other(
    scripts: Project, golden: Golden
) -> None:
    twins = 'import pytest\n\n@pytest.mark.parametrize("by", ["python", "python -u"])\n'
    scripts.pytester.makepyfile(
        test_mine=f'{twins}def test_train(perf, by):\n    perf.script(f"{{by}} train.py", steps=8)\n'
    )
    result = scripts.run("--update-baselines=new")
    result.assert_outcomes(passed=1, failed=1)
    assert len(scripts.launches) == 2
    golden.lines(result.stdout, "say name=")


def test_what_repeated_is_judged_by_one_launch_and_its_files_stand_beside(scripts: Project, golden: Golden) -> None:
    scripts.record(trace=COUNTS, evidence=evidence())
    scripts.fake(trace=COUNTS, evidence=evidence("bbbb"))
    result = scripts.run("--perf-strict", "-k", "1")
    result.assert_outcomes(passed=1)
    assert len(scripts.launches) == 1
    golden.lines(result.stdout, "train.py: aaaa -> bbbb")
    scripts.fake(trace=WAITING, evidence=evidence("bbbb"))
    result = scripts.run("-k", "1")
    result.assert_outcomes(failed=1)
    golden.lines(result.stdout, "regressed: sync")


def test_a_script_that_is_other_in_all_was_repeatable_by_chance(scripts: Project, golden: Golden) -> None:
    scripts.record(trace=COUNTS, evidence=evidence())
    scripts.fake(trace=WAITING, evidence=evidence(), loss=7.0)
    result = scripts.run("-k", "1")
    result.assert_outcomes(passed=1)
    golden.lines(result.stdout, "inconclusive", "learn it anew")


@pytest.mark.parametrize("steps", [8, 12])
def test_other_traced_steps_than_the_baseline_s_are_no_loss(scripts: Project, golden: Golden, steps: int) -> None:
    """Counts that agree pass and nothing is said; those of steps that may log, as recorded ones did not, are told."""
    scripts.record(trace=COUNTS, evidence=evidence())
    scripts.pytester.makepyfile(test_mine=SCRIPT.replace("steps=8", f"steps={steps}"))
    alike = scripts.run("-k", "1")
    alike.assert_outcomes(passed=1)
    assert "recorded at" not in alike.stdout.str()
    scripts.fake(trace=WAITING, evidence=evidence())
    result = scripts.run("-k", "1")
    result.assert_outcomes(**{"failed" if steps == 8 else "passed": 1})
    golden.lines(result.stdout, *(["regressed: sync"] if steps == 8 else ["inconclusive", "recorded at steps=8"]))
    if steps != 8:
        accepted = scripts.run("-k", "1", "--update-baselines", "--perf-reason", "more steps")
        accepted.assert_outcomes(passed=1)
        golden.lines(accepted.stdout, "held exactly")
        scripts.run("-k", "1", "--perf-strict").assert_outcomes(passed=1)


def chosen(layers: int, rate: float) -> dict[str, Any]:
    setup = {"config": {"layers": layers}, "parameter_groups": [f"2 lr={rate} weight_decay=0"], "hooks": {"of": layers}}
    return evidence() | {"setup": {**evidence()["setup"], **setup}}


def test_what_its_user_chose_otherwise_comes_before_what_followed(scripts: Project, golden: Golden) -> None:
    scripts.record(trace=COUNTS, evidence=chosen(4, 0.1))
    scripts.fake(trace=WAITING, evidence=chosen(2, 0.2), loss=7.0)
    result = scripts.run("-k", "1")
    result.assert_outcomes(failed=1)
    golden.lines(result.stdout, "regressed: changed", "4 -> 2", "loss of step")


def test_a_history_says_what_its_user_chose_otherwise(scripts: Project) -> None:
    found = []
    for layers, rate in ((4, 0.1), (4, 0.2)):
        scripts.fake(trace=COUNTS, evidence=chosen(layers, rate))
        scripts.run("-k", "1", "--perf-json=out.json")
        found += past_results(RunDocument(json.loads((scripts.path / "out.json").read_text())), "a run")
    (told,) = differences(*found)
    assert told.startswith("parameter_groups: ")
    assert ["lr=0.1" in each for each in told.split(" -> ")] == [True, False]
    of_an_older_row = differences(replace(found[0], versions={}), found[1])
    assert of_an_older_row
    assert not any(is_choice(line) for line in of_an_older_row)


def test_a_rate_has_the_name_of_what_is_counted(scripts: Project, golden: Golden) -> None:
    for counted in ("unknown", "sequences"):
        found = evidence() | {"tokens": counted}
        shutil.rmtree(scripts.path / "baselines", ignore_errors=True)  # another unit is no rate to be held against
        scripts.record(trace=COUNTS, evidence=found)
        scripts.fake(trace=COUNTS, evidence=found, step_seconds=0.9)
        result = scripts.run("-k", "1", "--perf-json=out.json", "--perf-report=page.html", "--perf-markdown=page.md")
        golden.lines(result.stdout, "finished", "regressed:", "  measured  ", "  regressed")
        (case,) = json.loads((scripts.path / "out.json").read_text())["results"]
        golden([name for name in case["metrics"] if "second" in name])
        assert "tokens" not in (scripts.path / "page.md").read_text().partition("| ")[2].partition("\n")[2]


def test_losses_may_be_unknown(scripts: Project) -> None:
    scripts.fake(evidence=evidence(losses="unknown"), losses=())
    scripts.run("--update-baselines=new", "-k", "1").assert_outcomes(passed=1)
    scripts.run("--perf-strict", "-k", "1").assert_outcomes(passed=1)


def test_a_plan_and_leftovers_know_scripts(scripts: Project, golden: Golden) -> None:
    golden.lines(scripts.run("--perf-dry-run", "--update-baselines=new").stdout, "launch(es)")
    scripts.record(evidence=evidence())
    scripts.pytester.makepyfile(test_mine=SCRIPT.replace("[1, 2]", "[1]"))
    golden.lines(scripts.run("--perf-dry-run").stdout, "unused baseline")


class TestTurns:
    COMPARE = """
        from pytest_llmperf import ScriptSpec

        def test_gain(perf):
            before, after = (ScriptSpec(command=f"python train.py {word}", steps=8) for word in ("slow", "fast"))
            perf.compare(before, after, throughput_at_least=1.5)
        """

    def test_two_scripts_take_turns(self, scripts: Project, golden: Golden) -> None:
        scripts.pytester.makepyfile(test_mine=self.COMPARE)
        scripts.fake(evidence=evidence(), by={"fast": {"step_seconds": 0.05}})
        result = scripts.run("--perf-json=out.json")
        result.assert_outcomes(passed=1)
        golden.lines(result.stdout, "throughput 2x")
        unlike = {"fast": {"evidence": evidence() | {"tokens": "unknown"}}}
        scripts.fake(evidence=evidence(), by=unlike)
        result = scripts.run()
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, "a ratio of")

    def test_another_revision_is_a_side_of_its_own(self, scripts: Project, golden: Golden) -> None:
        (scripts.path / "train.py").write_text("")
        for words in (
            ["init", "-q"],
            ["add", "-A"],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
        ):
            subprocess.run(["git", *words], cwd=scripts.path, check=True)
        scripts.fake(trace=COUNTS, evidence=evidence())
        result = scripts.run("--perf-against", "git:HEAD", "-k", "1")
        result.assert_outcomes(passed=1)
        assert len(scripts.launches) == 4, "two of each side tell what repeats"
        result = scripts.run("--perf-against", "git:gone", "-k", "1")
        golden.lines(result.stderr, "no such revision")
        scripts.pytester.makepyfile(test_mine="def test_ours(perf, train_spec):\n    perf.check(train_spec)\n")
        golden.lines(scripts.run("--perf-against", "git:HEAD").stdout, "holds scripts")


class TestLargestBatch:
    LARGEST = """
        from pytest_llmperf import ScriptSpec

        def test_largest(perf):
            perf.max_micro_batch(ScriptSpec(command="python train.py{}"))
        """

    def test_it_is_found_by_launches(self, scripts: Project, golden: Golden) -> None:
        scripts.pytester.makepyfile(test_mine=self.LARGEST.format(" --batch {micro_batch_size}"))
        scripts.fake(most=5, evidence=evidence())
        result = scripts.run("--perf-memory-limit=2GiB", "--update-baselines=new")
        result.assert_outcomes(passed=1)
        golden.lines(result.stdout, "5 sequences fit")

    def test_a_command_without_its_size_is_one_line(self, scripts: Project, golden: Golden) -> None:
        scripts.pytester.makepyfile(test_mine=self.LARGEST.format(""))
        result = scripts.run("--perf-memory-limit=2GiB")
        result.assert_outcomes(failed=1)
        golden.lines(result.stdout, "has no {micro")
        assert scripts.launches == []


def test_what_asks_for_our_own_training_leaves_a_script_as_it_is(scripts: Project, golden: Golden) -> None:
    scripts.record(evidence=evidence())
    for option in ("--perf-parity", "--perf-start=warm"):
        result = scripts.run(option, "-k", "1")
        result.assert_outcomes(passed=1)
        golden(result.stdout.str().partition("= llmperf =")[2].splitlines()[1:-1])
