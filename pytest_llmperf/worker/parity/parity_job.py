"""A launch that makes small trainings: the plain form's, truth first, or a spec's beside that truth."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pytest_llmperf.records.parity_order import BESIDE, SEEDS, ParityOrder
from pytest_llmperf.records.training_errors import FILE, FP32, OWN, TrainingErrors, merged
from pytest_llmperf.spec.small_config import small_config
from pytest_llmperf.spec.small_spec import in_fp32, in_pieces, keeps_states_short, true_optimizer
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.worker.failure_file import write_json
from pytest_llmperf.worker.heartbeat import Heartbeat
from pytest_llmperf.worker.parity.comparison import Truth, errors_of
from pytest_llmperf.worker.parity.small_trainer import SmallSteps, train_small
from pytest_llmperf.worker.request import Request


def make_small_trainings(
    spec: TrainSpec, order: ParityOrder, request: Request, device: torch.device, beat: Heartbeat
) -> None:
    """Leave the figures of each in the launch's folder, and where this launch makes it, the truth of each seed."""
    config = small_config(request.model_config, order.shrinks)
    # What is imported stays: the Trainer collects garbage at each training's begin and end. To collect it once before
    # that would be a third of a warm launch: a fork copies every page that holds an object then.
    gc.freeze()

    def train(spec: TrainSpec, **how: Any) -> SmallSteps:
        beat.enter("training")
        return train_small(spec, config, request.folder, device, **how)

    if order.truth:
        told = list(_beside_truth(spec, Path(order.truth), train))
    else:
        told = [one for number in range(SEEDS) for one in _plain(spec, number, order, request.folder, train)]
    beat.enter("finishing")
    if told:
        write_json(request.folder / FILE, [one.to_dict() for one in told])


def _truth_file(folder: Path, seed: int) -> Path:
    return folder / f"truth-{seed}.pt"


def _plain(
    plain: TrainSpec, number: int, order: ParityOrder, folder: Path, train: Callable[..., SmallSteps]
) -> Iterator[TrainingErrors]:
    """Of one seed: the truth, and the plain form with each step as a whole and in pieces.

    Where its optimizer rounds its states, one of the two keeps to the plain optimizer.
    """
    spec = replace(plain, seed=plain.seed + number)
    exact = replace(spec, optimizer=true_optimizer(spec) or spec.optimizer)
    seen = train(in_fp32(replace(exact, optimizer=true_optimizer(spec) or "adamw_torch")), is_plain=True, double=True)
    truth = Truth(seen.losses, seen.gradients)
    truth.save(_truth_file(folder, spec.seed))
    # FSDP computes with copies of the weights in 16 bits where others compute under autocast.
    own = exact if order.gathered == "no" else replace(exact, mixed_precision="no")
    forms = [(OWN, own, order.gathered)]
    if in_fp32(spec).digest != spec.digest:
        forms.append((FP32, in_fp32(exact), "no"))
    for form, whole, gathered in forms:
        pieces = in_pieces(replace(whole, optimizer=spec.optimizer))
        for each in (whole, pieces) if form == OWN or keeps_states_short(spec) else (whole,):
            yield errors_of(form, each, train(each, is_plain=True, gathered=gathered), truth)


def _beside_truth(spec: TrainSpec, folder: Path, train: Callable[..., SmallSteps]) -> Iterator[TrainingErrors]:
    """``spec`` in its own precision and in fp32, of all ranks; on other ranks than the first one nothing."""
    forms = {OWN: spec, FP32: in_fp32(spec)}
    if forms[FP32].digest == spec.digest:
        del forms[FP32]
    for number in range(BESIDE):
        seed = spec.seed + number
        truth: Truth | None = None
        for form, one in forms.items():
            of_seed = replace(one, seed=seed)
            seen = train(of_seed)
            truth = truth or Truth.load(_truth_file(folder, seed), seen.device)
            yield from _from_ranks(errors_of(form, of_seed, seen, truth))


def _from_ranks(own: TrainingErrors) -> Iterator[TrainingErrors]:
    if not dist.is_initialized():
        yield own
        return
    rank = dist.get_rank()
    found: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, found if rank == 0 else None)
    if rank == 0:
        yield merged(found)
