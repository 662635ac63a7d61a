"""FlopCounts: models' FLOPs, counted beside this process, which imports no torch, on tensors without content."""

from __future__ import annotations

from pytest_llmperf.launch.prediction_process import PredictionProcess
from pytest_llmperf.settings.models import Model

# Others may train beside it, on this host's other GPUs.
_NICENESS = 10
_LONGEST_ERROR = 200


class CountError(Exception):
    """A model's FLOPs cannot be counted: one line."""


class FlopCounts:
    """Asked as soon as a model is known, and read when its count is wanted."""

    def __init__(self) -> None:
        self._process = PredictionProcess(_NICENESS)

    def ask(self, model: Model, sequence_length: int) -> int:
        """The number of the count: training FLOPs of ``model`` for one token of a full sequence."""
        return self._process.ask({"model_config": dict(model.config), "sequence_length": sequence_length})

    def answer(self, number: int) -> float:
        """What was counted, once it is.

        Raises:
            CountError: transformers does not have the model, or its code does not run on tensors without content.
        """
        answer = self._process.answer(number)
        if "flops_per_token" in answer:
            return float(answer["flops_per_token"])
        error = str(answer.get("error"))
        raise CountError(error if len(error) <= _LONGEST_ERROR else f"{error[:_LONGEST_ERROR]}...")

    def close(self) -> None:
        """End what counts."""
        self._process.close()
