"""Scaling efficiency: the ratio, its noise, and which of two changes fails a wide case."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.acceptance import creep
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy, Rule
from pytest_llmperf.judge.run_effects import Narrow, Terms, judge_efficiency, less, milder
from pytest_llmperf.judge.stats import Difference
from pytest_llmperf.judge.store import BaselineError
from pytest_llmperf.judge.verdict import Decided, Judgement, joined, judge
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import VERDICTS, Check, Verdict
from pytest_llmperf.settings.spec import is_narrower
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tests.shelf import accept

WIDE = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, gpus=4)
ONE = replace(WIDE, gpus=1)
POLICY = Policy.for_gpu()
RULE = Rule()
VERDICT = st.sampled_from(["regressed", "inconclusive", "improved", "pass"])


def launches(spec: TrainSpec, *seconds: float) -> tuple[Launch, ...]:
    return tuple(launch_of(spec, Fake(step_seconds=each)) for each in seconds)


def baseline_of(spec: TrainSpec, *seconds: float) -> Baseline:
    runs = launches(spec, *seconds)
    return accept(
        None,
        judged=None,
        spec=spec,
        machine="m",
        launches=runs,
        verdict="new",
        checks=judge(runs, None, POLICY).checks,
        reason="",
        recorded_at="2026-01-01T00:00:00Z",
        recorded_by="t.py::t",
    )


# 1.00 s on one GPU and 1.05 s on four: 95.2 %.
WIDE_BASELINE = baseline_of(WIDE, 1.05, 1.05, 1.05)
ONE_BASELINE = baseline_of(ONE, 1.0, 1.0, 1.0)


def found(wide: tuple[float, ...], one: tuple[float, ...], **values: Any) -> Decided:
    """Four GPUs at these step times over one GPU at those, measured in this run."""
    narrow = Narrow(gpus=1, launches=launches(ONE, *one), baseline=ONE_BASELINE, in_this_run=True)
    arguments: dict[str, Any] = {"baseline": WIDE_BASELINE, "narrow": narrow, "terms": Terms()} | values
    policy = replace(POLICY, rule=RULE, noise=arguments.pop("noise", POLICY.noise))
    return judge_efficiency(launches(WIDE, *wide), policy=policy, **arguments)


def test_an_unchanged_efficiency_passes_and_says_what_it_is_over(golden: Golden) -> None:
    check = found((1.05, 1.05), (1.0, 1.0)).check
    assert check.value == pytest.approx(1 / 1.05)
    assert check.baseline == pytest.approx(1 / 1.05)
    assert check.verdict == "pass"
    golden(check.detail)


def test_a_wide_case_that_became_slower_alone_has_lost_efficiency(golden: Golden) -> None:
    result = found((1.25, 1.25), (1.0, 1.0))
    assert result.check.verdict == "regressed"
    golden(result.check.detail)
    assert not result.undecided
    assert result.check.change == pytest.approx(1.05 / 1.25 - 1, abs=1e-3)
    assert result.check.limit is not None
    assert result.check.value < result.check.limit < 1 / 1.05


def test_a_faster_narrow_case_fails_nothing_and_is_told(golden: Golden) -> None:
    result = found((1.05, 1.05), (0.85, 0.85))
    assert (result.check.verdict, result.undecided) == ("pass", False)
    assert result.check.change == pytest.approx(0.85 - 1, abs=1e-3)
    golden(result.check.detail)


def test_where_both_widths_lost_as_much_it_is_not_scaling(golden: Golden) -> None:
    check = found((1.3, 1.3), (1.3 / 1.05, 1.3 / 1.05)).check
    assert check.verdict == "pass"
    golden(check.detail)


def test_a_slower_narrow_case_is_no_praise() -> None:
    assert found((1.05, 1.05), (1.3, 1.3)).check.verdict == "pass"
    assert found((0.85, 0.85), (1.0, 1.0)).check.verdict == "improved"


def test_one_launch_condemns_nobody() -> None:
    assert found((1.3,), (1.0,)).undecided
    assert found((1.3, 1.05, 1.05, 1.05), (1.0,)).check.verdict != "regressed"


def test_a_stored_narrow_width_is_shown_and_judges_nothing(golden: Golden) -> None:
    stored = Narrow(gpus=1, launches=ONE_BASELINE.launches, baseline=ONE_BASELINE, in_this_run=False)
    check = found((1.3, 1.3), (), narrow=stored).check
    assert (check.verdict, check.tolerance) == (None, None)
    assert check.baseline == pytest.approx(1 / 1.05)
    golden(check.detail)
    floor = found((1.5, 1.5), (), narrow=stored, terms=Terms(at_least=0.8)).check
    assert (floor.verdict, floor.limit) == ("regressed", 0.8)


@pytest.mark.parametrize(("wide", "verdict"), [((1.05,), "pass"), ((1.5,), "inconclusive"), ((1.5, 1.5), "regressed")])
def test_a_floor_needs_no_baseline(wide: tuple[float, ...], verdict: str) -> None:
    result = found(wide, (1.0, 1.0), baseline=None, terms=Terms(at_least=0.85))
    assert (result.check.verdict, result.check.limit) == (verdict, 0.85)
    assert result.undecided == (verdict == "inconclusive")


def on_a_host(runs: tuple[Launch, ...], host: str) -> tuple[Launch, ...]:
    return tuple(
        replace(run, ranks=tuple(replace(rank, host=host, device=f"GPU {rank.rank}") for rank in run.ranks))
        for run in runs
    )


@pytest.mark.parametrize(
    ("efficiency", "verdict", "another"),
    [
        (0.87, "pass", False),
        (0.823, "inconclusive", True),
        (0.815, "inconclusive", False),
        (0.72, "inconclusive", True),
    ],
)
def test_launches_that_could_show_nothing_of_a_floor_are_not_spent(
    efficiency: float, verdict: str, another: bool
) -> None:
    stored = on_a_host(ONE_BASELINE.launches, "then")
    narrow = Narrow(gpus=1, launches=stored, baseline=None, in_this_run=False)
    wide = on_a_host(launches(WIDE, 1 / efficiency), "now")
    # Most of the error is the hosts': no launch on this one narrows it.
    found = judge_efficiency(wide, None, narrow, POLICY, Terms(at_least=0.8))
    assert (found.check.verdict, found.undecided) == (verdict, another)


def test_a_floor_counts_what_each_gpu_does_where_widths_share_a_batch() -> None:
    half = replace(ONE, micro_batch_size=2)
    narrow = Narrow(gpus=1, launches=launches(half, 2.0, 2.0), baseline=None, in_this_run=True)
    check = found((1.05, 1.05), (), narrow=narrow, baseline=None, terms=Terms(at_least=0.9)).check
    assert check.value == pytest.approx(1 / 1.05)
    assert check.verdict == "pass"


def test_a_tolerance_of_its_own_sees_less() -> None:
    quiet = replace(POLICY.noise, **{name: replace(s, sd=1e-4) for name, s in vars(POLICY.noise).items()})
    slower = (1.05 * 1.012,) * 2
    assert found(slower, (1.0, 1.0), noise=quiet).check.verdict == "pass"
    assert found(slower, (1.0, 1.0), noise=quiet, terms=Terms(tolerance=0.005)).check.verdict == "regressed"


@given(ratio=VERDICT, own=VERDICT)
def test_a_loss_and_a_gain_need_both_words(ratio: Verdict, own: Verdict) -> None:
    verdict = milder(ratio, own)
    assert verdict == milder(own, ratio)
    assert (verdict == "regressed") == (ratio == own == "regressed")
    assert (verdict == "improved") == (ratio == own == "improved")


errors, degrees = st.floats(1e-4, 0.1), st.floats(1, 100)


@given(st.floats(-1, 1), st.floats(-1, 1), errors, errors, degrees, degrees)
def test_a_ratio_has_the_noise_of_both(
    wide: float, narrow: float, mine: float, theirs: float, df: float, other: float
) -> None:
    a, b = Difference(wide, mine, df, mine, (wide,)), Difference(narrow, theirs, other, theirs, (narrow,))
    ratio = less(a, b)
    assert ratio.log == pytest.approx(wide - narrow)
    assert ratio.error == pytest.approx(math.hypot(mine, theirs))
    assert min(df, other) * (1 - 1e-9) <= ratio.df <= (df + other) * (1 + 1e-9)


@given(st.floats(0.2, 5.0), st.integers(1, 3))
def test_whatever_the_narrow_case_does_a_wide_one_that_holds_passes(one: float, number: int) -> None:
    assert found((1.05, 1.05, 1.05), (one,) * number).check.verdict == "pass"


def test_noise_alone_raises_no_alarm() -> None:
    chance = random.Random(15)

    def night(seconds: float) -> tuple[float, ...]:
        day = chance.gauss(0, 0.004)
        return tuple(seconds * math.exp(day + chance.gauss(0, 0.004)) for _ in range(4))

    verdicts = [found(night(1.05), night(1.0), terms=Terms(at_least=0.94)).check.verdict for _ in range(200)]
    assert "regressed" not in verdicts
    assert verdicts.count("pass") > 100


class TestJoined:
    PASS = Judgement("pass", "within tolerance", ())

    def test_a_case_is_as_bad_as_its_efficiency(self) -> None:
        lost = Check(metric="scaling_efficiency", value=0.8, unit="1", limit=0.85, verdict="regressed")
        judgement = joined(self.PASS, (lost,), undecided=True)
        assert (judgement.verdict, judgement.undecided) == ("regressed", False)
        assert judgement.reason == "scaling_efficiency 0.8, limit 0.85"
        assert judgement.checks == (lost,)

    @given(st.sampled_from(VERDICTS), st.sampled_from(["regressed", "inconclusive", "improved", "pass"]))
    def test_the_worst_counts(self, verdict: Verdict, other: Verdict) -> None:
        judgement = joined(
            Judgement(verdict, "why", ()), (Check(metric="m", value=1.0, unit="1", verdict=other),), undecided=False
        )
        assert judgement.verdict == min([verdict, other], key=VERDICTS.index)
        assert judgement.reason


def test_a_series_differs_in_its_gpus_alone() -> None:
    assert is_narrower(ONE, WIDE)
    assert is_narrower(replace(ONE, steps=50), WIDE)  # how long it is measured is no part of the work
    assert not is_narrower(WIDE, ONE)
    assert not is_narrower(WIDE, WIDE)
    assert not is_narrower(replace(ONE, attention="eager"), WIDE)
    assert [spec.gpus for spec in WIDE.narrower()] == [1, 2, 3]
    assert all(is_narrower(spec, WIDE) for spec in WIDE.narrower())
    # What cannot be sharded as the wide one is has nothing to do with it, and is no error.
    sharded = replace(WIDE, gpus=4, mixed_precision="no", parallelism="fsdp_hybrid")
    assert not is_narrower(ONE, sharded)
    assert is_narrower(replace(ONE, mixed_precision="no"), sharded)
    assert not is_narrower(replace(sharded, gpus=4), replace(sharded, gpus=6, parallelism="fsdp"))


class TestAFloorAboveWhatIsStored:
    """A floor is a limit above the stored value: it does not turn round what is better."""

    def accepted(self, before: float, wide: tuple[float, ...], one: float, terms: Terms) -> tuple[Baseline, Check]:
        """Four GPUs of a baseline with this step time, accepted without a reason; one GPU took a second then."""
        baseline = baseline_of(WIDE, before, before, before)
        check = found(wide, (one, one), baseline=baseline, terms=terms).check
        judgement = joined(
            judge(launches(WIDE, *wide), baseline, replace(POLICY, rule=RULE)), (check,), undecided=False
        )
        new = accept(
            baseline,
            judged=baseline,
            spec=WIDE,
            machine="m",
            launches=launches(WIDE, *wide),
            verdict=judgement.verdict,
            checks=judgement.checks,
            reason="",
            recorded_at="2026-01-02T00:00:00Z",
            recorded_by="t.py::t",
        )
        return new, check

    def test_a_gain_needs_no_reason(self) -> None:
        new, check = self.accepted(1.12, (1.02, 1.02), 0.99, Terms(at_least=0.93))
        assert (check.verdict, len(new.launches)) == ("improved", 2)

    def test_a_loss_by_the_floor_needs_one_however_little_changed(self, golden: Golden) -> None:
        with pytest.raises(BaselineError) as raised:
            self.accepted(1.05, (1.055, 1.055), 0.95, Terms(at_least=0.95, tolerance=0.12))
        golden(raised)

    def test_a_rise_is_no_creep(self) -> None:
        new, check = self.accepted(1.12, (1.10, 1.10), 1.07, Terms(at_least=0.93))
        assert check.verdict == "pass"
        assert check.change == pytest.approx(0.0895, abs=1e-3)
        anchor = replace(new.anchor, metrics={"scaling_efficiency": check.value / 1.0895})
        held, noise = replace(new, anchor=anchor, history=(anchor,)), Policy.for_gpu().noise
        assert creep(held, (check,), new.launches, noise) == ()
        lower = replace(check, value=check.value / 1.2)
        assert creep(held, (lower,), new.launches, noise)[0].startswith("creep: scaling_efficiency 0.81")
