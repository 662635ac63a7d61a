"""Loss curves: their parts, what is nothing, verdicts in both directions, and the file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.cli import main
from pytest_llmperf.judge.baseline import FEWEST_STEPS, LOSS_CURVES, BaselineStore, CurveBaseline, SeedCurve
from pytest_llmperf.judge.static_steps import entries_of_run
from pytest_llmperf.judge.store import BaselineError, Store, parse, text_of
from pytest_llmperf.judge.trainings import Span, judge_curve, parts_of, spans, spreads
from pytest_llmperf.records.result import OTHER_LEARNING, CurveWord, JudgedCurve
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.golden import Golden

STEPS = 32

SPEC = TrainSpec(model="llama-tiny", data="text", sequence_length=64, steps=STEPS, min_steps=STEPS)


def trainings(num: int, noise: float = 0.03, rng: int = 0, slope: float = 0.02) -> dict[int, tuple[float, ...]]:
    """Seeds, each with a level of its own and losses that fall."""
    draw = random.Random(rng)
    levels = [draw.gauss(6.0, noise) for _ in range(num)]
    return {
        42 + number: tuple(level - slope * step + draw.gauss(0, noise) for step in range(STEPS))
        for number, level in enumerate(levels)
    }


STORED = trainings(5)


def shifted(curves: Mapping[int, Sequence[float]], by: float) -> dict[int, tuple[float, ...]]:
    return {seed: tuple(loss + by for loss in losses) for seed, losses in curves.items()}


def in_turn(now: Mapping[int, Sequence[float]], then: Mapping[int, Sequence[float]]) -> JudgedCurve:
    """As the engine does: seed after seed until it is decided."""
    told = [judge_curve({seed: now[seed] for seed in list(then)[:num]}, then) for num in range(1, len(then) + 1)]
    return next((one for one in told if one.verdict != "undecided"), told[-1])


def test_parts_are_as_long_as_all_before_them(golden: Golden) -> None:
    assert spans(100) == (Span(2, 12), Span(13, 25), Span(26, 50), Span(51, 100))
    assert parts_of(range(1, 17)) == (2, 3.5, 6.5, 12.5)
    with pytest.raises(ValueError, match="15 steps, expected") as raised:
        spans(15)
    golden(raised)


@given(st.integers(FEWEST_STEPS, 5000))
def test_parts_have_every_step_but_the_first(steps: int) -> None:
    found = [step for span in spans(steps) for step in range(span.first, span.last + 1)]
    assert found == list(range(2, steps + 1))


def test_rounding_and_a_share_of_what_seeds_do_are_nothing() -> None:
    alike = spreads([[6.0] * STEPS, [6.0] * STEPS, [6.0] * STEPS])
    assert {part.nothing for part in alike} == {0.006}
    apart = spreads([[5.0] * STEPS, [6.0] * STEPS, [7.0] * STEPS])
    assert {part.nothing for part in apart} == {0.25}


def test_the_first_seed_decides_where_nothing_changed(golden: Golden) -> None:
    told = judge_curve({42: STORED[42]}, STORED)
    assert told.verdict == "same"
    golden(told.reason)
    near = judge_curve({42: shifted(STORED, 0.002)[42]}, STORED)
    assert near.verdict == "same"
    golden(near.reason)
    assert all(part.seen is None for part in near.parts)


@pytest.mark.parametrize(("by", "word", "how"), [(0.05, "worse", "more slowly"), (-0.05, "faster", "labels that leak")])
def test_other_losses_of_all_seeds_are_told_in_either_direction(by: float, word: str, how: str) -> None:
    told = in_turn(shifted(STORED, by), STORED)
    assert (told.verdict, told.seeds) == (word, (42, 43, 44, 45, 46))
    assert how in told.reason
    assert all(part.difference == pytest.approx(by) for part in told.parts)


@pytest.mark.parametrize(("by", "word"), [(2.0, "worse"), (-2.0, "faster")])
def test_what_no_seed_does_is_told_by_two(by: float, word: str) -> None:
    told = in_turn(shifted(STORED, by), STORED)
    assert (told.verdict, told.seeds) == (word, (42, 43))


def test_a_fault_of_late_steps_alone_is_told_by_its_part(golden: Golden) -> None:
    late = {
        seed: tuple(loss + 0.1 * (step >= STEPS // 2) for step, loss in enumerate(losses))
        for seed, losses in STORED.items()
    }
    told = in_turn(late, STORED)
    assert told.verdict == "worse"
    golden(told.reason)


def test_one_pair_apart_is_no_other_training() -> None:
    now = {**STORED, 42: shifted(STORED, 0.03)[42]}
    told = in_turn(now, STORED)
    assert told.verdict in ("same", "undecided")
    assert len(told.seeds) == 5


def test_what_is_known_too_badly_is_undecided_and_tells_what_would_have_been_seen(golden: Golden) -> None:
    told = in_turn(trainings(5, rng=1), STORED)
    assert told.verdict == "undecided"
    golden(told.reason)
    # Three pairs know less than that they are the same.
    three = {seed: STORED[seed] for seed in (42, 43, 44)}
    slower = {seed: shifted(three, by)[seed] for seed, by in zip(three, (0.02, 0.03, 0.04), strict=True)}
    assert in_turn(slower, three).verdict == "undecided"


@pytest.mark.simulated
def test_seeds_that_share_nothing_raise_hardly_an_alarm() -> None:
    told = [in_turn(trainings(5, rng=2 * draw), trainings(5, rng=2 * draw + 1)).verdict for draw in range(1500)]
    # One in a thousand is allowed; of four parts that belong together fewer are expected.
    assert sum(word in OTHER_LEARNING for word in told) <= 4


@given(
    st.lists(st.lists(st.floats(0.01, 15), min_size=STEPS, max_size=STEPS), min_size=6, max_size=6),
    st.sampled_from([0.25, 2.0, 1024.0]),  # exact, so that nothing turns at an edge
)
def test_verdicts_are_the_same_in_any_unit(curves: list[list[float]], unit: float) -> None:
    stored, now = dict(enumerate(curves[:3])), dict(enumerate(curves[3:]))
    told = judge_curve(now, stored)
    assert told.verdict in get_args(CurveWord)
    assert all(math.isfinite(part.loss) and part.nothing > 0 for part in told.parts)
    assert [part.loss for part in told.parts] == pytest.approx(
        [fmean(part) for part in zip(*map(parts_of, now.values()), strict=True)]
    )
    in_unit = [{seed: [unit * loss for loss in one] for seed, one in side.items()} for side in (now, stored)]
    assert judge_curve(*in_unit).verdict == told.verdict
    assert codec.read(JudgedCurve, json.loads(json.dumps(codec.plain(told)))) == told


def baseline(curves: Mapping[int, Sequence[float]] = STORED) -> CurveBaseline:
    return CurveBaseline(
        id=SPEC.id,
        digest=SPEC.digest,
        spec=SPEC.to_dict(),
        recorded_by="test_mine.py::test_it",
        recorded_at="2026-11-23T20:00:00Z",
        curves=tuple(SeedCurve(seed=seed, losses=tuple(losses)) for seed, losses in curves.items()),
        reason="why",
        versions={"torch": "2.11"},
    )


def test_a_file_keeps_losses_to_the_last_digit_of_float32(tmp_path: Path, golden: Golden) -> None:
    store = Store(tmp_path, CurveBaseline)
    assert store.load(LOSS_CURVES, SPEC) is None
    store.check_writable(LOSS_CURVES, SPEC)
    path = store.replace(SPEC, None, baseline())
    assert path == tmp_path / "loss-curves" / f"{SPEC.id}.json"
    found = store.load(LOSS_CURVES, SPEC)
    assert found is not None
    assert (found.seeds, found.steps) == ((42, 43, 44, 45, 46), STEPS)
    golden(judge_curve(STORED, found.losses).reason)
    assert parse(CurveBaseline, text_of(found), "it") == found
    with pytest.raises(BaselineError) as raised:
        store.replace(SPEC, None, baseline())
    golden(raised)
    assert store.replace(SPEC, found, replace(baseline(), reason="other")) == path


def test_other_searches_of_the_folder_do_not_see_it(tmp_path: Path) -> None:
    store = Store(tmp_path, CurveBaseline)
    store.check_writable(LOSS_CURVES, SPEC)
    store.replace(SPEC, None, baseline())
    assert BaselineStore(tmp_path).machines() == []
    assert [entry.digest for entry in entries_of_run(tmp_path, "m", on_cpu=False)] == [SPEC.digest]
    assert entries_of_run(tmp_path, "m", on_cpu=True) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": "cpu"}, 'machine is "cpu", which is unknown'),
        ({"curves": []}, "its seeds are none, expected 3 or more"),
        ({"curves": [{"seed": 1, "losses": [1.0] * 20}] * 3}, "its seeds are 1, 1, 1, expected 3 or more"),
        ({"curves": [{"seed": n, "losses": [1.0] * (20 + n)} for n in range(3)]}, "its curves are of 20, 21, 22 steps"),
        ({"curves": [{"seed": n, "losses": [1.0] * 8} for n in range(3)]}, "its curves are of 8 steps"),
        ({"curves": [{"seed": n, "losses": "1.0"} for n in range(3)]}, "losses is"),
        ({"curves": 7}, "curves is 7, expected a list"),
        ({"digest": "0" * 16}, "is of other settings than its digest"),
        ({"more": 1}, "which is unknown"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(change: Mapping[str, object], said: str) -> None:
    document = {**json.loads(text_of(baseline())), **change}
    with pytest.raises(BaselineError, match=r"^it: ") as caught:
        parse(CurveBaseline, json.dumps(document), "it")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    store = Store(tmp_path, CurveBaseline)
    store.check_writable(LOSS_CURVES, SPEC)
    path = store.replace(SPEC, None, baseline())
    assert main(["baselines", "show", str(path)]) == 0
    told = capsys.readouterr().out
    assert "5 seeds (42, 43, 44, 45, 46) of 32 steps" in told
    assert "17 to 32" in told
    path.write_text("{")
    assert main(["baselines", "show", str(path)]) == 1
    golden(capsys.readouterr().err)


def test_a_file_of_other_settings_is_not_used(tmp_path: Path, golden: Golden) -> None:
    store = Store(tmp_path, CurveBaseline)
    other = replace(SPEC, micro_batch_size=2)
    path = store.path(LOSS_CURVES, other)
    path.parent.mkdir()
    path.write_text(text_of(baseline()))
    with pytest.raises(BaselineError) as raised:
        store.load(LOSS_CURVES, other)
    golden(raised)
