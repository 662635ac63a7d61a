"""A loss on a GPU of which nothing tells yet may be the GPU's: it is decided once other cases have told of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.gpu_knowledge import FEWEST_CASES, Knowledge
from pytest_llmperf.judge.gpu_panel import EFFECTS_DF
from pytest_llmperf.judge.policy import Policy, Rule, decide, may_be_its_gpu
from pytest_llmperf.judge.run_effects import ONLY_ITS_GPU, judged_later
from pytest_llmperf.judge.stats import Difference
from pytest_llmperf.judge.verdict import WAITS, Judgement, judge
from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.launch import Launch
from tests.gpu_nights import Cases, World, baseline_of, flat, result_of, waiting_for_hosts

RATE = "tokens_per_second_per_gpu"
RULE = Rule.allowing(1.0, 10, 4)

# Of a host that no stored launch was on, and another one there.
UNSEEN, BESIDE = 99, 98

# Of one case, and of all of a bad GPU.
SLOWER = math.log(1.07)


@pytest.fixture
def world() -> World:
    return World(seed=9, launches=1)


@pytest.fixture(scope="module")
def stored() -> Cases:
    return World(seed=9).history(calibrated=True)


@pytest.fixture(scope="module")
def knowledge(stored: Cases) -> Knowledge:
    found = Knowledge.of(stored)
    assert found is not None
    return found


def policy_of(knowledge: Knowledge, *, waits: bool = True) -> Policy:
    return replace(Policy.for_gpu(), knowledge=knowledge, rule=RULE, waits=waits)


def judged(launches: Sequence[Launch], stored: Sequence[Launch], policy: Policy) -> Judgement:
    return judge(launches, baseline_of(stored), policy)


def by_nobody(launch: Launch) -> Launch:
    """The same, calibrated by versions that no other calibration is of."""
    (rank,) = launch.ranks
    assert isinstance(rank.calibration, Calibration)
    calibration = replace(rank.calibration, versions={**rank.calibration.versions, "torch": "9.9"})
    return replace(launch, ranks=(replace(rank, calibration=calibration),))


def test_what_tells_of_a_gpu(world: World, knowledge: Knowledge, stored: Cases) -> None:
    def tails(launch: Launch, seen: Sequence[Launch] = ()) -> float:
        return stats.difference([launch], stored[0], knowledge.with_seen(seen)).gpu_df

    def others(gpu: int, num: int) -> list[Launch]:
        return [world.launch(case, gpu) for case in range(1, 1 + num)]

    plain = world.launch(0, UNSEEN)
    assert tails(plain) == EFFECTS_DF
    assert tails(plain, others(UNSEEN, FEWEST_CASES - 1)) == EFFECTS_DF
    assert tails(plain, others(BESIDE, FEWEST_CASES)) == EFFECTS_DF
    assert math.isinf(tails(plain, others(UNSEEN, FEWEST_CASES)))
    # The case itself, however often, is no other one.
    assert tails(plain, [*others(UNSEEN, FEWEST_CASES - 1), world.launch(0, UNSEEN)]) == EFFECTS_DF
    assert math.isinf(tails(world.launch(0, UNSEEN, calibrated=True)))
    assert math.isinf(tails(plain, [world.launch(1, UNSEEN, calibrated=True)]))
    assert tails(plain, [world.launch(1, UNSEEN, "2026-01-31", calibrated=True)]) == EFFECTS_DF
    assert tails(by_nobody(world.launch(0, UNSEEN, calibrated=True))) == EFFECTS_DF


def test_a_gpu_that_was_launched_on_before_is_known(world: World, stored: Cases) -> None:
    bare = [[without_calibration(each) for each in case] for case in stored]
    known = Knowledge.of(bare)
    assert known is not None
    for before in (bare[0][0], bare[1][0]):  # by the case itself, and by another
        assert math.isinf(stats.difference([on_gpu_of(before, world.launch(0, UNSEEN))], bare[0], known).gpu_df)


def without_calibration(launch: Launch) -> Launch:
    return replace(launch, ranks=tuple(replace(rank, calibration=None) for rank in launch.ranks))


def on_gpu_of(other: Launch, launch: Launch) -> Launch:
    place = other.ranks[0]
    return replace(launch, ranks=tuple(replace(r, host=place.host, device=place.device) for r in launch.ranks))


def test_of_two_gpus_both_have_to_be_known(world: World, knowledge: Knowledge, stored: Cases) -> None:
    wide = world.launch(0, (UNSEEN, BESIDE))
    seen = [world.launch(case, UNSEEN) for case in range(1, 1 + FEWEST_CASES)]
    assert stats.difference([wide], stored[0], knowledge.with_seen(seen)).gpu_df == EFFECTS_DF
    seen += [world.launch(case, BESIDE) for case in range(1, 1 + FEWEST_CASES)]
    assert math.isinf(stats.difference([wide], stored[0], knowledge.with_seen(seen)).gpu_df)


def difference(log: float, gpu_df: float = EFFECTS_DF) -> Difference:
    return Difference(log=log, error=0.009, df=20.0, launch_sd=0.002, each=(log, log), gpu_df=gpu_df)


@pytest.mark.parametrize(("slower", "may_be"), [(0.06, True), (0.08, True), (0.2, False)])
def test_what_no_gpu_does_is_the_cases_loss(slower: float, may_be: bool) -> None:
    found = difference(math.log1p(slower))
    # However many gates the run has, and so however few alarms each is allowed.
    for rule in (RULE, Rule.allowing(1.0, 1000, 4)):
        assert decide(found, 0.02, rule).verdict == "regressed"
        assert may_be_its_gpu(found, 0.02, rule) is may_be
        assert not may_be_its_gpu(replace(found, gpu_df=math.inf), 0.02, rule)


def test_a_loss_on_a_gpu_that_nothing_tells_of_waits(world: World, knowledge: Knowledge, stored: Cases) -> None:
    launches = [world.launch(0, UNSEEN, slower=SLOWER) for _ in "ab"]
    at_once = judged(launches, stored[0], policy_of(knowledge, waits=False))
    assert at_once.verdict == "regressed"
    found = judged(launches, stored[0], policy_of(knowledge))
    assert (found.verdict, found.undecided) == ("inconclusive", False)
    (check,) = (each for each in found.checks if each.metric == RATE)
    assert check.detail.startswith(WAITS)
    (before,) = (each for each in at_once.checks if each.metric == RATE)
    assert (check.change, check.limit, check.detectable) == (before.change, before.limit, before.detectable)


def test_what_is_known_and_what_no_gpu_does_waits_for_nobody(world: World, knowledge: Knowledge, stored: Cases) -> None:
    far = [world.launch(0, UNSEEN, slower=math.log(1.2)) for _ in "ab"]
    assert judged(far, stored[0], policy_of(knowledge)).verdict == "regressed"
    calibrated = [world.launch(0, UNSEEN, slower=SLOWER, calibrated=True) for _ in "ab"]
    assert judged(calibrated, stored[0], policy_of(knowledge)).verdict == "regressed"
    launches = [world.launch(0, UNSEEN, slower=SLOWER) for _ in "ab"]
    seen = [world.launch(case, UNSEEN) for case in range(1, 1 + FEWEST_CASES)]
    assert judged(launches, stored[0], policy_of(knowledge.with_seen(seen))).verdict == "regressed"


def test_memory_waits_for_no_gpu(world: World, knowledge: Knowledge, stored: Cases) -> None:
    launches = [world.launch(0, UNSEEN, slower=SLOWER) for _ in "ab"]
    twice: dict[str, Any] = {"peak_reserved_bytes": 2**40, "peak_allocated_bytes": 2**40}
    more = [replace(each, ranks=tuple(replace(rank, **twice) for rank in each.ranks)) for each in launches]
    found = judged(more, stored[0], policy_of(knowledge))
    assert found.verdict == "regressed"
    assert RATE not in found.reason
    assert "peak_reserved_bytes" in found.reason


@pytest.mark.parametrize(("of_all", "end"), [(False, "regressed"), (True, "inconclusive")])
def test_the_others_tell_whose_it_was(
    world: World, knowledge: Knowledge, stored: Cases, of_all: bool, end: str
) -> None:
    launches = [world.launch(0, UNSEEN, slower=SLOWER) for _ in "ab"]
    result = result_of(launches, stored[0], policy_of(knowledge))
    others = flat([[world.launch(case, UNSEEN, slower=SLOWER * of_all)] for case in range(1, 10)])
    later = judged_later(result, stored[0], knowledge.with_seen([*launches, *others]), RULE)
    assert (result.verdict, later.verdict) == ("inconclusive", end)
    check = later.check(RATE)
    assert check is not None
    # What all of them lost may be the software's: nothing else tells of that GPU.
    assert check.detail == ONLY_ITS_GPU if of_all else check.detail not in (WAITS, ONLY_ITS_GPU)


def test_where_nobody_came_it_is_decided_by_what_there_is(world: World, knowledge: Knowledge, stored: Cases) -> None:
    launches = [world.launch(0, UNSEEN, slower=SLOWER) for _ in "ab"]
    result = result_of(launches, stored[0], policy_of(knowledge))
    assert result.verdict == "inconclusive"
    assert judged_later(result, stored[0], knowledge.with_seen(launches), RULE).verdict == "regressed"


# Of a case that waits for its host, which is the first one, from GPU to GPU.
HOST_BOUND_SD = 0.03


@pytest.fixture(scope="module")
def bound(stored: Cases) -> Cases:
    return waiting_for_hosts(stored, HOST_BOUND_SD)


@pytest.fixture(scope="module")
def of_bound(bound: Cases) -> Knowledge:
    found = Knowledge.of(bound)
    assert found is not None
    return found


def tonight(world: World, slower: float, case: int = 0, of_all: float = 0.0) -> tuple[list[Launch], list[Launch]]:
    """Launches of ``case``, and of the nine others, on a GPU that nobody knows."""
    own = [world.launch(case, UNSEEN, slower=slower + of_all) for _ in "abcd"]
    return own, flat([[world.launch(other, UNSEEN, slower=of_all)] for other in range(10) if other != case])


@pytest.mark.parametrize(("slower", "fails"), [(-0.03, False), (0.03, False), (0.06, False), (0.12, True)])
def test_a_strict_run_lets_a_case_do_what_it_does_by_itself_on_other_hosts(
    world: World, of_bound: Knowledge, bound: Cases, slower: float, fails: bool
) -> None:
    launches, others = tonight(world, slower)
    knowledge = of_bound.with_seen([*launches, *others])
    result = result_of(launches, bound[0], policy_of(knowledge))
    later = judged_later(result, bound[0], knowledge, RULE)
    check = later.check(RATE)
    assert check is not None
    assert check.by_itself is not None
    assert 0.06 < check.by_itself < 0.14
    assert (later.verdict, check.is_by_itself) == ("inconclusive", not fails)
    assert later.fails(strict=True) is fails
    where = "beyond" if fails else "within"
    assert f"{where} the {check.by_itself * 100:.1f} %" in check.sentence
    assert later.reason == check.sentence


def test_other_cases_and_young_baselines_have_nothing_by_themselves(
    world: World, of_bound: Knowledge, bound: Cases
) -> None:
    launches, others = tonight(world, 0.0, case=1)
    alike = stats.difference(launches, bound[1], of_bound.with_seen([*launches, *others]))
    assert math.isinf(alike.by_itself)
    # On so few units nobody knows what it does elsewhere.
    few = [sorted(case, key=lambda one: one.ranks[0].device)[:4] for case in bound[:1]]
    young = Knowledge.of([*few, *bound[1:]])
    assert young is not None
    launches, others = tonight(world, 0.05)
    found = stats.difference(launches, few[0], young.with_seen([*launches, *others]))
    assert math.isinf(found.by_itself)


def test_what_its_gpu_alone_would_explain_is_not_what_a_case_does_by_itself(
    world: World, of_bound: Knowledge, bound: Cases
) -> None:
    launches, others = tonight(world, 0.08, of_all=0.05)
    knowledge = of_bound.with_seen([*launches, *others])
    result = result_of(launches, bound[0], policy_of(knowledge))
    later = judged_later(result, bound[0], knowledge, RULE)
    check = later.check(RATE)
    assert check is not None
    assert (check.verdict, check.detail, check.is_by_itself) == ("inconclusive", ONLY_ITS_GPU, False)
    assert later.fails(strict=True)
