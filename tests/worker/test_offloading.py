"""Activations that wait in the host's memory are those that the backward pass needs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pytest_llmperf.worker.settings.compilation import Offloaded, offload  # noqa: E402 - it needs torch


def test_what_is_moved_comes_back_and_weights_stay() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    rows = torch.randn(8, 16)
    model(rows).square().sum().backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    offloaded = Offloaded(model, least_bytes=1)
    with offloaded:
        loss = model(rows).square().sum()
    loss.backward()
    assert all(torch.equal(own.grad, other) for own, other in zip(model.parameters(), kept, strict=True))
    # The rows, what the activation and the last layer were given, and the squared numbers.
    assert offloaded.moved == 4 * (8 * 16 + 2 * 8 * 32 + 8 * 4)


def test_what_is_small_stays() -> None:
    model = torch.nn.Linear(4, 4)
    offloaded = Offloaded(model)
    with offloaded:
        model(torch.randn(2, 4)).sum().backward()
    assert offloaded.moved == 0


def test_what_replaces_the_forward_pass_later_is_offloaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger's loss does, which the Trainer puts in when all else is prepared."""
    monkeypatch.setattr(Offloaded.__init__, "__defaults__", (1, "cpu"))
    model = torch.nn.Linear(4, 4)
    offload(model)
    own = model.forward
    model.forward = lambda rows: own(rows).exp()
    model(torch.randn(2, 4)).sum().backward()
    assert model._llmperf_offloaded > 0
    model.forward = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(2, 4))
    kept = model.weight.detach().clone().requires_grad_()
    kept.square().sum().backward()  # outside of a pass nothing is moved
    assert model._llmperf_offloaded == 0
