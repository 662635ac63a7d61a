"""Of which step a request is: what two of them share is predicted once, and only with the same versions exact."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

# What a prediction does not look at: how long is measured and by what it is judged, what fills the batches and who
# fetches them, and what a compiler or the matrix units make of the same step.
_WITHOUT_EFFECT = frozenset(
    "steps min_steps warmup_steps throughput_tolerance memory_tolerance seed data weights tf32 torch_compile "
    "torch_compile_mode torch_compile_scope text split tokenizer tokenise data_workers data_prefetch "
    "data_pinned".split()
)


def identity(request: Mapping[str, Any]) -> str:
    """The same for two requests whose predictions are the same."""
    if "spec" not in request:  # of a model, and of none of its steps
        return json.dumps(request, sort_keys=True, default=str)
    spec = {name: value for name, value in request["spec"].items() if name not in _WITHOUT_EFFECT}
    spec.pop("model", None)  # its configuration says what it is
    if spec.get("optimizer") == "adamw_torch_fused":
        spec["optimizer"] = "adamw_torch"
    if spec.get("parallelism") == "ddp":  # each rank's buckets are there or not
        spec["gpus"] = min(2, spec["gpus"])
    if spec.get("sdpa_backend") != "math":  # one kernel is as another
        spec["sdpa_backend"] = "auto"
    return json.dumps(
        [spec, request["model_config"], bool(request.get("operators")), bool(request.get("traffic"))],
        sort_keys=True,
        default=str,
    )


def kind(request: Mapping[str, Any]) -> str:
    """The same for two requests that one process may predict: Liger patches a family's classes for good.

    The others share what PyTorch has looked up, whichever family they are of.
    """
    spec = request.get("spec", {})
    if spec.get("parallelism") != "ddp":  # it makes ranks of its process
        return identity(request)
    recomputed = [spec.get(name) for name in ("checkpointing_policy", "gradient_checkpointing")]
    patched = [request["model_config"].get("model_type"), spec.get("liger_kernels")] if spec.get("liger") else []
    return json.dumps([*recomputed, *patched], default=str)


# Of one release there are builds for the CPU and for several of CUDA, which count alike.
_BUILD = re.compile(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$")

_PACKAGES = ("torch", "transformers", "accelerate", "pytest-llmperf")


def versions(*, liger: bool) -> dict[str, str]:
    """Of whatever a prediction runs."""
    found = {}
    for name in (*_PACKAGES, *(["liger-kernel"] if liger else [])):
        try:
            found[name] = _BUILD.sub("", metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return found
