"""The suite's own data on more GPUs."""

from __future__ import annotations

import pytest

from perf_tests.ladder import LADDER
from perf_tests.scaling import GLOBAL_BATCH, SHARDED, STRONG, STRONG_ON_CPU, WEAK, WEAK_ON_CPU, Width
from pytest_llmperf.analysis import ladder
from pytest_llmperf.plugin import needs
from pytest_llmperf.settings.spec import is_narrower
from pytest_llmperf.settings.train_spec import TrainSpec

EVERYTHING = (WEAK, STRONG, SHARDED, WEAK_ON_CPU, STRONG_ON_CPU)


def test_each_list_goes_from_narrow_to_wide_and_no_case_is_there_twice() -> None:
    for widths in EVERYTHING:
        by_series: dict[tuple[str, str], list[int]] = {}
        for width in widths:
            by_series.setdefault((width.spec.model, width.spec.parallelism), []).append(width.spec.gpus)
        assert all(gpus == sorted(gpus) for gpus in by_series.values())
        assert len({width.spec.id for width in widths}) == len(widths)
        assert len({width.spec.digest for width in widths}) == len(widths)


def test_weak_scaling_begins_with_the_ladders_last_step_and_has_every_width() -> None:
    last = [rung.spec for rung in LADDER if rung.number == "15.9"]
    assert [width.spec for width in WEAK if width.spec.gpus == 1] == last
    assert len(WEAK) == len(last) * len(ladder.WIDTHS)
    assert [width.spec.gpus for width in WEAK if width.published] == list(ladder.WIDTHS)


def test_shards_are_held_over_one_gpu_in_the_same_precision() -> None:
    kinds = {
        "bf16-pure": {"fsdp", "fsdp_hybrid", "tensor", "context"},
        "bf16-mixed": {"zero2", "zero3"},
    }
    alike = {kind: list[TrainSpec]() for kind in kinds}
    for width in SHARDED:
        if width.spec.parallelism != "sequence":
            alike[width.spec.precision].append(width.spec)
    for kind, parallelisms in kinds.items():
        first, *others = alike[kind]
        assert (first.gpus, first.parallelism) == (1, "ddp")
        assert {spec.parallelism for spec in others} == parallelisms
        assert all(is_narrower(first, spec) for spec in others if spec.model == first.model)


def test_ranks_that_share_sequences_have_the_tokens_of_one_gpu_each() -> None:
    shared = [width for width in SHARDED if width.spec.parallelism == "sequence"]
    assert [width.spec.gpus for width in shared] == [2, 4, 8]
    for width in shared:
        one = width.scaled_from
        assert one is not None
        needs.a_narrower_training(width.spec, one)
        assert width.spec.sequences_per_step == one.sequences_per_step * width.spec.gpus


@pytest.mark.parametrize("widths", [STRONG, STRONG_ON_CPU])
def test_strong_scaling_has_one_batch_and_one_start(widths: list[Width]) -> None:
    assert len({width.spec.sequences_per_step for width in widths}) == 1
    assert {width.scaled_from for width in widths} == {widths[0].spec}
    assert widths[0].spec.gpus == 1


def test_the_global_batch_is_what_it_says() -> None:
    assert {width.spec.sequences_per_step for width in STRONG} == {GLOBAL_BATCH}


@pytest.mark.parametrize("word", ["liger", "checkpointing", "compile", "eager", "flash", "fsdp"])
def test_a_settings_word_selects_what_has_it_on(word: str) -> None:
    for width in (width for widths in EVERYTHING for width in widths):
        on = {"liger": width.spec.liger, "fsdp": width.spec.parallelism.startswith("fsdp")}.get(word, False)
        names = f"perf_tests/test_scaling.py::test_weak::test_strong[{width.spec.id}]"
        assert (word in names) == on
