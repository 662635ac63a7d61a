"""Samples of one step, found again in their data set and held against its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.records.learning import RankLearning, merged_learning

torch = pytest.importorskip("torch")

SPEC, STEP = TrainSpec(model="llama-tiny"), 4


class Rows(list[dict[str, Any]]):
    """Of a text: three that are alike among ten, and then another epoch in another order."""

    distinct = 10

    def __init__(self) -> None:
        of_an_epoch = [0, 1, 2, 3, 4, 5, 6, 7, 1, 1]
        super().__init__(_row(number) for number in (*of_an_epoch, *reversed(of_an_epoch)))


def _row(number: int) -> dict[str, Any]:
    tokens = torch.arange(number, number + 6)
    return {"input_ids": tokens, "labels": tokens}


def misplaced(read: Sequence[int], step: int, rows: Any) -> tuple[int, int]:
    """Samples of another step, and of none, where two ranks have ``read`` the samples of these indices."""
    from pytest_llmperf.worker.recipes.huggingface import inspection  # noqa: PLC0415 - needs torch

    ranks = []
    for own in (read[::2], read[1::2]):
        batch = {name: torch.stack([rows[index][name] for index in own]) for name in ("input_ids", "labels")}
        ranks.append(RankLearning(**inspection.found_in(inspection.row_digests(SPEC, batch), rows, step * STEP, STEP)))
    learning = merged_learning(ranks)
    return learning.misplaced_samples, learning.foreign_samples


@pytest.mark.parametrize(
    ("read", "step", "expected"),
    [
        ((0, 1, 2, 3), 0, 0),
        ((3, 2, 1, 0), 0, 0),  # whichever rank has them
        ((4, 5, 6, 7), 1, 0),
        ((0, 1, 2, 3), 1, 4),  # always the first batch
        ((2, 3, 4, 5), 1, 2),
        ((5, 4, 4, 5), 1, 2),  # ranks share
        ((8, 9, 10, 11), 2, 0),  # over the end of an epoch, and all four are alike
        ((1, 1, 10, 11), 2, 0),  # what is alike cannot be told apart
        ((12, 13, 14, 15), 3, 0),  # in another epoch's order
        ((2, 3, 4, 5), 3, 2),  # and not in the first one's
    ],
)
def test_a_step_has_the_samples_that_come_next(read: Sequence[int], step: int, expected: int) -> None:
    assert misplaced(read, step, Rows()) == (expected, 0)


def test_one_other_among_what_is_alike_is_told() -> None:
    assert misplaced((8, 9, 0, 11), 2, Rows()) == (1, 0)
