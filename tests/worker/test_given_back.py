"""What was on a GPU before a training is neither kept nor counted as its peak."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pytest_llmperf.observe import device  # noqa: E402 - it needs torch


def test_peaks_count_from_when_the_device_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in 16 bits, of which those in four are made, were three quarters of an 8B model's peak."""
    called: list[object] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", called.append)
    device.give_back(torch.device("cpu"))
    assert called == []
    gpu = torch.device("cuda", 1)
    device.give_back(gpu)
    assert called == ["emptied", gpu]
