"""In the place of the recipe ``huggingface``: ranks that train a small network with plain PyTorch, over gloo."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from pytest_llmperf.observe.device import memory_of
from pytest_llmperf.observe.environment import place_of
from pytest_llmperf.observe.measurement import Clock, Diary
from pytest_llmperf.observe.training import Burner
from pytest_llmperf.observe.vital_signs import Heartbeat
from pytest_llmperf.records.launch import RankRecord, diary_of
from pytest_llmperf.records.ranks import Request, Trained
from pytest_llmperf.settings.train_spec import Injection, TrainSpec
from tests.evidence import evidence_of

# A step takes some ten milliseconds, about as long as one of a tiny model in the real trainer, and nearly no core: most
# tests wait meanwhile for somebody else to notice something.
_VOCABULARY, _WIDTH, _TOKENS, _LEARNING_RATE, _STEP_SECONDS = 64, 16, 64, 0.1, 0.01


def _sources() -> dict[str, str]:
    """As the real one tells of what Python runs at its start, where it is not this folder's own."""
    start = Path(str(sys.modules["sitecustomize"].__file__))
    others = {} if start.parent == Path(__file__).parent else {"sitecustomize": start}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in others.items()} | {"light": ""}


def train(
    spec: TrainSpec, request: Request, device: torch.device, beat: Heartbeat, measured: Callable[[Trained], None]
) -> Trained:
    """As the real one is called, and with as many steps, or as a soak's; it traces none, before which something were
    ``measured``."""
    del measured
    rank, tokens_per_step = int(os.environ["RANK"]), spec.sequences_per_step * spec.sequence_length // spec.gpus
    beat.step, beat.steps, beat.tokens_per_step = 0, spec.steps, tokens_per_step * spec.gpus
    if spec.gpus > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)  # others would only wait, at full speed
    torch.manual_seed(spec.seed)
    layers = (torch.nn.Embedding(_VOCABULARY, _WIDTH), torch.nn.Linear(_WIDTH, _VOCABULARY))
    model = torch.nn.Sequential(*layers)  # on the CPU: to move it imports, since torch 2.15, what is left out here
    parameters = [*model.parameters()]
    clock, injection, losses = Clock(), Injection.from_environment(spec.gpus), list[float]()
    burner = None
    if injection.concerns(rank):
        burner = Burner(device, clock, slow=injection.slow, hold=injection.hold, hang=injection.hang)
    steps: Iterable[int] = range(1, spec.steps + 1)
    begin: Callable[[], None] = clock.mark
    end_step: Callable[[], None] = clock.mark
    if path := diary_of(request.folder, rank):
        diary = Diary(clock, memory_of(device), path)
        beat.steps, steps, begin, end_step = 0, itertools.count(1), diary.begin, diary.end_step
    beat.enter("training")
    begin()
    for step in steps:
        tokens = torch.randint(_VOCABULARY, (_TOKENS,))
        loss = cross_entropy(model(tokens), tokens)
        # By hand: an optimizer of torch's imports its compiler, which takes as long as torch itself.
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            if spec.gpus > 1:
                dist.all_reduce(gradient)
            parameter.data.sub_(gradient, alpha=_LEARNING_RATE)
        losses.append(loss.item())
        time.sleep(_STEP_SECONDS)
        if burner is not None:
            burner.step(step)
        end_step()
        beat.step = step
    beat.enter("finishing")
    record = RankRecord(
        rank=rank,
        **vars(place_of(device)),
        step_seconds=clock.seconds(),
        tokens_per_step=tokens_per_step,
        peak_reserved_bytes=2**24 + (injection.hold if burner is not None else 0),
        peak_allocated_bytes=2**23,
        canary={"matmul_flops": 1e9, "copy_bytes_per_second": 1e9},
    )
    return Trained(
        record=record,
        losses=tuple(losses),
        train_seconds=sum(clock.seconds()),
        parameters=sum(parameter.numel() for parameter in parameters),
        evidence={**evidence_of(spec), "setup": {"sources": _sources()}},
    )
