"""How long a step may take on more ranks than were measured, beside the chapter's published widths and ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.analysis.formulas import Measured
from pytest_llmperf.records.trace import StaticStep
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.examples import examples
from tests.fakes import STEP

TOKENS, REDUCED = 37 * 1024, 2_471_628_800
#: Tokens/s a GPU of the chapter's table 15.10, Llama 3.2 1B under DDP on nodes of four H100.
CHAPTER = {1: 48229, 2: 46188, 4: 43432, 8: 42297, 16: 41869, 32: 41424}
STEPS = {ranks: StaticStep(**STEP, exchanges={"all_reduce": (49, REDUCED)}) for ranks in (*CHAPTER, 64, 1024)}


def measured(*widths: int, **more: Any) -> Measured:
    seconds = {ranks: (TOKENS / CHAPTER[ranks],) * 2 for ranks in widths}
    return Measured(seconds, **{"ranks_per_node": 4, "on_a_node": 290e9, "between_nodes": 25e9, **more})


def told(known: Measured, ranks: int, step: StaticStep | None = None) -> tuple[float, float] | None:
    spec = TrainSpec(model="llama-tiny", gpus=ranks)
    return known.step_range(spec, step or STEPS[ranks], lambda narrow: STEPS[narrow.gpus])


@pytest.mark.parametrize(
    ("widths", "held", "missed"),
    [((1,), (2, 8, 16, 32), (4,)), ((1, 4), (8, 16, 32), ()), ((4, 8), (16, 32), ())],
    ids=["one GPU", "a node", "two nodes"],
)
def test_the_chapters_widths_lie_in_the_range_but_for_one(
    widths: tuple[int, ...], held: tuple[int, ...], missed: tuple[int, ...]
) -> None:
    for ranks in (*held, *missed):
        found = told(measured(*widths), ranks)
        assert found is not None
        assert (found[0] <= TOKENS / CHAPTER[ranks] <= found[1]) == (ranks in held)


def test_two_measured_nodes_tell_more_to_within_3_per_cent() -> None:
    low, high = told(measured(4, 8), 32) or (0.0, 9.0)
    assert high / low < 1.03


def test_a_width_that_was_measured_is_told_as_it_was() -> None:
    assert told(measured(1, 4), 4) == (TOKENS / 43432,) * 2


@pytest.mark.parametrize(("widths", "rates"), [((), {}), ((4,), {"between_nodes": None}), ((8,), {})])
def test_what_was_not_measured_is_not_told(widths: tuple[int, ...], rates: dict[str, Any]) -> None:
    found = measured(*widths, **rates)
    assert told(found, 8 if widths != (8,) else 4) is None


@pytest.mark.parametrize("parallelism", ["tensor", "context"])
def test_of_ranks_that_share_each_sequence_no_other_width_tells(parallelism: str) -> None:
    spec = TrainSpec(model="llama-3.2-1b", gpus=4, parallelism=parallelism, mixed_precision="no")
    found = [measured(*widths).step_range(spec, STEPS[4], lambda narrow: STEPS[narrow.gpus]) for widths in ((2,), (4,))]
    assert found == [None, (TOKENS / CHAPTER[4],) * 2]


def test_only_replicas_of_a_hybrid_exchange_between_nodes() -> None:
    exchanges = {"all_gather of dp_shard_cp": (33, 4 * 10**9), "all_reduce of dp_replicate": (17, 10**9)}
    steps = {64: StaticStep(**STEP, exchanges=exchanges)}
    known = Measured({1: (1.0, 1.0)}, ranks_per_node=8, on_a_node=300e9, between_nodes=50e9)
    low, high = told(known, 64, steps[64]) or (0.0, 0.0)
    exchanged = 7 / 8 * 4e9 / 300e9 + 2 * 7 / 8 * 1e9 / 50e9
    assert low == 1.0
    assert high == pytest.approx(541 / 524 + exchanged + 0.006 * 2.38, abs=2e-3)


@given(st.sampled_from([2, 4, 8, 16, 32, 64]), st.floats(1e9, 1e12), st.floats(1e9, 1e12))
@examples(50)
def test_more_ranks_and_slower_links_take_no_less(ranks: int, on_a_node: float, between: float) -> None:
    known = measured(1, on_a_node=max(on_a_node, between), between_nodes=min(on_a_node, between))
    narrow, wide = (told(known, each) for each in (ranks, 1024))
    assert narrow is not None
    assert wide is not None
    assert narrow[0] == wide[0] <= narrow[1] <= wide[1]
