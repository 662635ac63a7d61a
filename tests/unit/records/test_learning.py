"""What ranks saw of an inspected step, as one; and what of it is held against a launch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.repeats import changed_gradients
from pytest_llmperf.judge.validity import notes, troubles, unlearnt
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.learning import OLDER, Learning, RankLearning, ReplayedUpdate, TensorSeen, merged_learning
from pytest_llmperf.records.trace import UNWANTED
from pytest_llmperf.support import codec
from tests.fakes import launch_of
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny", attention="sdpa", sequence_length=64, steps=20)

REPLAY = ReplayedUpdate(
    tensors=2, asked="AdamW", roundings=2.5, tensor="a", figure="weight", found=0.25, expected=0.25, counts=(24, 24)
)
SOUND = Learning(
    tensors=2,
    gradient_norm=2.0,
    clip_factors=(0.5, 0.5),
    max_norm=1.0,
    largest_update=1.0,
    update_bound=3.2,
    replay=REPLAY,
    learning_rates=(5e-5, 5e-5),
    scheduled_rate=5e-5,
    steps=24,
    schedule_steps=24,
    future=0.0,
)


def launch(learning: Learning = SOUND, **values: Any) -> Launch:
    return replace(launch_of(SPEC), learning=learning, **values)


def tensor(name: str = "a", **values: Any) -> TensorSeen:
    seen = {"is_updated": True, "is_reached": True, "has_moved": True, "is_narrow": False, "weights": 1, "gradient": 2}
    return TensorSeen(name=name, **{**seen, **values})


def rank(*tensors: TensorSeen, **values: Any) -> RankLearning:
    squares = {"squares": 4.0, "clipped_squares": 1.0, "max_norm": 1.0, "steps": 24, "schedule_steps": 24}
    return RankLearning(tensors=tensors or (tensor(), tensor("b")), **{**squares, **values})


def test_ranks_that_saw_the_same_are_one() -> None:
    found = merged_learning([rank(samples=(0, 1)), rank(samples=(2, 3))])
    assert (found.tensors, found.gradient_norm, found.clip_factors) == (2, 2.0, (0.5, 0.5))
    assert (found.differing_weights, found.differing_gradients, found.shared_samples) == ((), (), 0)
    assert list(unlearnt(SPEC, launch(found))) == []


def test_the_norm_of_shards_is_of_all_of_them_and_of_replicas_of_one() -> None:
    shards = [rank(shard=0, squares=4.0), rank(shard=1, squares=5.0)]
    assert merged_learning(shards).gradient_norm == 3.0
    assert merged_learning([*shards, *shards]).gradient_norm == 3.0


def test_of_a_gradient_that_is_nothing_nothing_was_taken() -> None:
    found = merged_learning([rank(squares=0.0, clipped_squares=0.0, clip_factors=(0.5, 0.5))])
    assert (found.gradient_norm, found.clip_factors) == (0.0, (0.5, 1.0))


def test_a_rank_that_saw_nothing_is_named_where_there_are_several() -> None:
    blind = rank(none="no optimizer")
    assert merged_learning([blind]).none == "no optimizer"
    assert merged_learning([rank(), blind]).none == "rank 1: no optimizer"


def test_what_replicas_hold_differently_is_named_and_what_shards_hold_is_not(golden: Golden) -> None:
    other = rank(tensor(), tensor("b", weights=7, gradient=8))
    found = merged_learning([rank(), other])
    assert (found.differing_weights, found.differing_gradients) == (("b",), ("b",))
    assert merged_learning([rank(), replace(other, shard=1)]).differing_weights == ()
    lines = list(unlearnt(SPEC, launch(found)))
    golden(lines)


def test_an_empty_shard_does_not_make_a_tensor_still(golden: Golden) -> None:
    empty = tensor("b", is_reached=False, has_moved=False, weights=0, gradient=0)
    found = merged_learning([rank(shard=0), rank(tensor(), empty, shard=1)])
    assert (found.unreached, found.still) == ((), ())
    nowhere = merged_learning([rank(tensor(), empty, shard=0), rank(tensor(), empty, shard=1)])
    assert nowhere.unreached == ("b",)
    golden(unlearnt(SPEC, launch(nowhere)))


def test_what_does_not_move_is_lost_in_16_bits_and_a_fault_in_more(golden: Golden) -> None:
    wide, narrow = (
        merged_learning([rank(tensor(), tensor("b", has_moved=False, is_narrow=is_narrow))]) for is_narrow in (0, 1)
    )
    assert (wide.still, wide.lost) == (("b",), 0)
    assert (narrow.still, narrow.lost) == ((), 1)
    assert list(unlearnt(SPEC, launch(narrow))) == []
    (line,) = notes([launch(narrow)])
    golden(line)
    (said,) = unlearnt(SPEC, launch(wide))
    golden(said)


def test_samples_that_the_data_set_has_twice_may_be_read_twice() -> None:
    assert merged_learning([rank(samples=(0, 1)), rank(samples=(1, 2))]).shared_samples == 1
    assert merged_learning([rank(samples=(0, 1), ambiguous=frozenset({1})), rank(samples=(1, 2))]).shared_samples == 0
    assert merged_learning([rank(samples=(0, -1)), rank(samples=(-1, 2))]).foreign_samples == 2
    assert merged_learning([rank(samples=(-1, -1))]).shared_samples == 0


def test_samples_of_all_ranks_are_those_that_come_next_in_whatever_order() -> None:
    def misplaced(*read: tuple[int, ...], expected: tuple[int, ...] = (4, 5, 6, 6)) -> int:
        return merged_learning([rank(samples=each, expected_samples=expected) for each in read]).misplaced_samples

    assert misplaced((4, 6), (6, 5)) == 0
    assert misplaced((4, 4), (5, 6)) == 1
    assert misplaced((0, 1), (2, 3)) == 4
    assert misplaced((4, -1), (6, 5)) == 0  # told by itself
    assert misplaced((0, 1), (2, 3), expected=()) == 0


def test_the_worst_replay_of_all_ranks_is_the_launchs() -> None:
    far = replace(REPLAY, roundings=99.0, tensor="b", miscounted=("b",), counts=(1, 24))
    empty = replace(REPLAY, tensors=0, roundings=0.0, tensor="", counts=(0, 0))
    found = merged_learning([rank(replay=REPLAY), rank(replay=far), rank(replay=empty, shard=1)]).replay
    assert found == far
    assert merged_learning(
        [rank(replay=REPLAY), rank(replay=ReplayedUpdate(none="no formula"))]
    ).replay == ReplayedUpdate(none="no formula")
    assert merged_learning([rank(replay=empty)]).replay.counts == (0, 0)


def test_a_tensor_that_is_clipped_otherwise_than_the_whole_is_seen() -> None:
    assert merged_learning([rank(clip_factors=(0.5, 0.5)), rank(clip_factors=(0.1, 0.5))]).clip_factors == (0.1, 0.5)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"tensors": 0}, "no parameter asks for a gradient: nothing is trained"),
    "unheld": ({"unheld": ("a", "b", "c", "d")}, "the optimizer does not hold 4 of 2 tensors (a, b, c, …)"),
    "stale": ({"stale": 3}, "gradients of 3 tensors were not zero when a step began"),
    "unclipped": (
        {"clip_factors": (1.0, 1.0)},
        "gradients of norm 2 were multiplied by 1 when they were clipped to 1, expected 0.5",
    ),
    "clipped apart": (
        {"clip_factors": (0.5, 0.7)},
        "gradients of norm 2 were multiplied by 0.7 when they were clipped to 1, expected 0.5",
    ),
    "zeroed": (
        {"clip_factors": (0.0, 0.5)},
        "gradients of norm 2 were multiplied by 0 when they were clipped to 1, expected 0.5",
    ),
    "an infinite norm": ({"gradient_norm": math.inf}, "the norm of the gradients of step 24 is inf"),
    "no norm": (
        {"gradient_norm": math.nan, "clip_factors": (math.nan, 1.0)},
        "the norm of the gradients of step 24 is nan",
    ),
    "rate": ({"learning_rates": (1e-5, 1e-5)}, "the learning rate was 1e-05, its schedule says 5e-05"),
    "rates": ({"learning_rates": (1e-5, 5e-5)}, "the learning rate was 1e-05 to 5e-05, its schedule says 5e-05"),
    "schedule": ({"schedule_steps": 48}, "the schedule made 48 steps in 24 of the optimizer"),
    "update": (
        {"largest_update": 31.6},
        "an update was 31.6 learning rates, adamw_torch makes none of more than 3.2",
    ),
    "shared": ({"shared_samples": 2}, "2 samples of one step were read more than once: ranks share what they read"),
    "foreign": (
        {"foreign_samples": 1},
        (
            "1 samples on the device are none of the data set: a copy changed them (or, of a long one, they are "
            "another step's)"
        ),
    ),
    "misplaced": (
        {"misplaced_samples": 2},
        "2 samples of step 24 are another step's in the order of the data set: some are repeated, skipped or shuffled",
    ),
    "dropped": ({"dropped": 2}, "gradients of 2 tensors were lost from one accumulated pass to the next"),
    "a tensor clipped by itself": (
        {"clip_factors": (0.25, 0.5)},
        "gradients of norm 2 were multiplied by 0.25 when they were clipped to 1, expected 0.5",
    ),
    "counted": (
        {"replay": replace(REPLAY, miscounted=("b",), counts=(12, 24))},
        "the optimizer has counted 12 to 24 steps of 1 of 2 tensors (b), expected 24 each",
    ),
    "replay": (
        {"replay": replace(REPLAY, roundings=16.1, found=0.5)},
        "the weight of a changed by 0.5, AdamW changes it by 0.25 (apart by 16.1 roundings of that element)",
    ),
    "no number": (
        {"replay": replace(REPLAY, roundings=math.nan, found=math.nan)},
        "the weight of a changed by nan, AdamW changes it by 0.25 (apart by nan roundings of that element)",
    ),
    "labels": ({"labels": False}, "labels are not the inputs, which the model's loss shifts itself"),
    "future": (
        {"future": 0.012},
        "what comes later changes what is said before (0.012 of what it changes later): the causal mask is lost",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_line_and_makes_the_launch_invalid(name: str) -> None:
    values, said = FAULTS[name]
    found = launch(replace(SOUND, **values))
    assert list(unlearnt(SPEC, found)) == [said]
    assert said in troubles(SPEC, found)


def test_what_is_declared_is_not_held_against_a_launch_and_has_to_be_so(golden: Golden) -> None:
    declared = frozenset({"learning"})
    assert troubles(SPEC, launch(replace(SOUND, unreached=("b",))), declared) == ()
    golden(troubles(SPEC, launch(), declared))
    assert troubles(SPEC, launch(Learning(none=OLDER)), declared) == ()


def test_scaled_losses_skip_steps_and_scale_gradients() -> None:
    off = replace(REPLAY, roundings=1e9)
    scaled = replace(
        SOUND, replay=off, is_scaled=True, schedule_steps=20, clip_factors=(1e-5, 1e-5), learning_rates=(0.0, 0.0)
    )
    assert list(unlearnt(SPEC, launch(scaled))) == []


def test_what_nobody_looked_at_is_no_fault_and_is_told(golden: Golden) -> None:
    failed = merged_learning([rank(), rank(none="RuntimeError: so it is")])
    assert not failed
    assert list(unlearnt(SPEC, launch(failed))) == []
    (line,) = notes([launch(failed), launch(failed)])
    golden(line)
    for why in (OLDER, UNWANTED):
        assert list(notes([launch(Learning(none=why))])) == []


def test_modules_in_evaluation_mode_and_weights_that_came_apart_are_faults(golden: Golden) -> None:
    def set_up(**values: Any) -> Launch:
        return launch(evidence={**launch_of(SPEC).evidence, "setup": values})

    assert list(unlearnt(SPEC, set_up(training=True, tied_weights=True, config={"tie_word_embeddings": True}))) == []
    (mode,) = unlearnt(SPEC, set_up(training=False))
    golden(mode)
    for tied in (True, False):
        (line,) = unlearnt(SPEC, set_up(tied_weights=tied, config={"tie_word_embeddings": not tied}))
        golden(line)


def norms(first: float, loss: float = 10.5, **values: Any) -> Launch:
    plain = launch_of(SPEC)
    return replace(plain, gradient_norms=(first, 1.0), losses=(loss, *plain.losses[1:]), **values)


@pytest.mark.parametrize(
    ("then", "now", "is_told"),
    [(2.0, 2.02, False), (2.0, 2.1, True), (2.0, math.nan, True), (0.5, 0.6, True), (0.0, 0.5, False)],
)
def test_the_first_norm_is_the_baselines_where_the_first_loss_is(then: float, now: float, is_told: bool) -> None:
    assert bool(list(changed_gradients([norms(now)], [norms(then)]))) is is_told
    # Another loss is told by itself, and has another gradient.
    assert not list(changed_gradients([norms(now, 10.6)], [norms(then)]))
    assert not list(changed_gradients([norms(now)], [launch_of(SPEC)]))
    assert not list(changed_gradients([launch_of(SPEC)], [norms(then)]))


def test_in_fp8_scales_move_a_norm() -> None:
    assert not list(changed_gradients([norms(2.1, evidence={"fp8_modules": 4})], [norms(2.0)]))


@given(
    st.builds(
        Learning,
        tensors=st.integers(0, 500),
        unheld=st.lists(st.text(max_size=9), max_size=3).map(tuple),
        stale=st.integers(0, 9),
        gradient_norm=st.floats(0, 1e6),
        clip_factors=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        labels=st.booleans(),
        misplaced_samples=st.integers(0, 9),
        replay=st.sampled_from([REPLAY, ReplayedUpdate(none="no formula"), replace(REPLAY, miscounted=("b",))]),
        future=st.none() | st.floats(0, 2),
    )
)
def test_a_record_holds_it_unchanged(learning: Learning) -> None:
    before = launch(learning, gradient_norms=(1.5, 2.5))
    after = codec.read(Launch, json.loads(json.dumps(codec.plain(before))))
    assert (after.learning, after.gradient_norms) == (learning, (1.5, 2.5))


def test_older_records_have_none() -> None:
    values = codec.plain(launch_of(SPEC))
    assert "learning" not in values
    assert "gradient_norms" not in values
    assert codec.read(Launch, values).learning.none == OLDER


@pytest.mark.parametrize("driver", ["", "580.1"])
@pytest.mark.parametrize(("roundings", "lines"), [(15, 0), (17, 1), (math.nan, 1)])
def test_an_update_is_held_to_the_formula_on_a_gpu_as_on_a_cpu(driver: str, roundings: float, lines: int) -> None:
    made = launch(replace(SOUND, replay=replace(REPLAY, roundings=roundings)))
    there = replace(made, environment=replace(made.environment, driver=driver))
    assert len([*unlearnt(SPEC, there)]) == lines
    assert not [*notes([there, there])]


def test_records_of_before_updates_were_replayed_are_read_and_not_doubted() -> None:
    values = codec.plain(launch())
    del values["learning"]["replay"]
    learning = codec.read(Launch, values).learning
    assert learning == replace(SOUND, replay=ReplayedUpdate(none="recorded before updates were replayed"))
    assert list(unlearnt(SPEC, launch(learning))) == []


def test_what_is_none_of_it_is_refused(golden: Golden) -> None:
    values = {**codec.plain(launch_of(SPEC)), "learning": {"nonsense": 1}}
    with pytest.raises(ValueError, match="nonsense") as raised:
        codec.read(Launch, values)
    golden(raised)


def test_what_was_not_clipped_or_had_no_gradient_has_no_factor_to_be_held_to() -> None:
    whole = replace(SOUND, clip_factors=(1.0, 1.0))
    for found in (replace(whole, max_norm=0.0), replace(whole, gradient_norm=0.0)):
        assert list(unlearnt(SPEC, launch(found))) == []
