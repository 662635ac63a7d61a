"""The verdict on the largest micro-batch, and its baseline."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.judge.acceptance import accept_capacity, judge_capacity
from pytest_llmperf.judge.baseline import BaselineStore, CapacityBaseline
from pytest_llmperf.judge.store import Accepted, BaselineError, parse, text_of
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny", sequence_length=64)


def baseline(size: float, reason: str = "") -> CapacityBaseline:
    entry = Accepted(
        recorded_at="2026-01-01T00:00:00Z",
        reason=reason,
        launches=2,
        metrics={"max_micro_batch_size": size, "peak_reserved_bytes": 2.0**35 + 1},
    )
    return CapacityBaseline(
        id=SPEC.capacity_id,
        digest=SPEC.capacity_digest,
        machine="machine",
        spec=SPEC.to_dict(),
        recorded_by="test.py::test",
        anchor=entry,
        history=(entry,),
    )


def test_identity_knows_every_setting_but_the_size() -> None:
    other = replace(SPEC, micro_batch_size=7)
    assert (other.capacity_id, other.capacity_digest) == (SPEC.capacity_id, SPEC.capacity_digest)
    assert SPEC.capacity_id == "llama-tiny-bf16-sdpa-seq64-maxmbs-gpus1"
    assert len({SPEC.digest, SPEC.capacity_digest, replace(SPEC, attention="eager").capacity_digest}) == 3


@pytest.mark.parametrize(("size", "verdict"), [(36, "regressed"), (37, "pass"), (38, "improved")])
def test_one_more_or_less_is_told(size: int, verdict: str) -> None:
    check = judge_capacity(size, baseline(37))
    assert (check.verdict, check.baseline, check.value) == (verdict, 37, size)


def test_without_a_baseline_it_is_new() -> None:
    assert judge_capacity(37, None).verdict == "new"


def test_a_loss_needs_a_reason_and_the_anchor_stays() -> None:
    with pytest.raises(BaselineError, match=r"worse \(max_micro_batch_size 37 -> 36\)"):
        accept_capacity(baseline(37), baseline(36))
    smaller = accept_capacity(baseline(37), baseline(36, "a larger workspace"))
    assert (smaller.size, smaller.anchor, len(smaller.history)) == (36, baseline(37).anchor, 2)
    assert accept_capacity(smaller, baseline(40)).size == 40


def test_its_file_comes_back_and_is_no_baseline_of_launches(tmp_path: Path) -> None:
    store = BaselineStore(tmp_path)
    assert store.capacities.load("machine", SPEC) is None
    store.capacities.update("machine", SPEC, lambda _: baseline(37))
    assert store.capacities.load("machine", SPEC) == baseline(37)
    assert store.capacities.load("machine", replace(SPEC, micro_batch_size=9)) == baseline(37)
    assert store.baselines("machine") == []
    assert [(entry.id, entry.digest) for entry in store.entries("machine").values()] == [
        (SPEC.capacity_id, SPEC.capacity_digest)
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"history": []}, "it holds no history"),
        ({"history": [7]}, "history[0] is 7, expected an object"),
        ({"machine": None}, "machine is null, expected text"),
        ({"spec": []}, "spec is [], expected an object"),
        ({"anchor": None}, "anchor is null, expected an object"),
    ],
)
def test_what_is_wrong_is_said_in_words(change: dict[str, Any], said: str) -> None:
    text = json.dumps({**json.loads(text_of(baseline(37))), **change})
    with pytest.raises(BaselineError, match=re.escape(said)):
        parse(CapacityBaseline, text, "some/file.json")


def test_an_anchor_that_was_edited_is_noticed(golden: Golden) -> None:
    document = json.loads(text_of(baseline(37)))
    document["anchor"]["metrics"]["max_micro_batch_size"] = 30
    with pytest.raises(BaselineError) as raised:
        parse(CapacityBaseline, json.dumps(document), "some/file.json")
    golden(raised)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": 1}',
        '{"schema": 2}',
        text_of(baseline(0)),
        text_of(baseline(37))[:-40],
    ],
)
def test_a_file_that_cannot_serve_is_one_line(tmp_path: Path, text: str) -> None:
    store = BaselineStore(tmp_path)
    store.capacities.update("machine", SPEC, lambda _: baseline(37))
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BaselineError) as caught:
        store.capacities.load("machine", SPEC)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(BaselineError):
        store.capacities.update("machine", SPEC, lambda _: baseline(38))
    assert path.read_text(encoding="utf-8") == text


def test_one_of_another_machine_or_spec_is_refused(tmp_path: Path, golden: Golden) -> None:
    store = BaselineStore(tmp_path)
    path = store.capacities.path("machine", SPEC)
    path.parent.mkdir(parents=True)
    for wrong in (replace(baseline(37), machine="other"), replace(baseline(37), digest="0" * 16)):
        path.write_text(text_of(wrong), encoding="utf-8")
        with pytest.raises(BaselineError) as raised:
            store.capacities.load("machine", SPEC)
        golden(raised)
