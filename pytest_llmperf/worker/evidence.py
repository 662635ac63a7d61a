"""What was really active in a launch, read off the objects that trained and not off the request."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedModel, Trainer

from pytest_llmperf.observe.device import is_gpu, room
from pytest_llmperf.settings import fault_injection
from pytest_llmperf.settings.evidence import RunEvidence
from pytest_llmperf.settings.setting import gathered
from pytest_llmperf.settings.train_spec import TrainSpec
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


class Witnesses:
    """Who watches a training of ``spec``, one for each setting; made before its Trainer is."""

    def __init__(self, spec: TrainSpec, model: PreTrainedModel) -> None:
        self._witnesses: Mapping[str, Callable[[Training], Any]] = {
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

    #: Tried last of all.
    attention_kernel = staticmethod(attention.attention_kernel)

    def collect(self, trainer: Trainer, model: PreTrainedModel) -> dict[str, Any]:
        """All that they saw, as a record holds it; called once, after all that is timed."""
        training = Training(trainer, model)
        return gathered({name: partial(witness, training) for name, witness in self._witnesses.items()})


def _run(training: Training) -> RunEvidence:
    return RunEvidence(
        device_type=training.device.type,
        injected=os.environ.get(fault_injection.VARIABLE, ""),
        allocator_retries=room().retries if is_gpu(training.device) else 0,
        found=attention.found_settings(),
    )
