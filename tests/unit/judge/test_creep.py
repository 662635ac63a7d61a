"""Creep: what many small steps add up to is held against the best that was accepted since the last reason."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_llmperf.judge.acceptance import best, creep
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.store import BaselineError
from pytest_llmperf.judge.verdict import Judgement, joined, judge, phase_checks
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Check
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tests.shelf import accept

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4)
POLICY = Policy.for_gpu()


def on(host: str, seconds: float = 0.1, **fake: Any) -> list[Launch]:
    """Two launches there."""
    one = launch_of(SPEC, Fake(step_seconds=seconds, **fake))
    ranks = tuple(replace(rank, host=host, device=f"GPU {host}", boot=host) for rank in one.ranks)
    return [replace(one, ranks=ranks)] * 2


def judged(old: Baseline | None, launches: Sequence[Launch]) -> tuple[Judgement, tuple[str, ...]]:
    judgement = judge(launches, old, POLICY)
    phases = phase_checks(launches, old or None, POLICY)
    judgement = joined(judgement, phases.checks, undecided=False)
    return judgement, creep(old, judgement.checks, launches, POLICY.noise) if old else ()


def refreshed(old: Baseline | None, launches: Sequence[Launch], reason: str = "", day: int = 1) -> Baseline:
    judgement, crept = judged(old, launches)
    return accept(
        old,
        judged=old,
        spec=SPEC,
        machine="m",
        launches=launches,
        verdict=judgement.verdict,
        checks=judgement.checks,
        reason=reason,
        recorded_at=f"2026-01-{day:02}T00:00:00Z",
        recorded_by="t.py::t",
        changed=crept,
    )


def after_a_gain() -> Baseline:
    return refreshed(refreshed(None, on("a")), on("a", 0.1 / 1.1), day=2)


def refused_at(baseline: Baseline, steps: Sequence[list[Launch]]) -> tuple[int, Baseline, str]:
    """Which refresh is the first that needs a reason, what was accepted until then, and what is said."""
    for number, launches in enumerate(steps, 1):
        try:
            baseline = refreshed(baseline, launches, day=number + 2)
        except BaselineError as error:
            return number, baseline, str(error)
    return 0, baseline, ""


class TestSmallSteps:
    SLOWER = tuple(on(f"host{n}", 0.1 / 1.1 * 1.005**n) for n in range(1, 21))

    def test_a_slow_loss_after_a_gain_needs_a_reason_where_it_crosses_the_tolerance(self, golden: Golden) -> None:
        number, _, said = refused_at(after_a_gain(), self.SLOWER)
        assert 10 <= number <= 12  # of new hosts 5 % are tolerated
        assert "(creep: tokens_per_second_per_gpu" in said
        golden(said)

    def test_who_says_why_begins_anew(self) -> None:
        number, baseline, _ = refused_at(after_a_gain(), self.SLOWER)
        launches = self.SLOWER[number - 1]
        explained = refreshed(baseline, launches, reason="a driver", day=25)
        assert judged(explained, launches)[1] == ()
        rate = "tokens_per_second_per_gpu"
        assert best(explained.history, rate) == explained.history[-1].metrics[rate]
        assert best(baseline.history, rate) == max(entry.metrics[rate] for entry in baseline.history)

    def test_a_run_without_an_update_tells_it(self) -> None:
        number, baseline, _ = refused_at(after_a_gain(), self.SLOWER)
        judgement, crept = judged(baseline, self.SLOWER[number - 1])
        assert judgement.verdict in ("pass", "inconclusive")
        assert len(crept) == 1
        assert "of 2026-01-" in crept[0]

    def test_memory_that_grows_a_little_at_a_time_needs_a_reason(self, golden: Golden) -> None:
        grown = [on("a", reserved_bytes=round(2**30 * 1.009**n)) for n in range(1, 21)]
        number, baseline, said = refused_at(refreshed(None, on("a")), grown)
        assert number == 1  # beyond what is the same in two launches
        golden(said)
        assert judged(baseline, grown[0])[1] == ()

    def test_a_first_step_that_grows_is_creep_too(self) -> None:
        grown = [on("a", first_step_seconds=10 * 1.3**n) for n in range(1, 6)]
        number, _, said = refused_at(refreshed(None, on("a", first_step_seconds=10)), grown)
        assert (number, "creep: first_step_seconds" in said) == (3, True)

    def test_imports_are_held_against_launches_that_began_alike(self) -> None:
        def cold(seconds: float) -> list[Launch]:
            return [replace(one, phases={"imports": seconds}) for one in on("a")]

        number, _, said = refused_at(refreshed(None, cold(40)), [cold(55), cold(70), cold(85)])
        assert (number, "creep: imports_seconds" in said) == (3, True)

    def test_next_to_nothing_may_double(self) -> None:
        baseline = refreshed(None, on("a", first_step_seconds=0.2))
        assert judged(baseline, on("a", first_step_seconds=2.0))[1] == ()


class TestNoise:
    @pytest.mark.parametrize("sd", [0.007, 0.0126, 0.02])
    def test_hosts_that_differ_are_no_creep(self, sd: float) -> None:
        chance, asked = random.Random(5), 0
        for _ in range(5):
            baseline = refreshed(None, on("first"))
            for number in range(20):
                launches = on(f"h{number}", 0.1 * (1 + chance.gauss(0, sd)))
                judgement, crept = judged(baseline, launches)
                asked += bool(crept)
                if judgement.verdict == "pass" and not crept:
                    baseline = refreshed(baseline, launches, day=number + 2)
        assert asked <= (sd == 0.02)  # of a hundred

    def test_an_odd_lean_launch_is_not_what_all_are_held_against(self) -> None:
        sizes = [1.0, 1.004, 0.998, 1.003, 0.997, 1.002]
        baseline = None
        for day, size in enumerate(sizes, 1):
            baseline = refreshed(baseline, on("a", reserved_bytes=round(2**30 * size)), day=day)
        assert baseline is not None
        assert judged(baseline, on("a", reserved_bytes=round(2**30 * 1.0075)))[1] == ()


def test_what_steps_leave_behind_and_its_limit_lets_through_is_no_creep(golden: Golden) -> None:
    baseline = after_a_gain()
    entries = tuple(replace(each, metrics={**each.metrics, "allocated_growth_bytes": 0.0}) for each in baseline.history)
    check = Check(
        metric="allocated_growth_bytes",
        value=106.7,
        unit="bytes",
        baseline=0.0,
        limit=65536,
        tolerance=0.1,
        verdict="pass",
    )
    stored = replace(baseline, history=entries)
    assert creep(stored, [check], on("a"), POLICY.noise) == ()
    golden(creep(stored, [replace(check, value=7e4)], on("a"), POLICY.noise)[0])
