"""Sampling: the order in which the Trainer by itself takes samples, held against the one that its arguments ask for.

What is trained on has an order of its own (``worker/data``), so that losses can be compared; a broken sampler would
pass unseen. So this rank's loader is made once more as the Trainer makes it, and asked for the indices of two epochs.
Nothing is fetched, and ranks exchange nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

# An order that two epochs share is told by the second.
_EPOCHS = 2


def misorder(trainer: Trainer) -> str:
    """What of the order of samples is not as asked; empty where all is, and where an order is asked for by other rules.

    Those are lengths, batches that one rank hands out, and a generator that ranks share.
    """
    args, config = trainer.args, trainer.args.accelerator_config
    asked = getattr(args, "train_sampling_strategy", "random")
    by_other_rules = config.dispatch_batches or config.split_batches or not config.use_seedable_sampler
    if asked not in ("random", "sequential") or by_other_rules:
        return ""
    seed = args.seed if args.data_seed is None else args.data_seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        loader = _loader(trainer)
        taken = [_epoch(loader, epoch) for epoch in range(_EPOCHS)]
    number, ranks, batch = len(trainer.train_dataset), args.world_size, args.train_batch_size
    for epoch, own in enumerate(taken):
        order = _shuffled(number, seed + epoch) if asked == "random" else list(range(number))
        shares = [_share(order, rank, ranks, batch) for rank in range(ranks)]
        if own != shares[args.process_index]:
            what = _named(own, shares, args.process_index, taken[0] if epoch else None)
            return f"{what} in epoch {epoch + 1} ({asked}, seed {seed})"
    return ""


def _loader(trainer: Trainer) -> Any:
    """The Trainer's, with its own sampler in the place of ours."""
    prepared = trainer.accelerator._dataloaders  # noqa: SLF001
    known = len(prepared)
    try:
        trainer._get_train_sampler = Trainer._get_train_sampler.__get__(trainer)  # noqa: SLF001
        return Trainer.get_train_dataloader(trainer)
    finally:
        del trainer._get_train_sampler  # the class has ours  # noqa: SLF001
        del prepared[known:]


def _epoch(loader: Any, epoch: int) -> list[int]:
    """The indices that it would fetch."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    return [int(index) for batch in loader.batch_sampler for index in batch]


def _shuffled(number: int, seed: int) -> list[int]:
    # The operator and not the function: what has replaced that is what this looks for.
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = torch.ops.aten.randperm.generator(number, generator=generator).tolist()
    return order


def _share(order: list[int], rank: int, ranks: int, batch: int) -> list[int]:
    """Every so many batches of it; the data set has as many for each rank."""
    return [index for start in range(rank * batch, len(order), ranks * batch) for index in order[start : start + batch]]


def _named(own: list[int], shares: list[list[int]], rank: int, before: list[int] | None) -> str:
    due = shares[rank]
    other = next((number for number, share in enumerate(shares) if own == share), None)
    if other is not None:
        return f"rank {rank} takes the samples of rank {other}"
    if own == before:
        return "samples come in the order of the epoch before"
    if sorted(own) == own and due != sorted(due):
        return f"samples are not shuffled: {len(own)} of {len(due)} come in the order of the data set"
    if len(set(own)) < len(set(due)):
        return f"{len(set(own))} different samples are taken, expected {len(set(due))}"
    return f"samples come in another order ({_first(own)}), expected {_first(due)}"


def _first(order: list[int]) -> str:
    return ", ".join(map(str, order[:4])) + ", ..."
