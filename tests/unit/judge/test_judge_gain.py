"""Ratios of two specs, bounds on them, and cases that move together."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.pairs import Bounds, judge_gain
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.verdict import judge_pairs
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.examples import examples
from tests.fakes import Fake, launch_of
from tests.golden import Golden

SMALL = TrainSpec(model="llama-tiny", sequence_length=64, steps=12)
LARGE = replace(SMALL, micro_batch_size=2)
POLICY = Policy.for_gpu()


def pair(before: float, after: float, spec: TrainSpec = SMALL, reserved: int = 2**30) -> tuple[Launch, Launch]:
    return launch_of(SMALL, Fake(step_seconds=before)), launch_of(
        spec, Fake(step_seconds=after, reserved_bytes=reserved)
    )


def verdict(pairs: list[tuple[Launch, Launch]], **bounds: Bounds) -> tuple[str, bool]:
    judgement = judge_gain(pairs, bounds, POLICY)
    return judgement.verdict, judgement.undecided


class TestGain:
    def test_one_pair_far_above_its_bound_is_enough(self) -> None:
        assert verdict([pair(0.13, 0.1)], throughput=Bounds(at_least=1.2)) == ("pass", False)

    def test_below_it_two_decide(self) -> None:
        bounds = Bounds(at_least=1.4)
        assert verdict([pair(0.13, 0.1)], throughput=bounds) == ("inconclusive", True)
        assert verdict([pair(0.13, 0.1)] * 2, throughput=bounds) == ("regressed", False)

    def test_at_its_bound_nothing_is_shown(self) -> None:
        bounds = Bounds(at_least=1.2)
        decided = [verdict([pair(0.12, 0.1)] * number, throughput=bounds) for number in (1, 2, 3, 4)]
        # A fourth pair would move it too little to show more.
        assert decided == [("inconclusive", another) for another in (True, True, False, False)]

    def test_an_upper_bound(self) -> None:
        assert verdict([pair(0.13, 0.1)] * 2, throughput=Bounds(at_most=1.2))[0] == "regressed"
        assert verdict([pair(0.11, 0.1)], throughput=Bounds(at_most=1.2))[0] == "pass"

    @given(
        seconds=st.lists(st.floats(0.09, 0.13), min_size=1, max_size=4),
        bound=st.floats(0.8, 1.2),
        side=st.sampled_from(["at_least", "at_most"]),
    )
    @examples(50)
    def test_a_bound_is_decided_by_the_interval_that_is_shown(
        self, seconds: list[float], bound: float, side: str
    ) -> None:
        pairs = [pair(each, 0.1) for each in seconds]
        bounds = Bounds(at_least=bound) if side == "at_least" else Bounds(at_most=bound)
        found = judge_gain(pairs, {"throughput": bounds}, POLICY)
        shown = re.search(r"\((\S+) to (\S+)\), to be", found.reason)
        assert shown
        beyond = sorted(math.log(float(end) / bound) * (1 if side == "at_least" else -1) for end in shown.groups())
        rounding = 0.006
        assert beyond[0] > -rounding if found.verdict == "pass" else beyond[0] < rounding
        assert beyond[1] < rounding or found.verdict != "regressed"

    def test_a_larger_batch_is_compared_by_its_tokens(self, golden: Golden) -> None:
        # Twice the tokens in 1.6 times the time.
        found = judge_gain([pair(0.1, 0.16, LARGE)], {}, POLICY)
        assert found.checks[0].value == pytest.approx(1.25)
        assert found.verdict == "pass"
        golden(found.reason)

    @pytest.mark.parametrize(
        ("shift", "learnt", "said"),
        [(0.009, 1.0, "pass"), (0.02, 1.0, "regressed"), (-0.1, 1.0, "regressed"), (0.0, 0.01, "inconclusive")],
    )
    def test_losses_are_held_step_by_step(self, shift: float, learnt: float, said: str) -> None:
        before, after = (launch_of(SMALL, Fake()) for _ in range(2))
        losses = [6.0 - learnt * step / len(before.losses) for step in range(len(before.losses))]
        before = replace(before, losses=tuple(losses))
        after = replace(after, losses=(*losses[:-1], losses[-1] + shift))
        judgement = judge_gain([(before, after)], {"loss": Bounds(at_most=0.01)}, POLICY)
        assert (judgement.verdict, judgement.undecided) == (said, False)
        assert judgement.checks[2].value == pytest.approx(abs(shift))
        assert "to be within 0.01" in judgement.reason
        assert ("shows nothing" in judgement.reason) == (said == "inconclusive")

    @pytest.mark.parametrize(
        ("reserved", "decided"),
        [
            ([2**29], ("pass", False)),
            ([2**30], ("inconclusive", True)),
            ([2**30, 2**30], ("regressed", False)),
            ([2**30, 2**29], ("pass", False)),
        ],
    )
    def test_memory_is_that_of_the_leanest_launch(self, reserved: list[int], decided: tuple[str, bool]) -> None:
        pairs = [pair(0.1, 0.1, reserved=each) for each in reserved]
        assert verdict(pairs, memory=Bounds(at_most=0.6)) == decided

    @pytest.mark.parametrize(
        ("sides", "bounds", "decided"),
        [
            # The leanest of each side are of different pairs: 1.11, which one pair alone shows.
            ([(1.0, 1.05), (0.9, 1.0)], Bounds(at_most=1.1), ("inconclusive", True)),
            ([(1.0, 1.05), (0.9, 1.0), (0.9, 1.0)], Bounds(at_most=1.1), ("regressed", False)),
            ([(1.0, 1.2), (1.0, 1.05), (1.0, 1.3)], Bounds(at_most=1.1), ("pass", False)),
            ([(1.0, 1.0), (1.3, 1.3)], Bounds(at_most=1.1), ("pass", False)),
            ([(1.0, 1.05)] * 2, Bounds(at_least=1.1), ("regressed", False)),
            ([(1.0, 1.15), (1.0, 1.05)], Bounds(at_least=1.1), ("inconclusive", True)),
        ],
    )
    def test_a_bound_of_memory_is_broken_by_two_pairs_each_by_itself(
        self, sides: list[tuple[float, float]], bounds: Bounds, decided: tuple[str, bool]
    ) -> None:
        pairs = [
            (pair(0.1, 0.1, reserved=int(before * 2**30))[1], pair(0.1, 0.1, reserved=int(after * 2**30))[1])
            for before, after in sides
        ]
        assert verdict(pairs, memory=bounds) == decided

    @pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, "1.2"])
    def test_a_bound_is_a_positive_ratio(self, bad: float, golden: Golden) -> None:
        with pytest.raises(ValueError, match="must be a") as raised:
            Bounds(at_least=bad)
        golden(raised)
        with pytest.raises(ValueError, match="no ratio can") as raised:
            Bounds(at_least=2, at_most=1)
        golden(raised)


class TestPairs:
    @pytest.mark.parametrize(
        ("slower", "said"), [(1.0, "pass"), (1.005, "pass"), (1.02, "regressed"), (0.97, "improved")]
    )
    def test_environments_are_held_to_one_per_cent(self, slower: float, said: str) -> None:
        assert judge_pairs([pair(0.1, 0.1 * slower)] * 4, POLICY).verdict == said

    def test_memory_and_trouble_count_here_too(self) -> None:
        assert judge_pairs([pair(0.1, 0.1, reserved=2**31)] * 2, POLICY).verdict == "regressed"
        assert judge_pairs([pair(0.1, 0.1)], POLICY, ["asked for liger, nothing was patched"]).verdict == "invalid"
        assert judge_pairs([pair(0.1, math.nan)], POLICY).verdict == "invalid"
