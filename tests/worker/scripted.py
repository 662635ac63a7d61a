"""Launches of scripts that tests write, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.spec import ScriptSpec

#: Trains a small network by an own loop for so many steps; what a test adds stands in ``{each}`` and ``{after}``.
LOOP = """
import os, pathlib, signal, sys, time
import torch
{before}
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, {steps} + 1):
    loss = model(torch.randn(8, 16)).square().mean()
    {each}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
{after}
"""


def loop(folder: Path, *, steps: int = 1000, before: str = "", each: str = "pass", after: str = "") -> Path:
    """``train.py`` in ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(LOOP.format(steps=steps, before=before, each=each, after=after))
    return folder


def launch(
    folder: Path,
    command: str = "python train.py",
    *,
    seconds: float = 120.0,
    watch: Callable[[Progress], None] = lambda _: None,
    **fields: Any,
) -> Launch | Failure:
    """One launch of ``command``, written to run in ``folder``; ``watch`` hears how far it is."""
    given = {"steps": 6, "warmup_steps": 2, **fields}
    python = given.pop("python", None)
    request = LaunchRequest(
        spec=ScriptSpec(command=command, **given),
        folder=folder.with_name(f"{folder.name}-launch"),
        gpus=(),
        timeout_seconds=seconds,
        root=folder,
        **({"python": python} if python else {}),
    )
    return LocalLauncher().launch(request, watch)
