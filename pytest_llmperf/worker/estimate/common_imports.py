"""What predictions import, imported before they are forked: each would take seconds for it otherwise."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from pytest_llmperf.worker.build import hf_config_of


def prepare(request: Mapping[str, Any]) -> None:
    """Import what the prediction of ``request`` needs; nothing of it is patched by that."""
    with suppress(Exception):  # what is wrong is the prediction's own to tell
        _ = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config_of(request["model_config"]))]
    spec = request.get("spec", {})
    if spec.get("liger"):
        _import_liger()
    if spec.get("parallelism", "ddp") != "ddp":
        _import_sharding()


@cache
def _import_liger() -> None:
    with suppress(Exception):
        importlib.import_module("liger_kernel.transformers.monkey_patch")
        ops = importlib.import_module("liger_kernel.ops")
        for info in pkgutil.iter_modules(ops.__path__):
            importlib.import_module(f"{ops.__name__}.{info.name}")


@cache
def _import_sharding() -> None:
    with suppress(Exception):
        importlib.import_module("torch.distributed.fsdp")
