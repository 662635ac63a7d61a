"""StepPredictions: what fake tensors tell of the steps of many configurations, asked ahead and read when wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pytest_llmperf.launch.memory_estimate import step_request, why_none
from pytest_llmperf.launch.prediction_process import PredictionProcess
from pytest_llmperf.spec.train_spec import SpecError, TrainSpec

# Others train on this host meanwhile.
_NICENESS = 10


class StepPredictions:
    """Of one search, by one process that needs no GPU."""

    def __init__(self) -> None:
        self._process = PredictionProcess(_NICENESS)
        self._memory: dict[TrainSpec, int] = {}
        self._work: dict[TrainSpec, int] = {}

    def ask(self, specs: Iterable[TrainSpec], *, work: bool = False) -> None:
        """Let their memory, or for ``work`` their operators, be predicted beside what this process does."""
        numbers = self._work if work else self._memory
        for spec in specs:
            known = _predictable(spec)
            if known is not None and spec not in numbers:
                request = step_request(known, operators=work)
                numbers[spec] = self._process.ask(request | ({"traffic": True} if work else {}))

    def peak_bytes(self, spec: TrainSpec) -> int | None:
        """Of one rank; ``None`` where it cannot be predicted."""
        self.ask([spec])
        answer = self._process.answer(self._memory[spec]) if spec in self._memory else {}
        return sum(answer["parts"].values()) if "parts" in answer else None

    def work(self, spec: TrainSpec) -> Mapping[str, Any] | None:
        """``operators``, ``flops`` and ``traffic`` by operator; ``None`` as above."""
        self.ask([spec], work=True)
        answer = self._process.answer(self._work[spec]) if spec in self._work else {}
        return answer if "traffic" in answer else None

    def close(self) -> None:
        """End what predicts."""
        self._process.close()


def _predictable(spec: TrainSpec) -> TrainSpec | None:
    """What is predicted in the place of ``spec``: fp8 keeps 16-bit values, or fewer; nothing without Liger."""
    if why_none(spec) is not None:
        return None
    try:
        return replace(spec, fp8="no")
    except SpecError:
        return None
