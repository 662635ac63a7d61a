"""Change points of histories: a change is found where it is, and a host is none."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_llmperf.judge import case_histories as all_histories
from pytest_llmperf.judge.case_histories import (
    CaseHistory,
    Scattering,
    SharedEffects,
    differences,
    groups,
    histories,
)
from pytest_llmperf.judge.change_points import (
    EFFICIENCY,
    FALSE_ALARM,
    NORMAL,
    Covariance,
    Timeline,
    find_changes,
    levels_between,
)
from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.result import PastResult
from pytest_llmperf.run.history import scattering
from pytest_llmperf.support import codec
from tests.examples import examples
from tests.golden import Golden
from tests.history import MACHINE, NOISE, nights, past_result, with_versions


def told(results: Sequence[PastResult], *, are_gpus: bool = True) -> list[CaseHistory]:
    return histories(results, {MACHINE: Scattering(NOISE, are_gpus=are_gpus)})


def changes(results: Sequence[PastResult]) -> dict[str, list[str]]:
    """The days on which each case that changed went to another level."""
    found = {one.id: [segment.results[0].began[:10] for segment in one.segments[1:]] for one in told(results)}
    return {name: days for name, days in found.items() if days}


def independent(num: int, sd: float) -> Covariance:
    return Covariance(((sd**2 * np.eye(num), 100.0),))


def test_a_step_is_found_at_its_first_value() -> None:
    logs = [0.0] * 10 + [0.03] * 10
    (change,) = found = find_changes(logs, independent(20, 0.005), range(20))
    assert change.index == 10
    assert change.log == pytest.approx(0.03)
    levels = levels_between(logs, independent(20, 0.005), found)
    assert [(level.start, level.end) for level in levels] == [(0, 10), (10, 20)]
    assert [level.log for level in levels] == pytest.approx([0.0, 0.03])


def test_what_comes_back_is_two_changes() -> None:
    logs = [0.0] * 8 + [0.04] * 6 + [0.0] * 8
    found = find_changes(logs, independent(22, 0.005), range(22))
    assert [change.index for change in found] == [8, 14]


@pytest.mark.parametrize("place", [0, 7, 19])
def test_one_run_that_was_slow_is_no_level(place: int) -> None:
    logs = [0.0] * 20
    logs[place] = 0.5
    assert find_changes(logs, independent(20, 0.005), range(20)) == []


@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize("at_the_end", [True, False])
def test_how_far_few_runs_are_off_is_told_in_full(num: int, at_the_end: bool) -> None:
    logs = [0.0] * 12 + [0.3] * num
    logs = logs if at_the_end else logs[::-1]
    (change,) = found = find_changes(logs, independent(len(logs), 0.005), range(len(logs)))
    assert abs(change.log) == pytest.approx(0.3)
    levels = levels_between(logs, independent(len(logs), 0.005), found)
    assert sorted(level.log for level in levels) == pytest.approx([0.0, 0.3], abs=1e-9)


def test_nights_on_one_gpu_scatter_as_their_differences_show_and_as_was_known_before() -> None:
    usual, times = math.hypot(NOISE.session.sd, NOISE.launch.sd), 3.0
    apart = times * math.sqrt(2) * usual  # of two nights
    several = [past_result(night, log=math.log(0.1) + apart * (night % 2)) for night in range(5)]
    (near, df), _ = Timeline.of(several).scatter(NOISE).parts
    told, before = EFFICIENCY * 4, NOISE.launch.df
    assert df == pytest.approx(before + told)
    variance = (before + told * (times * NORMAL) ** 2) / (before + told) * usual**2
    np.testing.assert_allclose(near, variance * np.eye(5))


def test_two_nights_of_a_large_loss_are_told_in_full() -> None:
    several = [past_result(night, log=math.log(0.13 if night >= 12 else 0.1)) for night in range(14)]
    (segment,) = told(several)[0].segments[1:]
    assert segment.step_seconds == pytest.approx(0.13, rel=1e-3)
    assert segment.change is not None
    assert segment.change.low < 0.1 / 0.13 - 1 < segment.change.high


def test_one_odd_run_of_a_level_is_still_drawn_to_it() -> None:
    logs = [0.0] * 10 + [0.05] * 4 + [0.9] + [0.05] * 5
    found = find_changes(logs, independent(20, 0.005), range(20))
    assert [change.index for change in found] == [10]
    assert levels_between(logs, independent(20, 0.005), found)[1].log == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("at_the_end", [True, False])
def test_what_three_runs_at_an_end_share_is_not_drawn_to_the_rest(at_the_end: bool) -> None:
    logs = [0.0] * 17 + [0.03] * 3
    (level,) = levels_between(logs if at_the_end else logs[::-1], independent(20, 0.005), [])
    assert level.log == pytest.approx(3 * 0.03 / 20)


def test_what_is_too_small_to_matter_is_none() -> None:
    logs = [0.0] * 30 + [0.004] * 30
    assert find_changes(logs, independent(60, 0.0005), range(60)) == []


@given(st.integers(1, 12), st.floats(-0.1, 0.1))
def test_few_values_are_one_level_or_two(num: int, step: float) -> None:
    logs = [0.0 if number < num // 2 else step for number in range(num)]
    found = find_changes(logs, independent(num, 0.005), range(num))
    levels = levels_between(logs, independent(num, 0.005), found)
    assert len(levels) == len(found) + 1
    assert (levels[0].start, levels[-1].end) == (0, num)
    if num < 4:
        assert not found


@given(st.lists(st.floats(-0.05, 0.05), min_size=4, max_size=30), st.floats(-3, 3))
@example([-0.03125, -0.03125, -0.015569690159707189, 0.0, 0.0], 1.0)
@examples(25)
def test_only_differences_count(logs: list[float], by: float) -> None:
    here = find_changes(logs, independent(len(logs), 0.005), range(len(logs)))
    there = find_changes([log + by for log in logs], independent(len(logs), 0.005), range(len(logs)))
    assert [change.index for change in here] == [change.index for change in there]


@pytest.mark.parametrize("hosts", [lambda night: night, lambda night: night // 10, lambda _: 0])
def test_nights_that_differ_by_their_hosts_alone_have_no_change_point(hosts: object) -> None:
    spoilt = sum(bool(changes(nights(40, 1, hosts, seed=seed))) for seed in range(40))  # type: ignore[arg-type]
    assert spoilt <= 1


def test_a_host_that_is_slow_for_weeks_is_no_change_of_its_cases() -> None:
    for cases in (1, 8):
        results = nights(60, cases, lambda night: night // 14, bad={2: 0.04})
        assert changes(results) == {}


def test_the_same_on_the_same_host_is_a_change() -> None:
    results = nights(60, 1, lambda _: 0, slower={0: (30, 0.04)})
    assert changes(results) == {"llama-case0-gpus1": ["2026-01-31"]}


def test_a_change_on_the_host_that_has_just_begun_is_found_where_it_is() -> None:
    results = nights(60, 1, lambda night: night // 20, slower={0: (25, 0.04)})
    (days,) = changes(results).values()
    assert days in (["2026-01-25"], ["2026-01-26"], ["2026-01-27"])


def test_a_small_change_of_one_case_is_found_by_what_the_others_tell_of_the_gpu() -> None:
    alone = sum(bool(changes(nights(20, 1, slower={0: (14, 0.015)}, seed=seed))) for seed in range(20))
    beside = sum(
        set(changes(nights(20, 8, slower={0: (14, 0.015)}, seed=seed))) == {"llama-case0-gpus1"} for seed in range(20)
    )
    assert alone < 10
    assert beside >= 18


def test_what_all_cases_lose_is_told_as_shared() -> None:
    results = nights(40, 6, slower=dict.fromkeys(range(6), (20, 0.05)))
    found = told(results)
    assert [[segment.results[0].began[:10] for segment in one.segments[1:]] for one in found] == [["2026-01-21"]] * 6
    for one in found:
        change = one.segments[1].change
        assert change is not None
        assert change.shared is not None
        assert change.rate == pytest.approx(math.expm1(-0.05), abs=0.01)
        assert change.low < change.rate < change.high


def test_most_cases_changing_does_not_make_the_others_change_the_other_way() -> None:
    results = nights(40, 8, slower=dict.fromkeys(range(5), (20, 0.06)))
    assert set(changes(results)) == {f"llama-case{case}-gpus1" for case in range(5)}


def test_invalid_runs_do_not_count() -> None:
    results = nights(20, 1, slower={0: (10, 0.5)})
    late = [replace(one, verdict="invalid") if one.began >= "2026-01-11" else one for one in results]
    assert changes(late) == {}
    (history,) = told(late)
    assert len(history.results) == 20
    assert len(history.segments[0].results) == 10


def test_a_case_of_which_nothing_counts_has_no_level() -> None:
    (history,) = told([replace(one, verdict="invalid") for one in nights(5)])
    assert history.segments == ()
    assert history.latest_change is None


def test_what_else_changed_stands_beside_it() -> None:
    results = with_versions(nights(40, 1, lambda _: 0, slower={0: (20, 0.05)}), 20, torch="2.12")
    (history,) = told(results)
    assert history.segments[1].different == ("torch: 2.11 -> 2.12",)


def test_runs_of_which_nobody_told_the_host_are_taken_for_hosts_of_their_own() -> None:
    results = nights(60, 1, lambda night: night // 30, bad={1: 0.03})
    assert changes(results) == {}
    untold = [replace(one, launches=tuple(replace(each, places=()) for each in one.launches)) for one in results]
    scatter = Timeline.of(untold).scatter(NOISE).total
    assert np.count_nonzero(scatter) == len(untold)


def test_a_series_that_scatters_more_than_is_usual_is_judged_by_that() -> None:
    source = random.Random(3)
    logs = [source.gauss(0, 0.03) for _ in range(60)]
    results = [past_result(night, log=math.log(0.1) + log) for night, log in enumerate(logs)]
    assert changes(results) == {}
    own = Timeline.of(results).scatter(NOISE).total
    usual = Timeline.of([past_result(night) for night in range(60)]).scatter(NOISE).total
    assert own[0, 0] > 2 * usual[0, 0]


def test_launches_of_one_run_on_several_gpus_stay_together() -> None:
    found = []
    for night in range(20):
        one = past_result(night, log=math.log(0.1) + (0.05 if night >= 10 else 0.0))
        other = past_result(night, log=math.log(0.101) + (0.05 if night >= 10 else 0.0), host=7)
        found.append(replace(one, launches=(*one.launches, *other.launches)))
    (history,) = told(found)
    assert [len(segment.results) for segment in history.segments] == [10, 10]


def test_of_several_launches_of_a_run_each_counts() -> None:
    one = past_result()
    twice = replace(one, launches=(one.launches[0], replace(one.launches[0], step_seconds=0.4)))
    assert twice.step_seconds == pytest.approx(0.2)
    (point,) = Timeline.of([twice]).points
    assert point.log == pytest.approx(math.log(0.2))
    assert point.num_launches == 2


def test_each_change_holds_beside_the_others() -> None:
    levels = [-0.01] * 6 + [0.01] * 5 + [0.02] * 11 + [0.03] * 18
    found = find_changes(levels, independent(40, 0.005), range(40))
    assert len(found) == 2
    assert all(change.probability * 37 < FALSE_ALARM for change in found)


def test_a_series_that_scatters_more_from_host_to_host_is_judged_by_that() -> None:
    source = random.Random(3)
    logs = [source.gauss(0, 0.05) for _ in range(60)]
    results = [past_result(night, log=math.log(0.1) + log, host=night) for night, log in enumerate(logs)]
    own = Timeline.of(results).scatter(NOISE).parts
    usual = Timeline.of([past_result(night, host=night) for night in range(60)]).scatter(NOISE).parts
    # Nothing tells whether it is its nights or its hosts: both.
    near, far = (float(a[0, 0] / b[0, 0]) for (a, _), (b, _) in zip(own, usual, strict=True))
    assert near == pytest.approx(far)
    assert near > 4
    assert changes(results) == {}


def test_too_few_cases_tell_nothing_of_their_gpu() -> None:
    for cases, are_told in ((3, False), (4, True)):
        effects = SharedEffects.of([Timeline.of(each) for each in by_case(nights(20, cases)).values()]).effects
        assert bool(effects) == are_told


def by_case(results: Sequence[PastResult]) -> dict[str, list[PastResult]]:
    return {name: [one for one in results if one.id == name] for name in dict.fromkeys(one.id for one in results)}


@pytest.mark.parametrize("clock", [1980.0, 0.0])
def test_cases_at_the_power_limit_tell_nothing_of_those_below_it_or_of_which_that_is_unknown(clock: float) -> None:
    results = nights(40, 8, lambda _: 0)
    clocks = {"llama-case0-gpus1": clock}
    below = [
        replace(one, launches=tuple(replace(each, sm_clock_mhz=clocks.get(one.id, 1980.0)) for each in one.launches))
        if one.id in ("llama-case0-gpus1", "llama-case1-gpus1", "llama-case2-gpus1", "llama-case3-gpus1")
        else one
        for one in results
    ]
    timelines = [Timeline.of(each) for each in by_case(below).values()]
    assert [[one.results[0].id[10:11] for one in group] for group in groups(timelines)] == [list("4567"), list("0123")]


def test_what_programs_on_a_cpu_do_is_not_taken_off_its_cases() -> None:
    results = nights(40, 6, lambda _: 0, slower=dict.fromkeys(range(6), (20, 0.05)))
    for are_gpus in (True, False):
        latest = [one.latest_change for one in told(results, are_gpus=are_gpus)]
        found = [one.change if one else None for one in latest]
        assert [change is not None and change.shared is not None for change in found] == [are_gpus] * 6
    known = scattering(["cpu-amd-2c", "site-cpu", MACHINE], Path("nowhere"))
    assert [known[name].are_gpus for name in ("cpu-amd-2c", "site-cpu", MACHINE)] == [False, False, True]


def test_on_a_cpu_counts_alone_tell_of_changes() -> None:
    results = nights(40, 1, lambda _: 0, slower={0: (20, 0.5)})
    assert [len(one.segments) for one in told(results, are_gpus=False)] == [1]
    more = [replace(one, counts={"operators_per_step": 9.0 + (one.began >= "2026-01-11")}) for one in results]
    (case,) = told(more, are_gpus=False)
    assert [(one.results[0].began[:10], one.change) for one in case.segments] == [
        ("2026-01-01", None),
        ("2026-01-11", None),
    ]
    assert "operators_per_step: 9 -> 10" in case.segments[1].different


def test_on_a_cpu_what_is_not_committed_begins_no_change() -> None:
    """Drafts run again and again and each does something else; what lasts is committed, or in no commit at all."""
    runs = [("a", 9), ("a+", 10), ("a+", 11), ("a", 9), ("b+", 12), ("b", 10), ("b", 10)]

    def days(*, commits: bool) -> list[tuple[str, bool]]:
        results = [
            replace(one, revision=name if commits else "a+", counts={"operators_per_step": float(count)})
            for one, (name, count) in zip(nights(len(runs), 1, lambda _: 0), runs, strict=True)
        ]
        (case,) = told(results, are_gpus=False)
        return [(one.results[0].began[8:10], "revision: a -> b" in one.different) for one in case.segments[1:]]

    assert days(commits=True) == [("06", True)]
    assert [day for day, _ in days(commits=False)] == ["02", "03", "04", "05", "06"]


def test_projects_are_cases_of_their_own() -> None:
    results = nights(20, 1)
    fast = [replace(one, project="b", launches=nights(20, 1)[0].launches) for one in results]
    assert [(one.latest.project, len(one.results)) for one in told([*results, *fast])] == [("", 20), ("b", 20)]


def test_of_a_case_with_very_many_runs_the_newest_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A covariance of ten thousand runs takes minutes and gigabytes."""
    monkeypatch.setattr(all_histories, "MOST_RUNS", 12)
    results = [past_result(night, log=math.log(0.1) + 0.05 * (night < 10)) for night in range(30)]
    (history,) = histories(results, {MACHINE: Scattering(NOISE)})
    assert [result.began for result in history.results] == [result.began for result in results[-12:]]
    assert len(history.segments) == 1


def two_weeks(night: int) -> int:
    return night // 14


@pytest.mark.parametrize(("num", "cases"), [(28, 5), (28, 1), (16, 5)])
def test_a_change_with_a_change_of_hosts_is_told_and_is_no_change_point(num: int, cases: int) -> None:
    """Hosts differ by 0.8 %: whichever it was, 5 % is not passed over in silence."""
    results = nights(num, cases, two_weeks, slower=dict.fromkeys(range(cases), (14, 0.05)), seed=3)
    for one in told(with_versions(results, 14, driver="590")):
        assert len(one.segments) == 1
        (step,) = one.steps
        assert step.began[:10] == "2026-01-15"
        assert -0.08 < step.rate < -0.02
        assert [line.partition(":")[0] for line in step.different] == ["driver", "host"]


def test_hosts_that_come_back_each_night_or_differ_by_little_are_no_step() -> None:
    slower = {0: (14, 0.05)}
    for hosts in (lambda night: night, lambda night: (night // 7) % 2, lambda _: 0):
        assert [one.steps for one in told(nights(28, 1, hosts, slower=slower))] == [()]
    assert [one.steps for one in told(nights(28, 5, two_weeks, seed=3))] == [()] * 5
    busy = nights(28, 5, two_weeks, slower=dict.fromkeys(range(5), (14, 0.05)), seed=3)
    assert {one.steps for one in told(busy, are_gpus=False)} == {()}


def calibrated(result: PastResult, product: float, **versions: str) -> PastResult:
    made = Calibration(
        made_at=result.began, seconds={"bf16_product": product, "copy": 0.5, "all_reduce": 1.0}, versions=versions
    )
    return replace(result, calibrations={result.launches[0].site: codec.plain(made)})


def test_calibrations_tell_of_the_hosts_as_far_as_they_are_comparable(golden: Golden) -> None:
    before, after = nights(2)
    same = differences(calibrated(before, 1.0, torch="2.12"), calibrated(after, 1.05, torch="2.12"))
    golden(same[-2:])
    other = differences(calibrated(before, 1.0, torch="2.12"), calibrated(after, 1.05, torch="2.13"))
    golden([line for line in other if "calibration" in line])
