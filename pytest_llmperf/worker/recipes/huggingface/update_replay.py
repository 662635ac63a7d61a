"""UpdateReplay: the inspected update of a sample of each tensor, made once more by AdamW's formula in double precision.

What was asked for is the arguments', since the optimizer's groups may have been changed. Beside it the order of
samples, and sums over tensors that each are read once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from pytest_llmperf.records.learning import ReplayedUpdate
from pytest_llmperf.worker.settings.parallelism import sharing

# An order that two epochs share is told by the second.
_EPOCHS = 2


def misorder(trainer: Trainer) -> str:
    """Say how the order of samples is not as asked; empty where it is, or where other rules were asked for."""
    args, config = trainer.args, trainer.args.accelerator_config
    asked = getattr(args, "train_sampling_strategy", "random")
    by_other_rules = config.dispatch_batches or config.split_batches or not config.use_seedable_sampler
    if asked not in ("random", "sequential") or by_other_rules:
        return ""
    seed = args.seed if args.data_seed is None else args.data_seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        taken = list(_epochs(trainer))
    number, batch, together = len(trainer.train_dataset), args.train_batch_size, sharing(trainer)
    ranks, rank = args.world_size // together, args.process_index // together
    for epoch, own in enumerate(taken):
        order = list(range(number))
        if asked == "random":  # the operator and not the function: what has replaced that is what this looks for
            generator = torch.Generator().manual_seed(seed + epoch)
            order = torch.ops.aten.randperm.generator(number, generator=generator).tolist()
        # Every so many batches of it; the data set has as many for each rank.
        starts = [range(other * batch, number, ranks * batch) for other in range(ranks)]
        shares = [[index for start in own_starts for index in order[start : start + batch]] for own_starts in starts]
        if own != shares[rank]:
            what = _named(own, shares, rank, taken[0] if epoch else None)
            return f"{what} in epoch {epoch + 1} ({asked}, seed {seed})"
    return ""


def _epochs(trainer: Trainer) -> Iterator[list[int]]:
    """The indices that the Trainer would fetch with its own sampler in the place of ours."""
    prepared = trainer.accelerator._dataloaders  # noqa: SLF001
    known = len(prepared)
    try:
        trainer._get_train_sampler = Trainer._get_train_sampler.__get__(trainer)  # noqa: SLF001
        loader = Trainer.get_train_dataloader(trainer)
    finally:
        del trainer._get_train_sampler  # the class has ours  # noqa: SLF001
        del prepared[known:]
    for epoch in range(_EPOCHS):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        yield [int(index) for batch in loader.batch_sampler for index in batch]


def _named(own: list[int], shares: list[list[int]], rank: int, before: list[int] | None) -> str:
    due = shares[rank]
    if own in shares:
        return f"rank {rank} takes the samples of rank {shares.index(own)}"
    if own == before:
        return "samples come in the order of the epoch before"
    if sorted(own) == own and due != sorted(due):
        return f"samples are not shuffled: {len(own)} of {len(due)} come in the order of the data set"
    if len(set(own)) < len(set(due)):
        return f"{len(set(own))} different samples are taken, expected {len(set(due))}"
    first, wanted = (", ".join(map(str, order[:4])) for order in (own, due))
    return f"samples come in another order ({first}, ...), expected {wanted}, ..."


# Whole numbers of as many bytes.
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are to be trained, each once, by its name in the model."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bit_sums(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Sum each one's bits as whole numbers of its elements' width, modulo 2**64; 0 of what is not there."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(_WHOLE[tensor.element_size()]).sum(dtype=torch.int64)

    return list(map(int, fetched([None if each is None else bits(local(each)) for each in tensors])))


def square_sums(tensors: Iterable[torch.Tensor | None]) -> list[float]:
    """Sum each one's squares, to seven digits; 0 of what is not there."""
    norms = [
        None if each is None else torch.linalg.vector_norm(local(each), dtype=torch.float32).double()
        for each in tensors
    ]
    return [norm**2 for norm in fetched(norms)]


def fetched(sums: Iterable[torch.Tensor | None]) -> list[Any]:
    """All of them at once, since a device is waited for whenever one is asked for; 0 of what is not there."""
    sums = list(sums)
    there = [each for each in sums if each is not None]
    found = iter(torch.stack(there).tolist() if there else ())
    return [0 if each is None else next(found) for each in sums]


# Of each tensor: enough that one of them is updated as the others are.
_SAMPLED = 256


def sample(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Some elements of each at equal distances, one behind the other; the same ones each time."""
    flat = [local(each).reshape(-1) for each in tensors]
    return torch.cat([each[:: max(1, each.numel() // _SAMPLED)][:_SAMPLED].float() for each in flat])


def sampled(tensor: torch.Tensor) -> int:
    numel = local(tensor).numel()
    return min(_SAMPLED, -(-numel // max(1, numel // _SAMPLED))) if numel else 0


# transformers' names of those that compute what the formula says, with states that are not cut short.
_FUSED = "adamw_torch_fused"
_ADAMW = ("adamw_torch", _FUSED)

# In a mixture a tensor of an expert that no token went to has no gradient, and its optimizer makes no step of it.
_MAY_WAIT = "expert"


@dataclass(frozen=True)
class AdamW:
    rate: float
    mean_beta: float
    square_beta: float
    epsilon: float
    decay: float
    is_fused: bool = False
    """Whether a kernel may have these in fp32, and what it makes of them: a bias correction is a difference of such."""

    def __str__(self) -> str:
        return (
            f"AdamW (rate {self.rate:g}, betas {self.mean_beta:g} and {self.square_beta:g}, epsilon {self.epsilon:g}, "
            f"weight decay {self.decay:g})"
        )


@dataclass(frozen=True)
class Elements:
    """Of a tensor, in double precision: its weights and the optimizer's averages of gradients and squares."""

    weight: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor


# What rounding a value twice adds to a rounding; and relative, of settings that a kernel has in fp32.
_TWICE, _SHORT = 2.0**-10, 2.0**-24


def updated(
    asked: AdamW, before: Elements, gradient: torch.Tensor, step: int, roundoffs: tuple[float, float]
) -> tuple[Elements, Elements, Elements]:
    """Algorithm 2 of Loshchilov and Hutter, "Decoupled weight decay regularization", in ``step`` (from 1). What it
    makes of ``before``, the unit of each element's rounding (by ``roundoffs`` of the weights' type and of the states'),
    and how far it may be off beside that. A weight is rounded as it is stored, by decay twice more."""
    of_weight, of_state = roundoffs
    tiny = torch.finfo(torch.float32).tiny  # a square below it has fewer digits
    mean = asked.mean_beta * before.mean + (1 - asked.mean_beta) * gradient
    square = asked.square_beta * before.square + (1 - asked.square_beta) * gradient**2
    root = (square / (1 - asked.square_beta**step)).sqrt() + asked.epsilon
    rate = asked.rate / (1 - asked.mean_beta**step)
    weight = before.weight * (1 - asked.rate * asked.decay) - rate * mean / root
    of_mean = of_state * (asked.mean_beta * before.mean.abs() + (1 - asked.mean_beta) * gradient.abs()) + tiny
    stored = of_weight * (3 if asked.decay else 1) * (1 + _TWICE)
    short_mean, short_square = (
        _SHORT * asked.is_fused * each for each in (before.mean.abs() + gradient.abs(), before.square + gradient**2)
    )
    short = asked.is_fused * (_short(asked.mean_beta, step) + _short(asked.square_beta, step) / 2)
    short_root = short_square / (2 * square + tiny)
    allowed = rate * (short_mean + (short + short_root) * mean.abs()) / root
    return (
        Elements(weight, mean, square),
        Elements(rate * of_mean / root, of_mean, of_state * square + tiny),
        Elements(stored * torch.maximum(before.weight.abs(), weight.abs()) + allowed, short_mean, short_square),
    )


def _short(beta: float, step: int) -> float:
    """How far 1 - beta**step is off, of itself, in fp32: as its sum is, and as a short beta makes its power."""
    return _SHORT * (1 + step * beta**step) / (1 - beta**step)


class UpdateReplay:
    """One step's, from between its clipping and its update on."""

    def __init__(self, trainer: Trainer, model: torch.nn.Module, optimizer: Any, rate: float) -> None:
        self._none = _why_not(trainer, optimizer)
        if self._none:
            return
        asked = trainer.args
        betas, is_fused = (asked.adam_beta1, asked.adam_beta2), _name(trainer) == _FUSED
        self._asked = AdamW(rate, *betas, asked.adam_epsilon, asked.weight_decay, is_fused)
        self._decaying = frozenset(trainer.get_decay_parameter_names(model)) if asked.weight_decay else frozenset()
        self._state = optimizer.state
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        own = trained(model)
        self._named = [(name, p) for name, p in own.items() if p.grad is not None and id(p) in held and sampled(p)]
        self._gradients = self._split([parameter.grad for _, parameter in self._named])
        self._before = self._elements()

    def replay(self, steps: int) -> ReplayedUpdate:
        """After the update, which is the Trainer's number ``steps``."""
        if self._none:
            return ReplayedUpdate(none=self._none)
        counts = [int(self._state.get(parameter, {}).get("step", 0)) for _, parameter in self._named]
        counted = list(zip((name for name, _ in self._named), counts, strict=True))
        # How many steps the optimizer should have made of each.
        expected = [count if _MAY_WAIT in name and 0 < count < steps else steps for name, count in counted]
        miscounted = [name for (name, count), due in zip(counted, expected, strict=True) if count != due]
        return replace(
            max(self._differences(expected), key=astuple, default=ReplayedUpdate()),
            tensors=len(self._named),
            asked=str(self._asked),
            miscounted=tuple(miscounted),
            counts=(min(counts, default=0), max(counts, default=0)),
        )

    def _differences(self, steps: list[int]) -> Iterator[ReplayedUpdate]:
        """The largest of each figure of each tensor."""
        found = zip(self._named, steps, self._before, self._gradients, self._elements(), strict=True)
        for (name, parameter), step, before, gradient, after in found:
            state = self._state.get(parameter, {}).get("exp_avg", parameter)
            roundoffs = torch.finfo(parameter.dtype).eps / 2, torch.finfo(state.dtype).eps / 2
            asked = self._asked if name in self._decaying else replace(self._asked, decay=0.0)
            elements = (before, after, *updated(asked, before, gradient, step, roundoffs))
            for figure, words in _FIGURES.items():
                then, now, expected, unit, allowed = (getattr(each, figure) for each in elements)
                beyond = ((now - expected).abs() - allowed).clamp(min=0)
                # By a rate of nothing no weight may move, and what has not is no division by that.
                far = torch.where(beyond == 0, beyond, beyond / unit).nan_to_num(nan=math.inf)
                at = int(far.argmax())
                moved, due = float(now[at] - then[at]), float(expected[at] - then[at])
                yield ReplayedUpdate(roundings=float(far[at]), tensor=name, figure=words, found=moved, expected=due)

    def _elements(self) -> list[Elements]:
        states = [self._state.get(parameter, {}) for _, parameter in self._named]
        weights = self._split([parameter for _, parameter in self._named])
        means, squares = (self._split([state.get(name) for state in states]) for name in ("exp_avg", "exp_avg_sq"))
        return [Elements(*each) for each in zip(weights, means, squares, strict=True)]

    def _split(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The sample of each, on the host; zeros of what is not there yet."""
        sizes = [sampled(parameter) for _, parameter in self._named]
        there = [
            local(parameter).new_zeros(size) if tensor is None else tensor
            for tensor, (_, parameter), size in zip(tensors, self._named, sizes, strict=True)
        ]
        return list(sample(there).double().cpu().split(sizes)) if there else []


_FIGURES = {"weight": "weight", "mean": "average gradient", "square": "average square"}


def _name(trainer: Trainer) -> str:
    return str(getattr(trainer.args.optim, "value", trainer.args.optim))


def _why_not(trainer: Trainer, optimizer: Any) -> str:
    """Why an update is not replayed, if it is not."""
    name = _name(trainer)
    if name not in _ADAMW:
        return f"{name} has no formula here"
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"{name} was asked for, and {type(optimizer).__name__} was there"
    if any(each.dtype == torch.float16 for group in optimizer.param_groups for each in group["params"]):
        return "float16 has no room for squares of gradients"
    if getattr(trainer.accelerator, "scaler", None) is not None:
        return "losses are scaled, which may skip an update"
    return ""
