"""What a launch that ended early may claim, and what steps leave behind in memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date, timedelta
from itertools import pairwise

import pytest

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.store import text_of
from pytest_llmperf.judge.verdict import GROWTH, growth_checks, joined, judge
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.steady_state import MOST_GROWTH, growth, takes_all_steps
from pytest_llmperf.records.trace import LEFT, Trace, TraceRow
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.fakes import launch_of
from tests.golden import Golden
from tests.shelf import baseline_at
from tools.launch_ends import late

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=60)
KIB, MIB = 2**10, 2**20
GPU = Policy.for_gpu()


def series(each: Callable[[int], float], steps: int = 60) -> list[int]:
    return [8 * 1024 * MIB + int(each(step)) for step in range(steps)]


def noise(size: float, seed: int = 1) -> Callable[[int], float]:
    source = random.Random(seed)
    return lambda _: source.uniform(0, size)


@pytest.mark.parametrize(
    ("held", "leaks"),
    [
        (series(lambda _: 0), False),
        (series(lambda step: 512 * step), False),  # what a trainer keeps of its losses
        (series(lambda step: 100 * KIB * step), True),
        (series(lambda step: 100 * KIB * step, 16), True),
        (series(lambda step: 10 * MIB * (step // 16)), True),  # now and then
        (series(lambda step: 100 * KIB * step + noise(MIB, step)(0)), True),
        (series(noise(100 * MIB)), False),  # tokens that vary
        (series(noise(100 * MIB), 12), False),
        (series(lambda step: 50 * MIB * (step >= 30)), False),  # a buffer that came late
        (series(lambda step: 5 * MIB * (step % 7)), False),  # what garbage collection frees
        (series(lambda step: -100 * KIB * step), False),
        (series(lambda step: 10 * MIB * min(step, 20)), False),  # experts that are reached one by one
    ],
)
def test_only_what_goes_on_growing_is_a_leak(held: Sequence[int], leaks: bool) -> None:
    found = growth(held)
    assert found is not None
    assert (found > MOST_GROWTH) == leaks


def test_random_memory_is_no_leak_in_any_of_many_launches() -> None:
    for seed in range(300):
        for steps in (12, 26, 56):
            assert (growth(series(noise(50 * MIB, seed), steps)) or 0.0) <= MOST_GROWTH


def test_few_steps_tell_nothing() -> None:
    assert growth(series(lambda step: MIB * step, 8)) is None


def leaking(kib: int = 0, steps: int = 60, stall: float = 1.0) -> Launch:
    launch = launch_of(replace(SPEC, steps=steps))
    (rank,) = launch.ranks
    seconds = [second * (1.0 if (step + 1) % 20 else stall) for step, second in enumerate(rank.step_seconds)]
    grown = tuple(series(lambda step: kib * KIB * step, steps))
    rank = replace(rank, step_seconds=tuple(seconds), allocated_bytes=grown)
    return replace(launch, ranks=(rank,), digest=SPEC.digest, planned_steps=0 if steps == SPEC.steps else SPEC.steps)


def stored(launches: Sequence[Launch]) -> Baseline:
    return replace(baseline_at(SPEC, 1000.0), launches=tuple(launches))


def verdict_of(*launches: Launch, accepted: Sequence[Launch] = (launch_of(SPEC),)) -> tuple[str | None, float | None]:
    (check,) = growth_checks(launches, accepted, 4)
    return check.verdict, check.limit


@pytest.mark.parametrize(
    ("launches", "verdict"),
    [
        ([leaking()], "pass"),
        ([leaking(steps=16)], None),
        ([leaking(100)], "inconclusive"),
        ([leaking(100), leaking(100)], "regressed"),
        ([leaking(100, steps=16)], "inconclusive"),
        ([leaking(100, steps=16), leaking(100)], "regressed"),
        ([leaking(100, steps=16), leaking()], "pass"),  # it came back
    ],
)
def test_a_leak_is_a_loss_by_two_launches(launches: list[Launch], verdict: str | None) -> None:
    assert verdict_of(*launches)[0] == verdict


def test_what_each_step_leaves_is_said_of_a_launch_that_was_traced() -> None:
    trace = Trace(
        rows=(TraceRow("wait", "aten::item", 1.0, 0.0),), places={LEFT: {"Tensor in 'kept' of train.py": 2.0}}
    )
    (check,) = growth_checks([leaking(100), replace(leaking(100), trace=trace)], (), 4)
    assert (check.verdict, check.detail) == ("regressed", "each step leaves 2 Tensor in 'kept' of train.py")
    (check,) = growth_checks([replace(leaking(100), trace=trace)], (), 4)
    assert check.detail.endswith("; each step leaves 2 Tensor in 'kept' of train.py")


def test_a_leak_that_was_accepted_with_a_reason_is_held_against_itself() -> None:
    known = leaking(100)
    verdict, limit = verdict_of(known, accepted=[known])
    assert (verdict, round(limit or 0.0)) == ("pass", 110 * KIB)
    assert verdict_of(leaking(130), leaking(130), accepted=[known])[0] == "regressed"


def test_where_nothing_is_stored_a_leak_is_a_loss_too_and_no_new_case() -> None:
    launches = [leaking(100), leaking(100)]
    judgement = joined(judge(launches, None, GPU), growth_checks(launches, (), 4), undecided=False)
    assert judgement.verdict == "regressed"
    assert judgement.reason.startswith(f"{GROWTH} 100 KiB, limit 64 KiB")
    (sound,) = growth_checks([leaking()], (), 4)
    assert (sound.verdict, sound.gates) == (None, False)
    assert not growth_checks([launch_of(SPEC)], (), 4)


def test_what_ended_early_passes_over_what_it_saw_alone(golden: Golden) -> None:
    baseline = stored([leaking()] * 3)
    seen, whole = (judge([leaking(steps=steps)], baseline, GPU) for steps in (16, 60))
    assert seen.verdict == "pass"
    golden(seen.reason)
    assert (whole.verdict, whole.reason) == ("pass", "within tolerance")
    stalls = [next(check for check in each.checks if check.metric == "stall_share") for each in (seen, whole)]
    assert [(check.verdict, check.detail) for check in stalls] == [(None, "16 of 60 steps seen"), ("pass", "")]


def test_a_stall_that_only_whole_launches_show_is_a_loss_whatever_short_ones_say() -> None:
    baseline = stored([leaking()] * 3)
    launches = [leaking(steps=16), leaking(stall=2.0), leaking(stall=2.0)]
    for number, verdict in ((2, "inconclusive"), (3, "regressed")):
        checks = judge(launches[:number], baseline, GPU).checks
        assert next(check.verdict for check in checks if check.metric == "stall_share") == verdict


def test_each_case_takes_all_its_steps_once_in_so_many_nights_and_a_share_of_them_each_night() -> None:
    digests = [replace(SPEC, seed=seed).digest for seed in range(200)]
    begin = date.fromordinal(date(2026, 2, 1).toordinal() // 10 * 10)  # a period of ten nights
    nights = [begin + timedelta(days=day) for day in range(10)]
    turns = {digest: sum(takes_all_steps(digest, night, 10) for night in nights) for digest in digests}
    assert set(turns.values()) == {1}
    each = Counter(night for night in nights for digest in digests if takes_all_steps(digest, night, 10))
    assert all(5 <= each[night] <= 40 for night in nights)
    assert not takes_all_steps(digests[0], begin, 0)
    assert all(takes_all_steps(digest, begin, 1) for digest in digests)


@pytest.mark.parametrize(("every", "nights"), [(1, 19), (2, 14), (5, 11), (7, 13), (10, 10), (14, 13)])
def test_a_gate_that_runs_each_so_many_days_reaches_every_case(every: int, nights: int) -> None:
    digests = [f"{number:08x}" for number in range(10)]
    gates = [date(2026, 1, 1) + timedelta(days=every * number) for number in range(300)]
    for digest in digests:
        turns = [number for number, day in enumerate(gates) if takes_all_steps(digest, day, 10)]
        assert max(later - turn for turn, later in pairwise([-1, *turns])) <= nights


def test_what_comes_late_or_seldom_is_found_by_whole_launches() -> None:
    header, *rows = late(3, seed=1)
    found = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}
    sound = [name for name in found if name == "nothing" or "varies" in name]
    for name, row in found.items():
        assert row["all steps: pass" if name in sound else "all steps: regressed"] == "100 %", name


def test_a_record_keeps_what_was_held_and_planned_and_an_old_one_has_neither(golden: Golden) -> None:
    launch = leaking(100, steps=16)
    assert codec.read(Launch, codec.plain(launch)) == launch
    assert not {"planned_steps", "allocated_bytes"} & {
        *codec.plain(launch_of(SPEC)),
        *codec.plain(launch_of(SPEC))["ranks"][0],
    }
    values = codec.plain(launch)
    values["ranks"][0]["allocated_bytes"] = [1]
    with pytest.raises(ValueError, match="allocated_bytes of other") as raised:
        codec.read(Launch, values)
    golden(raised)


def test_a_baseline_keeps_what_was_held_of_an_accepted_leak_alone() -> None:
    for kib, kept in ((0, False), (100, True)):
        text = text_of(stored([leaking(kib)]))
        assert ('"allocated_bytes"' in text) == kept
