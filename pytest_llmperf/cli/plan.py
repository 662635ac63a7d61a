"""``llmperf plan``: the memory that specs will need, predicted on any machine."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.shelf import CaseError, find
from pytest_llmperf.insight import memory
from pytest_llmperf.insight.memory import MemoryPlan
from pytest_llmperf.report import formats
from pytest_llmperf.spec import TrainSpec

_SECONDS = 300
# A traceback's last word, which may be followed by advice.
_ERROR = re.compile(r"^[\w.]+(?:Error|Exception): (.*)$", re.MULTILINE)
_PACKAGE_PARENT = Path(__file__).parents[2]


def specs_of(words: Sequence[str], baselines: Path) -> list[TrainSpec]:
    """The specs that ``words`` name: ids of stored cases, or one spec in ``key=value`` pairs.

    Raises:
        CaseError: neither, or a spec that cannot be; one line.
    """
    pairs = [word for word in words if "=" in word]
    named = [_stored(word, baselines) for word in words if "=" not in word]
    if not pairs:
        return named
    try:
        return [*named, TrainSpec.from_dict(dict(_pair(word) for word in pairs))]
    except ValueError as error:
        raise CaseError(str(error)) from error


def _stored(word: str, baselines: Path) -> TrainSpec:
    try:
        return TrainSpec.from_dict(find(word, baselines, None).baseline.spec)
    except ValueError as error:
        raise CaseError(f"{word}: its stored settings are none of today's ({error})") from error


def _pair(word: str) -> tuple[str, Any]:
    name, _, text = word.partition("=")
    kinds = {f.name: str(f.type) for f in fields(TrainSpec)}
    kind = kinds.get(name, "str")  # an unknown name is TrainSpec's to refuse
    try:
        if kind == "bool":
            return name, {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind == "int":
            return name, int(text)
        if kind.startswith("float"):
            return name, float(text)
    except (KeyError, ValueError):
        nearest = difflib.get_close_matches(text.lower(), ["true", "false"], n=1)
        hint = f", did you mean {nearest[0]}?" if nearest else ""
        raise CaseError(f"{word}: {text!r} is no {kind}{hint}") from None
    return name, text


def predict(spec: TrainSpec) -> MemoryPlan:
    """The prediction for ``spec``, by a process of its own: this one does not import torch.

    Raises:
        CaseError: it cannot be predicted; one line.
    """
    request = {"spec": spec.to_dict(), "model_config": dict(spec.architecture.config)}
    path = os.pathsep.join([str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A GPU that happens to be here would only be woken up.
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest_llmperf.worker.plan"],
            input=json.dumps(request),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return MemoryPlan(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise CaseError(f"{spec.id}: no prediction after {_SECONDS} s") from None
    errors = _ERROR.findall(done.stderr) or ["it said nothing"]
    raise CaseError(f"{spec.id}: its memory cannot be predicted: {errors[-1]}")


def page(spec: TrainSpec, plan: MemoryPlan) -> list[str]:
    """What is predicted, part by part, and the chapter's formulas beside it."""
    lines = [spec.id, f"  peak allocated  {formats.memory(plan.peak_allocated_bytes, 2):>10}  of each rank's GPU"]
    lines += [
        f"    {name:12}  {formats.memory(plan.parts[name], 2):>10}  {text}"
        for name, text in memory.PARTS.items()
        if plan.parts.get(name)
    ]
    geometry = spec.architecture.geometry
    if geometry is not None:
        num_parameters = memory.chapter_parameters(geometry)
        states = formats.memory(memory.chapter_model_bytes(num_parameters), 2)
        activations = formats.memory(memory.chapter_activation_bytes(geometry, spec), 2)
        lines += [
            "  the chapter's formulas, for comparison",
            f"    parameters    {num_parameters / 1e9:>9.3f}B  N = h·v + L·(12h² + 13h) + 2h",
            f"    model states  {states:>10}  16 bytes a parameter",
            f"    activations   {activations:>10}  s·b·h·L·(34 + 5·a·s/h)",
        ]
    return lines


def document(spec: TrainSpec, plan: MemoryPlan) -> dict[str, Any]:
    """The same for programs."""
    return {
        "id": spec.id,
        "digest": spec.digest,
        "peak_allocated_bytes": plan.peak_allocated_bytes,
        "parts": dict(plan.parts),
    }
