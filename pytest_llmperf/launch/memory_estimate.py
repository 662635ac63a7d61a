"""Prediction: a spec's memory on a GPU, by a process that needs none and imports torch in this one's place."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pytest_llmperf.spec.train_spec import TrainSpec

# For one prediction, imports before the first included.
_SECONDS = 300
_END_SECONDS = 1.0
# Where the process ended before it could say what is wrong: a traceback's last word, which advice may follow.
_ERROR = re.compile(r"^[\w.]+(?:Error|Exception): (.*)$", re.MULTILINE)
# A list of all that transformers knows is no answer.
_LONGEST_ERROR = 300
_PACKAGE_PARENT = Path(__file__).parents[2]


class PredictionError(Exception):
    """A spec's memory cannot be predicted: one line."""


_Answers = Generator[Mapping[str, int] | PredictionError, None, None]


def predictions(specs: Sequence[TrainSpec]) -> _Answers:
    """For each of ``specs``, in their order and each as soon as it is known, why there is none, or bytes of one rank at
    its peak by part."""
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    asked = [spec for spec in specs if has_liger or not spec.liger]
    answers = _answers(asked)
    try:
        for spec in specs:
            if spec.liger and not has_liger:
                yield _error(spec, "Liger is not installed; pip install 'pytest-llmperf[liger]'")
            else:
                yield next(answers)
    finally:
        answers.close()


def _answers(specs: Sequence[TrainSpec]) -> _Answers:
    if not specs:
        return
    with tempfile.TemporaryFile() as errors:
        process = _started(specs, errors)
        known: dict[int, Mapping[str, Any]] = {}
        try:
            lines = _lines(process)
            for number, spec in enumerate(specs):
                while number not in known:
                    line = next(lines, None)
                    if line is None:
                        break
                    known[line["number"]] = line
                yield _concluded(spec, known.get(number), process, errors)
        finally:
            _end(process)


def _started(specs: Sequence[TrainSpec], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A GPU that happens to be here would only be woken up. A prediction uses one core.
    fixed = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as requests:
        for spec in specs:
            request = {"spec": spec.to_dict(), "model_config": dict(spec.architecture.config)}
            requests.write(json.dumps(request).encode() + b"\n")
        requests.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", "pytest_llmperf.worker.estimate"],
            stdin=requests,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **fixed},
            start_new_session=True,  # it is ended with all that it has forked
        )


def _lines(process: subprocess.Popen[bytes]) -> Iterator[Mapping[str, Any]]:
    """What it says, until it ends or says nothing for too long."""
    rest = b""
    while process.stdout is not None and select.select([process.stdout], [], [], _SECONDS)[0]:
        read = os.read(process.stdout.fileno(), 2**16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a library may print, too
                value = json.loads(line)
                if isinstance(value, dict) and "number" in value:
                    yield value


def _concluded(
    spec: TrainSpec, answer: Mapping[str, Any] | None, process: subprocess.Popen[bytes], errors: IO[bytes]
) -> Mapping[str, int] | PredictionError:
    if answer is None:
        try:
            code = process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return PredictionError(f"{spec.id}: no prediction after {_SECONDS} s")
        errors.seek(0)
        said = _ERROR.findall(errors.read().decode(errors="replace"))
        return _error(spec, (said or [f"it ended with exit code {code} and said nothing"])[-1])
    if "parts" in answer:
        return dict(answer["parts"])
    return _error(spec, str(answer.get("error")))


def _error(spec: TrainSpec, why: str) -> PredictionError:
    return PredictionError(f"{spec.id}: its memory cannot be predicted: {_shortened(why)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # where it has ended and was reaped, no such group is left
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
