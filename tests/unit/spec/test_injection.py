"""What ``LLMPERF_INJECT`` may ask for."""

from __future__ import annotations

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.settings.train_spec import Injection
from tests.golden import Golden


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slow=nan", "slow=nan must be a share of the step time, e.g. slow=0.03 for 3 %"),
        ("slow=inf", "slow=inf must be a share of the step time"),
        ("slow=-1", "slow=-1 must be a share of the step time"),
        ("hold=-1", "hold=-1 must be a number of bytes"),
        ("hang=-1", "hang=-1 must be a step"),
        ("slow=0.1 rank=2", "rank=2 must be one of this launch's ranks, 0 to 1"),
        ("slow=0.1 rank=-1", "rank=-1 must be one of this launch's ranks, 0 to 1"),
    ],
)
def test_an_injection_that_cannot_be(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", text)
    with pytest.raises(ValueError, match="must be") as error:
        Injection.from_environment(2)
    assert str(error.value).startswith(f"LLMPERF_INJECT='{text}': {said}")


def test_a_setting_is_up_to_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", "attention=eager rank=1")
    injection = Injection.from_environment()
    assert [injection.mutated(TrainSpec(model="llama-tiny"), rank).attention for rank in (0, 1)] == ["sdpa", "eager"]


def test_what_transformers_is_given_can_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", 'training_arguments={"adam_beta2":0.9}')
    spec = Injection.from_environment().mutated(TrainSpec(model="llama-tiny"), 0)
    assert spec == TrainSpec(model="llama-tiny", training_arguments={"adam_beta2": 0.9})


def test_a_setting_that_is_none_is_refused_with_its_origin(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", "atention=eager")
    with pytest.raises(ValueError, match="did you mean") as raised:
        Injection.from_environment()
    golden(raised)


def test_a_value_that_a_setting_cannot_have_is_refused_with_its_origin(
    monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", "attention=eagr")
    with pytest.raises(ValueError, match="did you mean") as raised:
        Injection.from_environment().mutated(TrainSpec(model="llama-tiny"), 0)
    golden(raised)


def test_a_word_that_is_none_is_told_with_the_nearest(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", "slwo=5")
    with pytest.raises(ValueError, match="nor a setting ") as raised:
        Injection.from_environment()
    golden(raised)


@pytest.mark.parametrize("text", ["slow", "slow=much", "hold=1.5", "rank=x"])
def test_an_injection_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", text)
    with pytest.raises(ValueError, match=r"LLMPERF_INJECT='.*': expected slow=SHARE"):
        Injection.from_environment()
