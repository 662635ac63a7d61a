"""What a plain spec gives its Trainer, beside the defaults of TrainingArguments and of TRL's SFTConfig."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainingArguments

from pytest_llmperf import TrainSpec
from pytest_llmperf.worker import build
from tools.tables import add_option, table

# The launch's folder and the machine's, and what is said of each training anyway.
_NOT_COMPARED = ("output_dir", "use_cpu", "ddp_backend", "dataloader_pin_memory", "max_steps")


def rows() -> Iterator[tuple[str, ...]]:
    """Each argument for which one of them has another value; SFTConfig's is empty where TRL is not installed."""
    spec = TrainSpec(model="llama-3.2-1b")
    with mock.patch.object(build, "TrainingArguments", dict):
        given: Any = build.training_arguments(spec, Path(), torch.device("cpu"), spec.steps)
    plain = _defaults(TrainingArguments)
    try:
        SFTConfig: Any = import_module("trl").SFTConfig  # noqa: N806 - a class
    except ImportError:
        trls: dict[str, Any] = {}
    else:
        trls = _defaults(SFTConfig)
    yield "argument", "TrainSpec", "TrainingArguments", "SFTConfig"
    for name, theirs in sorted(plain.items()):
        values = given.get(name, theirs), theirs, trls.get(name, theirs)
        if name not in _NOT_COMPARED and any(value != theirs for value in values):
            yield name, *map(_word, values[:2]), _word(values[2]) if trls else ""


def _defaults(kind: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(kind) if each.init and each.default is not MISSING}


def _word(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_option(parser)
    table(rows(), "defaults" if parser.parse_args().write else "")
