"""What is known of a spec or a model without a GPU: ``worker.estimate`` tells it, a process of its own with torch."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import IO, Any, cast

from pytest_llmperf.launch.device import NO_GPU
from pytest_llmperf.launch.process import package_path, python_path
from pytest_llmperf.records.trace import StaticStep
from pytest_llmperf.settings.models import Model
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec

# Without a word from it, imports before the first answer and one prediction that hangs, which it ends itself, included.
_SECONDS = 300
_END_SECONDS = 1.0
_NICEST = 19
# Others may train beside a count, on this host's other GPUs.
_NICENESS_OF_COUNTS = 10
# Where the process ended before it could say what is wrong: a traceback's last word, which advice may follow.
_ERROR = re.compile(r"^[\w.]+(?:Error|Exception): (.*)$", re.MULTILINE)
# A list of all that transformers knows is no answer.
_LONGEST_ERROR, _LONGEST_COUNT_ERROR = 300, 200
# Whose predicted peaks give a line over micro-batches; larger than where the optimizer's step is the peak.
_SIZES = (16, 32)
# The imports make nothing but what stays, and to look through it takes a tenth of their time.
_SERVER = """import gc, sys; gc.disable()
from pytest_llmperf.worker.estimate.prediction_server import serve; sys.exit(serve(0, 1))"""
# What every training needs: none of it is imported here, and the process that predicts imports all.
_NEEDED = ("torch", "transformers", "accelerate")


class PredictionError(Exception):
    """A spec's step, or its memory, is not known: one line."""

    def __init__(self, why: str, *, is_lost: bool = False) -> None:
        """``is_lost``: it should be known, and it is not the spec's doing that it is not: green would be a lie."""
        super().__init__(why)
        self.is_lost = is_lost


class CountError(Exception):
    """A model's FLOPs cannot be counted: one line."""


class PredictionProcess:
    """Answers by number, in the order of what was asked; the first question starts it."""

    def __init__(self, niceness: int = 0) -> None:
        """``niceness`` is above 0 where others train beside it."""
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process, which close() ends
        self._asked = 0
        self._unsent, self._rest = b"", b""
        self._known: dict[int, Mapping[str, Any]] = {}

    def send(self, request: Mapping[str, Any]) -> int:
        """The number of the answer to ``request``, as ``worker.estimate`` has them."""
        self._process = self._process or started(self._errors, self._niceness)
        self._unsent += json.dumps(request).encode() + b"\n"
        self._asked += 1
        self._exchange(0.0)
        return self._asked - 1

    def receive(self, number: int) -> Mapping[str, Any]:
        """The answer, once it is there; ``{"error": why}`` where nothing was."""
        while number not in self._known and self._exchange(_SECONDS):
            pass
        return self._known.get(number) or {"error": self._why_none(), "is_lost": True}

    def close(self) -> None:
        """End it, with all that it has forked."""
        process, self._process = self._process, None
        if process is not None:
            # It may have ended and been reaped; then no such group is left.
            with process, suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        self._errors.close()

    def _exchange(self, seconds: float) -> bool:
        """Send what waits and read what is there; whether there was anything in time."""
        if self._process is None:
            return False
        asks, answers = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        readable, writable, _ = select.select([answers], [asks] if self._unsent else [], [], seconds)
        if writable:
            try:
                self._unsent = self._unsent[os.write(asks.fileno(), self._unsent[:4096]) :]
            except BrokenPipeError:  # it ended: its answers, or their absence, say so
                self._unsent = b""
        if not readable:
            return bool(writable)
        read = os.read(answers.fileno(), 2**16)
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a library may print, too
                value = json.loads(line)
                if isinstance(value, dict) and "number" in value:
                    self._known[value["number"]] = value
        return bool(read)

    def _why_none(self) -> str:
        if self._process is None:
            return "its process was ended"
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"no answer after {_SECONDS} s"
        self._errors.seek(0)
        said: list[str] = _ERROR.findall(self._errors.read().decode(errors="replace"))
        return (said or [f"it ended with exit code {code} and said nothing"])[-1]


def started(errors: Any, niceness: int) -> subprocess.Popen[bytes]:
    """The process; what it has to say beside its answers goes to the file ``errors``."""
    # A GPU that happens to be here would only be woken up. A prediction uses one core.
    fixed = {**python_path(package_path(), os.environ), **NO_GPU, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, **fixed},
        start_new_session=True,  # it is ended with all that it has forked
    )
    if niceness:
        with suppress(OSError):  # it may have ended
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, process.pid, min(_NICEST, own + niceness))
    return process


def step_request(spec: TrainSpec, *, operators: bool = False, ranks_per_node: int = 0) -> dict[str, Any]:
    """A question for bytes by part, and for ``operators``, FLOPs and exchanges; 0 ranks a node: all on one."""
    asked = {"operators": operators, "ranks_per_node": ranks_per_node}
    return {"spec": spec.to_dict(), "model_config": dict(spec.architecture.config), **asked}


def why_none(spec: Spec) -> str | None:
    """Why ``spec`` cannot be predicted in this environment, where that is known without asking."""
    if not isinstance(spec, TrainSpec):
        return "a script's step is told by a launch"
    if spec.liger and find_spec("liger_kernel") is None:
        return "Liger is not installed; pip install 'pytest-llmperf[liger]'"
    if spec.lora and find_spec("peft") is None:
        return "PEFT is not installed; pip install 'pytest-llmperf[lora]'"
    if spec.parallelism.startswith("zero") and find_spec("deepspeed") is None:
        return "DeepSpeed is not installed; pip install 'pytest-llmperf[deepspeed]'"
    return None


class StaticSteps(PredictionProcess):
    def __init__(self, ranks_per_node: int = 0, *, operators: bool = True) -> None:
        super().__init__()
        self._asked_for = partial(step_request, operators=operators, ranks_per_node=ranks_per_node)
        self._numbers: dict[Spec, int] = {}

    def ask(self, specs: Iterable[Spec]) -> None:
        """Let those of a recipe be predicted beside what this process does."""
        for spec in (each for each in specs if isinstance(each, TrainSpec)):
            if spec not in self._numbers and why_none(spec) is None:
                self._numbers[spec] = self.send(self._asked_for(spec))

    def answer(self, spec: Spec, what: str) -> Mapping[str, Any] | PredictionError:
        """The answer that was asked for; ``what`` says that there is none."""
        answer = self.receive(self._numbers[spec]) if spec in self._numbers else {"error": why_none(spec)}
        if "parts" in answer:
            return answer
        is_lost = bool(answer.get("is_lost"))
        return PredictionError(f"{spec.id}: {what}: {_shortened(answer, _LONGEST_ERROR)}", is_lost=is_lost)

    def check(self) -> None:
        """Raise PredictionError, in one line, where this interpreter lacks what every training needs."""
        if missing := [name for name in _NEEDED if find_spec(name) is None]:
            raise PredictionError(
                f"{sys.executable} has no {', '.join(missing)}, so it can judge no step; "
                "run this with the Python that trains",
                is_lost=True,
            )

    def of(self, spec: Spec) -> StaticStep | PredictionError:
        self.ask([spec])
        found = self.answer(spec, "its step cannot be told without a launch")
        if isinstance(found, PredictionError):
            return found
        facts = {name: found[name] for name in ("operators", "flops", "versions", "padding")}
        counted = found["exchanges"].items()
        exchanges = {name: (count, whole + each * spec.gpus) for name, (count, whole, each) in counted}
        return StaticStep(memory=found["parts"], exchanges=exchanges, **facts)


def predictions(specs: Sequence[TrainSpec]) -> Generator[Mapping[str, int] | PredictionError, None, None]:
    """Of each of ``specs``, as soon as it is known, bytes of one rank at its peak by part, or why there is none."""
    with closing(StaticSteps(operators=False)) as steps:
        steps.ask(specs)
        for spec in specs:
            answer = steps.answer(spec, "its memory cannot be predicted")
            yield answer if isinstance(answer, PredictionError) else dict(answer["parts"])


def fitting_batch(spec: Spec, limit_bytes: int) -> int:
    """The micro-batch whose predicted memory meets the limit; that of ``spec`` where it cannot be predicted."""
    sums, own = [], spec.micro_batch_size
    assert isinstance(spec, TrainSpec)  # noqa: S101 - a script is launched
    for parts in predictions([replace(spec, micro_batch_size=size) for size in _SIZES]):
        if isinstance(parts, PredictionError):
            return own
        sums.append(sum(parts.values()))
    each = (sums[1] - sums[0]) / (_SIZES[1] - _SIZES[0])
    return max(1, int(_SIZES[0] + (limit_bytes - sums[0]) / each)) if each > 0 else own


class FlopCounts(PredictionProcess):
    """Counts, each asked for as soon as a model is known, and read when it is wanted."""

    def __init__(self) -> None:
        super().__init__(_NICENESS_OF_COUNTS)

    def ask(self, model: Model, sequence_length: int) -> int:
        """The number of the count: training FLOPs of ``model`` for one token of a full sequence."""
        return self.send({"model_config": dict(model.config), "sequence_length": sequence_length})

    def answer(self, number: int) -> float:
        """The count; CountError where transformers has no such model, or its code does not run without content."""
        answer = self.receive(number)
        if "flops_per_token" in answer:
            return float(answer["flops_per_token"])
        raise CountError(_shortened(answer, _LONGEST_COUNT_ERROR))


def _shortened(answer: Mapping[str, Any], most: int) -> str:
    why = str(answer.get("error"))
    return why if len(why) <= most else f"{why[:most]}..."
