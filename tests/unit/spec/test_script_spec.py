"""The id of a script: what of its work the words of its command do not show is in it by digits of the digest."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_llmperf.settings.spec import ScriptSpec

COMMAND = "python train.py --batch {micro_batch_size}"
SPEC = ScriptSpec(command=COMMAND)
SEARCHED: list[dict[str, Any]] = [{}, {"seed": 0}, {"command": COMMAND + " --more" * 20}]
UNUSUAL: list[dict[str, Any]] = [
    {"cwd": "examples"},
    {"tokens": 512},
    {"tokens": "sequences:64"},
    {"step": "AdamW"},
    {"training": 2},
    {"seed": 0},
    {"env": {"LOUD": "1"}},
]


def test_a_command_alone_is_named_by_its_words() -> None:
    assert SPEC.id == "train-batch-1-gpus1"
    assert SPEC.capacity_id == "train-batch-max-gpus1"
    assert SPEC.changed(steps=20, memory_tolerance=0.1).id == SPEC.id


@pytest.mark.parametrize("fields", UNUSUAL, ids=str)
def test_what_the_words_do_not_show_ends_the_id(fields: dict[str, Any]) -> None:
    spec = SPEC.changed(**fields)
    assert spec.id == f"train-batch-1-{spec.digest[:6]}-gpus1"
    assert SPEC.changed(**fields, name="mine").id == "mine-gpus1"


def test_specs_that_are_other_work_have_other_ids() -> None:
    specs = [SPEC, *(SPEC.changed(**fields) for fields in UNUSUAL)]
    assert len({spec.id for spec in specs}) == len({spec.digest for spec in specs}) == len(specs)


@pytest.mark.parametrize("fields", SEARCHED, ids=str)
def test_the_search_for_the_largest_micro_batch_has_one_id_whatever_it_begins_at(fields: dict[str, Any]) -> None:
    assert len({SPEC.changed(**fields, micro_batch_size=size).capacity_id for size in (1, 8)}) == 1
