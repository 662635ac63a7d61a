"""ObservedTraining: one rank's training, seen by witnesses that are there before it and told of once it is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer

from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.learning.learning import RankLearning
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.worker import evidence
from pytest_llmperf.worker.build import DTYPES
from pytest_llmperf.worker.checkpoint import Checkpoint
from pytest_llmperf.worker.data.training_data import TrainingData
from pytest_llmperf.worker.measuring.measurement import Measurement
from pytest_llmperf.worker.measuring.stopping import Stopping
from pytest_llmperf.worker.trained import Later, Trained


@dataclass
class ObservedTraining:
    """What is watched of the training of ``spec``."""

    spec: TrainSpec
    model: PreTrainedModel
    measurement: Measurement
    stopping: Stopping
    checkpoint: Checkpoint | None
    canary: Mapping[str, float]
    calibration: Calibration | None
    measured: Callable[[Trained], None]
    """Who is told before steps are traced: what breaks or hangs in these takes nothing from it."""
    data: TrainingData
    remarks: Sequence[str] = ()
    """What is asked for and is not done, a line each."""
    _kept: Trained | None = None
    _autocast: evidence.AutocastWitness = field(init=False)
    _liger: evidence.LigerNotes = field(default_factory=evidence.LigerNotes)

    def __post_init__(self) -> None:
        self._autocast = evidence.AutocastWitness(self.model, self.model.device.type)

    def keep(self, trainer: Trainer) -> None:
        """All that is timed is over."""
        self._kept = self._seen(trainer)
        self.measured(self._kept)

    def ended(self, trainer: Trainer, trace: Trace, learning: RankLearning) -> Trained:
        """All is over, and one more sequence may be tried."""
        trained = self._kept or self._seen(trainer)
        return replace(trained, later=Later(evidence.attention_kernel(trainer, self.model), trace, learning))

    def _seen(self, trainer: Trainer) -> Trained:
        measurement = self.measurement
        return Trained(
            step_seconds=measurement.step_seconds,
            waiting_seconds=measurement.waiting_seconds,
            losses=_step_losses(measurement.losses, self.spec.gradient_accumulation_steps),
            gradient_norms=_norms(measurement.gradient_norms),
            real_tokens=_by_step(measurement.real_tokens, self.spec.gradient_accumulation_steps),
            tokens_per_step=_per_step(measurement.num_tokens, len(measurement.step_seconds)),
            allocated_bytes=measurement.allocated_bytes,
            peak_reserved_bytes=measurement.peak_reserved_bytes,
            peak_allocated_bytes=measurement.peak_allocated_bytes,
            train_seconds=measurement.seconds,
            parameters=self.model.num_parameters(),
            canary=self.canary,
            calibration=self.calibration,
            evidence={
                **evidence.collect(trainer, self.model, DTYPES[self.spec.model_precision], self._autocast, self._liger),
                **self.data.evidence(len(measurement.step_seconds) * self.spec.sequences_per_step),
                **self.stopping.evidence,
                **(self.checkpoint.evidence if self.checkpoint else {}),
                **({"remarks": list(self.remarks)} if self.remarks else {}),
            },
        )


def _step_losses(micro_losses: list[torch.Tensor], per_step: int) -> tuple[float, ...]:
    """Loss of each optimizer step; the Trainer scales micro-batch losses so that they add up to it."""
    losses = torch.stack(micro_losses).float().cpu()
    return tuple(losses.view(-1, per_step).sum(dim=1).tolist())


def _norms(norms: list[torch.Tensor]) -> tuple[float, ...]:
    """As numbers; of sharded weights ranks add theirs up here. None where the loss's scale made one infinite."""
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    found = tuple(torch.stack(whole).float().tolist()) if whole else ()
    return found if all(map(math.isfinite, found)) else ()


def _by_step(numbers: list[int], per_step: int) -> tuple[int, ...]:
    return tuple(sum(numbers[start : start + per_step]) for start in range(0, len(numbers), per_step))


def _per_step(tokens: int, steps: int) -> int:
    if tokens % steps:
        raise RuntimeError(f"{tokens} tokens in {steps} steps: the batches were not all of one size")
    return tokens // steps
