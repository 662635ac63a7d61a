"""Where the tensors of small trainings are kept, and how their figures come to the host."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - after what skips

from pytest_llmperf.worker.recipes.huggingface.parity import (  # noqa: E402
    Truth,
    errors_of,
)
from pytest_llmperf.worker.recipes.huggingface.small_trainer import (  # noqa: E402
    SmallSteps,
    place_for,
    plain_updates,
)

SPEC = TrainSpec(model="llama-tiny", model_precision="fp32", mixed_precision="no", steps=2, min_steps=2, warmup_steps=1)


class _Fetches(TorchDispatchMode):
    """Counts figures that are fetched one by one: a GPU is waited for at each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def _seen(num_tensors: int) -> tuple[SmallSteps, Truth]:
    def tensors() -> Any:
        return [{f"{n}.weight": torch.randn(3, 2, dtype=torch.float64) for n in range(num_tensors)} for _ in range(2)]

    gradients = tensors()
    seen = SmallSteps(losses=[1.0, 0.9], gradients=gradients, clipped=gradients, weights=tensors(), updates=tensors())
    return seen, Truth([1.0, 0.9], tensors())


def _fetched(num_tensors: int) -> int:
    given = _seen(num_tensors)
    # Of an optimizer with a plain form, whose own steps are no part of what is counted, and of one without.
    with _Fetches() as watch:
        errors_of("own", replace(SPEC, optimizer="lion_32bit"), *given)
    return watch.count


def test_figures_come_to_the_host_together_however_many_tensors_there_are() -> None:
    assert _fetched(40) == _fetched(2)


@pytest.mark.parametrize(("gradient", "lost"), [(0.0, 0.0), (1.0, 1.0)])
def test_what_no_gradient_reaches_loses_no_update(gradient: float, lost: float) -> None:
    """Its decay alone may be too small for its type, and is not why it stays."""
    seen, truth = _seen(2)
    for name in seen.weights[0]:
        for step in range(2):
            seen.updates[step][name].zero_()
            seen.clipped[step][name].fill_(gradient)
    seen.decaying = frozenset(seen.weights[0])
    assert errors_of("own", SPEC, seen, truth).lost_updates == lost


def test_what_is_kept_stays_on_the_device_unless_it_would_fill_it() -> None:
    gpu = torch.device("cuda", 1)
    assert place_for(30_000_000, 2, gpu) == gpu
    assert place_for(40_000_000, 2, gpu) == torch.device("cpu")


def test_a_truth_is_loaded_where_it_is_compared(tmp_path: Path) -> None:
    _, truth = _seen(2)
    truth.save(tmp_path / "truth.pt")
    there = Truth.load(tmp_path / "truth.pt", torch.device("meta"))
    assert {one.device.type for one in there.gradients[0].values()} == {"meta"}
    assert Truth.load(tmp_path / "truth.pt").gradients[0]["0.weight"].equal(truth.gradients[0]["0.weight"])


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd", "adagrad", "rmsprop"])
def test_plain_updates_are_made_tensor_by_tensor_on_every_device(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a GPU would be offered: the faster forms, for all tensors at once.
    supported = "_get_foreach_kernels_supported_devices"
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], supported, lambda: ["cpu", "cuda"])
    seen, _ = _seen(3)
    asked: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        plain_updates(optimizer, seen.weights, seen.clipped, frozenset())
    assert asked
    assert not [name for name in asked if "_foreach_" in name]
