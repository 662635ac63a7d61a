"""Inspection: one more step, after all that are timed or traced, of which everything is looked at that shows learning.

Nothing here exchanges anything with other ranks: what goes wrong on one costs the launch no more than this."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer

from pytest_llmperf.observe.tracer import said
from pytest_llmperf.records.learning import RankLearning, TensorSeen
from pytest_llmperf.settings.data import is_apart
from pytest_llmperf.settings.parallelism import zero_stage
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.recipes.huggingface import update_replay
from pytest_llmperf.worker.recipes.huggingface.data import unflattened
from pytest_llmperf.worker.recipes.huggingface.update_replay import bit_sums, sample, sampled, square_sums, trained
from pytest_llmperf.worker.settings.parallelism import is_sharded, sharing

# A window of attention or a kernel's block is longer than half of it at times; more would only cost memory.
_LENGTH = 128


# Another document's tokens are weighted with nothing; experts may multiply them in another order.
_LEAST = 1e-3


def documents(spec: TrainSpec, trainer: Trainer, model: PreTrainedModel) -> dict[str, str]:
    """Evidence of whether a document's tokens see those of the one before it in their row, where they should not."""
    if not is_apart(spec):
        return {}
    seen = seen_half(trainer, model, 0)
    return {"documents": "unknown" if seen is None else "apart" if seen < _LEAST else "mixed"}


def seen_half(trainer: Trainer, model: PreTrainedModel, changed: int) -> float | None:
    """By how much other tokens in the half ``changed`` of a sequence change the other one's logits, of its own change;
    the first half is a document of its own where that is changed. ``None``: not tried, as flex_attention would compile
    once more and ranks of a sharded model all gather the weights; or it did not go through, for want of memory say."""
    if model.config._attn_implementation == "flex_attention" or is_sharded(model):
        return None
    tokens = trainer.train_dataset[0]["input_ids"][:_LENGTH].unsqueeze(0).to(model.device)
    half = tokens.shape[1] // 2
    if half == 0:
        return None
    first, second = slice(half), slice(half, 2 * half)
    other, own, unchanged = tokens.clone(), (first, second)[changed], (second, first)[changed]
    other[:, own] = (other[:, own] + 1) % model.config.get_text_config().vocab_size
    is_training = model.training
    # As the model numbers them, or each document by itself.
    apart = {} if changed else {"position_ids": torch.arange(half, device=model.device).repeat(2).unsqueeze(0)}

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens, **apart).logits
        return found.float()

    try:
        # Without dropout; and as it is written, since a compiled one would be compiled once more for this length.
        model.eval()
        with torch.no_grad(), trainer.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            change = (logits(tokens) - logits(other)).abs()
        before, after = float(change[:, unchanged].max()), float(change[:, own].max())
    except Exception:  # noqa: BLE001 - whatever stands in the way, the measurement is done and counts
        return None
    finally:
        model.train(is_training)
    return before / after if after > 0 else None


# A data set of more would take longer to read than all else; and what a model is given of each sample.
_MOST_READ, _OF_A_SAMPLE = 20_000, ("input_ids", "labels", "attention_mask", "position_ids")


def row_digests(spec: TrainSpec, inputs: Mapping[str, torch.Tensor]) -> list[bytes]:
    """Digest each sequence of a batch on the device: tokens, labels, and mask or positions."""
    on_host = {name: inputs[name].cpu() for name in _OF_A_SAMPLE if name in inputs}
    return [_digest(sample) for sample in unflattened(spec, on_host)]


def found_in(digests: Sequence[bytes], dataset: Any, first: int, num: int) -> dict[str, Any]:
    """``digests`` as indices of ``dataset``, beside the ``num`` from ``first`` on, which the step should have. Fields
    of a ``RankLearning``: of samples that are alike the first one's index, -1 of one that is not there. Of a large data
    set those due alone are looked at."""
    distinct = getattr(dataset, "distinct", None) or len(dataset)
    expected = range(first, min(first + num, len(dataset)))
    index_of: dict[bytes, int] = {}
    times: Counter[bytes] = Counter()
    by_index: dict[int, bytes] = {}
    for index in expected if distinct > _MOST_READ else range(distinct):
        digest = by_index[index] = _digest(dataset[index])
        index_of.setdefault(digest, index)
        times[digest] += 1
    again = first // distinct != (first + num - 1) // distinct  # the step goes on with another epoch
    # Where an epoch is over, samples are those of another order.
    due = (by_index.get(index) or _digest(dataset[index]) for index in expected)
    return {
        "samples": tuple(index_of.get(digest, -1) for digest in digests),
        "expected_samples": tuple(index_of.get(each, -1) for each in due),
        # Which the data set has more than once.
        "ambiguous": frozenset(index_of[one] for one in digests if one in index_of and (again or times[one] > 1)),
    }


def _digest(sample: Mapping[str, torch.Tensor]) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for name in _OF_A_SAMPLE:
        if name in sample:
            hashed.update(name.encode() + sample[name].to(torch.int64).contiguous().numpy().tobytes())
    return hashed.digest()


# transformers' word for a label that no loss counts.
_LEFT_OUT = -100

# Bytes of types whose last bit an update may be less than; squares of float32 below which there are no seven digits.
_NARROW, _FEWER_DIGITS = 2, 1e-30

#: Steps that it adds.
INSPECTED_STEPS = 1


def _kept(look: Callable[..., None]) -> Callable[..., None]:
    """``look``, unless an earlier one failed: whatever stands in the way, what was measured stands."""

    @wraps(look)
    def kept(self: Inspection, *given: Any) -> None:
        if not self.none:
            try:
                look(self, *given)
            except Exception as error:  # noqa: BLE001 - as above
                self.none = said(error)

    return kept


class Inspection:
    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec
        # Its engine makes the step within the backward pass, of parts that it has laid flat.
        self.none = "DeepSpeed keeps gradients and updates to itself" if zero_stage(spec) else ""
        """Why there is nothing to tell, if there is nothing."""
        self._passes = self._stale = self._dropped = 0
        self._digests: list[bytes] = []
        self._has_own_labels = True
        self._is_begun = self._is_over = False
        self._learning: RankLearning | None = None

    @property
    def is_running(self) -> bool:
        return self._is_begun and not self._is_over

    @_kept
    def before(self, model: torch.nn.Module) -> None:
        self._first = bit_sums(trained(model).values())

    def begin(self) -> None:
        self._is_begun = True

    @_kept
    def begin_step(self, model: torch.nn.Module) -> None:
        self._stale = sum(each > 0 for each in square_sums(_gradients(model)))

    @_kept
    def begin_pass(self, inputs: dict[str, Any]) -> None:
        self._digests += row_digests(self._spec, inputs)
        labels, tokens = inputs.get("labels"), inputs["input_ids"]
        # Each label should be its own input, which the model's loss shifts, or left out of the loss.
        has_own = labels is not None and bool(((labels == tokens) | (labels == _LEFT_OUT)).all())
        self._has_own_labels = self._has_own_labels and has_own

    @_kept
    def end_forward(self, model: torch.nn.Module) -> None:
        """Gradients should be what the pass before has left, for this one's to be added."""
        if not self._passes:
            return
        dropped = sum(one != other for one, other in zip(bit_sums(_gradients(model)), self._bits, strict=True))
        if not any(self._bits):  # it has left none; FSDP keeps them elsewhere between its passes
            dropped = 0 if is_sharded(model) else len(self._bits)
        self._dropped = max(self._dropped, dropped)

    @_kept
    def end_pass(self, model: torch.nn.Module) -> None:
        """With the last one of a step gradients are exchanged."""
        gradients = _gradients(model)
        self._bits = bit_sums(gradients)
        self._passes += 1
        if self._passes == self._spec.gradient_accumulation_steps:
            self._squares = square_sums(gradients)

    @_kept
    def before_update(self, trainer: Trainer, model: torch.nn.Module) -> None:
        """Gradients are clipped. The schedule's rate is what it makes of the arguments."""
        self._clipped, self._weights = square_sums(_gradients(model)), sample(trained(model).values())
        optimizer, schedule = _optimizer(trainer), _schedule(trainer)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._rates = min(rates), max(rates)
        if hasattr(schedule, "lr_lambdas"):
            self._scheduled = float(trainer.args.learning_rate) * float(schedule.lr_lambdas[0](schedule.last_epoch))
        else:
            self._scheduled = float(schedule.get_last_lr()[0])
        self._update = update_replay.UpdateReplay(trainer, model, optimizer, self._scheduled)

    def end_step(self) -> bool:
        self._is_over = True
        return True

    def learning(self, trainer: Trainer, model: PreTrainedModel, failed: BaseException | None) -> RankLearning:
        """Return what was seen, once all is over; ``failed`` is what has ended the step early."""
        if failed is not None or not self._is_over:
            self.none = self.none or (said(failed) if failed else "it was not begun")
        self._end(trainer, model)
        return self._learning or RankLearning(none=self.none)

    @_kept
    def _end(self, trainer: Trainer, model: PreTrainedModel) -> None:
        named = trained(model)
        parameters = [*named.values()]
        updated = {id(each) for group in _optimizer(trainer).param_groups for each in group["params"]}
        seen = zip(named.items(), self._first, bit_sums(parameters), self._bits, self._squares, strict=True)
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
            for (name, parameter), then, weights, gradient, squares in seen
        ]
        # Of ranks that share each sequence the first one tells of it, and of what all have.
        is_first = trainer.args.process_index % sharing(trainer) == 0
        own = [is_first or isinstance(parameter, DTensor) for parameter in parameters]
        digests = self._digests if is_first else []
        largest, bound = self._largest_update(trainer, parameters)
        steps, of_a_step = trainer.state.global_step, self._spec.sequences_per_step
        # accelerate steps a schedule that it wraps once for each rank.
        each = trainer.args.world_size if isinstance(trainer.lr_scheduler, AcceleratedScheduler) else 1
        pairs = zip(self._squares, self._clipped, strict=True)
        factors = [math.sqrt(now / then) for then, now in pairs if then > _FEWER_DIGITS]
        self._learning = RankLearning(
            shard=_shard(parameters),
            tensors=tuple(tensors),
            stale=self._stale,
            squares=sum(each for each, is_own in zip(self._squares, own, strict=True) if is_own),
            clipped_squares=sum(each for each, is_own in zip(self._clipped, own, strict=True) if is_own),
            max_norm=float(trainer.args.max_grad_norm),
            largest_update=largest,
            update_bound=bound,
            learning_rates=self._rates,
            scheduled_rate=self._scheduled,
            steps=steps,
            schedule_steps=int(_schedule(trainer).last_epoch) // each,
            is_scaled=getattr(trainer.accelerator, "scaler", None) is not None,
            **found_in(digests, trainer.train_dataset, (steps - INSPECTED_STEPS) * of_a_step, of_a_step),
            misorder=update_replay.misorder(trainer),
            labels=self._has_own_labels,
            future=seen_half(trainer, model, 1) if self._spec.fp8 == "no" else None,
            replay=self._update.replay(steps),
            clip_factors=(min(factors), max(factors)) if factors else (),
            dropped=self._dropped if any(self._squares) else 0,  # some optimizers keep no gradients
        )

    def _largest_update(self, trainer: Trainer, parameters: list[Any]) -> tuple[float, float]:
        """The largest update of the sample, in learning rates, and what this optimizer's are never larger than."""
        optimizer, sizes = _optimizer(trainer), [sampled(each) for each in parameters]
        groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        moved = (sample(parameters) - self._weights).abs().cpu().split(sizes)
        weights = self._weights.abs().cpu().split(sizes)
        largest, bound = 0.0, 0.0
        for parameter, far, weight in zip(parameters, moved, weights, strict=True):
            group = groups.get(id(parameter))
            if group is None or not far.numel() or not float(group["lr"]) > 0:
                continue
            rate, decay = float(group["lr"]), float(group.get("weight_decay") or 0.0)
            explained = (rate * decay + torch.finfo(parameter.dtype).eps) * weight
            largest = max(largest, float((far - explained).max()) / rate)
            if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
                mean, square = group["betas"]
                bound = max(bound, adam_bound(mean, square, trainer.state.global_step))
            else:
                bound = math.inf
        return largest, bound or math.inf


def _gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in trained(model).values()]


def _optimizer(trainer: Trainer) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it


def _schedule(trainer: Trainer) -> Any:
    return getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)


def adam_bound(mean: float, square: float, step: int) -> float:
    """No gradients make Adam's update in ``step`` (from 1) larger, in rates, but for decay: Cauchy and Schwarz."""
    shares = sum((mean * mean / square) ** age for age in range(step))
    return (1 - mean) / (1 - mean**step) * math.sqrt((1 - square**step) / (1 - square) * shares)


def _shard(parameters: list[Any]) -> int:
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh, number = parameter.device_mesh, 0
            for size, at, placement in zip(mesh.shape, mesh.get_coordinate() or (), parameter.placements, strict=True):
                number = number * size + at if placement.is_shard() else number
            return number
    return 0
