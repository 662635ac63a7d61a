"""pytest-llmperf: hold the throughput and memory of LLM training against stored baselines.

What a user's own tests need is here by name; ``pytest_llmperf.insight`` has the chapter's figures and the formulas."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_llmperf.support import __version__ as __version__

if TYPE_CHECKING:
    from pytest_llmperf.plugin.hooks import is_active, on_cpu
    from pytest_llmperf.plugin.perf import Perf
    from pytest_llmperf.plugin.reports import DidNotTrain
    from pytest_llmperf.records.result import CaseResult, Reference
    from pytest_llmperf.settings.spec import ScriptSpec
    from pytest_llmperf.settings.train_spec import TrainSpec
    from pytest_llmperf.support.formats import GIB

__all__ = ["GIB", "CaseResult", "DidNotTrain", "Perf", "Reference", "ScriptSpec", "TrainSpec", "is_active", "on_cpu"]

# Found when they are asked for: the worker imports this package too, and knows no pytest.
_HOMES = {
    "CaseResult": "records.result",
    "DidNotTrain": "plugin.reports",
    "GIB": "support.formats",
    "Perf": "plugin.perf",
    "Reference": "records.result",
    "ScriptSpec": "settings.spec",
    "TrainSpec": "settings.train_spec",
    "is_active": "plugin.hooks",
    "on_cpu": "plugin.hooks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
