"""Faults that leave speed and memory as they are, put into the real stack: what one inspected step says of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.repeats import changed_gradients
from pytest_llmperf.judge.validity import notes, troubles, unlearnt
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support import codec
from tests.worker.import_patch import as_on_gpus, in_the_rank
from tests.worker.launching import launched
from tests.worker.learning_faults import FAULTS, SPEC, TRAINER, TWO, WRONG_GRADIENT, Fault
from tests.worker.own_faults import IN_A_LAUNCH

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]


TOLD = {**FAULTS, **IN_A_LAUNCH}


def faulty(fault: Fault, folder: Path, *, trace: bool = True) -> Launch:
    variables = in_the_rank(folder, fault.module, fault.patch)
    return launched(fault.spec, folder / "run", variables=variables, trace=trace)


@pytest.mark.parametrize("name", TOLD)
def test_a_fault_is_told(tmp_path: Path, name: str) -> None:
    # As many steps as with a trace, which tells nothing of it.
    spec = replace(TOLD[name].spec, steps=8, min_steps=8)
    launch = faulty(replace(TOLD[name], spec=spec), tmp_path, trace=False)
    assert launch.learning, launch.learning.none
    lines = list(unlearnt(spec, launch))
    assert any(line.startswith(TOLD[name].said) or TOLD[name].said in line for line in lines), lines
    assert set(lines) <= set(troubles(spec, launch))


SOUND = {
    "alone": SPEC,
    "16 bits": replace(SPEC, model_precision="bf16"),
    "autocast": replace(SPEC, mixed_precision="bf16"),
    "accumulated": replace(SPEC, gradient_accumulation_steps=3),
    "ddp": replace(TWO, gradient_accumulation_steps=2),
    "wide": replace(SPEC, micro_batch_size=4),
    "fsdp": replace(TWO, parallelism="fsdp"),
    "recomputed": replace(SPEC, gradient_checkpointing=True, attention="eager"),
    "dropout": replace(SPEC, model="opt-tiny"),
    "another optimizer": replace(SPEC, optimizer="adafactor"),
    "fused": replace(SPEC, optimizer="adamw_torch_fused"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    folder = tmp_path_factory.mktemp("sound")

    def one(name: str, spec: TrainSpec) -> Launch:
        below = folder / name.replace(" ", "-")
        below.mkdir()
        variables = in_the_rank(below, TRAINER, as_on_gpus()) if spec.parallelism != "ddp" else {}
        return launched(spec, below / "run", variables=variables)

    return {name: one(name, spec) for name, spec in SOUND.items()}


@pytest.mark.parametrize("name", SOUND)
def test_what_learns_is_not_doubted(sound: dict[str, Launch], name: str) -> None:
    launch = sound[name]
    assert launch.learning, launch.learning.none
    assert troubles(SOUND[name], launch) == ()
    assert launch.learning.tensors >= 20
    replay = launch.learning.replay
    if SOUND[name].optimizer == "adafactor":
        assert replay.none == "adafactor has no formula here"
    else:
        assert (replay.tensors, replay.counts) == (launch.learning.tensors, (9, 9))
        assert 0 <= replay.roundings < 6  # 2.3 were seen
    assert launch.learning.gradient_norm > 0
    assert len(launch.gradient_norms) == 4
    assert codec.read(Launch, codec.plain(launch)).learning == launch.learning
    assert not list(changed_gradients([launch], [launch]))
    assert 0 < launch.phases["inspection"] < 1


def test_updates_that_16_bits_lose_are_told_and_are_no_fault(sound: dict[str, Launch]) -> None:
    (line,) = notes([sound["16 bits"]])
    assert line.startswith("5 of 20 tensors did not change in 9 steps: weights kept in 16 bits alone round ")
    assert not list(notes([sound["alone"]]))


def test_norms_and_clipping_are_of_the_whole_gradient_however_it_is_sharded(sound: dict[str, Launch]) -> None:
    # Four sequences a step each: two of two ranks, or of two shards, or two passes of two.
    norms = [sound[name].learning.gradient_norm for name in ("fsdp", "wide")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert sound["fsdp"].gradient_norms == pytest.approx(sound["wide"].gradient_norms, rel=1e-4)


def test_a_kernel_whose_gradient_alone_is_wrong_is_told_by_the_baselines_first_norm(
    tmp_path: Path, sound: dict[str, Launch]
) -> None:
    launch = faulty(WRONG_GRADIENT, tmp_path)
    assert launch.losses[0] == sound["alone"].losses[0]
    assert troubles(SPEC, launch) == ()
    (line,) = changed_gradients([launch], [sound["alone"]])
    assert line.startswith("the first gradient has norm ")
    assert line.endswith("gradients are not computed as they were")


FAILS = """
    def fails(*_):
        raise RuntimeError("no such luck")
    module.row_digests = fails"""


def test_what_cannot_be_inspected_costs_nothing_else(tmp_path: Path, sound: dict[str, Launch]) -> None:
    launch = faulty(Fault(0, SPEC, "pytest_llmperf.worker.recipes.huggingface.inspection", FAILS, ""), tmp_path)
    assert launch.learning.none == "RuntimeError: no such luck"
    assert launch.losses == sound["alone"].losses
    assert launch.trace
    assert list(notes([launch])) == ["whether it learns was not looked at: RuntimeError: no such luck"]
    assert troubles(SPEC, launch) == ()


def test_no_gradients_make_adams_update_larger_than_its_bound() -> None:
    torch = pytest.importorskip("torch")
    from pytest_llmperf.worker.recipes.huggingface.inspection import adam_bound  # noqa: PLC0415 - needs torch

    for steps in (1, 2, 12, 400):
        # Those that reach it: each as large as its share of the first average is beside that of the second.
        worst = torch.tensor([(0.9 / 0.999) ** (steps - 1 - step) for step in range(steps)], dtype=torch.float64)
        drawn = torch.randn(steps, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(steps))
        weight = torch.nn.Parameter(torch.zeros(201, dtype=torch.float64))
        before, adam = weight.detach(), torch.optim.Adam([weight], lr=1.0, eps=0.0)
        for gradient in torch.cat([worst[:, None], drawn], dim=1):
            before = weight.detach().clone()
            weight.grad = gradient.clone()
            adam.step()
        updates = (weight.detach() - before).abs()
        assert float(updates[0]) == pytest.approx(adam_bound(0.9, 0.999, steps), rel=1e-6)
        assert float(updates.max()) <= adam_bound(0.9, 0.999, steps) * (1 + 1e-9)
