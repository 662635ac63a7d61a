"""Two branches' changes of one baseline as one: launches, history, anchor, and what cannot be one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.acceptance import MAX_LAUNCHES
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import Accepted, BaselineError
from pytest_llmperf.judge.baseline_union import united, united_capacity
from pytest_llmperf.judge.batch_size_baseline import CapacityBaseline, accept_capacity
from pytest_llmperf.judge.policy import METRICS, Policy
from pytest_llmperf.judge.static.stored_step import StoredStep
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.static_step import StaticStep
from pytest_llmperf.spec.train_spec import TrainSpec
from tests.examples import examples
from tests.fakes import STEP, Fake, launch_of
from tests.shelf import accept

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4)


def launch(step_seconds: float = 0.1, **fake: Any) -> Launch:
    made = launch_of(SPEC, Fake(step_seconds=step_seconds, **fake))
    return replace(made, environment=replace(made.environment, driver="1"))  # a GPU's tolerances


def accepted(old: Baseline | None, day: int, *launches: Launch, reason: str = "", by: str = "t.py::t") -> Baseline:
    """What is in the file once ``launches`` were accepted on this day of January."""
    judgement = judge(launches, old, Policy.for_gpu())
    new = accept(
        old,
        judged=old,
        spec=SPEC,
        machine="m",
        launches=launches,
        verdict=judgement.verdict,
        checks=judgement.checks,
        reason=reason,
        recorded_at=f"2026-01-{day:02}T00:00:00Z",
        recorded_by=by,
    )
    return read(new)


def joined(old: Baseline, day: int, *launches: Launch) -> Baseline:
    """The same of launches that pass, without judging them."""
    entry = Accepted(
        recorded_at=f"2026-01-{day:02}T00:00:00Z",
        reason="",
        launches=len(launches),
        metrics={name: metric.of(launches) for name, metric in METRICS.items()},
    )
    return replace(old, launches=(*old.launches, *launches)[-MAX_LAUNCHES:], history=(*old.history, entry))


def read(baseline: Baseline) -> Baseline:
    return Baseline.from_json(baseline.to_json(), "f")


def steps(baseline: Baseline) -> list[float]:
    return [run.median_step_seconds for run in read(baseline).launches]


def days(baseline: Baseline | CapacityBaseline) -> list[int]:
    return [int(entry.recorded_at[8:10]) for entry in baseline.history]


BASE = accepted(None, 1, launch())


class TestLaunchesOfBothSides:
    def test_they_join_in_order_of_time_and_the_newest_acceptance_counts(self) -> None:
        ours = accepted(accepted(BASE, 2, launch(0.1001)), 4, launch(0.1003), by="ours")
        theirs = accepted(BASE, 3, launch(0.1002), launch(0.1002), by="theirs")
        for one in (united(BASE, ours, theirs), united(BASE, theirs, ours), united(None, ours, theirs)):
            assert days(one) == [1, 2, 3, 4]
            assert steps(one) == [0.1, 0.1001, 0.1002, 0.1002, 0.1003]
            assert (one.anchor, one.recorded_by) == (BASE.anchor, "ours")

    def test_what_both_sides_hold_is_there_once(self) -> None:
        picked = accepted(BASE, 2, launch(0.1001))
        ours, theirs = accepted(picked, 3, launch(0.1002)), accepted(picked, 4, launch(0.1003))
        one = united(BASE, ours, theirs)
        assert (days(one), steps(one)) == ([1, 2, 3, 4], [0.1, 0.1001, 0.1002, 0.1003])

    def test_calibrations_of_both_sides_are_kept(self) -> None:
        def calibrated(day: int) -> Launch:
            made = Calibration(made_at=f"2026-01-{day:02}T00:00:00Z", seconds={"copy": 0.0005}, versions={})
            one = launch()
            return replace(one, ranks=tuple(replace(rank, calibration=made) for rank in one.ranks))

        base = accepted(None, 1, calibrated(1))
        both = read(united(base, accepted(base, 2, calibrated(2)), accepted(base, 3, launch())))
        kept = [run.ranks[0].calibration for run in both.launches]
        assert [one and one.made_at[8:10] for one in kept] == ["01", "02", None]

    def test_a_side_that_changed_nothing_adds_nothing(self) -> None:
        theirs = accepted(BASE, 2, launch(0.2), launch(0.2), reason="a slower driver")
        for one in (united(BASE, BASE, theirs), united(BASE, theirs, BASE), united(BASE, theirs, theirs)):
            assert one == theirs

    def test_a_clock_that_went_wrong_moves_no_anchor(self) -> None:
        late = accepted(None, 9, launch())
        one = united(late, accepted(late, 3, launch(0.1001)), accepted(late, 2, launch(0.1002)))
        assert (days(one), one.anchor) == ([9, 2, 3], late.anchor)
        back = accepted(accepted(BASE, 9, launch(0.1001)), 5, launch(0.1002))
        assert days(united(BASE, back, accepted(BASE, 8, launch(0.1003)))) == [1, 8, 9, 5]

    def test_first_recordings_of_both_sides_are_one_and_the_first_is_the_anchor(self) -> None:
        later = accepted(None, 2, launch(0.1001))
        for one in (united(None, BASE, later), united(None, later, BASE)):
            assert (days(one), steps(one), one.anchor) == ([1, 2], [0.1, 0.1001], BASE.anchor)

    def test_no_more_are_kept_than_a_baseline_keeps(self) -> None:
        ours = accepted(BASE, 2, *[launch(0.1001)] * 20)
        theirs = accepted(BASE, 3, *[launch(0.1002)] * 20)
        one = united(BASE, ours, theirs)
        assert steps(one) == [0.1001] * 4 + [0.1002] * 20
        assert len(one.launches) == MAX_LAUNCHES

    def test_an_acceptance_of_more_launches_than_are_kept_stays_readable(self) -> None:
        ours = accepted(BASE, 2, *[launch(0.1001)] * 30)
        assert len(united(BASE, ours, accepted(BASE, 3, launch())).launches) == MAX_LAUNCHES
        assert len(united(BASE, accepted(BASE, 1, launch()), ours).launches) == MAX_LAUNCHES

    @examples(25)
    @given(
        st.lists(
            st.tuples(st.booleans(), st.integers(2, 28), st.sampled_from([1, 5, 12])),
            max_size=6,
            unique_by=lambda change: change[1],
        )
    )
    def test_what_comes_of_any_two_can_be_read_and_loses_no_acceptance(
        self, changes: list[tuple[bool, int, int]]
    ) -> None:
        sides = [BASE, BASE]
        for mine, day, number in changes:
            sides[mine] = joined(sides[mine], day, *[launch(0.1 + day / 1e5)] * number)
        one = united(BASE, *sides)
        assert steps(one)
        assert all(entry in one.history for side in sides for entry in side.history)
        assert len(one.launches) == min(MAX_LAUNCHES, sum(entry.launches for entry in one.history))


class TestOneSideReplaced:
    def test_static_figures_are_of_the_side_that_changed_the_step_whenever_the_other_was_written(self) -> None:
        old, changed, again = (
            StoredStep(step=StaticStep(**{**STEP, "operators": {"aten::mm": n}}), recorded_at=f"2026-01-0{day}")
            for n, day in ((45, 1), (40, 2), (45, 3))
        )
        base = replace(BASE, static=old)
        sides = (replace(joined(base, 2, launch()), static=changed), replace(joined(base, 3, launch()), static=again))
        assert united(base, *sides).static == changed
        assert united(base, *reversed(sides)).static == changed
        assert united(base, sides[0], replace(sides[1], static=None)).static == changed

    def test_no_static_figures_stand_for_two_other_steps(self) -> None:
        sides = [
            replace(
                joined(BASE, day, launch()),
                static=StoredStep(step=StaticStep(**{**STEP, "flops": {"aten::mm": day}}), recorded_at="2026"),
            )
            for day in (2, 3)
        ]
        with pytest.raises(BaselineError, match="ours and theirs accepted another step each; take one side"):
            united(BASE, *sides)

    def test_a_trace_of_launches_that_were_replaced_goes_with_them(self) -> None:
        kernels = {"kernel": {"nvjet": 9.0}}
        base = accepted(None, 1, launch(trace=kernels), launch(trace=kernels))
        ours = joined(base, 2, launch(trace=kernels))
        theirs = accepted(base, 3, launch(0.2), launch(0.2), reason="another model")
        assert ours.trace
        assert theirs.trace is None
        assert united(base, ours, theirs).trace is None
        traced = accepted(base, 3, launch(0.2), launch(0.2, trace={"kernel": {"a": 1.0}}), reason="another model")
        assert united(base, ours, traced).trace == traced.trace

    """What there was: launches of another speed are no population with it."""

    FASTER = accepted(BASE, 3, launch(0.05), launch(0.05))

    def test_its_launches_stand_and_the_others_acceptance_is_history(self) -> None:
        confirmed = accepted(BASE, 2, launch(0.1001))
        for one in (united(BASE, self.FASTER, confirmed), united(BASE, confirmed, self.FASTER)):
            assert (days(one), steps(one)) == ([1, 2, 3], [0.05, 0.05])

    def test_what_the_other_side_confirmed_between_joins_no_other_speed(self) -> None:
        faster = accepted(self.FASTER, 5, launch(0.0501))
        one = united(BASE, faster, accepted(BASE, 4, launch(0.1001)))
        assert (days(one), steps(one)) == ([1, 3, 4, 5], [0.0501])

    def test_the_old_speed_that_is_newer_is_a_conflict(self) -> None:
        with pytest.raises(BaselineError) as caught:
            united(BASE, self.FASTER, accepted(BASE, 4, launch(0.0999)))
        assert str(caught.value) == (
            f"{SPEC.id}: tokens_per_second_per_gpu was accepted as 1,280 tokens/s in ours, 641 tokens/s in theirs; "
            "take one side (git checkout --ours or --theirs) and record the case anew where both changes are in"
        )

    def test_also_where_the_machine_tolerates_as_much(self) -> None:
        def on_cpu(side: Baseline) -> Baseline:
            runs = [replace(run, environment=replace(run.environment, driver="")) for run in side.launches]
            return replace(side, launches=tuple(runs))

        with pytest.raises(BaselineError, match="tokens_per_second_per_gpu was accepted as"):
            united(BASE, on_cpu(self.FASTER), on_cpu(accepted(BASE, 4, launch(0.1001))))


class TestBothSidesReplaced:
    def test_what_agrees_is_pooled_without_what_there_was(self) -> None:
        ours = accepted(BASE, 2, launch(0.05), launch(0.05))
        theirs = accepted(BASE, 3, launch(0.0501), launch(0.0501))
        assert steps(united(BASE, ours, theirs)) == [0.05, 0.05, 0.0501, 0.0501]

    @pytest.mark.parametrize("other", [0.06, 0.2])
    def test_what_does_not_is_a_conflict(self, other: float) -> None:
        ours = accepted(BASE, 2, launch(0.05), launch(0.05))
        theirs = accepted(BASE, 3, launch(other), launch(other), reason="why")
        for mine, yours in ((ours, theirs), (theirs, ours)):
            with pytest.raises(BaselineError, match="tokens_per_second_per_gpu was accepted as"):
                united(BASE, mine, yours)

    def test_so_it_is_with_memory(self) -> None:
        ours = accepted(BASE, 2, *[launch(reserved_bytes=2**31)] * 2, reason="why")
        theirs = accepted(BASE, 3, *[launch(reserved_bytes=2**29)] * 2)
        with pytest.raises(BaselineError, match=r"peak_reserved_bytes was accepted as 2.00 GiB in ours, 512.0 MiB in"):
            united(BASE, ours, theirs)
        assert united(BASE, ours, accepted(BASE, 1, launch())).newest == ours.newest
        with pytest.raises(BaselineError, match="peak_reserved_bytes was accepted as"):
            united(BASE, ours, accepted(BASE, 4, launch()))  # newer, and of what there was

    def test_first_recordings_that_do_not_agree_are_one_too(self) -> None:
        with pytest.raises(BaselineError, match="tokens_per_second_per_gpu was accepted as"):
            united(None, BASE, accepted(None, 2, launch(0.11)))

    def test_what_is_exact_and_changed_on_one_side_is_one_too(self) -> None:
        ours = accepted(BASE, 20, launch(evidence={"liger_modules": 3}), reason="fewer kernels")
        theirs = accepted(BASE, 21, launch())
        with pytest.raises(BaselineError, match="not the same in theirs and ours"):
            united(BASE, ours, theirs)
        assert united(BASE, ours, BASE).history == ours.history

    def test_a_specs_own_tolerance_decides(self) -> None:
        wide = {**BASE.spec, "throughput_tolerance": 0.2}
        one = united(None, replace(BASE, spec=wide), replace(accepted(None, 2, launch(0.11)), spec=wide))
        assert steps(one) == [0.1, 0.11]

    def test_another_host_may_be_further_off(self) -> None:
        elsewhere = launch(0.103)
        elsewhere = replace(elsewhere, ranks=(replace(elsewhere.ranks[0], host="other"),))
        assert steps(united(None, BASE, accepted(None, 2, elsewhere))) == [0.1, 0.103]
        with pytest.raises(BaselineError, match="tokens_per_second_per_gpu was accepted as"):
            united(None, BASE, accepted(None, 2, launch(0.103)))


class TestNoMerge:
    @pytest.mark.parametrize(
        ("name", "other"), [("digest", replace(BASE, digest="x")), ("machine", replace(BASE, machine="x"))]
    )
    def test_of_two_cases(self, name: str, other: Baseline) -> None:
        with pytest.raises(BaselineError, match=f"ours is of {name} {getattr(BASE, name)}, theirs of x; take one side"):
            united(None, BASE, other)

    def test_where_one_took_back_what_was_accepted(self) -> None:
        base = accepted(BASE, 2, launch())
        for mine, yours, side in ((BASE, accepted(base, 3, launch()), "ours"), (base, BASE, "theirs")):
            with pytest.raises(BaselineError, match=f"in {side} what was accepted at 2026-01-02T00:00:00Z is gone"):
                united(base, mine, yours)


class TestLargestMicroBatch:
    @staticmethod
    def sized(old: CapacityBaseline | None, day: int, size: float) -> CapacityBaseline:
        entry = Accepted(
            recorded_at=f"2026-01-{day:02}T00:00:00Z",
            reason="why",
            launches=2,
            metrics={"max_micro_batch_size": size, "peak_reserved_bytes": 2.0**35 + day},
        )
        names = {"id": SPEC.capacity_id, "digest": SPEC.capacity_digest, "machine": "m", "recorded_by": "t.py::t"}
        new = CapacityBaseline(**names, spec=SPEC.to_dict(), anchor=entry, history=(entry,))
        return accept_capacity(old, new)

    def test_the_newest_counts_and_the_first_is_the_anchor(self) -> None:
        base = self.sized(None, 1, 37)
        ours, theirs = self.sized(base, 3, 40), self.sized(base, 2, 37)
        for one in (united_capacity(base, ours, theirs), united_capacity(base, theirs, ours)):
            assert (days(one), one.size, one.anchor) == ([1, 2, 3], 40, base.anchor)

    @pytest.mark.parametrize(("mine", "yours"), [(40, 41), (36, 37), (40, 37)])
    def test_sizes_that_do_not_agree_are_a_conflict(self, mine: int, yours: int) -> None:
        base = self.sized(None, 1, 37)
        with pytest.raises(BaselineError, match=f"max_micro_batch_size was accepted as {mine} in ours, {yours} in"):
            united_capacity(base, self.sized(base, 2, mine), self.sized(base, 3, yours))
