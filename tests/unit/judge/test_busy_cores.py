"""A CPU whose cores other programs use says nothing of a speed, and all of what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.judge.beside_baseline import BesideBaseline
from pytest_llmperf.judge.policy import Policy, StoredOfKind
from pytest_llmperf.judge.verdict import Judgement
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tests.shelf import baseline_at

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4, gpus=2)


def launch(slower: float = 1.0, waited: float = 0.0, others: float = 0.0, own: float = 1.0, **fake: Any) -> Launch:
    """One whose ranks waited for cores, used them and had others beside them for such shares of its training."""
    run = launch_of(SPEC, Fake(step_seconds=0.1 * slower, **fake))
    cores = tuple(each * run.train_seconds for each in (waited, own, 2 * own + others))
    return replace(run, ranks=tuple(replace(rank, core_seconds=cores) for rank in run.ranks))


untold = partial(launch_of, SPEC)


def held(launches: Sequence[Launch], stored: Sequence[Launch] = (untold(),)) -> BesideBaseline:
    baseline = replace(baseline_at(SPEC, 1000.0), launches=tuple(stored))
    return BesideBaseline(
        SPEC, tuple(launches), baseline, Policy.for_cpu(), StoredOfKind(BaselineStore(Path("/")), "m", on_cpu=True)
    )


def judged(launches: Sequence[Launch], stored: Sequence[Launch] = (untold(),)) -> Judgement:
    return held(launches, stored).judgement((), ())


def test_a_record_that_somebody_shortened_is_refused_in_a_line(golden: Golden) -> None:
    with pytest.raises(ValueError, match="core_seconds") as refused:
        replace(untold().ranks[0], core_seconds=(1.0, 2.0))
    golden(refused)


BUSY = launch(6.0, waited=1.3, others=1.4)


def test_a_slow_launch_whose_threads_waited_for_what_others_used_is_no_regression(golden: Golden) -> None:
    judgement = judged([BUSY, BUSY])
    golden([judgement.verdict, judgement.reason, *held([BUSY, BUSY]).of_judgement(judgement, on_cpu=True)])


@pytest.mark.parametrize(
    ("launches", "stored"),
    [
        ([launch(6.0), launch(6.0)], [untold()]),
        ([untold(Fake(step_seconds=0.6))] * 2, [launch()]),
        # More threads than cores, and nobody else.
        ([launch(6.0, waited=14.0, others=0.05)] * 2, [untold()]),
        # Each rank's others are its peers.
        ([launch(6.0, waited=1.3, own=2.0)] * 2, [launch(own=1.0)]),
        # Twice as slow as the waits explain.
        ([launch(16.0, waited=0.5, others=1.0)] * 2, [untold()]),
        # As it was when its baseline was recorded.
        ([BUSY, BUSY], [launch(waited=1.25, others=1.3)]),
        # What the stored launches waited too explains nothing.
        ([launch(9.0, waited=0.75, others=0.8)] * 2, [launch(waited=0.6, others=0.7)]),
        # Two of three were on idle cores.
        ([BUSY, launch(6.0), launch(6.0)], [untold()]),
    ],
)
def test_a_slow_launch_that_no_other_program_explains_is_one(launches: list[Launch], stored: list[Launch]) -> None:
    assert judged(launches, stored).verdict == "regressed"


def test_one_launch_on_idle_cores_condemns_nobody() -> None:
    assert judged([BUSY, BUSY, launch(6.0)]).verdict == "inconclusive"


def test_what_was_recorded_on_busy_cores_is_held_on_busier_ones() -> None:
    assert judged([BUSY, BUSY], [launch(waited=0.6, others=0.7)]).verdict == "inconclusive"


def test_what_is_exact_is_judged_on_busy_cores_too() -> None:
    large = replace(
        BUSY, ranks=tuple(replace(rank, peak_reserved_bytes=2**32, peak_allocated_bytes=2**32) for rank in BUSY.ranks)
    )
    judgement = judged([large] * 4)
    found = {check.metric: check.verdict for check in judgement.checks}
    assert judgement.verdict == "regressed"
    assert (found["peak_reserved_bytes"], found["tokens_per_second_per_gpu"]) == ("regressed", "inconclusive")


@pytest.mark.parametrize(("waited", "verdict"), [(1.3, "inconclusive"), (0.0, "regressed")])
def test_what_comes_before_the_steps_waits_as_they_do(waited: float, verdict: str) -> None:
    stored = replace(untold(), phases={"start": 4.0, "model": 1.0})
    slow = replace(launch(waited=waited, others=1.4), phases={"start": 28.0, "model": 1.0})
    judgement = judged([slow, slow], [stored])
    assert {check.metric: check.verdict for check in judgement.checks}["start_seconds"] == verdict
