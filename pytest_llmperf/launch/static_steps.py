"""StaticSteps: what fake tensors tell of specs' steps, asked as soon as a spec is known and read when it is wanted."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec

from pytest_llmperf.launch.memory_estimate import PredictionError, prediction_error, step_request, why_none
from pytest_llmperf.launch.prediction_process import PredictionProcess
from pytest_llmperf.records.static_step import StaticStep
from pytest_llmperf.settings.train_spec import TrainSpec

# None of them is imported here, and the process that predicts imports all.
_NEEDED = ("torch", "transformers", "accelerate")
_WHAT = "its step cannot be told without a launch"


class StaticSteps:
    """Of one run."""

    def __init__(self) -> None:
        self._process = PredictionProcess()
        self._numbers: dict[TrainSpec, int] = {}

    def check(self) -> None:
        """Refuse an interpreter that can tell of no spec.

        Raises:
            PredictionError: it lacks what every training needs, in one line.
        """
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if missing:
            raise PredictionError(
                f"{sys.executable} has no {', '.join(missing)}, so it can judge no step; "
                "run this with the Python that trains"
            )

    def ask(self, specs: Iterable[TrainSpec]) -> None:
        """Let them be predicted beside what this process does."""
        for spec in specs:
            if spec not in self._numbers and why_none(spec) is None:
                self._numbers[spec] = self._process.ask(step_request(spec, operators=True))

    def of(self, spec: TrainSpec) -> StaticStep | PredictionError:
        """The step of ``spec``, or why there is none."""
        why = why_none(spec)
        if why is not None:
            return prediction_error(spec, why, _WHAT)
        self.ask([spec])
        answer = self._process.answer(self._numbers[spec])
        if "parts" not in answer:
            error = prediction_error(spec, str(answer.get("error")), _WHAT)
            error.is_lost = bool(answer.get("is_lost"))
            return error
        return StaticStep(
            operators=answer["operators"],
            flops=answer["flops"],
            memory=answer["parts"],
            versions=answer["versions"],
        )

    def close(self) -> None:
        """End what predicts."""
        self._process.close()
