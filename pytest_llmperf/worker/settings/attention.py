"""Attention: which implementations a model has, PyTorch's kernels for it, and the operators that it called."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedModel, Trainer

from pytest_llmperf.observe.device import SDPA_SWITCHES, matmul_precision, sdpa_kernels
from pytest_llmperf.settings.attention import ATTENTIONS, FLASH, UNKNOWN
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.folder import RefusedError
from pytest_llmperf.worker.settings.experts import Operators, products_of
from pytest_llmperf.worker.settings.parallelism import is_sharded

# An attention, and the class attribute by which a family says that it has it.
_SAID_BY = {
    "sdpa": "_supports_sdpa",
    **dict.fromkeys(FLASH, "_supports_flash_attn"),
    "flex_attention": "_supports_flex_attn",
}


def transformers_version() -> str:
    return f"transformers {version('transformers')}"


def attentions_of(kind: type) -> tuple[str, ...]:
    """The attentions that the model class ``kind`` says it has; one that says nothing is taken to have it."""
    found = ("eager", *(name for name, said in _SAID_BY.items() if getattr(kind, said, True)))
    # Where a class lists kernels of its own, transformers takes one of them in the place of what was asked for.
    own = getattr(kind, "_compatible_flash_implementations", None) or found
    return tuple(name for name in ATTENTIONS if name in found and (name not in FLASH or name in own))


def check_attention(kind: type, hf_config: Any, asked: str) -> None:
    """Raise a ``RefusedError`` where the model class ``kind`` does not have the attention that was asked for."""
    there = attentions_of(kind)
    if asked in there:
        return
    if there == ("eager",) and not hasattr(hf_config, "num_attention_heads"):
        raise RefusedError(
            f"{hf_config.model_type} has no attention at all, and attention={asked!r} nothing to replace; "
            "expected 'eager', which leaves a model as it is: use attention='eager'"
        )
    known = ", ".join(repr(one) for one in there)
    raise RefusedError(
        f"{hf_config.model_type} has no attention={asked!r} in {transformers_version()}, expected "
        f"{'one of ' if len(there) > 1 else ''}{known}: use attention='eager'"
    )


@cache
def found_settings() -> Mapping[str, Any]:
    """What the user's environment has set of all that a launch forces; asked before the first time that it does."""
    return {"sdpa_kernels": sdpa_kernels(), "matmul_precision": matmul_precision()}


def choose_sdpa(spec: TrainSpec) -> None:
    """Leave PyTorch's attention only the kernel asked for; ``auto`` leaves it those that this environment has."""
    wanted = found_settings()["sdpa_kernels"] if spec.sdpa_backend == "auto" else [spec.sdpa_backend]
    for name, switch in SDPA_SWITCHES.items():
        if (name in wanted) != (name in sdpa_kernels()):
            switch(name in wanted)


def last_kernels(trainer: Trainer, model: PreTrainedModel) -> dict[str, str]:
    """The operators of attention that one more sequence calls, after all steps (empty: matrix products), and of experts
    where there are some. ``unknown``: it failed or is not tried: flex_attention would compile anew, ranks of a sharded
    model wait for one that failed."""
    unknown = {"attention_kernel": UNKNOWN}
    if model.config._attn_implementation == "flex_attention" or is_sharded(model):
        return unknown
    batch = trainer.train_dataset[0]
    inputs = {name: value.unsqueeze(0).to(model.device) for name, value in batch.items()}
    try:
        with trainer.accelerator.autocast(), Operators("attention", "flash") as ops, products_of(model) as products:
            model(**inputs)
    except Exception:  # noqa: BLE001 - whatever stands in the way, the measurement is done and counts
        return unknown
    return {"attention_kernel": " ".join(ops.names)} | ({"experts_kernel": " ".join(products)} if products else {})


WITNESSES = {"attention": lambda *_: lambda training: {"attention": str(training.model.config._attn_implementation)}}
