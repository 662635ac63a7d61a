"""What a run that is over says of its cases, each by what all of them know of their GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from pytest_llmperf.judge.beside_baseline import ONE_SESSION
from pytest_llmperf.judge.gpu_knowledge import FEWEST_CASES, Knowledge
from pytest_llmperf.judge.policy import Policy, Rule
from pytest_llmperf.judge.verdict import WAITS
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Verdict
from pytest_llmperf.run import cases, whole_run
from pytest_llmperf.run.options import Settings
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.whole_run import WholeRun, judged_together
from pytest_llmperf.support import codec
from tests.engine.conftest import Engine
from tests.golden import Golden
from tests.gpu_nights import Cases, World, baseline_of, case_log, flat, is_limited, result_of, spec_of
from tests.shelf import keep

GPUS = Machine(gpus=(Gpu(0, "GPU-a", "NVIDIA H200", 140 * 2**30),), cpu_name="Fake CPU", cores=8)

# Of a host that no stored launch was on.
UNSEEN = 99

RATE = "tokens_per_second_per_gpu"


@cache
def _before() -> tuple[World, Cases, Knowledge]:
    """The world as its history leaves it, that history, and what it tells of GPUs: learnt once."""
    world = World(seed=9)
    stored = world.history(launches=6, gpus=16)
    knowledge = Knowledge.of(stored)
    assert knowledge is not None
    return world, stored, knowledge


class Night:
    """One run on a GPU that no baseline knows, where case 0 may be slower than it was."""

    def __init__(self, engine: Engine) -> None:
        engine.on(GPUS)
        self.engine = engine
        world, self.stored, self.knowledge = _before()
        self.world = deepcopy(world)
        self.machine = self.context().machine_kind
        keep(
            engine.path / "baselines",
            *(baseline_of(launches, case, self.machine) for case, launches in enumerate(self.stored)),
        )

    def context(self, **settings: Any) -> Run:
        return Run(
            Settings(**{"gpus": 1, "baselines": self.engine.path / "baselines", **settings}), rootdir=self.engine.path
        )

    def result(self, case: int, slower: float = 0.0, launches: int = 2, gpu: int = UNSEEN) -> CaseResult:
        """Judged by what was stored alone, as the first of a night is."""
        policy = replace(Policy.for_gpu(), knowledge=self.knowledge, rule=Rule.allowing(1.0, 10, 4))
        made = [self.world.launch(case, gpu, slower=slower) for _ in range(launches)]
        return result_of(made, self.stored[case], policy, self.machine)

    def results(self, slower: float = 0.0, launches: int = 2) -> list[CaseResult]:
        return [self.result(0, slower, launches), *(self.result(case) for case in range(1, 10))]


def lines_of(found: WholeRun) -> list[str]:
    """What fails the run and no test of it."""
    late = [each.line for each in (*found.regressed, *found.undecided)]
    return [*late, *([found.line] if found.fails else []), *filter(None, [found.unjudged])]


@pytest.fixture
def night(engine: Engine) -> Night:
    return Night(engine)


# Less than what an unseen GPU may do, more than what this one does.
SLOWER = math.log(1.045)


def test_a_case_that_passed_is_regressed_by_what_the_others_tell(night: Night, golden: Golden) -> None:
    results = night.results(SLOWER)
    assert results[0].verdict in ("pass", "inconclusive")
    found = judged_together(night.context(), results)
    assert [each.verdict for each in found.results] == ["regressed", *["pass"] * 9]
    (line,) = lines_of(found)
    assert line.startswith(f"{results[0].nodeid}: {results[0].id}: {RATE} ")
    golden(line)
    assert found.change is not None
    assert found.verdict == "pass"
    assert found.document()["all_cases"]["verdict"] == "pass"


def test_a_clean_night_says_nothing(night: Night) -> None:
    found = judged_together(night.context(), night.results())
    assert {each.verdict for each in found.results} == {"pass"}
    assert (lines_of(found), found.line) == ([], "")


def test_one_launch_alone_condemns_nobody(night: Night) -> None:
    found = judged_together(night.context(), night.results(SLOWER, launches=1))
    assert found.results[0].verdict == "inconclusive"
    assert lines_of(found) == []


def test_what_has_failed_stays_failed_and_is_told_once(night: Night) -> None:
    results = night.results(math.log(1.2))
    assert results[0].verdict == "regressed"
    found = judged_together(night.context(), results)
    assert found.results[0] == results[0]
    assert lines_of(found) == []


def test_what_goes_wrong_in_it_takes_no_result_and_fails_the_run_by_a_line(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("Singular\nmatrix")

    monkeypatch.setattr(whole_run, "common_change", broken)
    results = night.results(SLOWER)
    found = judged_together(night.context(), results)
    assert found.results == results
    line = "the whole run was not judged: ArithmeticError: Singular matrix; each case stands by itself"
    assert (lines_of(found), found.line, found.document()) == ([line], "", {"unjudged": line})


def other_machine(result: CaseResult) -> CaseResult:
    return replace(result, machine="another")


def updated(result: CaseResult) -> CaseResult:
    return replace(result, updated="recorded")


def in_turns(result: CaseResult) -> CaseResult:
    return replace(result, launches_before=result.launches)


def unlaunched(result: CaseResult) -> CaseResult:
    return replace(result, launches=())


def unstored(result: CaseResult) -> CaseResult:
    launches = tuple(replace(launch, digest="other") for launch in result.launches)
    return replace(result, digest="other", launches=launches)


def worse_elsewhere(result: CaseResult) -> CaseResult:
    """By what is no metric of the baseline."""
    return replace(result, verdict="changed")


@pytest.mark.parametrize("other", [other_machine, updated, in_turns, unlaunched, unstored, worse_elsewhere])
def test_what_is_not_held_against_a_baseline_here_is_left_as_it_is(
    night: Night, other: Callable[[CaseResult], CaseResult]
) -> None:
    first, *rest = night.results(SLOWER)
    found = judged_together(night.context(), [other(first), *rest])
    assert found.results[0] == other(first)
    assert lines_of(found) == []


@pytest.mark.parametrize("settings", [{"gpus": 0}, {"static": True}, {"against": "/other/python"}])
def test_nothing_is_said_where_gpus_are_not_what_differs(night: Night, settings: dict[str, Any]) -> None:
    results = night.results(SLOWER)
    found = judged_together(night.context(**settings), results)
    assert (found.results, lines_of(found), found.change) == (results, [], None)


def test_a_baseline_that_cannot_be_read_is_none(night: Night) -> None:
    path = next(path for path in night.engine.baselines if night.stored[0][0].digest in path.read_text())
    path.write_text("{", encoding="utf-8")
    results = night.results(SLOWER)
    found = judged_together(night.context(), results)
    assert found.results[0] == results[0]
    assert {each.verdict for each in found.results[1:]} == {"pass"}


def with_steps(launch: Launch, seconds: float) -> Launch:
    ranks = tuple(replace(rank, step_seconds=(seconds,) * len(rank.step_seconds)) for rank in launch.ranks)
    return replace(launch, ranks=ranks)


@pytest.mark.parametrize("seconds", [0.0, math.nan, math.inf, 1e-5])
def test_what_is_invalid_tells_of_no_gpu(night: Night, seconds: float) -> None:
    results = night.results(SLOWER)
    broken = tuple(with_steps(launch, seconds) for launch in results[5].launches)
    invalid = replace(results[5], verdict="invalid", checks=(), launches=broken)
    others = [*results[:5], *results[6:]]
    found = judged_together(night.context(), [*others, invalid])
    without = judged_together(night.context(), others)
    assert (list(found.results), found.change) == ([*without.results, invalid], without.change)


def test_a_case_that_two_tests_share_is_told_of_both(night: Night) -> None:
    first, *rest = night.results(SLOWER)
    second = replace(first, nodeid="t.py::other", shares=first.nodeid)
    # As xdist's controller has it: each with a copy of its own.
    copied = [codec.read(CaseResult, codec.plain(each)) for each in (first, second, *rest)]
    found = judged_together(night.context(), copied)
    assert [line.split(": ")[0] for line in lines_of(found)] == [first.nodeid, "t.py::other"]
    assert found.change == judged_together(night.context(), [first, *rest]).change


def shifted(night: Night, gpu: int, slower: float, **more: Any) -> list[CaseResult]:
    results = [night.result(case, slower, gpu=gpu) for case in range(10)]
    # Each alone was within what it is held to.
    return [replace(each, **{"verdict": "pass", **more}) for each in results]


def test_a_change_that_all_cases_share_fails_the_run(night: Night, golden: Golden) -> None:
    results = shifted(night, 3, math.log(1.04))
    found = judged_together(night.context(), results)
    assert found.verdict == "regressed"
    golden(found.line)
    assert lines_of(found)[-1] == found.line
    told = found.document()["all_cases"]
    assert told["verdict"] == "regressed"
    assert told["low"] < told["slower_by"] < told["high"]
    assert (told["cases"], told["gpus"], told["is_known"], told["is_calibrated"]) == (10, 1, True, False)


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_all_lose_on_a_gpu_that_nothing_tells_of_is_no_pass(night: Night, is_strict: bool, golden: Golden) -> None:
    results = [night.result(case, math.log(1.04)) for case in range(10)]
    assert "regressed" not in verdicts(results)
    found = judged_together(night.context(strict=is_strict), results)
    asked = ", by their software or by a GPU that nothing else tells of: 10 cases on 1 GPU, 10 inconclusive"
    assert asked in found.line
    golden(found.line)
    assert verdicts(found.results) == ["inconclusive"] * 10
    # A strict run fails for it by one line.
    assert lines_of(found) == [found.line] * is_strict
    assert found.document()["all_cases"]["verdict"] == "inconclusive"


def test_what_some_lose_on_a_gpu_that_nothing_tells_of_is_no_pass_either(night: Night) -> None:
    """A library that the cases at the power limit use: the model lays it to a GPU that is bad at that limit."""
    limited = math.log(1.045)
    results = [night.result(case, limited * is_limited(case), gpu=UNSEEN) for case in range(10)]
    found = judged_together(night.context(), results)
    lost = [each.verdict for case, each in enumerate(found.results) if is_limited(case)]
    assert set(lost) <= {"inconclusive", "regressed"}
    assert "cases inconclusive" in found.line or "regressed" in lost


def test_of_gpus_that_nothing_tells_of_what_no_gpu_does_by_itself_fails(night: Night) -> None:
    found = judged_together(night.context(), shifted(night, UNSEEN, math.log(1.15)))
    assert found.verdict == "regressed"
    assert found.line in lines_of(found)


def test_a_change_that_is_accepted_fails_nothing(night: Night) -> None:
    found = judged_together(night.context(), shifted(night, 3, math.log(1.04), updated="recorded"))
    assert found.verdict == "pass"


def test_cases_that_gate_no_throughput_are_held_to_no_change(night: Night) -> None:
    results = [replace(each, checks=()) for each in shifted(night, 3, math.log(1.04))]
    assert judged_together(night.context(), results).verdict == "pass"


def test_two_that_took_turns_do_not_tighten_what_all_are_held_to(night: Night) -> None:
    results = [held(each, 0.1) for each in shifted(night, 3, math.log(1.04))]
    pair = replace(held(results[0], 0.01), digest="pair", launches_before=results[0].launches)
    assert judged_together(night.context(), [*results, pair]).verdict == "pass"


def test_one_case_that_is_held_tightly_does_not_hold_all(night: Night) -> None:
    results = [held(each, 0.1) for each in shifted(night, 3, math.log(1.04))]
    assert judged_together(night.context(), [held(results[0], 0.01), *results[1:]]).verdict == "pass"
    assert judged_together(night.context(), [held(each, 0.01) for each in results]).verdict == "regressed"


def test_a_new_case_that_is_recorded_excuses_no_other(night: Night) -> None:
    results = shifted(night, 3, math.log(1.04))
    new = replace(results[0], digest="new", verdict="new", updated="recorded")
    assert judged_together(night.context(), [*results, new]).verdict == "regressed"


def test_what_one_gpu_alone_has_done_tells_nothing_of_it(night: Night) -> None:
    """Its calibration by a version that no other has, say."""
    context = night.context()
    alone = replace(night.world.launch(0, UNSEEN), digest="alone", started_at="2026-01-01T00:00:00Z")
    context.stored.launches = [*context.stored.launches, [alone]]
    found = judged_together(context, shifted(night, UNSEEN, math.log(1.04)))
    assert found.change
    assert not found.change.is_known
    assert found.verdict == "inconclusive"


def held(result: CaseResult, tolerance: float) -> CaseResult:
    """To this tolerance, by the user."""
    checks = [
        replace(each, tolerance=tolerance, known_tolerance=None) if each.metric == RATE else each
        for each in result.checks
    ]
    return replace(result, checks=tuple(checks))


def test_what_workers_have_recorded_meanwhile_is_no_baseline(night: Night) -> None:
    """The controller of a parallel run reads baselines at its end: by then they hold tonight's launches."""
    results = night.results(SLOWER)
    before = judged_together(night.context(), results)
    for case in (0, 4):
        recorded = baseline_of([*night.stored[case], *results[case].launches], case, night.machine)
        keep(night.engine.path / "baselines", recorded)
    after = judged_together(night.context(), results)
    assert verdicts(after.results) == verdicts(before.results)
    assert after.change is not None
    assert before.change is not None
    assert after.change.log == pytest.approx(before.change.log, abs=5e-4)
    assert after.change.error == pytest.approx(before.change.error, rel=0.1)


def verdicts(results: Sequence[CaseResult]) -> list[Verdict | Any]:
    return [each.verdict for each in results]


def test_a_run_knows_what_it_has_launched_so_far(night: Night) -> None:
    stored = night.context().stored
    knowledge = stored.knowledge_beside(())
    assert knowledge is not None
    assert knowledge.seen == ()
    assert stored.knowledge_beside(()) is knowledge
    assert night.context(gpus=0).stored.knowledge_beside(()) is None
    assert night.context(against="/other/python").stored.knowledge_beside(()) is None
    assert len(stored.launches) == 10
    assert len(flat(stored.launches)) == 60


def test_a_step_time_that_is_none_is_invalid_on_a_gpu_that_is_to_be_known_too(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(night.engine.path / "cache"))
    night.engine.fake(step_seconds=0.0)
    assert night.engine.check(spec_of(0), gpus=1).result.verdict == "invalid"


# More than noise and what usual GPUs do, less than what a bad one may.
LOST = math.log(1.07)


@pytest.mark.parametrize(
    ("num_gates", "settings", "verdict"),
    [
        (10, {}, "inconclusive"),
        (FEWEST_CASES + 1, {}, "inconclusive"),
        (FEWEST_CASES, {}, "regressed"),  # too few to tell of its GPU, whoever comes
        (10, {"strict": True}, "regressed"),  # which passes nothing that is not shown
        (10, {"update": "all"}, "regressed"),  # a loss is recorded with a reason alone
        (10, {"update": "new"}, "regressed"),
    ],
)
def test_a_loss_on_a_gpu_that_nobody_knows_waits_for_the_runs_other_cases(
    night: Night, monkeypatch: pytest.MonkeyPatch, num_gates: int, settings: dict[str, Any], verdict: Verdict
) -> None:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(night.engine.path / "cache"))
    night.engine.fake(step_seconds=math.exp(case_log(0) + LOST))
    caller = night.engine.caller(gpus=1, **settings)
    caller.run.num_gates = num_gates
    conclusion = cases.Cases(caller).check(spec_of(0))
    found = conclusion.result
    waits = verdict == "inconclusive"
    assert (found.verdict, conclusion.fails, len(found.launches)) == (verdict, not waits, 2)
    assert (WAITS in found.notes) is waits
    # Nobody else was on its GPU: by the end it is what it would have been.
    together = judged_together(caller.run, [found])
    assert together.results[0].verdict == "regressed"
    assert [line.rpartition("; ")[2] for line in lines_of(together)] == ["its test ended as inconclusive"] * waits


@pytest.mark.parametrize("sessions", [1, 2])
def test_an_undecided_case_of_one_session_says_what_would_help(
    night: Night, monkeypatch: pytest.MonkeyPatch, sessions: int
) -> None:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(night.engine.path / "cache"))
    first, second, *_ = night.stored[0]
    keep(night.engine.path / "baselines", baseline_of([first, second][:sessions], 0, night.machine))
    night.engine.fake(step_seconds=math.exp(case_log(0) + math.log(1.05)))
    found = cases.Cases(night.engine.caller(gpus=1)).check(spec_of(0)).result
    assert found.verdict == "inconclusive"
    assert (ONE_SESSION in found.notes) is (sessions == 1)


def held_back(night: Night, cases: Sequence[int], slower: Callable[[int], float]) -> list[CaseResult]:
    """``cases`` of one run on one GPU, each by what it knew by then."""
    stored, made, results = night.knowledge, list[Launch](), list[CaseResult]()
    assert stored is not None
    for case in cases:
        launches = [night.world.launch(case, UNSEEN, slower=slower(case)) for _ in "ab"]
        knowledge = stored.with_seen(made)
        policy = replace(Policy.for_gpu(), knowledge=knowledge, rule=Rule.allowing(1.0, 10, 4), waits=True)
        results.append(result_of(launches, night.stored[case], policy, night.machine))
        made += launches
    return results


def test_one_bad_gpu_fails_none_of_its_cases_and_is_told(night: Night, golden: Golden) -> None:
    results = held_back(night, range(10), lambda _: LOST)
    assert verdicts(results[:FEWEST_CASES]) == ["inconclusive"] * FEWEST_CASES
    found = judged_together(night.context(), results)
    assert "regressed" not in verdicts(found.results)
    # What all lose may be the stack's too: that much fails the run, by one line.
    assert lines_of(found) == [found.line]
    golden(found.line)


def test_the_first_case_of_a_night_that_lost_by_itself_fails_its_run(night: Night, golden: Golden) -> None:
    results = held_back(night, range(10), lambda case: LOST * (case == 0))
    assert verdicts(results) == ["inconclusive", *["pass"] * 9]
    found = judged_together(night.context(), results)
    assert verdicts(found.results) == ["regressed", *["pass"] * 9]
    (line,) = lines_of(found)
    assert line.startswith(f"{results[0].nodeid}: {results[0].id}: {RATE} ")
    golden(line)


def test_workers_that_saw_few_cases_each_are_judged_by_all_of_them(night: Night) -> None:
    """Each worker of xdist knows its own alone; the controller has what all of them found."""
    workers = [held_back(night, cases, lambda case: LOST * (case == 0)) for cases in ((0, 1, 2), (3, 4, 5), (6, 7, 8))]
    copied = [codec.read(CaseResult, codec.plain(each)) for results in workers for each in results]
    assert verdicts(copied) == ["inconclusive", *["pass"] * 8]
    assert verdicts(judged_together(night.context(), copied).results) == ["regressed", *["pass"] * 8]
