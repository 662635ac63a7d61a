"""Updates of PyTorch's own AdamW, sound ones and others, beside its formula; no launch is needed to see them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llmperf.judge.validity import unlearnt
from pytest_llmperf.records.learning import Learning, ReplayedUpdate
from tests.fakes import launch_of
from tests.golden import Golden
from tests.worker.learning_faults import SPEC

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, RATE = 9, 5e-5


class Model(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Parameter((torch.randn(60, 16) * 0.02).to(dtype))
        self.norm = torch.nn.Parameter(torch.ones(16, dtype=dtype))
        self.expert = torch.nn.Parameter((torch.randn(16, 16) * 0.02).to(dtype))


def trainer(**arguments: Any) -> Any:
    asked = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "optim": "adamw_torch"}
    return SimpleNamespace(
        args=SimpleNamespace(**{**asked, **arguments}),
        accelerator=SimpleNamespace(scaler=None),
        get_decay_parameter_names=lambda _: ["embed", "expert"],
    )


def adamw(model: Model, **settings: Any) -> Any:
    groups = [{"params": [model.embed, model.expert]}, {"params": [model.norm], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{"lr": RATE, "weight_decay": 0.0, **settings})


def replayed(
    settings: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    dtype: Any = torch.float32,
    change: Callable[[int, Model, Any], bool] = lambda *_: True,
) -> ReplayedUpdate:
    """Of the last of some steps; ``change`` does something before the optimizer's, and says whether that comes."""
    from pytest_llmperf.worker.recipes.huggingface.update_replay import UpdateReplay  # noqa: PLC0415 - needs torch

    model, own = Model(dtype), trainer(**(arguments or {}))
    optimizer = adamw(model, **(settings or {}))
    replays = []
    for step in range(1, STEPS + 1):
        for size, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn_like(parameter) * 0.1 ** (size + 2)
        replays.append(UpdateReplay(own, model, optimizer, (settings or {}).get("lr", RATE)))
        if change(step, model, optimizer):
            optimizer.step()
    return replays[-1].replay(STEPS)


def told(replay: ReplayedUpdate) -> list[str]:
    learning = Learning(tensors=3, steps=STEPS, schedule_steps=STEPS, replay=replay)
    return list(unlearnt(SPEC, replace(launch_of(SPEC), learning=learning)))


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_every_form_of_adamw_is_its_formula_within_a_few_roundings(
    form: dict[str, bool], dtype: Any, decay: float, golden: Golden
) -> None:
    name = "adamw_torch_fused" if "fused" in form else "adamw_torch"
    found = replayed({**form, "weight_decay": decay}, {"weight_decay": decay, "optim": name}, dtype)
    assert told(found) == []
    assert (found.tensors, found.miscounted, found.counts) == (3, (), (STEPS, STEPS))
    assert 0 < found.roundings < 4
    golden(found.asked)


def _without_gradient(name: str) -> Callable[[int, Model, Any], bool]:
    def change(step: int, model: Model, _: Any) -> bool:
        if step > 1:
            getattr(model, name).grad = None
        return True

    return change


def _halved(_: int, model: Model, __: Any) -> bool:
    model.norm.grad *= 0.5
    return True


def _twice(_: int, __: Model, optimizer: Any) -> bool:
    optimizer.step()
    return True


def _slower(_: int, __: Model, optimizer: Any) -> bool:
    optimizer.param_groups[1]["lr"] = RATE / 10
    return True


FAULTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "betas swapped": ({"betas": (0.999, 0.9)}, None, "the "),
    "beta2 0.95": ({"betas": (0.9, 0.95)}, None, "the "),
    "epsilon 1e-3": ({"eps": 1e-3}, None, "the weight of "),
    "weight decay 1.0": ({"weight_decay": 1.0}, None, "the weight of "),
    "ascends": ({"maximize": True}, None, "the average gradient of "),
    "every second step skipped": ({}, lambda step, *_: step % 2 == 1, "the optimizer has counted 5 steps of 2 of 3 "),
    "the last step skipped": ({}, lambda step, *_: step < STEPS, "the optimizer has counted 8 steps of 2 of 3 "),
    "each step twice": ({}, _twice, "the optimizer has counted 18 steps of 3 of 3 "),
    "one tensor never stepped after the first": ({}, _without_gradient("norm"), "the optimizer has counted 1 to 9 "),
    "a gradient halved after it was clipped": ({}, _halved, "the average "),
    "a group at a tenth of the rate": ({}, _slower, "the weight of norm "),
}


# In 16 bits no decay of 5e-5 moves a weight, and no update one that is 1: what changes nothing is no fault.
_LOST = {"weight decay 1.0", "a group at a tenth of the rate"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in FAULTS for dtype in (torch.float32, torch.bfloat16)[: 1 if name in _LOST else 2]],
    ids=str,
)
def test_an_update_that_was_not_asked_for_is_told(name: str, dtype: Any) -> None:
    settings, change, said = FAULTS[name]
    lines = told(replayed(settings, dtype=dtype, change=change or (lambda *_: True)))
    assert any(line.startswith(said) for line in lines), lines


def test_a_fused_kernel_may_have_its_settings_in_fp32() -> None:
    """As PyTorch's on a GPU: betas that are rounded, and bias corrections that are differences of what is rounded."""
    betas = tuple(float(torch.tensor(beta, dtype=torch.float32)) for beta in (0.9, 0.999))
    assert told(replayed({"betas": betas}, {"optim": "adamw_torch_fused"})) == []
    assert told(replayed({"betas": betas}))
    for other in ((0.9001, 0.999), (0.9, 0.9991)):
        assert told(replayed({"betas": other}, {"optim": "adamw_torch_fused"}))


def test_decay_that_was_asked_for_is_missed(golden: Golden) -> None:
    (line,) = told(replayed({"weight_decay": 0.0}, {"weight_decay": 0.1}))
    golden(line)


def test_a_step_at_no_rate_moves_no_weight_not_even_one_that_is_zero(golden: Golden) -> None:
    """As a warm-up begins; a bias that is zero then stays it."""

    def cleared(_: int, model: Model, __: Any) -> bool:
        model.norm.data.zero_()
        return True

    assert told(replayed({"lr": 0.0}, change=cleared)) == []

    def moved(step: int, model: Model, _: Any) -> bool:
        model.norm.data.fill_(0.0 if step < STEPS else 1e-9)
        return True

    (line,) = told(replayed({"lr": 0.0}, change=moved))
    golden(line)


def test_an_expert_that_was_not_asked_counts_fewer_steps() -> None:
    def waits(step: int, model: Model, _: Any) -> bool:
        if step % 2 == 0:
            model.expert.grad = None
        return True

    found = replayed(change=waits)
    assert (found.miscounted, found.counts) == ((), (5, 9))
    assert told(found) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"optim": "adafactor"}, "adafactor has no formula here"),
        ({"optim": "adamw_torch_fused"}, "adamw_torch_fused was asked for, and SGD was there"),
    ],
)
def test_what_is_not_replayed_says_why(arguments: dict[str, Any], why: str) -> None:
    from pytest_llmperf.worker.recipes.huggingface.update_replay import UpdateReplay  # noqa: PLC0415 - needs torch

    model = Model(torch.float32)
    found = UpdateReplay(trainer(**arguments), model, torch.optim.SGD(model.parameters()), RATE).replay(STEPS)
    assert found == ReplayedUpdate(none=why)
    assert told(found) == []


def test_scaled_losses_and_float16_are_not_replayed(golden: Golden) -> None:
    from pytest_llmperf.worker.recipes.huggingface.update_replay import UpdateReplay  # noqa: PLC0415 - needs torch

    narrow, wide, scaled = Model(torch.float16), Model(torch.float32), trainer()
    scaled.accelerator.scaler = object()
    golden(UpdateReplay(trainer(), narrow, adamw(narrow), RATE).replay(STEPS).none)
    assert UpdateReplay(scaled, wide, adamw(wide), RATE).replay(STEPS).none.startswith("losses are scaled")


def test_an_update_that_is_no_number_is_told() -> None:
    def broken(step: int, model: Model, _: Any) -> bool:
        if step == STEPS:
            model.norm.data.fill_(math.nan)
        return True

    found = replayed(change=broken)
    assert found.tensor == "norm"
    assert told(found)
