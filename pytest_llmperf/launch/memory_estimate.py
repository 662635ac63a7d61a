"""Prediction: a spec's memory on a GPU, by a process that needs none."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from pytest_llmperf.launch.prediction_process import PredictionProcess
from pytest_llmperf.settings.train_spec import TrainSpec

# A list of all that transformers knows is no answer.
_LONGEST_ERROR = 300


class PredictionError(Exception):
    """A spec's memory cannot be predicted: one line."""

    is_lost = False
    """Whether whoever predicts has ended: it is not the spec's doing that nobody knows."""


_Answers = Generator[Mapping[str, int] | PredictionError, None, None]


def predictions(specs: Sequence[TrainSpec]) -> _Answers:
    """For each of ``specs``, in their order and each as soon as it is known, why there is none, or bytes of one rank at
    its peak by part."""
    process = PredictionProcess()
    try:
        numbers = [process.ask(step_request(spec)) if why_none(spec) is None else None for spec in specs]
        process.end_of_questions()
        for spec, number in zip(specs, numbers, strict=True):
            if number is None:
                yield prediction_error(spec, why_none(spec) or "")
                continue
            yield concluded(spec, process.answer(number))
    finally:
        process.close()


def step_request(spec: TrainSpec, *, operators: bool = False) -> dict[str, Any]:
    """A question for bytes by part, and for ``operators`` with their arithmetic where these are wanted."""
    request = {"spec": spec.to_dict(), "model_config": dict(spec.architecture.config)}
    return request | ({"operators": True} if operators else {})


def concluded(spec: TrainSpec, answer: Mapping[str, Any]) -> Mapping[str, int] | PredictionError:
    """The parts of an ``answer``, or what is wrong."""
    return dict(answer["parts"]) if "parts" in answer else prediction_error(spec, str(answer.get("error")))


def why_none(spec: TrainSpec) -> str | None:
    """Why ``spec`` cannot be predicted in this environment, where that is known without asking."""
    if spec.liger and importlib.util.find_spec("liger_kernel") is None:
        return "Liger is not installed; pip install 'pytest-llmperf[liger]'"
    return None


def prediction_error(spec: TrainSpec, why: str, what: str = "its memory cannot be predicted") -> PredictionError:
    """In one line of a length that somebody reads."""
    shortened = why if len(why) <= _LONGEST_ERROR else f"{why[:_LONGEST_ERROR]}..."
    return PredictionError(f"{spec.id}: {what}: {shortened}")
