"""The chapter's formulas, and specs on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec, models
from pytest_llmperf.cli.plan import page, specs_of
from pytest_llmperf.cli.shelf import CaseError
from pytest_llmperf.insight.memory import (
    MemoryPlan,
    chapter_activation_bytes,
    chapter_model_bytes,
    chapter_parameters,
)

BASELINES = Path(__file__).parents[2] / "baselines"


def test_the_chapters_formulas() -> None:
    geometry = models.resolve("opt-1.3b").geometry
    assert geometry is not None
    # OPT is the block the formula is for; its positions are what it leaves out.
    assert chapter_parameters(geometry) == pytest.approx(1_315_758_080, rel=0.005)
    assert chapter_model_bytes(10) == 160
    spec = TrainSpec(model="opt-1.3b", micro_batch_size=2)
    assert chapter_activation_bytes(geometry, spec) == 1024 * 2 * 2048 * 24 * (34 + 5 * 32 * 1024 // 2048)


def test_a_spec_in_pairs_and_one_by_its_id() -> None:
    words = ["model=llama-3.2-1b", "liger=true", "micro_batch_size=37", "llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus1"]
    by_id, in_pairs = specs_of(words, BASELINES)
    assert in_pairs.digest == by_id.digest == "e8eccc4c06e1f771"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=llama-3.2-1b", "liger=yes"], "liger=yes: 'yes' is no bool"),
        (["model=llama-3.2-1b", "liger=ture"], "did you mean true?"),
        (["model=llama-3.2-1b", "gpus=two"], "gpus=two: 'two' is no int"),
        (["model=llama-3.2-1b", "lieger=true"], "has no field 'lieger', did you mean 'liger'?"),
        (["liger=true"], "needs a model"),
        (["model=lama-3.2-1b"], "did you mean 'llama-3.2-1b'?"),
        (["no-such-id"], "no such case"),
    ],
)
def test_what_names_no_spec_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(CaseError) as caught:
        specs_of(words, BASELINES)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_page_adds_up_and_leaves_out_what_is_not_there() -> None:
    plan = MemoryPlan({"weights": 2**30, "activations": 2**31, "workspace": 2**26, "gradients": 0})
    lines = page(TrainSpec(model="opt-1.3b"), plan)
    assert plan.peak_allocated_bytes == 3 * 2**30 + 2**26
    assert lines[1].split()[2:4] == ["3.06", "GiB"]
    assert not any("gradients" in line for line in lines)
    assert any("34 + 5" in line for line in lines)
