"""Inspection: one more step, after all that are timed or traced, of which everything is looked at that shows learning.

Nothing here exchanges anything with other ranks, so that what goes wrong on one leaves none waiting; and whatever goes
wrong costs the launch no more than this: it says why it was not looked at.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer

from pytest_llmperf.observe.tracer import said
from pytest_llmperf.records.learning import RankLearning, TensorSeen, uninspected
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.recipes.huggingface.update_replay import (
    UpdateReplay,
    bit_sums,
    misorder,
    sample,
    sampled,
    square_sums,
    trained,
)
from pytest_llmperf.worker.settings.parallelism import is_sharded

# The future: whether what a model says of a position depends on what comes after it.


# A window of attention or a kernel's block is longer than half of it at times; more would only cost memory.
_LENGTH = 128


def seen_future(trainer: Trainer, model: PreTrainedModel) -> float | None:
    """By how much other tokens in the second half of a sequence change the logits of its first half.

    As a share of the largest change that they make in the second half. ``None`` where that was not tried:
    flex_attention would compile once more, and of a sharded model all ranks must gather the weights; or where it does
    not go through, for want of memory for instance.
    """
    if model.config._attn_implementation == "flex_attention" or is_sharded(model):
        return None
    tokens = trainer.train_dataset[0]["input_ids"][:_LENGTH].unsqueeze(0).to(model.device)
    half = tokens.shape[1] // 2
    if half == 0:
        return None
    other = tokens.clone()
    other[:, half:] = (other[:, half:] + 1) % model.config.get_text_config().vocab_size
    is_training = model.training

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens).logits
        return found.float()

    try:
        # Without dropout; and as it is written, since a compiled one would be compiled once more for this length.
        model.eval()
        with torch.no_grad(), trainer.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            change = (logits(tokens) - logits(other)).abs()
        before, after = float(change[:, :half].max()), float(change[:, half:].max())
    except Exception:  # noqa: BLE001 - whatever stands in the way, the measurement is done and counts
        return None
    finally:
        model.train(is_training)
    return before / after if after > 0 else None


# Which samples of a data set a batch on the device holds, by what they say.


# A data set of more would take longer to read than all else; those of a step follow one another in it.
_MOST_READ = 20_000

# What a model is given of each.
_OF_A_SAMPLE = ("input_ids", "labels", "attention_mask")


def row_digests(inputs: Mapping[str, torch.Tensor]) -> list[bytes]:
    """Of each sequence of a batch: its tokens, labels and mask, each of shape (sequences, tokens)."""
    on_host = {name: inputs[name].cpu() for name in _OF_A_SAMPLE if name in inputs}
    return [_digest({name: each[row] for name, each in on_host.items()}) for row in range(len(on_host["input_ids"]))]


@dataclass(frozen=True)
class Read:
    """What of a data set was read in a step, by indices; of samples that are alike, the first one's."""

    samples: tuple[int, ...]
    """-1: one that is not there."""
    expected: tuple[int, ...]
    """Of all ranks, if samples are taken in their order."""
    ambiguous: frozenset[int]
    """Those of the samples that the data set has more than once."""


def found_in(digests: Sequence[bytes], dataset: Any, first: int, num: int) -> Read:
    """``digests`` as indices of ``dataset``, beside the ``num`` from ``first`` on, which the step should have.

    All of a small one is looked at; of a larger one, or of one whose samples are made anew each time, those alone.
    """
    distinct = getattr(dataset, "distinct", None) or len(dataset)
    expected = range(first, min(first + num, len(dataset)))
    is_long = distinct > _MOST_READ or getattr(dataset, "is_costly", False)
    index_of: dict[bytes, int] = {}
    times: Counter[bytes] = Counter()
    by_index: dict[int, bytes] = {}
    for index in expected if is_long else range(distinct):
        digest = by_index[index] = _digest(dataset[index])
        index_of.setdefault(digest, index)
        times[digest] += 1
    again = first // distinct != (first + num - 1) // distinct  # the step goes on with another epoch
    ambiguous = frozenset(index_of[digest] for digest in digests if digest in index_of and (again or times[digest] > 1))
    # Where an epoch is over, samples are those of another order.
    due = (by_index.get(index) or _digest(dataset[index]) for index in expected)
    return Read(
        tuple(index_of.get(digest, -1) for digest in digests), tuple(index_of.get(each, -1) for each in due), ambiguous
    )


def _digest(sample: Mapping[str, torch.Tensor]) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for name in _OF_A_SAMPLE:
        if name in sample:
            hashed.update(name.encode() + sample[name].to(torch.int64).contiguous().numpy().tobytes())
    return hashed.digest()


# transformers' word for a label that no loss counts.
_LEFT_OUT = -100


#: Steps that it adds.
STEPS = 1


class Inspection:
    """Of one rank's training of ``spec``."""

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec
        self._none = ""
        self._passes = 0
        self._digests: list[bytes] = []
        self._found: dict[str, Any] = {"labels": True, "dropped": 0}
        self._is_begun = self._is_over = False

    @property
    def is_running(self) -> bool:
        """Whether its step has begun and is not over."""
        return self._is_begun and not self._is_over

    def before(self, model: torch.nn.Module) -> None:
        """The first step: nothing has moved yet."""
        self._keep(lambda: {"first": bit_sums([each for _, each in trained(model)])})

    def begin(self) -> None:
        """With the next step."""
        self._is_begun = True

    def begin_step(self, model: torch.nn.Module) -> None:
        """Before its first forward pass."""
        self._keep(lambda: {"stale": sum(each > 0 for each in square_sums([p.grad for _, p in trained(model)]))})

    def begin_pass(self, inputs: dict[str, Any]) -> None:
        """Of a micro-batch, as the model is given it."""
        self._keep(lambda: self._batch(inputs))

    def end_forward(self, model: torch.nn.Module) -> None:
        """Of a micro-batch: gradients of those before it should be there, for its own to be added."""
        if self._passes:
            self._keep(lambda: {"dropped": max(self._found["dropped"], self._dropped(model))})

    def end_pass(self, model: torch.nn.Module) -> None:
        """With the last one of a step gradients are exchanged."""
        self._passes += 1
        gradients = [parameter.grad for _, parameter in trained(model)]
        self._keep(lambda: {"gradients": bit_sums(gradients)})
        if self._passes == self._spec.gradient_accumulation_steps:
            self._keep(lambda: {"squares": square_sums(gradients)})

    def before_update(self, trainer: Trainer, model: torch.nn.Module) -> None:
        """Gradients are clipped."""
        parameters = [each for _, each in trained(model)]
        self._keep(lambda: {"clipped": square_sums([each.grad for each in parameters]), "weights": sample(parameters)})
        self._keep(lambda: self._rates(trainer))
        optimizer = _optimizer(trainer)
        self._keep(lambda: {"update": UpdateReplay(trainer, model, optimizer, self._found["scheduled"])})

    def end_step(self) -> bool:
        """Whether that was the last one, as it is."""
        self._is_over = True
        return True

    def learning(self, trainer: Trainer, model: PreTrainedModel, failed: BaseException | None) -> RankLearning:
        """What was seen, once all is over; ``failed`` is what has ended the step early."""
        if failed is not None or not self._is_over:
            self._none = self._none or (said(failed) if failed else "it was not begun")
        else:
            self._keep(lambda: self._ended(trainer, model))
        return self._found.get("learning") or uninspected(self._none)

    @staticmethod
    def _rates(trainer: Trainer) -> dict[str, Any]:
        """In this step the least and the most of all groups; and what the schedule makes of the arguments."""
        rates = [float(group["lr"]) for group in _optimizer(trainer).param_groups]
        schedule = _schedule(trainer)
        if hasattr(schedule, "lr_lambdas"):
            scheduled = float(trainer.args.learning_rate) * float(schedule.lr_lambdas[0](schedule.last_epoch))
        else:
            scheduled = float(schedule.get_last_lr()[0])
        return {"rates": (min(rates), max(rates)), "scheduled": scheduled}

    def _dropped(self, model: torch.nn.Module) -> int:
        """Tensors whose gradients are not what the pass before has left; all, where it has left none of any.

        Between its passes FSDP keeps gradients elsewhere.
        """
        now, then = bit_sums([parameter.grad for _, parameter in trained(model)]), self._found["gradients"]
        if not any(then):
            return 0 if is_sharded(model) else len(then)
        return sum(one != other for one, other in zip(now, then, strict=True))

    def _batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Each label should be its own input, which the model's loss shifts, or left out of the loss."""
        self._digests += row_digests(inputs)
        labels, tokens = inputs.get("labels"), inputs["input_ids"]
        has_own = labels is not None and bool(((labels == tokens) | (labels == _LEFT_OUT)).all())
        return {"labels": self._found["labels"] and has_own}

    def _ended(self, trainer: Trainer, model: PreTrainedModel) -> dict[str, Any]:
        found, named = self._found, trained(model)
        parameters = [each for _, each in named]
        updated = {id(each) for group in _optimizer(trainer).param_groups for each in group["params"]}
        now = bit_sums(parameters)
        tensors = [
            TensorSeen(
                name=name,
                is_updated=id(parameter) in updated,
                is_reached=squares > 0,
                has_moved=then != weights,
                is_narrow=parameter.element_size() <= _NARROW,
                weights=weights,
                gradient=gradient,
            )
            for (name, parameter), then, weights, gradient, squares in zip(
                named, found["first"], now, found["gradients"], found["squares"], strict=True
            )
        ]
        largest, bound = self._update(trainer, parameters)
        steps = trainer.state.global_step
        of_a_step = self._spec.sequences_per_step
        read = found_in(self._digests, trainer.train_dataset, (steps - STEPS) * of_a_step, of_a_step)
        # accelerate steps a schedule that it wraps once for each rank.
        each = trainer.args.world_size if isinstance(trainer.lr_scheduler, AcceleratedScheduler) else 1
        learning = RankLearning(
            shard=_shard(parameters),
            tensors=tuple(tensors),
            stale=found["stale"],
            squares=sum(found["squares"]),
            clipped_squares=sum(found["clipped"]),
            max_norm=float(trainer.args.max_grad_norm),
            largest_update=largest,
            update_bound=bound,
            learning_rates=found["rates"],
            scheduled_rate=found["scheduled"],
            steps=steps,
            schedule_steps=int(_schedule(trainer).last_epoch) // each,
            is_scaled=getattr(trainer.accelerator, "scaler", None) is not None,
            samples=read.samples,
            expected_samples=read.expected,
            ambiguous=read.ambiguous,
            misorder=misorder(trainer),
            labels=found["labels"],
            future=seen_future(trainer, model) if self._spec.fp8 == "no" else None,
            replay=found["update"].replay(steps),
            clip_factors=_factors(found["squares"], found["clipped"]),
            dropped=found["dropped"] if any(found["squares"]) else 0,  # some optimizers keep no gradients
        )
        return {"learning": learning}

    def _update(self, trainer: Trainer, parameters: list[Any]) -> tuple[float, float]:
        """The largest update of the sample, in learning rates, and what this optimizer's are never larger than."""
        groups = {id(each): group for group in _optimizer(trainer).param_groups for each in group["params"]}
        moved = (sample(parameters) - self._found["weights"]).abs().cpu().split([sampled(each) for each in parameters])
        weights = self._found["weights"].abs().cpu().split([sampled(each) for each in parameters])
        largest, bound = 0.0, 0.0
        for parameter, far, weight in zip(parameters, moved, weights, strict=True):
            group = groups.get(id(parameter))
            if group is None or not far.numel() or not float(group["lr"]) > 0:
                continue
            rate, decay = float(group["lr"]), float(group.get("weight_decay") or 0.0)
            explained = (rate * decay + torch.finfo(parameter.dtype).eps) * weight
            largest = max(largest, float((far - explained).max()) / rate)
            if type(_optimizer(trainer)) in (torch.optim.Adam, torch.optim.AdamW):
                mean, square = group["betas"]
                bound = max(bound, adam_bound(mean, square, trainer.state.global_step))
            else:
                bound = math.inf
        return largest, bound or math.inf

    def _keep(self, ask: Callable[[], dict[str, Any]]) -> None:
        if self._none:
            return
        try:
            self._found |= ask()
        except Exception as error:  # noqa: BLE001 - whatever stands in the way, what was measured stands
            self._none = said(error)


# Bytes of types whose last bit an update may be less than.
_NARROW = 2


def _factors(before: list[float], after: list[float]) -> tuple[float, ...]:
    """The least and the most, if any, by which a tensor's gradient was multiplied, by sums of squares."""
    factors = [math.sqrt(now / then) for then, now in zip(before, after, strict=True) if then > _FEWER_DIGITS]
    return (min(factors), max(factors)) if factors else ()


# Squares of float32 below it are not told to seven digits.
_FEWER_DIGITS = 1e-30


def _optimizer(trainer: Trainer) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it


def _schedule(trainer: Trainer) -> Any:
    return getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)


def adam_bound(mean: float, square: float, step: int) -> float:
    """No gradients whatever make Adam's update in ``step`` (from 1) larger, in learning rates, but for its decay.

    Its two averages are sums over the gradients of all steps (Kingma and Ba, "Adam", algorithm 1); by Cauchy and
    Schwarz their ratio is at most this. The paper's own bound, of section 2.1, is of one gradient alone.
    """
    shares = sum((mean * mean / square) ** age for age in range(step))
    return (1 - mean) / (1 - mean**step) * math.sqrt((1 - square**step) / (1 - square) * shares)


def _shard(parameters: list[Any]) -> int:
    """Which of the shards this rank holds."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh, number = parameter.device_mesh, 0
            for size, at, placement in zip(mesh.shape, mesh.get_coordinate() or (), parameter.placements, strict=True):
                number = number * size + at if placement.is_shard() else number
            return number
    return 0
