"""The suite's own data on other families than the ladder's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perf_tests.families import FAMILIES, Family
from perf_tests.ladder import LADDER
from pytest_llmperf.settings.attention import ATTENTIONS

ON_CPU = [family.on_cpu() for family in FAMILIES]


@pytest.mark.parametrize("families", [FAMILIES, ON_CPU], ids=["on a GPU", "on a CPU"])
def test_no_two_cases_are_the_same_and_none_is_the_ladders(families: list[Family]) -> None:
    specs = [family.spec for family in families]
    assert len({spec.id for spec in specs}) == len({spec.digest for spec in specs}) == len(specs)
    ladder = [rung if families is FAMILIES else rung.on_cpu() for rung in LADDER]
    assert not {spec.digest for spec in specs} & {rung.spec.digest for rung in ladder}


def test_every_family_runs_without_liger_and_with_it() -> None:
    on, off = ([f.spec for f in FAMILIES if f.spec.liger == liger] for liger in (True, False))
    assert [replace(spec, liger=False) for spec in on] == off


def test_all_take_the_same_tokens_a_step_in_bf16_with_sdpa() -> None:
    specs = [family.spec for family in FAMILIES]
    assert {spec.sequences_per_step * spec.sequence_length for spec in specs} == {8192}
    assert {(spec.precision, spec.attention, spec.gpus) for spec in specs} == {("bf16", "sdpa", 1)}


def test_only_where_liger_is_asked_for_can_it_be_declared_inactive() -> None:
    assert all(family.spec.liger for family in FAMILIES if family.inactive)
    assert {family.spec.model for family in FAMILIES if family.inactive} == {"gpt2-medium"}


def test_the_tiny_model_is_of_the_same_family() -> None:
    for family, tiny in zip(FAMILIES, ON_CPU, strict=True):
        assert tiny.spec.architecture.model_type == family.spec.architecture.model_type
        assert tiny.spec.model != family.spec.model
        assert tiny.spec.sequence_length <= 64


@pytest.mark.parametrize("word", ["liger", "checkpointing", "compile", "fsdp", "accum", "fp8", *ATTENTIONS])
def test_a_settings_word_selects_what_has_it_on(word: str) -> None:
    for spec in (family.spec for family in (*FAMILIES, *ON_CPU)):
        on = {"liger": spec.liger, spec.attention: True}.get(word, False)
        assert (word in f"perf_tests/test_families.py::test_family[{spec.id}]") == on
