"""Where a bisection looks next, and on which side of the middle launches are shown to be."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.pairs import (
    Look,
    Side,
    Yardstick,
    compared_ends,
    criteria,
    is_shown,
    side_of,
    side_of_difference,
)
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.stats import Difference, Noise, Spread
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Candidate
from pytest_llmperf.run.bisection import Lineage, most_steps
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.examples import examples
from tests.fakes import Fake, launch_of

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12)
QUIET = Policy.for_gpu()
_STILL = Spread(0.0, 1e6)


def line(num: int) -> Lineage:
    return Lineage([Candidate(str(number), (str(number - 1),)) for number in range(num)])


def searched(lineage: Lineage, side: dict[str, Side]) -> tuple[dict[str, Side], list[str]]:
    """What becomes known where each candidate is as ``side`` says, and those that were asked, in their order."""
    known: dict[str, Side] = {lineage.bad.name: "bad"}
    asked = []
    while (candidate := lineage.following(known)) is not None:
        known[candidate.name] = side[candidate.name]
        asked.append(candidate.name)
    return known, asked


@given(st.integers(1, 300).flatmap(lambda num: st.tuples(st.just(num), st.integers(0, num - 1))))
def test_the_first_bad_of_a_line_is_found_by_the_logarithm_of_its_length(case: tuple[int, int]) -> None:
    num, first = case
    lineage = line(num)
    known, asked = searched(lineage, {str(one): "bad" if one >= first else "good" for one in range(num)})
    assert [one.name for one in lineage.suspects(known)] == [str(first)]
    assert len(asked) <= most_steps(num) == math.ceil(math.log2(num))
    assert lineage.before(lineage.suspects(known)[0], known) == (str(first - 1) if first else None)


@given(st.data())
def test_where_some_are_skipped_the_range_has_the_first_bad_one_and_no_more_than_they_hide(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 60))
    first = data.draw(st.integers(0, num - 1))
    hidden = data.draw(st.sets(st.integers(0, num - 1))) - {num - 1}
    sides: dict[str, Side] = {
        str(one): "skipped" if one in hidden else "bad" if one >= first else "good" for one in range(num)
    }
    lineage = line(num)
    known, asked = searched(lineage, sides)
    suspects = [int(one.name) for one in lineage.suspects(known)]
    least = next(one for one in range(first, num) if one not in hidden)
    last_good = max((one for one in range(first) if one not in hidden), default=-1)
    assert suspects == list(range(last_good + 1, least + 1))
    assert first in suspects
    assert len(asked) == len(set(asked))


@st.composite
def merges(draw: st.DrawFn) -> Lineage:
    """A history in which each follows one or two before it, and the last all ends."""
    num = draw(st.integers(1, 25))
    made: list[Candidate] = []
    for number in range(num):
        parents = draw(st.sets(st.integers(-1, number - 1), min_size=1, max_size=2))
        made.append(Candidate(str(number), tuple(map(str, parents))))
    followed = {name for one in made for name in one.parents}
    heads = tuple(one.name for one in made if one.name not in followed)
    return Lineage([*made, Candidate("last", heads)])


@given(merges(), st.randoms(use_true_random=False))
def test_of_merges_the_one_is_found_that_all_bad_ones_follow(lineage: Lineage, chance: random.Random) -> None:
    first = chance.choice(lineage.candidates)
    bad = {first.name}
    for one in lineage.candidates:
        if bad & set(one.parents):
            bad.add(one.name)
    sides: dict[str, Side] = {one.name: "bad" if one.name in bad else "good" for one in lineage.candidates}
    known, _ = searched(lineage, sides)
    assert lineage.suspects(known) == (first,)


def test_of_a_merge_a_branch_is_left_out_once_its_end_is_good() -> None:
    names = {"a": (), "b": ("a",), "x": (), "y": ("x",), "m": ("b", "y")}
    lineage = Lineage([Candidate(name, parents) for name, parents in names.items()])
    known: dict[str, Side] = {"m": "bad", "y": "good"}
    assert [one.name for one in lineage.suspects(known)] == ["a", "b", "m"]
    assert lineage.before(lineage.candidates[1], {**known, "a": "good"}) == "a"
    assert lineage.before(lineage.candidates[4], {**known, "b": "good"}) == "b"


def _seen(each: list[float], sd: float) -> Difference:
    num = len(each)
    return Difference(math.fsum(each) / num, sd / math.sqrt(num), math.inf, sd, tuple(each))


def _ends(truth: float, sd: float, alpha: float, chance: random.Random) -> Yardstick | None:
    """How far apart they are seen to be; ``None``: they could not be told apart."""
    each = [chance.gauss(truth, sd)]
    while len(each) < 8:
        each.append(chance.gauss(truth, sd))
        seen = _seen(each, sd)
        if is_shown(seen.log, seen, alpha / 2, 8):
            return Yardstick("speed", seen.log, seen.error)
    return None


def _decided(truth: float, sd: float, ends: Yardstick, alpha: float, chance: random.Random) -> tuple[Look, int]:
    each: list[float] = []
    while True:
        each.append(chance.gauss(truth, sd))
        told = side_of_difference(_seen(each, sd), ends, alpha=alpha, budget=8)
        if not told.goes_on:
            return told, len(each)


@examples(12)
@given(
    num=st.integers(2, 40),
    share=st.floats(0, 1, exclude_max=True),
    sign=st.sampled_from([-1, 1]),
    in_sds=st.floats(3, 20),
)
def test_with_known_noise_at_least_95_of_100_searches_do_not_lose_the_first_bad_one(
    num: int, share: float, sign: int, in_sds: float
) -> None:
    """Of a change of three times a pair's scatter: nearer to it, ends that chance enlarged are what is searched."""
    first, sd, wrong, tries = int(share * num), 0.003, 0, 200
    alpha = 0.05 / (most_steps(num) + 2)
    chance = random.Random(f"{num} {first} {sign} {in_sds:.2f}")
    for _ in range(tries):
        lineage, size = line(num), sign * in_sds * sd
        ends = _ends(size, sd, alpha, chance)
        if ends is None:  # it ends here, and names nothing
            continue
        sides: dict[str, Side] = {str(num - 1): "bad"}
        while (candidate := lineage.following(sides)) is not None:
            truth = size if int(candidate.name) >= first else 0.0
            told, _ = _decided(truth, sd, ends, alpha, chance)
            assert told.side is not None
            sides[candidate.name] = told.side
        wrong += str(first) not in [one.name for one in lineage.suspects(sides)]
    # Of 200 with one in twenty wrong, 19 and more are so one time in a hundred.
    assert wrong < 19


def test_a_large_change_takes_one_pair_a_step_and_a_small_one_more() -> None:
    chance = random.Random(1)
    large = [_decided(0.05, 0.003, Yardstick("speed", 0.05), 0.01, chance)[1] for _ in range(50)]
    small = [_decided(0.005, 0.003, Yardstick("speed", 0.005), 0.01, chance) for _ in range(50)]
    assert set(large) == {1}
    assert max(num for _, num in small) > 1
    assert {told.side for told, _ in small} <= {"bad", "skipped"}


def test_one_in_the_middle_stays_undecided_and_says_so() -> None:
    told = side_of_difference(
        Difference(0.01, 0.001, math.inf, 0.003, (0.01,) * 8), Yardstick("speed", 0.02), alpha=0.01, budget=8
    )
    assert told == Look(
        False, "skipped", "undecided by 8 pairs: +1.0% of step time, too near the middle between good and bad"
    )


def pair(*, good: Fake | None = None, bad: Fake | None = None) -> tuple[Launch, Launch]:
    return launch_of(SPEC, good), launch_of(SPEC, bad)


OPERATORS = {"operator": {"aten::mm": 10.0}}
MORE = {"operator": {"aten::mm": 14.0}}


class TestTheEnds:
    def test_a_slower_end_is_told_by_speed(self) -> None:
        told = compared_ends(
            [pair(bad=Fake(step_seconds=0.12))] * 2, QUIET, criteria(None, on_cpu=False), alpha=0.01, budget=8
        )
        assert told.yardstick is not None
        assert told.yardstick.by == "speed"
        assert told.yardstick.size == pytest.approx(math.log(1.2))

    def test_one_pair_alone_may_have_met_a_neighbour(self) -> None:
        order = criteria("speed", on_cpu=False)
        slower = pair(bad=Fake(step_seconds=0.2))
        assert compared_ends([slower], QUIET, order, alpha=0.01, budget=8).goes_on
        assert compared_ends([slower], QUIET, order, alpha=0.01, budget=1).yardstick is not None
        once = compared_ends([slower, pair()], QUIET, order, alpha=0.01, budget=2)
        assert (once.goes_on, once.yardstick) == (False, None)

    def test_unless_it_is_asked_for_a_cpus_clock_tells_only_what_is_beyond_its_tolerance(self) -> None:
        pairs = [pair(bad=Fake(step_seconds=0.3))] * 4
        still = Policy.for_cpu()
        assert compared_ends(pairs, still, criteria("speed", on_cpu=True), alpha=0.01, budget=4).yardstick
        assert not compared_ends(pairs, still, criteria(None, on_cpu=True), alpha=0.01, budget=4).yardstick

    def test_ends_that_are_the_same_are_a_tie(self) -> None:
        still = Policy(QUIET.tolerances, Noise(host=_STILL, site=_STILL, session=_STILL, launch=Spread(1e-6, 1e6)))
        told = compared_ends([pair()], still, criteria(None, on_cpu=False), alpha=0.01, budget=8)
        assert (told.goes_on, told.yardstick) == (False, None)

    def test_ends_that_may_still_differ_take_another_pair(self) -> None:
        told = compared_ends(
            [pair(bad=Fake(step_seconds=0.1005))], QUIET, criteria(None, on_cpu=False), alpha=0.01, budget=8
        )
        assert told.goes_on

    @pytest.mark.parametrize(
        ("by", "bad"),
        [
            ("memory", Fake(reserved_bytes=2**31)),
            ("counts", Fake(trace=MORE)),
            ("evidence", Fake(evidence={"optimizer": "SGD"}, trace=OPERATORS)),
        ],
    )
    def test_what_is_exact_tells_by_one_pair(self, by: str, bad: Fake) -> None:
        pairs = [pair(good=Fake(trace=OPERATORS), bad=bad)]
        order = criteria(None if by == "counts" else by, on_cpu=True)  # type: ignore[arg-type]
        told = compared_ends(pairs, QUIET, order, alpha=0.01, budget=8)
        assert told.yardstick is not None
        assert told.yardstick.by == by
        assert side_of(pairs, told.yardstick, QUIET, alpha=0.01, budget=8) == Look(False, "bad")
        same = [pair(good=Fake(trace=OPERATORS), bad=Fake(trace=OPERATORS))]
        assert side_of(same, told.yardstick, QUIET, alpha=0.01, budget=8) == Look(False, "good")

    def test_what_was_not_traced_cannot_be_told_by_counts(self) -> None:
        ends = compared_ends(
            [pair(good=Fake(trace=OPERATORS), bad=Fake(trace=MORE))], QUIET, ["counts"], alpha=0.01, budget=8
        )
        assert ends.yardstick is not None
        told = side_of([pair(good=Fake(trace=OPERATORS))], ends.yardstick, QUIET, alpha=0.01, budget=8)
        assert told == Look(False, "skipped", "its launches do not tell of operators_per_step")
