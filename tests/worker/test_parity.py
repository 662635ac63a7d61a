"""Small trainings beside their plain form: sound ones are let be, and faults put into the real stack are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.records.learning import OWN
from pytest_llmperf.settings.parallelism import gathered_precision, zero_stage
from pytest_llmperf.settings.registry import plainest
from tests.worker.engine import checks
from tests.worker.parity import AS_ON_GPUS, NO_CHANGE, Plain, figures
from tests.worker.parity_faults import FAULTS

pytest.importorskip("torch")

from tests.worker import plain_llama

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(400)]

SPEC = TrainSpec(
    model="llama-tiny", model_precision="fp32", mixed_precision="bf16", sequence_length=32, micro_batch_size=2
)
FP32 = replace(SPEC, mixed_precision="no")
SHARDING = ("torch.distributed.fsdp", AS_ON_GPUS)

PlainOf = Callable[[TrainSpec], Plain]


@pytest.fixture(scope="module")
def plain_of(tmp_path_factory: pytest.TempPathFactory) -> PlainOf:
    """The plain form of a spec, launched once for all that have the same."""
    known: dict[tuple[str, str], Plain] = {}

    def plain(spec: TrainSpec) -> Plain:
        gathered = gathered_precision(spec)
        key = plainest(spec).digest, gathered
        if key not in known:
            known[key] = Plain(spec, tmp_path_factory.mktemp("plain") / "home", gathered)
        return known[key]

    return plain


def test_the_plain_form_is_what_the_formulas_say(plain_of: PlainOf) -> None:
    told = plain_llama.compared(plain_of(FP32).folder / "run")
    assert told["names"]
    assert max(*told["losses"], *told["gradients"]) < 1e-9


SOUND: Mapping[str, tuple[TrainSpec, tuple[str, str]]] = {
    "attention and recomputation": (
        replace(SPEC, gradient_checkpointing=True, checkpointing_policy="selective", optimizer="adamw_torch_fused"),
        NO_CHANGE,
    ),
    "ranks that accumulate": (replace(FP32, gpus=2, gradient_accumulation_steps=2), NO_CHANGE),
    "replicas of shards": (replace(FP32, gpus=4, parallelism="fsdp_hybrid"), SHARDING),
    "layers that ranks share": (replace(FP32, gpus=2, parallelism="tensor"), SHARDING),
    "shards, gathered in bf16": (replace(SPEC, gpus=2, parallelism="fsdp"), SHARDING),
    "weights that DeepSpeed shares": (replace(SPEC, gpus=2, parallelism="zero3"), NO_CHANGE),
    "matrices by Muon": (replace(FP32, optimizer="muon"), NO_CHANGE),
    "compiled layers": (replace(FP32, torch_compile=True, torch_compile_scope="layers"), NO_CHANGE),
}


# To compile takes ten seconds, and many ranks import as often.
OFTEN = ("attention and recomputation", "ranks that accumulate", "matrices by Muon", "layers that ranks share")


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.wide] * (each not in OFTEN)) for each in SOUND],
)
def test_a_sound_training_is_let_be(name: str, plain_of: PlainOf, tmp_path: Path) -> None:
    spec, patch = SOUND[name]
    if zero_stage(spec):
        pytest.importorskip("deepspeed")
    parity = plain_of(spec).beside(spec, tmp_path / "here", patch)
    assert parity.troubles == ()
    # Rounding is there, and less than it may be.
    assert all(0 < share < 1 for share in figures(parity).values())


# A fault that one training beside the truth shows is shown by three.
ONE = """
    from pytest_llmperf.records import learning
    learning.PARITY_BESIDE = 1"""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.wide] if "torch_compile" in FAULTS[each].spec else []) for each in FAULTS],
)
def test_a_fault_is_named(name: str, plain_of: PlainOf, tmp_path: Path) -> None:
    fault = FAULTS[name]
    spec = replace(FP32, **fault.spec)
    parity = plain_of(spec).beside(spec, tmp_path / "here", (fault.module, fault.patch + ONE))
    assert parity.troubles, figures(parity)
    assert fault.told in parity.troubles[0]


def test_updates_that_bf16_weights_lose_are_counted(plain_of: PlainOf, tmp_path: Path) -> None:
    told = plain_of(FP32).trained(replace(FP32, model_precision="bf16"), tmp_path / "here")
    assert all((0.01 < one.lost_updates < 0.5) == (one.form == OWN) for one in told)


def test_a_case_and_a_pair_share_one_plain_form(tmp_path: Path) -> None:
    asked = checks(tmp_path)
    alone = asked.same_training(FP32)
    both = asked.same_training(replace(FP32, attention="eager"), replace(FP32, micro_batch_size=1))
    assert [one.result.verdict for one in (alone, both)] == ["pass", "pass"], (alone, both)
    assert alone.result.check("gradient_error") is not None

    assert _launches(asked) == 3  # the plain form, FP32, and eager attention


def _launches(asked: Any) -> int:
    return int(asked._caller.findings.spent.launches)
