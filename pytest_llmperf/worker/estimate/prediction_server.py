"""The server of ``launch/prediction``: what steps will be, predicted in forks.

Standard input holds a request a line, until its end: ``{"spec", "model_config"}``, and ``"operators": true`` where
these are to be counted too. Standard output gets an answer a line as soon as it is known: ``{"number": of the request,
from 0, "parts": {…}}``, or an ``error`` in the parts' place. A request of ``{"model_config", "sequence_length"}`` is
for arithmetic, and has ``flops_per_token`` in that place. What is asked twice is predicted once. A fork for each kind,
since Liger patches classes for good: what PyTorch has looked up for the first step of a kind serves the others."""

from __future__ import annotations

import gc
import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import wait
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from pytest_llmperf.settings.parallelism import zero_stage
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.estimate.arithmetic import model_flops
from pytest_llmperf.worker.estimate.exchanges import OperatorCounter, deepspeed
from pytest_llmperf.worker.estimate.memory_estimator import plan


def prepare(request: Mapping[str, Any]) -> None:
    """Import what the prediction of ``request`` needs, before it is forked; nothing is patched by that."""
    with suppress(Exception):  # what is wrong is the prediction's own to tell
        _ = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config_of(request["model_config"]))]
    spec = request.get("spec", {})
    with suppress(Exception):
        if spec.get("liger"):
            importlib.import_module("liger_kernel.transformers.monkey_patch")
            ops = importlib.import_module("liger_kernel.ops")
            for info in pkgutil.iter_modules(ops.__path__):
                importlib.import_module(f"{ops.__name__}.{info.name}")
        if spec.get("lora"):
            importlib.import_module("peft")
        if str(spec.get("parallelism")).startswith("zero"):
            deepspeed()


# What a prediction does not look at: how long is measured, judgement, data, compilers and matrix units.
_WITHOUT_EFFECT = frozenset(
    "steps min_steps warmup_steps throughput_tolerance memory_tolerance seed data weights tf32 torch_compile "
    "torch_compile_mode torch_compile_scope text split tokenizer".split()
)


def identity(request: Mapping[str, Any]) -> str:
    """The same for two requests whose predictions are the same, which are made once."""
    if "spec" not in request:  # of a model, and of none of its steps
        return json.dumps(request, sort_keys=True, default=str)
    spec = {name: value for name, value in request["spec"].items() if name not in _WITHOUT_EFFECT}
    spec.pop("model", None)  # its configuration says what it is
    if spec.get("parallelism") == "ddp":  # each rank's buckets are there or not
        spec["gpus"] = min(2, spec["gpus"])
    if spec.get("sdpa_backend") != "math":  # one kernel is as another
        spec["sdpa_backend"] = "auto"
    asked = [spec, request["model_config"], bool(request.get("operators")), request.get("ranks_per_node")]
    return json.dumps(asked, sort_keys=True, default=str)


def kind(request: Mapping[str, Any]) -> str:
    """The same for two requests that one process may predict: Liger patches a family's classes for good."""
    spec = request.get("spec", {})
    if spec.get("parallelism") != "ddp":  # it makes ranks of its process
        return identity(request)
    recomputed = [spec.get(name) for name in ("checkpointing_policy", "gradient_checkpointing")]
    patched = [request["model_config"].get("model_type"), spec.get("liger_kernels")] if spec.get("liger") else []
    return json.dumps([*recomputed, *patched], default=str)


# Of one release there are builds for the CPU and for several of CUDA, which count alike.
_BUILD = re.compile(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$")

_PACKAGES = ("torch", "transformers", "accelerate", "pytest-llmperf")


def versions(spec: TrainSpec) -> dict[str, str]:
    found, used = {}, {"liger-kernel": spec.liger, "deepspeed": zero_stage(spec)}
    for name in (*_PACKAGES, *(each for each, is_used in used.items() if is_used)):
        with suppress(metadata.PackageNotFoundError):
            found[name] = _BUILD.sub("", metadata.version(name))
    return found


# A fork takes one core and less than 1 GB. A step of the largest models takes some seconds: what takes longer hangs.
_AT_ONCE, _MOST_SECONDS = 8, 120.0

# Whatever the first prediction of a process imports and looks up is there for all.
_FIRST = TrainSpec(model="llama-tiny", sequence_length=16, micro_batch_size=1)


@dataclass
class _Prediction:
    request: Mapping[str, Any]
    numbers: list[int] = field(default_factory=list)
    answer: Mapping[str, Any] | None = None


@dataclass
class _Fork:
    """One process, the pipe to it, and the prediction that it is at."""

    process: Any
    pipe: Any
    kind: str
    at: _Prediction | None = None
    until: float = math.inf

    def ask(self, prediction: _Prediction | None) -> None:
        """Let it begin, or end where there is nothing more."""
        self.at, self.until = prediction, time.monotonic() + _MOST_SECONDS if prediction else math.inf
        with suppress(OSError):  # it is gone: its end says so
            self.pipe.send(prediction and prediction.request)


class _Server:
    def __init__(self, asks: int, answers: int) -> None:
        self._asks, self._answers = asks, answers
        self._is_open, self._rest, self._count = True, b"", 0
        self._known: dict[str, _Prediction] = {}
        self._waiting: list[_Prediction] = []
        self._forks: dict[Any, _Fork] = {}
        self._most = min(_AT_ONCE, len(os.sched_getaffinity(0)))

    def run(self) -> None:
        if wait([self._asks], 0):
            self._read_requests()
        gc.freeze()
        gc.enable()
        is_warm = False
        while self._is_open or self._waiting or self._forks:
            if self._waiting and not is_warm and len(self._known) > 1:  # for one alone it would take longer
                is_warm = True
                with suppress(Exception):  # what is wrong is each one's own to tell
                    plan(_FIRST, _FIRST.architecture.config, OperatorCounter())
                gc.collect()
                gc.freeze()  # to look through what the imports have made, again and again, is a sixth of the time
            while self._waiting and len(self._forks) < self._most:
                self._begin(self._waiting.pop(0))
            watched = [*self._forks, *([self._asks] if self._is_open else [])]
            until = min((fork.until for fork in self._forks.values()), default=math.inf)
            for ready in wait(watched, None if until == math.inf else max(0.0, until - time.monotonic())):
                if ready == self._asks:
                    self._read_requests()
                else:
                    self._read_answer(self._forks[ready])
            for fork in self._forks.values():
                if fork.at is not None and fork.until < time.monotonic():
                    self._conclude(fork.at, {"error": f"it was not done within {_MOST_SECONDS:g} s"})
                    fork.at, fork.until = None, math.inf
                    fork.process.kill()  # whose end is read as any other's

    def _read_requests(self) -> None:
        read = os.read(self._asks, 2**20)
        self._is_open = bool(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in filter(bytes.strip, lines):
            request, number = json.loads(line), self._count
            self._count += 1
            key = identity(request)
            if key not in self._known:
                self._known[key] = _Prediction(request)
                self._waiting.append(self._known[key])
            prediction = self._known[key]
            prediction.numbers.append(number)
            if prediction.answer is not None:
                self._tell(number, prediction.answer)

    def _begin(self, prediction: _Prediction) -> None:
        prepare(prediction.request)
        context = multiprocessing.get_context("fork")
        pipe, end = context.Pipe()
        process = context.Process(target=_serve_kind, args=(end, pipe), daemon=True)
        process.start()
        end.close()
        self._forks[pipe] = fork = _Fork(process, pipe, kind(prediction.request))
        fork.ask(prediction)

    def _read_answer(self, fork: _Fork) -> None:
        try:
            answer = fork.pipe.recv()
        except (EOFError, OSError):  # it has ended
            del self._forks[fork.pipe]
            fork.pipe.close()
            fork.process.join()
            if fork.at is not None:
                self._conclude(fork.at, {"error": f"its process ended with {fork.process.exitcode}"})
            return
        if fork.at is not None:
            self._conclude(fork.at, answer)
        if (alike := next((one for one in self._waiting if kind(one.request) == fork.kind), None)) is not None:
            self._waiting.remove(alike)
        fork.ask(alike)

    def _conclude(self, prediction: _Prediction, answer: Mapping[str, Any]) -> None:
        prediction.answer = answer
        for number in prediction.numbers:
            self._tell(number, answer)

    def _tell(self, number: int, answer: Mapping[str, Any]) -> None:
        os.write(self._answers, (json.dumps({"number": number, **answer}) + "\n").encode())


def serve(asks: int, answers: int) -> int:
    own = os.dup(answers)
    os.write(own, b"\n")  # what has been printed so far may have no end of line
    os.dup2(sys.stderr.fileno(), answers)  # what libraries print from now on is no answer, and swallows none
    # Before fake tensors do: where PyTorch was built for CUDA and sees no GPU, they put a guard in its place that
    # counts one, and a backward pass that is the first one then starts a thread for it, after which none may fork.
    torch.ones((), requires_grad=True).backward()
    _Server(asks, own).run()
    return 0


def _serve_kind(pipe: Any, parents: Any) -> None:
    """In the fork; the ``parents`` end is closed by the parent alone."""
    parents.close()
    while (request := pipe.recv()) is not None:
        pipe.send(_answer(request))


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "sequence_length" in request:
            return {"flops_per_token": model_flops(request["model_config"], request["sequence_length"])}
        spec = TrainSpec.from_dict(request["spec"])
        operators = OperatorCounter() if request.get("operators") else None
        parts = plan(spec, request["model_config"], operators, request.get("ranks_per_node", 0))
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything, and who asked wants one line
        word = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "  # 'x' alone says nothing
        return {"error": word + " ".join(str(error).split())}
    if operators is None:
        return {"parts": parts}
    return {
        "parts": parts,
        "operators": dict(operators.operators),
        "flops": dict(operators.flops),
        "exchanges": dict(operators.exchanges.found),
        "padding": operators.padding,
        "versions": versions(spec),
    }
