"""From launches and a baseline to a verdict."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy, Rule
from pytest_llmperf.judge.verdict import Judgement, judge
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import measured
from pytest_llmperf.records.result import VERDICTS, Check
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tests.shelf import accept

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4, gpus=2)
POLICY = Policy.for_gpu()
RATE_ALONE = replace(POLICY, tolerances={"tokens_per_second_per_gpu": 0.02})
RATE, MEMORY = "tokens_per_second_per_gpu", "peak_reserved_bytes"

seconds = st.floats(1e-3, 1e3)


def launch(step_seconds: float = 0.1, **fake: Any) -> Launch:
    return launch_of(SPEC, Fake(step_seconds=step_seconds, **fake))


def baseline_of(*launches: Launch) -> Baseline:
    return accept(
        None,
        judged=None,
        spec=SPEC,
        machine="m",
        launches=launches,
        verdict="new",
        checks=judge(launches, None, POLICY).checks,
        reason="",
        recorded_at="2026-01-01T00:00:00Z",
        recorded_by="t.py::t",
    )


def check_of(judgement: Judgement, metric: str) -> Check:
    return next(check for check in judgement.checks if check.metric == metric)


def elsewhere(run: Launch) -> Launch:
    return replace(run, ranks=tuple(replace(rank, host="another") for rank in run.ranks))


BASELINE = baseline_of(launch())
# Three launches that agree: what they say of this hardware is known well.
SETTLED = baseline_of(launch(), launch(), launch())


def test_the_metrics_come_in_the_designs_order_and_extra_ones_last() -> None:
    mfu = Check(metric="mfu", value=0.5, unit="1")
    checks = judge([launch()], BASELINE, POLICY, extra=[mfu]).checks
    assert [check.metric for check in checks] == [*measured(), "mfu"]
    assert [check.unit for check in checks] == ["tokens/s", "tokens/s", "s", "s", "1", "bytes", "bytes", "1", "1"]


def test_a_baseline_that_is_predicted_says_so_beside_the_stored_figure() -> None:
    """Its launches are of two hosts, and the rate of this one is told."""
    stored = baseline_of(launch(0.1), elsewhere(launch(0.115)))
    check = check_of(judge([launch(0.1)], stored, POLICY), RATE)
    assert check.baseline == pytest.approx(640, rel=0.01)
    assert check.detail.endswith("its baseline is predicted for this GPU and day; stored: 597 tokens/s")
    assert "predicted" not in check_of(judge([launch(0.1)], SETTLED, POLICY), RATE).detail


def test_only_metrics_with_a_tolerance_gate_and_the_others_are_shown() -> None:
    judgement = judge([launch(0.1)], BASELINE, POLICY)
    gating = {check.metric for check in judgement.checks if check.verdict}
    assert gating == {RATE, MEMORY, "first_step_seconds", "stall_share"}
    shown = check_of(judgement, "step_seconds")
    assert shown.baseline == pytest.approx(0.1)
    assert shown.change == pytest.approx(0)
    assert (shown.limit, shown.gates) == (None, False)


# A rate of 1/1.02 is the limit itself; near it nothing can be shown.
@pytest.mark.parametrize(
    ("slower", "verdict"),
    [
        (1.0, "pass"),
        (1.008, "pass"),
        (1.019, "inconclusive"),
        (1.04, "regressed"),
        (0.99, "pass"),
        (0.95, "improved"),
        (10.0, "regressed"),
    ],
)
def test_a_rate_is_held_within_its_tolerance_both_ways(slower: float, verdict: str) -> None:
    judgement = judge([launch(0.1 * slower)] * 4, SETTLED, POLICY)
    assert (judgement.verdict, check_of(judgement, RATE).verdict) == (verdict, verdict)
    assert not judgement.undecided


def test_one_launch_that_is_slow_asks_for_another_and_two_decide() -> None:
    once, twice = (judge([launch(0.11)] * number, SETTLED, POLICY) for number in (1, 2))
    assert (once.verdict, once.undecided) == ("inconclusive", True)
    assert (twice.verdict, twice.undecided) == ("regressed", False)


def test_a_budget_of_one_launch_is_kept() -> None:
    judgement = judge([launch(0.11)], SETTLED, replace(POLICY, rule=Rule(budget=1)))
    assert (judgement.verdict, judgement.undecided) == ("regressed", False)


def test_an_unchanged_case_is_decided_by_one_launch() -> None:
    judgement = judge([launch()], SETTLED, POLICY)
    assert (judgement.verdict, judgement.undecided) == ("pass", False)


def test_a_slow_launch_among_good_ones_is_pooled_with_them() -> None:
    assert judge([launch(0.12), launch(), launch()], SETTLED, POLICY).verdict in {"pass", "inconclusive"}
    assert judge([launch(), launch(0.12), launch(0.12)], SETTLED, POLICY).verdict != "pass"


def test_hardware_that_the_baseline_has_not_seen_gets_a_wider_tolerance() -> None:
    here, there = (check_of(judge([run], SETTLED, POLICY), RATE) for run in (launch(), elsewhere(launch())))
    assert (here.tolerance, there.tolerance) == (0.02, 0.05)
    assert here.detectable is not None
    assert there.detectable is not None
    assert here.detectable < there.detectable
    chosen = judge([elsewhere(launch())], SETTLED, POLICY.merged({RATE: 0.03}))
    assert check_of(chosen, RATE).tolerance == 0.03


def test_a_gate_that_cannot_see_its_tolerance_says_so(golden: Golden) -> None:
    blind = judge([elsewhere(launch())], BASELINE, POLICY.merged({RATE: 0.001}))
    golden(check_of(blind, RATE).detail)


def test_a_first_step_is_confirmed_by_a_second_launch() -> None:
    slow = with_step(with_step(launch(), 0, 0, 9.0), 1, 0, 9.0)
    assert judge([slow], SETTLED, POLICY).undecided
    assert judge([slow, launch()], SETTLED, POLICY).verdict == "pass"
    twice = judge([slow, slow], SETTLED, POLICY)
    assert (twice.verdict, check_of(twice, "first_step_seconds").verdict) == ("regressed", "regressed")


def test_a_first_step_on_a_cold_host_condemns_nobody_where_no_second_launch_is_allowed(golden: Golden) -> None:
    slow = with_step(with_step(launch(), 0, 0, 9.0), 1, 0, 9.0)
    judgement = judge([slow], SETTLED, replace(POLICY, rule=Rule(budget=1)))
    assert (judgement.verdict, judgement.undecided) == ("inconclusive", False)
    golden(check_of(judgement, "first_step_seconds").detail)


def test_stalls_in_every_launch_are_a_regression_that_the_median_hides() -> None:
    stalled = with_step(launch(), 0, 9, 3.0)
    assert check_of(judge([stalled], SETTLED, POLICY), RATE).change == pytest.approx(0)
    assert judge([stalled], SETTLED, POLICY).undecided
    assert judge([stalled, launch()], SETTLED, POLICY).verdict == "pass"
    assert judge([stalled, stalled], SETTLED, POLICY).reason.startswith("stall_share ")


def test_what_a_host_that_nobody_knows_may_take_by_itself_is_no_regression() -> None:
    jittery = with_step(launch(), 0, 9, 0.113)
    assert 0.01 < check_of(judge([jittery], SETTLED, POLICY), "stall_share").value < 0.02
    assert judge([jittery, jittery], SETTLED, POLICY).reason.startswith("stall_share ")
    there = [elsewhere(jittery)] * 2
    assert check_of(judge(there, SETTLED, POLICY), "stall_share").verdict == "pass"
    worse = [elsewhere(with_step(launch(), 0, 9, 3.0))] * 2
    assert check_of(judge(worse, SETTLED, POLICY), "stall_share").verdict == "regressed"


def of_one_rank(run: Launch) -> Launch:
    return replace(run, ranks=run.ranks[:1])


ODD, USUAL, LEAN = launch(reserved_bytes=2**31), launch(), launch(reserved_bytes=2**29)


@pytest.mark.parametrize(
    ("launches", "budget", "verdict", "undecided"),
    [
        ([ODD], 4, "inconclusive", True),
        ([ODD, USUAL], 4, "pass", False),
        ([ODD, ODD, USUAL], 4, "inconclusive", False),
        # Ranks that exchange buffers do not repeat themselves: one alone does.
        ([ODD, ODD], 4, "inconclusive", True),
        ([ODD] * 4, 4, "regressed", False),
        ([of_one_rank(ODD)] * 2, 4, "regressed", False),
        ([ODD], 1, "regressed", False),
        ([LEAN], 4, "inconclusive", True),
        ([LEAN, USUAL], 4, "pass", False),
        ([LEAN, LEAN], 4, "improved", False),
        ([LEAN, USUAL, LEAN], 4, "improved", False),
        ([LEAN, ODD], 4, "pass", False),
        ([LEAN], 1, "improved", False),
    ],
)
def test_memory_is_lost_where_every_launch_says_so_and_gained_by_two(
    launches: list[Launch], budget: int, verdict: str, undecided: bool
) -> None:
    judgement = judge(launches, SETTLED, replace(POLICY, rule=Rule(budget=budget)))
    assert (judgement.verdict, judgement.undecided) == (verdict, undecided)


def test_memory_that_a_compiler_lost_takes_more_launches_than_two() -> None:
    compiled = replace(of_one_rank(ODD), evidence={**ODD.evidence, "compiled_graphs": 1})
    assert judge([compiled] * 2, SETTLED, POLICY).undecided


def test_memory_that_is_lost_needs_no_other_launch_to_tell_of_speed() -> None:
    slow = [of_one_rank(launch(seconds, reserved_bytes=2**31)) for seconds in (0.05, 0.11)]
    judgement = judge(slow, SETTLED, POLICY)
    assert (judgement.verdict, judgement.undecided) == ("regressed", False)


def test_a_case_that_lost_speed_spends_no_launch_on_its_memory() -> None:
    judgement = judge([launch(0.11, reserved_bytes=2**31)] * 2, SETTLED, POLICY)
    assert (judgement.verdict, judgement.undecided) == ("regressed", False)
    assert (check_of(judgement, RATE).verdict, check_of(judgement, MEMORY).verdict) == ("regressed", "inconclusive")


def test_an_odd_launch_that_was_accepted_moves_no_limit() -> None:
    accepted = baseline_of(USUAL, ODD)
    assert check_of(judge([USUAL], accepted, POLICY), MEMORY).verdict == "pass"
    assert (
        check_of(judge([launch(reserved_bytes=int(2**30 * 1.02))] * 4, accepted, POLICY), MEMORY).verdict == "regressed"
    )


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.009, "pass"), (1.011, "regressed"), (0.991, "pass"), (0.989, "improved")]
)
def test_memory_is_held_within_its_tolerance_both_ways(factor: float, verdict: str) -> None:
    judgement = judge([of_one_rank(launch(reserved_bytes=int(2**30 * factor)))] * 2, BASELINE, POLICY)
    assert (judgement.verdict, check_of(judgement, MEMORY).verdict) == (verdict, verdict)


GIB, ALLOCATED = 2**30, "peak_allocated_bytes"
LARGE = 40 * GIB  # of which a block's rounding is little


def peaks(allocated: int, reserved: int = LARGE, torch: str = "2.11") -> Launch:
    run = of_one_rank(launch())
    ranks = (replace(run.ranks[0], peak_allocated_bytes=allocated, peak_reserved_bytes=reserved),)
    return replace(run, ranks=ranks, environment=replace(run.environment, versions={"torch": torch}))


@pytest.mark.parametrize(
    ("now", "verdict", "of_reserved"),
    [
        (peaks(GIB * 36), "pass", "pass"),
        (peaks(GIB * 36 + 2**23), "pass", "pass"),
        (peaks(int(GIB * 36 * 1.001)), "regressed", "pass"),
        (peaks(int(GIB * 36 * 0.999)), "improved", "pass"),
        (peaks(int(GIB * 36 * 1.001), torch="2.13"), "pass", "pass"),  # another version rounds otherwise
        (peaks(int(GIB * 36 * 1.02), torch="2.13"), "regressed", "pass"),
        # What the allocator does with the same blocks is told, and fails where it is much.
        (peaks(GIB * 36, int(LARGE * 0.98)), "pass", "pass"),
        (peaks(GIB * 36, int(LARGE * 1.02)), "pass", "pass"),
        (peaks(GIB * 36, int(LARGE * 1.06)), "pass", "changed"),
    ],
)
def test_allocated_memory_that_repeats_itself_is_held_to_a_blocks_rounding(
    now: Launch, verdict: str, of_reserved: str
) -> None:
    judgement = judge([now] * 2, baseline_of(*[peaks(GIB * 36)] * 2), POLICY)
    assert (check_of(judgement, ALLOCATED).verdict, check_of(judgement, MEMORY).verdict) == (verdict, of_reserved)


@pytest.mark.parametrize("stored", [[peaks(GIB * 36)], [peaks(GIB * 36), peaks(GIB * 37)]])
def test_allocated_memory_that_was_not_seen_to_repeat_itself_gates_nothing(stored: list[Launch]) -> None:
    judgement = judge([peaks(GIB * 38, int(LARGE * 1.02))] * 2, baseline_of(*stored), POLICY)
    assert check_of(judgement, ALLOCATED).verdict is None
    assert check_of(judgement, MEMORY).verdict == "regressed"


@pytest.mark.parametrize(("chosen", "factor"), [(0.1, 1.05), (0.01, 1.005)], ids=["wider", "the usual one"])
def test_a_tolerance_that_was_chosen_for_memory_stays(chosen: float, factor: float) -> None:
    policy = POLICY.merged({ALLOCATED: chosen})
    judgement = judge([peaks(int(GIB * 36 * factor))] * 2, baseline_of(*[peaks(GIB * 36)] * 2), policy)
    assert check_of(judgement, ALLOCATED).verdict == "pass"


def test_limits_follow_the_direction_in_which_a_metric_gets_worse() -> None:
    judgement = judge([launch()], BASELINE, Policy({RATE: 0.25, "step_seconds": 0.25}))
    rate, limit = check_of(judgement, RATE), check_of(judgement, "step_seconds").limit
    assert rate.limit is not None
    assert limit is not None
    assert rate.limit < rate.value / 1.2
    assert limit > 0.12


def test_a_case_is_as_bad_as_its_worst_metric_and_names_it(golden: Golden) -> None:
    judgement = judge([launch(0.05, reserved_bytes=2**31)] * 2, BASELINE, replace(POLICY, rule=Rule(budget=2)))
    assert judgement.verdict == "regressed"
    golden(judgement.reason)


def test_the_reason_reads_as_a_sentence() -> None:
    was = baseline_of(launch(64 / 71_800))
    judgement = judge([launch(64 / 66_900)] * 2, was, POLICY)
    assert re.fullmatch(
        r"tokens_per_second_per_gpu 66,900 tokens/s, baseline 71,800 tokens/s, limit 70,\d\d\d tokens/s \(-6\.8 %\)",
        judgement.reason,
    )


def test_a_small_figure_keeps_its_digits(golden: Golden) -> None:
    reason = judge([launch(loss=0.2)] * 2, baseline_of(launch(loss=0.1)), Policy({"final_loss": 0.05})).reason
    golden(reason)


def test_a_baseline_of_zero_has_no_change_and_still_gates() -> None:
    judgement = judge([of_one_rank(launch(loss=1.0))] * 2, baseline_of(launch(loss=0.0)), Policy({"final_loss": 0.1}))
    assert (judgement.verdict, judgement.reason) == ("regressed", "final_loss 1, baseline 0, limit 0")


def test_no_baseline_is_new_with_its_figures() -> None:
    judgement = judge([launch()], None, POLICY)
    assert judgement.verdict == "new"
    assert check_of(judgement, RATE).value == pytest.approx(640)
    assert {check.verdict for check in judgement.checks} == {"new", None}


def test_nothing_that_gates_says_so(golden: Golden) -> None:
    judgement = judge([launch(9.0)], BASELINE, Policy({}))
    assert judgement.verdict == "pass"
    golden(judgement.reason)


def test_launches_are_pooled_by_their_geometric_mean() -> None:
    checks = judge([launch(0.1), launch(0.4)], BASELINE, POLICY)
    assert check_of(checks, "step_seconds").value == pytest.approx(0.2)


def test_memory_is_the_worst_rank_of_the_leanest_launch(golden: Golden) -> None:
    full = replace(USUAL, ranks=(USUAL.ranks[0], replace(USUAL.ranks[1], peak_reserved_bytes=2**31)))
    assert check_of(judge([USUAL, full], BASELINE, POLICY), MEMORY).value == 2**30
    check = check_of(judge([full], BASELINE, POLICY), MEMORY)
    assert check.value == 2**31
    golden(check.detail)


def test_the_loss_is_the_last_one_of_the_last_launch() -> None:
    assert check_of(judge([launch(loss=2.0), launch(loss=3.0)], BASELINE, POLICY), "final_loss").value == 3.0


class TestInvalid:
    def test_contradictions_come_before_any_comparison(self, golden: Golden) -> None:
        judgement = judge([launch(9.0)], None, POLICY, ("asked for liger; nothing was patched", "second"))
        # "; " separates reasons, so none may hold one.
        assert (judgement.verdict, judgement.checks) == ("invalid", ())
        golden(judgement.reason)

    def test_no_launch(self, golden: Golden) -> None:
        golden(judge([], BASELINE, POLICY).reason)

    def test_launches_that_differ_in_tokens(self, golden: Golden) -> None:
        other = launch()
        other = replace(other, ranks=tuple(replace(rank, tokens_per_step=32) for rank in other.ranks))
        golden(judge([launch(), other], BASELINE, POLICY).reason)

    def test_the_same_trouble_is_said_once(self) -> None:
        bad = launch(loss=math.nan)
        assert judge([bad, bad], BASELINE, POLICY, ("the loss was nan at step 1",)).reason == (
            "the loss was nan at step 1"
        )

    def test_a_baseline_that_is_no_figure(self, golden: Golden) -> None:
        judgement = judge([launch()], replace(BASELINE, launches=(launch(math.nan),)), POLICY)
        assert judgement.verdict == "invalid"
        golden(judgement.reason)

    @pytest.mark.parametrize(
        ("metric", "value", "reason"),
        [
            ("mfu", 1.2, "mfu 120 % is more than the chip can do"),
            ("mfu", math.nan, "mfu is nan"),
            ("least_memory_traffic", 3.0, "least_memory_traffic 300 % is more than the chip can do"),
        ],
    )
    def test_an_impossible_share_of_the_chip(self, metric: str, value: float, reason: str) -> None:
        judgement = judge([launch()], BASELINE, POLICY, extra=[Check(metric=metric, value=value, unit="1")])
        assert (judgement.verdict, judgement.reason) == ("invalid", reason)

    def test_all_of_the_chip_is_possible(self) -> None:
        assert judge([launch()], BASELINE, POLICY, extra=[Check(metric="mfu", value=1.0, unit="1")]).verdict == "pass"


class TestPolicy:
    def test_an_unknown_metric_names_the_nearest(self, golden: Golden) -> None:
        with pytest.raises(ValueError, match=r"'peak_reserved_byte' \(did you") as raised:
            Policy({"peak_reserved_byte": 0.1})
        golden(raised)
        with pytest.raises(ValueError, match=r"'zzz'; known: tokens_per_second_per_gpu, "):
            Policy({"zzz": 0.1})

    @pytest.mark.parametrize("value", [0, -0.1, math.nan, math.inf, True, "0.05", None])
    def test_a_tolerance_is_a_positive_fraction(self, value: Any, golden: Golden) -> None:
        with pytest.raises(ValueError, match="must be a") as caught:
            POLICY.merged({RATE: value})
        golden(caught)
        assert "\n" not in str(caught.value)

    def test_merged_leaves_the_original_alone(self) -> None:
        assert POLICY.merged({RATE: 0.5}).tolerances == {**POLICY.tolerances, RATE: 0.5}
        assert POLICY.tolerances[RATE] == 0.02

    def test_a_cpu_gets_wide_tolerances(self) -> None:
        cpu = Policy.for_cpu().tolerances
        assert all(cpu[metric] > tolerance for metric, tolerance in POLICY.tolerances.items() if metric in cpu)


class TestProperties:
    @given(base=seconds, slow=seconds, slower=st.floats(1.0, 10.0))
    def test_slower_is_never_better(self, base: float, slow: float, slower: float) -> None:
        was = baseline_of(launch(base))
        order = ("regressed", "inconclusive", "pass", "improved")
        first, then = (judge([launch(time)] * 4, was, RATE_ALONE).verdict for time in (slow, slow * slower))
        assert order.index(then) <= order.index(first)

    @given(base=seconds, ratio=st.floats(0.5, 2.0), exponent=st.integers(-8, 8))
    def test_the_unit_of_time_is_irrelevant(self, base: float, ratio: float, exponent: int) -> None:
        # Powers of two, so that scaling itself rounds nothing; at a limit the logarithms round, and it may tip.
        scale = 2.0**exponent
        plain = judge([launch(base * ratio)], baseline_of(launch(base)), RATE_ALONE)
        scaled = judge([launch(base * ratio * scale)], baseline_of(launch(base * scale)), RATE_ALONE)
        difference = check_of(plain, RATE).change
        assert difference == pytest.approx(check_of(scaled, RATE).change)
        assert plain.verdict == scaled.verdict

    @given(times=st.lists(seconds, min_size=2, max_size=6), data=st.data())
    def test_the_order_of_launches_is_irrelevant(self, times: list[float], data: st.DataObject) -> None:
        shuffled = data.draw(st.permutations(times))
        was = baseline_of(launch(1.0))
        first, then = (judge([launch(time) for time in order], was, POLICY) for order in (times, shuffled))
        assert first.verdict == then.verdict
        assert check_of(first, RATE).change == pytest.approx(check_of(then, RATE).change)

    @given(
        bad=st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0]),
        rank=st.integers(0, 1),
        step=st.integers(0, SPEC.steps - 1),
        place=st.integers(0, 2),
    )
    def test_a_step_time_that_is_none_never_passes(self, bad: float, rank: int, step: int, place: int) -> None:
        broken = with_step(launch(), rank, step, bad)
        launches = [broken if index == place else launch() for index in range(3)]
        assert judge(launches, BASELINE, POLICY).verdict == "invalid"

    @given(bad=st.sampled_from([math.nan, math.inf, -math.inf]), step=st.integers(0, SPEC.steps - 1))
    def test_a_loss_that_is_none_never_passes(self, bad: float, step: int) -> None:
        good = launch()
        losses = tuple(bad if index == step else loss for index, loss in enumerate(good.losses))
        assert judge([replace(good, losses=losses)], BASELINE, POLICY).verdict == "invalid"

    @given(time=seconds, reserved=st.integers(1, 2**40))
    def test_the_verdict_is_the_worst_of_the_gating_ones(self, time: float, reserved: int) -> None:
        judgement = judge([launch(time, reserved_bytes=reserved)], BASELINE, POLICY)
        gating = [check.verdict for check in judgement.checks if check.verdict is not None]
        assert judgement.verdict == min(gating, key=VERDICTS.index)
        assert "\n" not in judgement.reason


def with_step(good: Launch, rank: int, step: int, value: float) -> Launch:
    ranks = list(good.ranks)
    times = ranks[rank].step_seconds
    ranks[rank] = replace(ranks[rank], step_seconds=(*times[:step], value, *times[step + 1 :]))
    return replace(good, ranks=tuple(ranks))
