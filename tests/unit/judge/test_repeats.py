"""What of a script is exact is found out by the launches that record it, and held so."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf.judge.acceptance import describe
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.exact import changes, count_checks
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.repeats import Repeats, unlike_losses
from pytest_llmperf.judge.stats import log_of
from pytest_llmperf.judge.store import parse, text_of
from pytest_llmperf.judge.verdict import judge, judge_pairs
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Check
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.settings.spec import ScriptSpec
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tests.shelf import accept

SPEC = ScriptSpec(command="python train.py", steps=8, warmup_steps=2)
LOSSES = (9.0, 8.0, 7.0, 6.5, 6.2, 6.1, 6.05, 6.0)
EVIDENCE = {"tokens": "counted", "device_type": "cuda"}
COUNTS = {"kernel": {"gemm": 100.0}, "copy": {"Memcpy DtoH": 2.0}, "wait": {"cudaStreamSynchronize": 1.0}}


def launch(losses: tuple[float, ...] = LOSSES, counts: Any = COUNTS, **rank: Any) -> Launch:
    made = launch_of(SPEC, Fake(trace=counts, evidence={**EVIDENCE, "setup": {"sources": {"train.py": "1"}}}))
    rank = {"allocated_bytes": tuple(range(100, 108)), **rank}
    return replace(made, losses=losses, ranks=tuple(replace(each, **rank) for each in made.ranks))


def counts(gemm: float = 100.0, waits: float = 1.0) -> dict[str, dict[str, float]]:
    return {**COUNTS, "kernel": {"gemm": gemm}, "wait": {"cudaStreamSynchronize": waits}}


def recorded(*launches: Launch, old: Baseline | None = None, reason: str = "") -> Baseline:
    judged = Check(metric="peak_reserved_bytes", value=2**30, unit="bytes")
    known: dict[str, Any] = {"spec": SPEC, "machine": "m", "verdict": "pass" if old else "new", "checks": [judged]}
    when: dict[str, Any] = {"recorded_at": "2026-01-01T00:00:00Z", "recorded_by": "t.py::t", "reason": reason}
    new = accept(old, judged=old, launches=launches, **known, **when)
    return parse(Baseline, text_of(new), "it")


def told(baseline: Baseline, *launches: Launch) -> list[str]:
    assert baseline.repeats
    return [*changes(launches, baseline.explained), *baseline.repeats.changes(launches, baseline.explained)]


def verdicts(baseline: Baseline, *launches: Launch) -> dict[str, str | None]:
    return {each.metric: each.verdict for each in count_checks(launches, baseline.trace, baseline.repeats)}


class TestFound:
    def test_what_repeats_is_held_exactly(self, golden: Golden) -> None:
        baseline = recorded(launch(), launch())
        assert baseline.repeats == Repeats(
            launches=2,
            losses=8,
            counts=("kernels_per_step", "copies_per_step", "synchronisations_per_step"),
            tokens=True,
            memory=((2**30, *range(100, 108)),),
        )
        golden(describe(None, baseline)[-1])

    def test_the_rest_is_a_band(self, golden: Golden) -> None:
        other = tuple(loss + 0.01 * step for step, loss in enumerate(LOSSES))
        baseline = recorded(launch(), launch(other, counts(gemm=110.0), peak_allocated_bytes=2**29))
        assert baseline.repeats == Repeats(
            launches=2,
            losses=1,
            counts=("copies_per_step", "synchronisations_per_step"),
            ranges={"kernels_per_step": (100.0, 110.0)},
            tokens=True,
        )
        golden(describe(None, baseline)[-1])

    def test_losses_that_part_are_exact_up_to_the_first_alone(self) -> None:
        parted = (*LOSSES[:3], *(loss + 1e-6 for loss in LOSSES[3:]))
        baseline = recorded(launch(), launch(parted))
        assert baseline.repeats
        assert baseline.repeats.losses == 1
        third = (*LOSSES[:2], LOSSES[2] + 1e-6, *LOSSES[3:])
        assert told(baseline, launch(third)) == []
        assert told(baseline, launch((8.5, *LOSSES[1:])))

    def test_unknown_losses_are_not_claimed(self, golden: Golden) -> None:
        unknown = replace(launch(()), evidence={**EVIDENCE, "losses": "unknown"})
        baseline = recorded(unknown, unknown)
        golden(describe(None, baseline)[-1])
        assert told(baseline, unknown) == []

    @pytest.mark.parametrize(("more", "said"), [(0.0, "pass"), (1 / 3, "pass"), (1.0, "regressed")])
    def test_a_wait_more_in_each_step_is_no_chance(self, more: float, said: str) -> None:
        """Unseeded, and with a log each tenth step: its counts are a range, of which both launches had the same end."""
        waits = counts(waits=27 + 2 / 3)
        lucky = recorded(launch(counts=waits), launch((8.5, *LOSSES[1:]), counts=waits))
        assert "synchronisations_per_step" in (lucky.repeats or Repeats).ranges
        now = launch((8.6, *LOSSES[1:]), counts=counts(waits=27 + 2 / 3 + more))
        assert verdicts(lucky, now)["synchronisations_per_step"] == said

    def test_steps_that_are_unlike_are_exact_of_a_training_that_begins_alike(self) -> None:
        unlike = counts(gemm=100 + 1 / 3)
        assert "kernels_per_step" in (recorded(launch(counts=unlike), launch(counts=unlike)).repeats or Repeats).counts
        parted = recorded(launch(counts=unlike), launch((LOSSES[0], 8.5, *LOSSES[2:]), counts=unlike)).repeats
        assert "kernels_per_step" in (parted or Repeats).counts
        lucky = recorded(launch(counts=unlike), launch((8.5, *LOSSES[1:]), counts=unlike)).repeats
        assert lucky
        assert lucky.counts == ()

    def test_what_one_trace_told_alone_is_exact_once_another_tells_the_same(self) -> None:
        untraced = replace(launch(), trace=Trace(none="a traced step failed"))
        alone = recorded(launch(), untraced)
        assert "kernels_per_step" in (alone.repeats or Repeats).ranges
        healed = recorded(launch(), launch(), old=alone, reason="quiet now").repeats or Repeats
        assert ("kernels_per_step" in healed.counts, healed.ranges) == (True, {})

    def test_a_host_s_memory_is_not_claimed(self) -> None:
        assert recorded(launch(allocated_bytes=()), launch(allocated_bytes=())).repeats == Repeats(
            launches=2,
            losses=8,
            counts=("kernels_per_step", "copies_per_step", "synchronisations_per_step"),
            tokens=True,
        )

    def test_one_launch_alone_tells_nothing(self) -> None:
        found = Repeats.of([launch()])
        assert (found.counts, found.losses, found.tokens, found.memory) == ((), 0, False, ())
        assert list(found.changes([launch((8.5, *LOSSES[1:]), counts(gemm=101.0))], [launch()])) == []

    def test_our_own_training_has_no_such_finding(self) -> None:
        assert "repeats" not in json.loads(text_of(replace(recorded(launch(), launch()), repeats=None)))

    def test_what_joins_widens_the_finding_and_other_files_begin_it_anew(self) -> None:
        baseline = recorded(launch(), launch())
        joined = recorded(launch(counts=counts(gemm=101.0)), old=baseline, reason="because").repeats
        assert joined
        assert (joined.launches, joined.ranges) == (3, {"kernels_per_step": (100.0, 101.0)})
        edited = launch(counts=counts(gemm=101.0))
        edited = replace(edited, evidence={**EVIDENCE, "setup": {"sources": {"train.py": "2"}}})
        anew = recorded(edited, edited, old=baseline, reason="because").repeats
        assert anew
        assert (anew.launches, anew.ranges) == (2, {})

    def test_launches_from_before_an_accepted_change_take_nothing_from_what_is_exact_since(self) -> None:
        edited = launch(losses=tuple(loss / 2 for loss in LOSSES), counts=counts(gemm=101.0), tokens_per_step=64)
        edited = replace(edited, evidence={**EVIDENCE, "setup": {"sources": {"train.py": "2"}}})
        accepted = recorded(edited, edited, old=recorded(launch(), launch()), reason="because")
        again = recorded(edited, edited, old=accepted, reason="a second session")
        assert len(again.launches) == 6
        assert accepted.repeats
        assert again.repeats == replace(accepted.repeats, launches=4)
        assert set(again.repeats.counts) == {*verdicts(again, edited)}


class TestHeld:
    def test_the_same_launch_changes_nothing(self) -> None:
        baseline = recorded(launch(), launch())
        assert told(baseline, launch()) == []
        assert set(verdicts(baseline, launch()).values()) == {"pass"}

    def test_the_peak_of_more_steps_is_another_s(self, golden: Golden) -> None:
        baseline = recorded(*(launch(peak_allocated_bytes=500) for _ in range(2)))
        golden(told(baseline, launch(peak_allocated_bytes=600)))
        longer = {"step_seconds": (0.1,) * 9, "allocated_bytes": tuple(range(100, 109)), "peak_allocated_bytes": 600}
        assert told(baseline, launch((*LOSSES, 5.9), **longer)) == []

    def test_a_synchronisation_more_is_a_loss(self) -> None:
        baseline = recorded(launch(), launch())
        assert verdicts(baseline, launch(counts=counts(waits=2.0)))["synchronisations_per_step"] == "regressed"

    @pytest.mark.parametrize(
        ("gemm", "verdict"), [(90.0, "pass"), (120.0, "pass"), (130.0, "pass"), (131.0, "changed")]
    )
    def test_a_range_is_left_by_two_of_its_widths(self, gemm: float, verdict: str) -> None:
        baseline = recorded(launch(), launch(counts=counts(gemm=110.0)))
        assert verdicts(baseline, launch(counts=counts(gemm=gemm)))["kernels_per_step"] == verdict

    def test_each_exact_figure_has_its_line(self, golden: Golden) -> None:
        baseline = recorded(launch(), launch())
        other = launch(
            (*LOSSES[:3], 6.6, *LOSSES[4:]), tokens_per_step=65, allocated_bytes=(100, 101, 202, *range(103, 108))
        )
        golden(told(baseline, other))
        assert told(baseline, other, launch()) == [], "of launches that differ the mildest counts"

    def test_other_versions_or_hardware_leave_the_band_alone(self) -> None:
        baseline = recorded(launch(), launch())
        other = launch((*LOSSES[:3], 6.6, *LOSSES[4:]), tokens_per_step=65)
        for changed in ({"versions": {"torch": "2.1"}}, {"gpu": "another"}):
            assert told(baseline, replace(other, environment=replace(other.environment, **changed))) == []

    def test_another_file_is_no_change_and_is_named(self) -> None:
        baseline = recorded(launch(), launch())
        edited = replace(launch(), evidence={**EVIDENCE, "setup": {"sources": {"train.py": "2"}}})
        assert told(baseline, edited) == []
        assert baseline.launches[-1].differences(edited) == ("train.py: 1 -> 2",)

    def test_losses_of_unseeded_trainings_stay_in_their_band(self) -> None:
        # A band of two launches is left by 13 of the seeds from 0 to 65536, which is a rate and no rule of each seed.
        for seed in range(200):
            chance = random.Random(seed)
            each = [launch(tuple(loss + chance.gauss(0, 0.05) for loss in LOSSES)) for _ in range(3)]
            baseline = recorded(*each[:2])
            assert [line for line in told(baseline, each[2]) if "mean loss" in line] == [], seed
            doubled = launch(tuple(2 * loss for loss in LOSSES))
            assert any("mean loss" in line for line in told(baseline, doubled))


class TestChance:
    def test_all_that_was_exact_and_is_other_was_chance(self) -> None:
        baseline = recorded(launch(), launch())
        other = launch((8.0, *LOSSES[1:]), counts(gemm=101.0))
        assert baseline.repeats
        assert baseline.repeats.is_chance([other], baseline.explained, are_counts_other=True)
        assert not baseline.repeats.is_chance([other], baseline.explained, are_counts_other=False)
        assert not baseline.repeats.is_chance([launch()], baseline.explained, are_counts_other=True)
        edited = replace(other, evidence={**EVIDENCE, "setup": {"sources": {"train.py": "2"}}})
        assert not baseline.repeats.is_chance([edited], baseline.explained, are_counts_other=True)

    @pytest.mark.parametrize("first", [1.0, 1 + 1e-7, 1 + 1.6e-3])
    def test_a_training_that_begins_alike_and_computes_otherwise_is_no_chance(self, first: float) -> None:
        """Attention by hand, a loss in float32: seen at 7e-8 and, where the loss was rounded to bf16, at 1.6e-3."""
        baseline = recorded(launch(), launch())
        other = launch((LOSSES[0] * first, *(loss * 1.01 for loss in LOSSES[1:])), counts(gemm=101.0))
        assert baseline.repeats
        assert not baseline.repeats.is_chance([other], baseline.explained, are_counts_other=True)

    def test_tokens_count_where_they_vary(self) -> None:
        varied = {"step_tokens": (60, 68, *(64 for _ in range(6)))}
        baseline = recorded(launch(**varied), launch(**varied))
        assert baseline.repeats
        same = launch((8.0, *LOSSES[1:]), counts(gemm=101.0), **varied)
        other = replace(same, ranks=tuple(replace(rank, step_tokens=(68, 60, *(64,) * 6)) for rank in same.ranks))
        assert not baseline.repeats.is_chance([same], baseline.explained, are_counts_other=True)
        assert baseline.repeats.is_chance([other], baseline.explained, are_counts_other=True)


class TestUnknown:
    """What one launch knows and another does not is no figure, and told."""

    def test_rates_of_two_units_do_not_compare(self, golden: Golden) -> None:
        unknown = replace(launch(tokens_per_step=1), evidence={**EVIDENCE, "tokens": "unknown"})
        for now, then in ((unknown, launch()), (launch(), unknown)):
            assert judge([now], recorded(then, then), Policy.for_gpu()).verdict == "invalid"
        golden(judge([launch()], recorded(unknown, unknown), Policy.for_gpu()).reason)
        assert judge_pairs([(launch(), unknown)], Policy.for_gpu()).verdict == "invalid"

    def test_losses_that_come_or_go(self, golden: Golden) -> None:
        unknown = replace(launch(()), evidence={**EVIDENCE, "losses": "unknown"})
        for now, then in ((unknown, launch()), (launch(), unknown)):
            judgement = judge([now], recorded(then, then), Policy.for_gpu())
            assert "final_loss" not in {check.metric for check in judgement.checks}
        golden(told(recorded(launch(), launch()), unknown))


class TestUnequalSteps:
    TOKENS = (64, 64, *(32, 96) * 3)

    def test_the_rate_is_that_of_the_sum_and_a_stall_is_none_of_it(self) -> None:
        seconds = tuple(0.01 + tokens / 1000 for tokens in self.TOKENS)
        made = launch(step_tokens=self.TOKENS, step_seconds=seconds)
        start = made.steady.start
        assert made.tokens_per_second == pytest.approx(sum(self.TOKENS[start:]) / sum(seconds[start:]))
        stalled = launch(step_tokens=self.TOKENS, step_seconds=(*seconds[:6], 5.0, seconds[7]))
        assert stalled.tokens_per_second == pytest.approx(made.tokens_per_second, rel=0.2)

    def test_launches_of_other_tokens_are_compared_by_their_rates(self) -> None:
        twice = tuple(2 * tokens for tokens in self.TOKENS)
        before, after = (
            launch(step_tokens=tokens, tokens_per_step=sum(tokens) // 8, step_seconds=tuple(n / 1000 for n in tokens))
            for tokens in (self.TOKENS, twice)
        )
        assert log_of(before) == pytest.approx(log_of(after))
        assert recorded(before, after).launches[1].step_tokens == twice, "a file holds it"
        judgement = judge([after], recorded(before, before), Policy.for_gpu())
        assert {check.metric: check.verdict for check in judgement.checks}["tokens_per_second_per_gpu"] == "pass"


class TestAnotherConfiguration:
    """Of a search, whose trials are short."""

    KNOWN = tuple(6.0 - 0.02 * step + 0.01 * (step % 2) for step in range(7))
    OTHER = tuple(loss + 0.02 for loss in KNOWN)

    def test_one_that_begins_alike_has_the_same_first_loss_but_for_rounding(self) -> None:
        assert not unlike_losses([loss * 1.003 for loss in self.KNOWN], self.KNOWN, self.KNOWN)
        assert unlike_losses([loss * 1.005 for loss in self.KNOWN], self.KNOWN, self.KNOWN)

    def test_of_other_tokens_or_where_nothing_repeats_the_band_holds(self) -> None:
        off = [loss * 1.005 for loss in self.KNOWN]
        assert not unlike_losses(off, self.KNOWN, self.KNOWN, 2.0)
        assert not unlike_losses(off, self.KNOWN, self.OTHER)
        for factor in (0.5, 0.9, 1.1, 2.0):
            assert unlike_losses([loss * factor for loss in self.KNOWN], self.KNOWN, self.KNOWN, 2.0)

    def test_a_batch_that_may_be_split_otherwise_is_of_other_samples(self) -> None:
        for factor in (0.97, 1.03):
            off = [loss * factor for loss in self.KNOWN]
            assert unlike_losses(off, self.KNOWN, self.KNOWN)
            assert not unlike_losses(off, self.KNOWN, self.KNOWN, is_same_batch=False)
        assert unlike_losses([loss * 1.1 for loss in self.KNOWN], self.KNOWN, self.KNOWN, is_same_batch=False)

    def test_fewer_tokens_scatter_by_more(self) -> None:
        off = [loss + 0.2 for loss in self.KNOWN]
        assert unlike_losses(off, self.KNOWN, ())
        assert not unlike_losses(off, self.KNOWN, (), 1 / 16)

    def test_one_that_learns_nothing_is_told(self) -> None:
        learns = [6.0 - 0.3 * step for step in range(7)]
        noisy = [loss + 0.1 * (-1) ** step for step, loss in enumerate(learns)]
        assert unlike_losses([6.0] * 7, learns, ())
        assert not unlike_losses(noisy, learns, learns, 2.0)

    def test_what_nobody_knows_is_not_held(self) -> None:
        assert not unlike_losses((), self.KNOWN, ())
        assert not unlike_losses(self.KNOWN, (), ())
