"""Prediction: a spec's memory on a GPU, by a process that needs none and imports torch in this one's place."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pytest_llmperf.spec.train_spec import TrainSpec

_SECONDS = 300
# Where the process ended before it could say what is wrong: a traceback's last word, which advice may follow.
_ERROR = re.compile(r"^[\w.]+(?:Error|Exception): (.*)$", re.MULTILINE)
# A list of all that transformers knows is no answer.
_LONGEST_ERROR = 300
_PACKAGE_PARENT = Path(__file__).parents[2]


class PredictionError(Exception):
    """A spec's memory cannot be predicted: one line."""


def predict(spec: TrainSpec) -> Mapping[str, int]:
    """Bytes of one rank at its peak, by part.

    Raises:
        PredictionError: they cannot be predicted.
    """
    if spec.liger and importlib.util.find_spec("liger_kernel") is None:
        raise PredictionError(
            f"{spec.id}: its memory cannot be predicted: Liger is not installed; pip install 'pytest-llmperf[liger]'"
        )
    request = {"spec": spec.to_dict(), "model_config": dict(spec.architecture.config)}
    path = os.pathsep.join([str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A GPU that happens to be here would only be woken up.
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest_llmperf.worker.estimate.memory_estimator"],
            input=json.dumps(request),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PredictionError(f"{spec.id}: no prediction after {_SECONDS} s") from None
    parts, error = _answer(done)
    if parts is None:
        raise PredictionError(f"{spec.id}: its memory cannot be predicted: {_shortened(error)}")
    return parts


def _answer(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, int] | None, str]:
    """The parts, or what went wrong."""
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        return answer.get("parts"), str(answer.get("error", ""))
    except (AttributeError, LookupError, ValueError):
        said = _ERROR.findall(done.stderr) or [f"it ended with exit code {done.returncode} and said nothing"]
        return None, said[-1]


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
