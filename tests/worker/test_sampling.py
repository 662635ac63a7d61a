"""The order in which the Trainer takes samples, held against what its arguments ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 24


@pytest.fixture
def order(tmp_path: Path) -> Callable[..., str]:
    """What is said of the Trainer with these arguments."""
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 - needs torch

    from pytest_llmperf.worker.recipes.huggingface.update_replay import misorder  # noqa: PLC0415

    def said(**asked: Any) -> str:
        args = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=2, **asked
        )
        trainer = Trainer(model=torch.nn.Linear(2, 2), args=args, train_dataset=[{"x": n} for n in range(SAMPLES)])
        torch.randn(3)  # whatever was drawn since
        return misorder(trainer)

    return said


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"seed": 7},
        {"data_seed": 9},
        {"dataloader_drop_last": True},
        {"train_sampling_strategy": "sequential"},
        {"train_sampling_strategy": "group_by_length"},  # by lengths, of which nothing here knows the order
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"accelerator_config": {"split_batches": True}},
    ],
)
def test_an_order_that_was_asked_for_is_not_doubted(order: Callable[..., str], asked: dict[str, Any]) -> None:
    assert order(**asked) == ""


def _in_order(self: Any) -> Iterator[int]:
    return iter(range(len(self.data_source)))


def _half(self: Any) -> Iterator[int]:
    return iter(torch.randperm(len(self.data_source), generator=self.generator).tolist()[: SAMPLES // 2])


def _in_pairs(self: Any) -> Iterator[int]:
    for first in range(0, len(self.data_source), 2):
        yield from (first + 1, first)


NOT_SHUFFLED = "samples are not shuffled: 24 of 24 come in the order of the data set in epoch 1"


@pytest.mark.parametrize(
    ("what", "fault", "said"),
    [
        ("torch.utils.data.RandomSampler.__iter__", _in_order, NOT_SHUFFLED),
        ("torch.randperm", lambda number, **_: torch.arange(number), NOT_SHUFFLED),
        ("torch.utils.data.RandomSampler.__iter__", _half, "12 different samples are taken, expected 24 in epoch 1"),
        ("torch.utils.data.RandomSampler.__iter__", _in_pairs, "samples come in another order (1, 0, 3, 2, ...), "),
        (
            "accelerate.data_loader.SeedableRandomSampler.set_epoch",
            lambda *_: None,
            "samples come in the order of the epoch before in epoch 2 (random, seed 42)",
        ),
        ("torch.random.initial_seed", lambda: 3, "samples come in another order ("),
    ],
)
def test_another_order_is_named(
    order: Callable[..., str], monkeypatch: pytest.MonkeyPatch, what: str, fault: Any, said: str
) -> None:
    monkeypatch.setattr(what, fault)
    assert order().startswith(said)


def test_an_order_where_a_shuffle_was_not_asked_for_is_named(
    order: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torch.utils.data.SequentialSampler.__iter__", lambda self: iter([*range(1, len(self.data_source)), 0])
    )
    assert order(train_sampling_strategy="sequential").startswith("samples come in another order (1, 2, 3, 4, ...), ")
