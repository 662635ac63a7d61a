"""What launches of different cases tell of the GPUs that they share, on simulated nights with known effects."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge import gpu_knowledge as model_module
from pytest_llmperf.judge import stats
from pytest_llmperf.judge.gpu_knowledge import Knowledge, learn, robust
from pytest_llmperf.judge.gpu_panel import (
    EFFECTS_DF,
    Incidence,
    Model,
    Observation,
    Panel,
    Unit,
    observations_of,
    unit_of,
)
from pytest_llmperf.judge.policy import Policy, Rule, decide, least_tolerance, passing_ranges
from pytest_llmperf.judge.run_effects import MOST, CommonChange, common_change, judged_later
from pytest_llmperf.judge.stats import Difference, Spread, log_of, quantile
from pytest_llmperf.judge.verdict import judge, speed_check
from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Check
from pytest_llmperf.support import codec
from tests.examples import examples
from tests.golden import Golden
from tests.gpu_nights import TONIGHT, Cases, World, baseline_of, device_of, flat, is_limited, result_of, spec_of

RATE = "tokens_per_second_per_gpu"
RULE = Rule.allowing(1.0, 10, 4)

# Of a host that no stored launch was on.
UNSEEN = 99


def known(cases: Cases) -> Knowledge:
    knowledge = Knowledge.of(cases)
    assert knowledge is not None
    return knowledge


def night(world: World, gpu: int = UNSEEN, cases: int = 10, *, slower: float = 0.0, calibrated: bool = False) -> Cases:
    """Two launches of each case on one GPU, all of them ``slower`` by this logarithm."""
    return [[world.launch(case, gpu, slower=slower, calibrated=calibrated) for _ in "ab"] for case in range(cases)]


def same(one: Difference, other: Difference) -> bool:
    return (one.log, one.error, one.df) == pytest.approx((other.log, other.error, other.df), abs=1e-9, rel=1e-6)


@pytest.fixture
def world() -> World:
    return World(seed=7, launches=1)


@pytest.fixture(scope="module")
def stored() -> Cases:
    return World(seed=7).history()


@pytest.fixture(scope="module")
def knowledge(stored: Cases) -> Knowledge:
    return known(stored)


@pytest.mark.simulated
def test_effects_of_gpus_are_recovered_as_each_kind_of_case_feels_them() -> None:
    world = World(seed=1, host_sd=0.01, device_sd=0.01, day_sd=0.0, own_sd=0.001)
    knowledge = known(world.history(cases=12, launches=24, gpus=24))
    posterior = robust(knowledge.model, Panel.of(knowledge.stored))
    units = list({each.unit.devices: each.unit for each in knowledge.stored}.values())
    gpus = [int(unit.devices[0].split("GPU-")[1][:8], 16) for unit in units]
    assert len(units) == 24
    means, covariance = posterior.of(units)
    for case in (0, 1):
        general, limited = knowledge.model.loading(spec_of(case).digest).mean
        told = [general * means[i] + limited * means[24 + i] for i in range(24)]
        true = [world.effect(gpu, unit.day, limited=is_limited(case)) for gpu, unit in zip(gpus, units, strict=True)]
        centre = sum(t - e for t, e in zip(told, true, strict=True)) / 24  # the mean of all is a case's own
        assert max(abs(t - e - centre) for t, e in zip(told, true, strict=True)) < 0.004 < 0.4 * max(map(abs, true))
    assert (covariance.diagonal() > 0).all()


def waiting(launch: Launch, seed: int) -> Launch:
    """The same where each step waits for its host, which is busy for some steps and then is not."""
    source, pace, steps = random.Random(seed), 0.0, []
    for _ in range(40):
        pace = 0.8 * pace + source.gauss(0.0, 0.04)
        steps.append(launch.median_step_seconds * math.exp(pace))
    ranks = tuple(replace(rank, step_seconds=(1.0, *steps)) for rank in launch.ranks)
    return replace(launch, ranks=ranks)


def test_what_a_launch_does_not_know_of_itself_the_next_one_there_does_not_either(
    world: World, knowledge: Knowledge, stored: Cases
) -> None:
    launches = [waiting(world.launch(0, UNSEEN), seed) for seed in range(3)]
    least = min(launch.median_error for launch in launches)
    assert least > 0.008
    assert stats.difference(launches, stored[0], knowledge).error > least
    elsewhere = [waiting(world.launch(0, UNSEEN + 8 * seed), seed) for seed in range(3)]
    apart = stats.difference(elsewhere, stored[0], knowledge).error
    assert apart < 0.8 * stats.difference(launches, stored[0], knowledge).error


@pytest.mark.simulated
def test_what_runs_at_the_power_limit_feels_that_part_of_an_effect_more() -> None:
    world = World(seed=2, host_sd=0.01, device_sd=0.01, own_sd=0.001)
    model = known(world.history(cases=12, launches=24)).model
    loadings = [model.loading(spec_of(case).digest).mean for case in range(12)]
    apart = [loadings[case][1] - loadings[case + 1][1] for case in range(0, 12, 2)]
    assert min(apart) > 0.5
    assert [mean[0] for mean in loadings] == pytest.approx([1.0] * 12, abs=0.35)


@examples(15)
@given(factors=st.lists(st.floats(1e-6, 1e4), min_size=4, max_size=4))
def test_units_of_time_do_not_matter(factors: list[float]) -> None:
    def scaled(launch: Launch, factor: float) -> Launch:
        ranks = [
            replace(rank, step_seconds=tuple(factor * each for each in rank.step_seconds)) for rank in launch.ranks
        ]
        return replace(launch, ranks=tuple(ranks))

    world = World(seed=3)
    stored, tonight = world.history(cases=4, launches=4, gpus=8), night(world, cases=4)
    others = [
        [[scaled(one, factors[i]) for one in case] for i, case in enumerate(cases)] for cases in (stored, tonight)
    ]
    plain = stats.difference(tonight[0], stored[0], known(stored).with_seen(flat(tonight)))
    assert same(stats.difference(others[1][0], others[0][0], known(others[0]).with_seen(flat(others[1]))), plain)


def test_a_case_never_tells_of_itself(world: World, stored: Cases, knowledge: Knowledge) -> None:
    tonight = night(world)
    own = [world.launch(0, UNSEEN, slower=slower) for slower in (0.1, -0.2)]
    without = knowledge.with_seen(flat(tonight[1:]))
    beside = knowledge.with_seen([*flat(tonight), *own])
    assert same(stats.difference(tonight[0], stored[0], beside), stats.difference(tonight[0], stored[0], without))


def test_more_cases_narrow_the_error(world: World, stored: Cases, knowledge: Knowledge) -> None:
    tonight = night(world)
    errors = [
        stats.difference(tonight[0], stored[0], knowledge.with_seen(flat(tonight[1 : 1 + num]))).error
        for num in (0, 4, 6, 9)
    ]
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 0.5 * errors[0]


def test_so_few_cases_that_one_of_them_may_have_changed_tell_nothing_of_their_gpu(
    world: World, stored: Cases, knowledge: Knowledge
) -> None:
    tonight = night(world)
    alone = stats.difference(tonight[0], stored[0], knowledge)
    for num in (1, 2, 3):
        assert same(stats.difference(tonight[0], stored[0], knowledge.with_seen(flat(tonight[1 : 1 + num]))), alone)
    # Nor do many that were on other GPUs.
    elsewhere = night(world, UNSEEN + 1)[4:]
    few = knowledge.with_seen([*flat(tonight[1:4]), *flat(elsewhere)])
    others = knowledge.with_seen(flat(elsewhere))
    assert same(stats.difference(tonight[0], stored[0], few), stats.difference(tonight[0], stored[0], others))


@pytest.mark.parametrize("gain", [0.03, 0.05, 0.1])
def test_a_case_that_gained_does_not_make_the_next_one_regressed(
    world: World, stored: Cases, knowledge: Knowledge, gain: float
) -> None:
    gained = list(night(world, cases=1, slower=-gain))
    for case in range(1, 6):
        tonight = [world.launch(case, UNSEEN) for _ in "ab"]
        difference = stats.difference(tonight, stored[case], knowledge.with_seen(flat(gained)))
        assert decide(difference, least_tolerance(difference), RULE).verdict != "regressed"
        gained.append(tonight)


@pytest.mark.parametrize(
    ("times", "believed"), [(1.0, True), (1.03, True), (0.93, False), (10.0, False), (1e-6, False)]
)
def test_a_calibration_that_no_chip_can_give_is_none(
    calibrated_world: World, calibrated: Cases, informed: Knowledge, times: float, believed: bool
) -> None:
    case = [calibrated_world.launch(0, UNSEEN, calibrated=True) for _ in "ab"]
    with_it = [_scaled_calibration(each, times) for each in case]
    without = [replace(each, ranks=tuple(replace(rank, calibration=None) for rank in each.ranks)) for each in case]
    found, alone = (stats.difference(each, calibrated[0], informed) for each in (with_it, without))
    assert (found.error < alone.error) == believed
    assert same(found, alone) != believed
    # Nor does one that a baseline keeps keep others from being judged.
    broken = [[_scaled_calibration(calibrated[0][0], times), *calibrated[0][1:]], *calibrated[1:]]
    assert math.isfinite(least_tolerance(stats.difference(without, broken[0], known(broken))))


def _scaled_calibration(launch: Launch, times: float) -> Launch:
    def scaled(calibration: Calibration | None) -> Calibration | None:
        if calibration is None:
            return None
        return replace(calibration, seconds={name: times * each for name, each in calibration.seconds.items()})

    return replace(launch, ranks=tuple(replace(rank, calibration=scaled(rank.calibration)) for rank in launch.ranks))


@pytest.mark.parametrize("slower", [0.1, -0.1])
def test_another_case_that_changed_does_not_drag_the_rest(
    world: World, stored: Cases, knowledge: Knowledge, slower: float
) -> None:
    tonight = night(world)
    changed = [*tonight[:5], [world.launch(5, UNSEEN, slower=slower) for _ in "ab"], *tonight[6:]]
    plain, beside = (knowledge.with_seen(flat(cases)) for cases in (tonight, changed))
    for case in (0, 1, 2, 3, 4, 6):
        one, other = (stats.difference(tonight[case], stored[case], each) for each in (plain, beside))
        assert abs(one.log - other.log) < 0.006  # of 0.1; 24 other worlds: at most 0.0042


def test_a_launch_on_several_gpus_is_told_by_those_that_had_one() -> None:
    world = World(seed=4, own_sd=0.001)
    stored = world.history(cases=6)
    wide = [world.launch(6, (gpu, gpu + 1), f"2026-01-{gpu + 1:02d}") for gpu in range(0, 16, 2)]
    knowledge = known([*stored, wide])
    pair = [world.launch(6, (UNSEEN, UNSEEN + 1))]
    assert unit_of(pair[0]).devices == tuple(sorted(device_of(gpu) for gpu in (UNSEEN, UNSEEN + 1)))
    told = [
        knowledge.with_seen([world.launch(case, gpu) for gpu in gpus for case in range(6)])
        for gpus in ([], [UNSEEN], [UNSEEN, UNSEEN + 1])
    ]
    none, one, both = (each.told(pair[0].digest).of([unit_of(pair[0])])[1][0, 0] for each in told)
    assert both < 0.5 * one < 0.5 * none
    found = stats.difference(pair, wide, told[-1])
    assert abs(found.log) < 3 * found.error < 0.02


def test_a_gpu_is_known_better_on_the_same_day_and_less_on_another(
    world: World, stored: Cases, knowledge: Knowledge
) -> None:
    seen = flat(night(world)[1:])
    told = knowledge.with_seen(seen)
    tonight, later = ([world.launch(0, UNSEEN, day)] for day in (TONIGHT, "2026-02-02"))
    beside = [world.launch(0, UNSEEN + 1)]
    elsewhere = [world.launch(0, UNSEEN + 80)]
    errors = [stats.difference(each, stored[0], told).error for each in (tonight, later, beside, elsewhere)]
    assert all(better < worse for better, worse in pairwise(errors))


def test_a_host_is_the_same_after_a_reboot(world: World, stored: Cases, knowledge: Knowledge) -> None:
    last = stored[0][-1]
    again = replace(last, started_at=f"{TONIGHT}T12:00:00Z")
    rebooted = replace(again, ranks=tuple(replace(rank, boot="another") for rank in again.ranks))
    differences = [stats.difference([each], stored[0], knowledge) for each in (again, rebooted)]
    assert same(*differences)
    # Also of a GPU beside it that was seen after the reboot alone.
    (rank,) = rebooted.ranks
    beside = replace(rebooted, ranks=(replace(rank, device=device_of(UNSEEN)),))
    both = observations_of([again, rebooted, beside])
    assert Incidence([each.unit for each in both])["host"].shape[1] == 1


def test_a_gpu_is_known_worse_by_series_whose_loadings_are_not_known(
    calibrated_world: World, informed: Knowledge
) -> None:
    launch = calibrated_world.launch(0, UNSEEN, calibrated=True)
    series = [each.series for each in observations_of([launch]) if each.is_calibration]
    assert series

    def error(times: float) -> float:
        loadings = {
            name: replace(each, covariance=times * each.covariance) if name in series else each
            for name, each in informed.model.loadings.items()
        }
        own = replace(informed, model=replace(informed.model, loadings=loadings), _told={})
        unit = unit_of(launch)
        return float(own.told(spec_of(0).digest, observations_of([launch])).of([unit])[1][0, 0])

    assert error(0.0) < error(1.0) < error(4.0)


def test_an_unseen_gpu_alone_has_the_error_of_the_prior(knowledge: Knowledge) -> None:
    unit = Unit(("nowhere",), ("GPU-none",), TONIGHT)
    means, covariance = knowledge.told("some case").of([unit])
    assert means == pytest.approx([0.0, 0.0], abs=1e-12)
    assert covariance == pytest.approx(knowledge.model.covariance([unit]), rel=1e-6)


def with_calibrations(launches: Sequence[Launch], calibration: Calibration | None) -> list[Launch]:
    return [replace(one, ranks=tuple(replace(r, calibration=calibration) for r in one.ranks)) for one in launches]


@pytest.fixture
def calibrated_world() -> World:
    return World(seed=8, launches=1)


@pytest.fixture(scope="module")
def calibrated() -> Cases:
    return World(seed=8).history(calibrated=True)


@pytest.fixture(scope="module")
def informed(calibrated: Cases) -> Knowledge:
    return known(calibrated)


def test_a_calibration_tells_one_case_alone_of_its_gpu(
    calibrated_world: World, calibrated: Cases, informed: Knowledge
) -> None:
    alone = [calibrated_world.launch(0, UNSEEN, calibrated=True)]
    told, untold = (stats.difference(each, calibrated[0], informed) for each in (alone, with_calibrations(alone, None)))
    assert told.error < 0.6 * untold.error
    assert abs(told.log) < 4 * told.error


def test_of_other_versions_a_copy_alone_is_comparable_and_tells_of_no_gpu(
    calibrated_world: World, calibrated: Cases, informed: Knowledge
) -> None:
    made = replace(calibrated_world.calibration(UNSEEN, TONIGHT), versions={"torch": "9.9", "driver": "999"})
    alone = [calibrated_world.launch(0, UNSEEN)]
    told, untold = (stats.difference(each, calibrated[0], informed) for each in (with_calibrations(alone, made), alone))
    assert 0.8 * untold.error < told.error < untold.error
    assert told.gpu_df == untold.gpu_df == EFFECTS_DF
    # A slower copy, which a driver may do, is no GPU's.
    slower = replace(made, seconds={**made.seconds, "copy": 1.02 * made.seconds["copy"]})
    moved = stats.difference(with_calibrations(alone, slower), calibrated[0], informed)
    assert abs(moved.log - untold.log) < 0.01


@pytest.mark.parametrize("num", [1, 4])
def test_calibrations_of_new_versions_agree_with_one_another_alone(
    calibrated_world: World, informed: Knowledge, num: int
) -> None:
    """As in the night of an upgrade, on some new GPUs: what all lose is no pass."""
    launches = []
    for case in range(12):
        gpu = UNSEEN + case % num
        made = replace(calibrated_world.calibration(gpu, TONIGHT), versions={"driver": "999"})
        launches += with_calibrations([calibrated_world.launch(case % 10, gpu, slower=math.log(1.05))], made)
    found = common_change(informed.with_seen(launches))
    assert found is not None
    assert not found.is_known
    assert not found.is_calibrated
    assert found.verdict(0.02, RULE) in ("inconclusive", "regressed")


@pytest.mark.parametrize("other", [{"trouble": "another process computed"}, {"procedure": 2}])
def test_a_calibration_that_is_none_or_not_comparable_tells_nothing(
    calibrated_world: World, calibrated: Cases, informed: Knowledge, other: dict[str, object]
) -> None:
    made = replace(calibrated_world.calibration(UNSEEN, TONIGHT), **other)  # type: ignore[arg-type]
    alone = [calibrated_world.launch(0, UNSEEN)]
    told, untold = (stats.difference(each, calibrated[0], informed) for each in (with_calibrations(alone, made), alone))
    assert same(told, untold)


def test_baselines_of_before_calibrations_serve(world: World, stored: Cases, knowledge: Knowledge) -> None:
    alone = [world.launch(0, UNSEEN, calibrated=True)]
    told, untold = (stats.difference(each, stored[0], knowledge) for each in (alone, with_calibrations(alone, None)))
    assert same(told, untold)
    changed = common_change(knowledge.with_seen(flat(night(world, calibrated=True))))
    assert changed is not None
    assert not changed.is_calibrated


def test_what_a_baseline_keeps_of_the_run_itself_counts_once(
    calibrated_world: World, calibrated: Cases, informed: Knowledge
) -> None:
    """Rounded, as files have it: a calibration of today, and launches that a worker has recorded meanwhile."""

    def rounded(launch: Launch) -> Launch:
        def short(seconds: float) -> float:
            return float(f"{seconds:.6g}")

        ranks = []
        for rank in launch.ranks:
            made = rank.calibration
            assert made is not None
            kept = replace(made, seconds={name: short(each) for name, each in made.seconds.items()})
            ranks.append(replace(rank, step_seconds=tuple(map(short, rank.step_seconds)), calibration=kept))
        return replace(launch, ranks=tuple(ranks))

    tonight = night(calibrated_world, calibrated=True)
    once = informed.with_seen(flat(tonight))
    recorded = observations_of(list(map(rounded, flat(tonight[5:]))))
    twice = Knowledge(informed.model, [*informed.stored, *recorded]).with_seen(flat(tonight))
    assert same(stats.difference(tonight[0], calibrated[0], twice), stats.difference(tonight[0], calibrated[0], once))
    # A calibration that is stored by now says no more for being found in the candidate's record too.
    alone = [calibrated_world.launch(0, UNSEEN, calibrated=True)]
    before = Knowledge(informed.model, [*informed.stored, *recorded])
    told, untold = (stats.difference(each, calibrated[0], before) for each in (alone, with_calibrations(alone, None)))
    assert same(told, untold)


def test_the_order_of_launches_does_not_matter(calibrated_world: World, calibrated: Cases) -> None:
    tonight = night(calibrated_world, calibrated=True)
    forwards = known(calibrated).with_seen(flat(tonight))
    backwards = known([case[::-1] for case in calibrated[::-1]]).with_seen(flat(tonight)[::-1])
    assert same(
        stats.difference(tonight[3], calibrated[3], forwards), stats.difference(tonight[3], calibrated[3], backwards)
    )
    one, other = common_change(forwards), common_change(backwards)
    assert one is not None
    assert other is not None
    assert (one.log, one.error) == pytest.approx((other.log, other.error), rel=1e-6)


def test_a_launch_of_two_tests_counts_once(world: World, stored: Cases, knowledge: Knowledge) -> None:
    """xdist's controller has a copy of it with each test's result."""
    tonight = night(world)
    copies = [codec.read(Launch, codec.plain(launch)) for launch in flat(tonight)]
    once, twice = knowledge.with_seen(flat(tonight)), knowledge.with_seen([*flat(tonight), *copies])
    assert same(stats.difference(tonight[0], stored[0], once), stats.difference(tonight[0], stored[0], twice))


def observation(case: str, gpu: int, log: float = 0.0, day: str = TONIGHT) -> Observation:
    return Observation(case, Unit((f"host-{gpu // 8}",), (f"GPU-{gpu}",), day), log)


@pytest.mark.parametrize(
    "observations",
    [
        [],
        [observation("a", gpu) for gpu in range(9)],
        [observation(case, gpu) for gpu in range(9) for case in "ab"],
        [observation(case, gpu) for gpu in range(2) for case in "abcdef"],
        [observation(case, 0) for case in "abcdef"],
        [observation(case, gpu) for gpu, case in enumerate("abcdef")],
    ],
    ids=["nothing", "one case", "two cases", "two GPUs", "one GPU", "no case on two GPUs"],
)
def test_of_too_little_nothing_is_learnt(observations: list[Observation]) -> None:
    assert learn(observations) is None


_LOGS = st.one_of(st.just(0.0), st.floats(-0.1, 0.1), st.floats(-20.0, 20.0))


@examples(25)
@given(st.data())
def test_whatever_is_stored_and_seen_all_figures_are_finite(data: st.DataObject) -> None:
    gpus, cases = data.draw(st.integers(3, 5)), data.draw(st.integers(3, 5))
    stored = [
        observation(f"case {case}", gpu, data.draw(_LOGS), "2026-01-01") for case in range(cases) for gpu in range(gpus)
    ]
    model = learn(stored)
    assert model is not None
    seen = [observation(f"case {case}", data.draw(st.integers(0, 9)), data.draw(_LOGS)) for case in range(cases)]
    knowledge = Knowledge(model, stored, seen)
    means, covariance = knowledge.told("case 0").of([observation("", gpu).unit for gpu in (0, 77)])
    assert all(map(math.isfinite, [*means, *covariance.ravel()]))
    assert (covariance.diagonal() >= 0).all()
    changed = common_change(knowledge)
    assert (changed is None) == (cases < 4)
    if changed is not None:
        assert all(map(math.isfinite, (changed.log, changed.error, changed.together, *changed.interval)))
    assert all(math.isfinite(spread.sd) for spread in (*model.own.values(), model.usual))


def test_differences_of_launches_that_are_all_alike_or_wild_are_finite() -> None:
    alike = World(seed=5, host_sd=0.0, device_sd=0.0, day_sd=0.0, own_sd=0.0)
    wild = World(seed=5, host_sd=2.0, device_sd=2.0, day_sd=1.0, own_sd=3.0)
    for world in (alike, wild):
        stored, tonight = world.history(cases=5, launches=3, gpus=4), night(world, cases=5)
        knowledge = known(stored).with_seen(flat(tonight))
        for case in range(5):
            found = stats.difference(tonight[case], stored[case], knowledge)
            assert all(map(math.isfinite, (found.log, found.error, found.df, found.launch_sd, *found.each)))
            assert found.error > 0
        one_each = [case[:1] for case in stored]
        stats.difference(tonight[0][:1], one_each[0], knowledge)


@pytest.mark.simulated
def test_intervals_hold_what_they_promise_and_nothing_is_an_alarm() -> None:
    """200 nights: of each one case against what nine others tell; nothing has changed."""
    inside = close = alarms = common = 0
    for seed in range(5):
        world = World(seed=100 + seed)
        stored = world.history(launches=6)
        knowledge = known(stored)
        for number in range(40):
            gpu, case = 100 + 8 * number, number % 10
            tonight = [[world.launch(one, gpu) for _ in "ab"] for one in range(10)]
            told = knowledge.with_seen(flat(tonight))
            found = stats.difference(tonight[case], stored[case], told)
            inside += abs(found.log) <= quantile(0.975, found.df) * found.error
            close += abs(found.log) <= quantile(0.75, found.df) * found.error
            alarms += decide(found, 0.02, RULE).verdict == "regressed"
            changed = common_change(told)
            assert changed is not None
            common += changed.verdict(0.02, RULE) == "regressed"
    assert inside / 200 > 0.92
    assert 0.42 < close / 200 < 0.72
    assert (alarms, common) == (0, 0)


@pytest.mark.simulated
def test_three_per_cent_in_one_case_are_found_on_a_gpu_that_no_baseline_knows() -> None:
    found = alone = 0
    for seed in range(8):
        world = World(seed=300 + seed)
        stored = world.history()
        knowledge = known(stored)
        tonight = [*night(world)[:9], [world.launch(9, UNSEEN, slower=math.log(1.03)) for _ in "ab"]]
        told = knowledge.with_seen(flat(tonight))
        found += decide(stats.difference(tonight[9], stored[9], told), 0.02, RULE).verdict == "regressed"
        alone += decide(stats.difference(tonight[9], stored[9], knowledge), 0.02, RULE).verdict == "regressed"
        for case in range(9):
            assert decide(stats.difference(tonight[case], stored[case], told), 0.02, RULE).verdict != "regressed"
    assert found >= 6
    assert alone <= 1


def changed_by(knowledge: Knowledge, cases: Cases) -> CommonChange:
    found = common_change(knowledge.with_seen(flat(cases)))
    assert found is not None
    return found


def test_three_per_cent_in_all_cases_are_found_with_calibrations(calibrated_world: World, informed: Knowledge) -> None:
    slower = math.log(1.03)
    found = changed_by(informed, night(calibrated_world, calibrated=True, slower=slower))
    assert found.is_calibrated
    assert found.is_news
    assert found.interval[0] < 0.03 < found.interval[1]
    assert (found.cases, found.gpus) == (10, 1)
    assert found.verdict(0.02, RULE) == "regressed"
    assert found.verdict(0.04, RULE) == "pass"
    just = replace(found, together=MOST)
    assert (just.is_news, just.verdict(0.02, RULE)) == (True, "regressed")
    faster = changed_by(informed, night(calibrated_world, UNSEEN + 8, calibrated=True, slower=-slower))
    assert faster.verdict(0.02, RULE) == "improved"


def test_without_calibrations_they_may_be_the_gpus(world: World, knowledge: Knowledge) -> None:
    found = changed_by(knowledge, night(world, slower=math.log(1.04)))
    assert not found.is_known
    assert found.is_news
    assert replace(found, is_known=True).verdict(0.02, RULE) == "regressed"
    assert found.verdict(0.02, RULE) == "inconclusive"
    assert found.verdict(0.045, RULE) == "pass"


def test_a_gpu_with_stored_launches_needs_no_calibration(world: World, knowledge: Knowledge) -> None:
    found = changed_by(knowledge, night(world, 3, slower=math.log(1.04)))
    assert found.is_known
    assert not found.is_calibrated
    assert found.verdict(0.02, RULE) == "regressed"


def test_what_half_of_the_cases_do_is_not_said_of_all(calibrated_world: World, informed: Knowledge) -> None:
    for number, moved in enumerate([*[{0, 1, 4, 5, 8}] * 6, *[{0, 1, 4, 5, 8, 9}] * 6]):
        gpu = 400 + 8 * number
        tonight = [
            [calibrated_world.launch(case, gpu, slower=0.06 * (case in moved), calibrated=True) for _ in "ab"]
            for case in range(10)
        ]
        found = changed_by(informed, tonight)
        assert found.together < 0.75
        assert not found.is_news
        assert found.verdict(0.02, RULE) == "pass"


def test_of_three_cases_nothing_is_said_of_all(world: World, knowledge: Knowledge) -> None:
    assert common_change(knowledge.with_seen(flat(night(world, cases=3)))) is None
    assert common_change(knowledge) is None


def gpu_policy(knowledge: Knowledge | None) -> Policy:
    return replace(Policy.for_gpu(), knowledge=knowledge, rule=RULE)


def test_nodes_of_one_launch_stay_two_hosts() -> None:
    one, other = Unit(("a",), ("GPU-1",), TONIGHT), Unit(("b",), ("GPU-2",), TONIGHT)
    both = Unit(("a", "b"), ("GPU-1", "GPU-2"), TONIGHT)
    for units in ([one, other, both], [both, other, one]):
        shares = Incidence(units)["host"]
        assert shares.shape == (3, 2)
        assert shares[units.index(both)].tolist() == [0.5, 0.5]
        assert sorted(shares[units.index(one)].tolist()) == [0.0, 1.0]


def test_a_tolerance_elsewhere_narrows_with_what_is_known(world: World, stored: Cases, knowledge: Knowledge) -> None:
    tonight = night(world)
    told = knowledge.with_seen(flat(tonight))
    baseline = baseline_of(stored[0])
    at = [gpu_policy(each).at(tonight[0], baseline) for each in (None, knowledge, told)]
    wide, less, least = (policy.tolerances[RATE] for policy in at)
    assert wide == 0.05
    assert 0.02 <= least < less <= 0.05
    assert least == max(0.02, least_tolerance(stats.difference(tonight[0], stored[0], told)))
    assert [policy.on_known.get(RATE) for policy in at[:2]] == [None, 0.02]
    there = [world.launch(0, int(stored[0][0].ranks[0].device.split("GPU-")[1][:8], 16))]
    assert gpu_policy(told).at(there, baseline).tolerances[RATE] == 0.02
    assert not gpu_policy(told).at(there, baseline).on_known


@pytest.mark.parametrize("own", [0.005, 0.03, 0.2])
def test_a_tolerance_of_the_users_own_is_kept(world: World, stored: Cases, knowledge: Knowledge, own: float) -> None:
    policy = gpu_policy(knowledge).merged({RATE: own}).at([world.launch(0, UNSEEN)], baseline_of(stored[0]))
    assert policy.tolerances[RATE] == own
    assert RATE not in policy.on_known


@pytest.mark.parametrize(("slower", "asks"), [(0.0, False), (0.03, True)])
def test_one_launch_that_would_not_pass_on_a_known_gpu_asks_for_a_second(slower: float, asks: bool) -> None:
    quiet = World(seed=6, host_sd=0.003, device_sd=0.003, day_sd=0.001, own_sd=0.0005)
    stored = quiet.history(launches=20)
    policy = gpu_policy(known(stored).with_seen([]))
    units = chain([UNSEEN], (quiet.random.randrange(100, 10_000) for _ in range(1000)))
    launches = ([quiet.launch(0, unit, slower=slower)] for unit in units)
    ordinary = (one for one in launches if abs(policy.difference(one, stored[0]).log - slower) <= 0.004)
    once = next(ordinary)
    judgement = judge(once, baseline_of(stored[0]), policy)
    assert judgement.undecided is asks
    again = [*once, replace(once[0], started_at=f"{TONIGHT}T23:59:59Z")]
    alone = replace(policy, rule=replace(RULE, budget=1))
    assert not judge(again, baseline_of(stored[0]), policy).undecided or asks
    assert not judge(once, baseline_of(stored[0]), alone).undecided


def test_foresight_knows_the_gpus_of_the_run(world: World, stored: Cases, knowledge: Knowledge) -> None:
    tonight = night(world)
    one = tonight[0][0]
    baseline = baseline_of(stored[0])
    before, after = (
        passing_ranges(baseline, gpu_policy(each), TONIGHT)
        for each in (knowledge, knowledge.with_seen(flat(tonight[1:])))
    )
    assert before is not None
    assert after is not None
    assert one.site not in before.at_sites
    passing = after.at_sites[one.site]
    assert passing.low < math.log(one.median_step_seconds) < passing.high
    # Steps that fewer know: less of the tolerance is lost to what is not known of the GPU.
    assert passing.error < after.elsewhere.error
    wide = knowledge.with_seen([world.launch(0, (UNSEEN, UNSEEN + 1))])
    of_pairs = passing_ranges(baseline, gpu_policy(wide), TONIGHT)
    assert of_pairs is not None
    assert of_pairs.at_sites.keys() == before.at_sites.keys()


def test_what_is_taken_off_for_its_gpu_is_told(
    world: World, stored: Cases, knowledge: Knowledge, golden: Golden
) -> None:
    """Most of what one launch is off by, where its case is as it was: what is known of a GPU is drawn to the mean."""
    launches = [world.launch(case, UNSEEN) for case in range(9)]
    launch, more = launches[3], knowledge.with_seen([*launches[:3], *launches[4:]])
    found = stats.difference([launch], stored[3], more)
    moved = log_of(launch) - fmean(map(log_of, stored[3]))
    assert abs(moved) > 0.008
    assert 0.5 < found.of_gpus / moved < 1.2
    assert abs(found.log) < 0.5 * abs(moved)
    check = Check(metric="tokens_per_second_per_gpu", value=1.0, unit="tokens/s", higher_is_better=True, tolerance=0.03)
    told = speed_check(check, found, Rule()).check.detail
    golden(told)
    alone = Difference(log=0.0, error=0.01, df=10.0, launch_sd=0.01, each=(0.0,), of_gpus=0.001)
    assert "its GPU" not in speed_check(check, alone, Rule()).check.detail
    near, far = (replace(alone, error=error, launch_sd=error) for error in (0.05, 1.0))
    golden([speed_check(check, each, Rule()).check.detail for each in (near, far)])


def test_what_passed_is_regressed_once_its_gpu_is_known_to_be_fast(golden: Golden) -> None:
    world = World(seed=9)
    stored = world.history()
    knowledge = known(stored)
    changed = [world.launch(0, UNSEEN, slower=math.log(1.045)) for _ in "ab"]
    result = result_of(changed, stored[0], gpu_policy(knowledge))
    assert result.verdict in ("pass", "inconclusive")
    others = flat([[world.launch(case, UNSEEN) for _ in "ab"] for case in range(1, 10)])
    later = judged_later(result, stored[0], knowledge.with_seen(others), RULE)
    assert later.verdict == "regressed"
    assert later.reason.startswith(RATE)
    golden(later.notes[-1])
    check, before = later.check(RATE), result.check(RATE)
    assert check is not None
    assert before is not None
    assert check.tolerance is not None
    assert before.tolerance is not None
    assert check.tolerance < before.tolerance
    assert check.value == before.value
    checks = tuple(replace(each, verdict=each.verdict and "pass") for each in result.checks)
    passed = judged_later(replace(result, verdict="pass", checks=checks), stored[0], knowledge.with_seen(others), RULE)
    assert passed.verdict == "regressed"
    golden(passed.notes[-1])
    # One launch alone condemns nobody.
    once = replace(result, launches=tuple(changed[:1]))
    assert judged_later(once, stored[0], knowledge.with_seen(others), RULE).verdict == "inconclusive"


def test_a_shuffled_night_says_the_same(world: World, stored: Cases, knowledge: Knowledge) -> None:
    tonight = night(world)
    mixed = flat(tonight)
    random.Random(0).shuffle(mixed)
    one, other = changed_by(knowledge, tonight), changed_by(knowledge, [mixed])
    assert (one.log, one.error, one.together) == pytest.approx((other.log, other.error, other.together), rel=1e-6)


@given(
    st.floats(1.0, 8.0),
    st.floats(0.0, 30.0),
    st.builds(Spread, st.floats(0.001, 0.01), st.floats(3.0, 5.0)),
)
def test_a_case_that_scatters_as_others_is_moderated_and_one_that_does_not_stands_alone(
    df: float, times: float, usual: Spread
) -> None:
    own = usual.sd * times
    found = model_module._own(own**2 * df, df, usual)
    if found.df == df:
        assert found.sd == pytest.approx(own)
        assert times > 2
    else:
        assert found.df == usual.df + df
        assert min(own, usual.sd) * (1 - 1e-9) <= found.sd <= max(own, usual.sd) * (1 + 1e-9)
    # Of three degrees of freedom beside three, 5 % of ratios of variances are above 9.28; of more the limit is lower.
    if df >= 3 and times**2 > 9.3:
        assert found.df == df


def test_a_case_that_was_never_stored_is_expected_by_what_is_usual(knowledge: Knowledge) -> None:
    assert knowledge.model.own_spread("new") == knowledge.model.usual
    assert list(knowledge.model.loading("new").mean) == [1.0, -0.5]
    assert list(Model().loading("new").mean) == [1.0, -0.5]
