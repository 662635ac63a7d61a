"""Arguments: given on to the Trainer and to a model's configuration, and read off them once they have trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from transformers import TrainingArguments

from pytest_llmperf.observe.environment import plain
from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.arguments import OPEN, ArgumentsEvidence, values
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.user_input import hint
from pytest_llmperf.worker.settings import Training

# Names that transformers has moved into one mapping.
_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")


class _Checked(TrainingArguments):
    device = None  # asking for it would begin the group of ranks


def arguments(spec: TrainSpec, _device: torch.device) -> Mapping[str, Any]:
    return check_values(spec)


def check_values(spec: TrainSpec) -> Mapping[str, Any]:
    """RefusedError: TrainingArguments does not take one of its values."""
    if given := values(spec, OPEN[0]):
        try:
            _Checked(output_dir="", use_cpu=True, report_to="none", **given)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise RefusedError(f"training_arguments: {' '.join(str(error).split())[:300]}") from error
    return given


def check_configuration(spec: TrainSpec, hf_config: Any) -> None:
    """Refuse a name that this kind of configuration does not have: it would be kept there, and change nothing."""
    asked = values(spec, OPEN[1])
    usual = type(hf_config)() if asked else hf_config
    known = [*usual.to_dict(), *usual.attribute_map, *(_ROPE if hasattr(usual, "rope_parameters") else ())]
    for name in asked:
        if name not in known and not hasattr(usual, f"_{name}"):
            line = f"{hf_config.model_type}'s configuration has no {name!r}{hint(name, known)}"
            raise RefusedError(f"model_kwargs: {line}; leave it out, or name one of its own")


def _witness(spec: TrainSpec, _model: Any) -> Callable[[Training], ArgumentsEvidence]:
    def seen(training: Training) -> ArgumentsEvidence:
        holders = training.trainer.args, training.model.config
        return ArgumentsEvidence(*(_held(one, values(spec, name)) for one, name in zip(holders, OPEN, strict=True)))

    return seen


def _held(holder: Any, names: Iterable[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        rope = getattr(holder, "rope_parameters", None) or {}
        moved: Any = rope.get(name, rope) if name in _ROPE else None
        value = getattr(holder, name, getattr(holder, f"_{name}", moved))
        value = value.to_dict() if hasattr(value, "to_dict") else value
        found[name] = plain(value.value if isinstance(value, Enum) else value)
    return found


WITNESSES = {"arguments": _witness}
