"""What was really active in a launch, read off the objects that trained and not off the request."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedModel, Trainer

from pytest_llmperf.observe.device import is_gpu, room
from pytest_llmperf.settings.registry import RunEvidence
from pytest_llmperf.settings.setting import gathered
from pytest_llmperf.settings.train_spec import INJECT, TrainSpec
from pytest_llmperf.worker.settings import (
    Training,
    attention,
    compilation,
    data,
    liger,
    optimizer,
    parallelism,
    precision,
    recomputation,
)
from pytest_llmperf.worker.setup import setup

#: Tried last of all.
attention_kernel = attention.attention_kernel


def watched(spec: TrainSpec, model: PreTrainedModel) -> Callable[[Trainer], dict[str, Any]]:
    """Let each setting's witness watch a training, before its Trainer is made.

    What is returned is called once, after all that is timed: it gives all that they saw, as a record holds it.
    """
    witnesses: Mapping[str, Callable[[Training], Any]] = {
        "run": _run,
        "precision": precision.Witness(spec, model),
        "attention": attention.witness,
        "liger": liger.Witness(),
        "compilation": compilation.witness,
        "optimizer": optimizer.witness,
        "recomputation": recomputation.witness,
        "parallelism": parallelism.witness,
        "data": data.witness,
        "setup": lambda training: {"setup": setup(training.trainer, training.model, training.optimizer)},
    }
    return lambda trainer: gathered(
        {name: partial(witness, Training(trainer, model)) for name, witness in witnesses.items()}
    )


def _run(training: Training) -> RunEvidence:
    return RunEvidence(
        device_type=training.device.type,
        injected=os.environ.get(INJECT, ""),
        allocator_retries=room().retries if is_gpu(training.device) else 0,
        found=attention.found_settings(),
    )
