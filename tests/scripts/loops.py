"""Loops of their own that train something tiny, one by each name: ``python loops.py NAME``."""

# mypy: disable-error-code="import-not-found,misc,untyped-decorator"

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from clock import Clock
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

STEPS, DEVICE = 40, os.environ.get("DEVICE", "cpu")
_WORDS, _WIDTH = 101, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(hidden)))


class Tiny(nn.Module):
    """Says a loss for ids."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, _WORDS)
        self._recomputes = recomputes

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True) if self._recomputes else block(hidden)
        return functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batches(rows: int = 4, length: int = 16, steps: int = STEPS) -> Iterator[torch.Tensor]:
    for _ in range(steps):
        yield torch.randint(_WORDS, (rows, length))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    clock: Clock,
    model: Any,
    optimizer: Any = None,
    step: Callable[[], Any] | None = None,
    data: Iterable[torch.Tensor] = (),
) -> None:
    optimizer = optimizer or adam(model)
    for ids in data or batches():
        loss = model(ids)
        loss.backward()
        (step or optimizer.step)()
        optimizer.zero_grad()
        clock.step(loss, ids.numel())


def plain(clock: Clock) -> None:
    train(clock, Tiny())


def accumulation(clock: Clock) -> None:
    model = Tiny()
    optimizer = adam(model)
    for ids in batches(rows=8):
        losses = [model(part) / 4 for part in ids.split(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(sum(losses), ids.numel())


def reference(clock: Clock) -> None:
    """With two batches a step, of which one is taken again, without gradients and with them."""
    model = Tiny()
    optimizer = adam(model)
    for ids in batches():
        with torch.no_grad():
            model(ids)
        loss = model(ids) - 0.1 * model(ids.flip(0)) - 0.1 * model(ids.view(ids.shape)).detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss, 2 * ids.numel())


def evaluating(clock: Clock) -> None:
    """With an evaluation after every fourth step, and batches that are padded to lengths of their own.

    A pass without any figures comes first, as where arithmetic is counted.
    """
    with torch.device("meta"):
        Tiny()(torch.randint(_WORDS, (4, 8))).backward()
    model = Tiny()
    optimizer = adam(model)
    for number in range(STEPS):
        ids = torch.randint(_WORDS, (4, 8 + number % 5))
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 3:
            model.eval()
            with torch.no_grad():
                model(torch.randint(_WORDS, (9, 16)))
            model.train()
        clock.step(loss, ids.numel())


def failing(clock: Clock) -> None:
    """Some batches raise, before, in and after the backward pass; the script goes on with the next."""
    model = Tiny()
    optimizer = adam(model)

    def refuse(_: Any) -> Any:
        raise ValueError("such gradients")

    for number, ids in enumerate(batches()):
        with suppress(ValueError):
            if number % 7 == 3:
                raise ValueError("such data")
            loss = model(ids)
            if number % 7 == 5:
                loss.register_hook(refuse)
            loss.backward()
            optimizer.step()
            clock.step(loss, ids.numel())
        optimizer.zero_grad()


def scaler(clock: Clock) -> None:
    """Gradients that overflow skip steps 3, 4 and 9."""
    model = Tiny()
    optimizer, scales = adam(model), torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=5)
    for number, ids in enumerate(batches(rows=8), 1):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            losses = [model(part) / 2 for part in ids.split(4)]
        for loss in losses:
            scales.scale(loss).backward()
        if number in (3, 4, 9):
            model.head.bias.grad[0] = float("inf")
        scales.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scales.step(optimizer)
        scales.update()
        optimizer.zero_grad()
        clock.step(sum(losses), ids.numel())


def lbfgs(clock: Clock) -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for _ in range(STEPS):
        given, wanted = torch.randn(8, 6), torch.randn(8, 1)

        def closure(given: torch.Tensor = given, wanted: torch.Tensor = wanted) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(given), wanted)
            loss.backward()
            return loss

        optimizer.step(closure)
        clock.step()


def gan(clock: Clock, critics: int = 2) -> None:
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    of_generator, of_critic = adam(generator), adam(critic)
    for _ in range(STEPS):
        for _ in range(critics):
            of_critic.zero_grad()
            (critic(generator(torch.randn(4, 4)).detach()).mean() - critic(torch.randn(4, 8)).mean()).backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(torch.randn(4, 4))).mean()).backward()
        of_generator.step()
        clock.step()


def gan5(clock: Clock) -> None:
    gan(clock, 5)


def muon(clock: Clock) -> None:
    model = Tiny()
    wide = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not one for one in wide)]
    optimizers = [torch.optim.Muon(wide), torch.optim.AdamW(others)]
    for ids in batches():
        loss = model(ids)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        clock.step(loss, ids.numel())


def rare(clock: Clock) -> None:
    """A second optimizer once in ten steps."""
    model, other = Tiny(), nn.Linear(4, 1)
    optimizer, seldom = adam(model), torch.optim.SGD(other.parameters(), lr=0.1)
    for number, ids in enumerate(batches()):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 9:
            other(torch.randn(4, 4)).mean().backward()
            seldom.step()
        # What the other one does counts to the next step.
        clock.step(None if number % 10 == 0 else loss, ids.numel())


def twice(clock: Clock) -> None:
    """The same optimizer twice an iteration."""
    model = Tiny()
    optimizer = adam(model)
    for ids in batches(rows=8):
        losses = []
        for part in ids.split(4):
            losses.append(model(part))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        clock.step(sum(losses), ids.numel())


def trainings(clock: Clock) -> None:
    """Two, one after the other, of two models; the second one is timed."""
    train(Clock(""), Tiny())
    model = Tiny()
    train(clock, model, torch.optim.SGD(model.parameters(), lr=0.1), data=batches(rows=2))


def compiled(clock: Clock) -> None:
    model = Tiny()
    train(clock, torch.compile(model, backend="aot_eager"), adam(model))


def compiled_layers(clock: Clock) -> None:
    model = Tiny()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    train(clock, model)


def compiled_in_place(clock: Clock) -> None:
    model = Tiny()
    model.compile(backend="aot_eager")
    train(clock, model)


def compiled_function(clock: Clock) -> None:
    """Nobody can tell from outside what goes into it."""
    model = Tiny()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager")
    def loss_of(ids: torch.Tensor) -> Any:
        return model(ids)

    for ids in batches():
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss)


def compiled_step(clock: Clock) -> None:
    """All of it, with the backward pass and the optimizer inside: a plain one, which is soon compiled."""
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager")
    def step(ids: torch.Tensor) -> Any:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for ids in batches():
        clock.step(step(ids))


def compiled_optimizer(clock: Clock) -> None:
    model = Tiny()
    optimizer = adam(model)
    train(clock, model, optimizer, torch.compile(optimizer.step, backend="aot_eager"))


def in_backward(clock: Clock) -> None:
    """Each parameter's optimizer steps as soon as its gradient is there."""
    model = Tiny()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def stepped(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)
    for ids in batches():
        loss = model(ids)
        loss.backward()
        clock.step(loss, ids.numel())


def checkpointed(clock: Clock) -> None:
    """Recomputed by a backward pass inside of the backward pass."""
    model = Tiny(recomputes=True)
    optimizer = adam(model)
    for ids in batches():
        loss = checkpoint(model, ids, use_reentrant=False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss, ids.numel())


def experts(clock: Clock) -> None:
    """As many operators as there are experts that the data chooses."""
    model, choices = Tiny(), nn.ModuleList(Block() for _ in range(4))
    optimizer = torch.optim.AdamW([*model.parameters(), *choices.parameters()])
    for number, ids in enumerate(batches()):
        hidden = model.embed(ids)
        for index in range(1 + number % 3):
            hidden = choices[index](hidden)
        loss = functional.cross_entropy(model.head(hidden).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss, ids.numel())


def by_hand(clock: Clock) -> None:
    model = Tiny()
    for ids in batches():
        loss = model(ids)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        clock.step(loss, ids.numel())


def by_functions(clock: Clock) -> None:
    """Gradients are asked for by ``torch.autograd.grad``: no backward pass, and no loss to see."""
    model = Tiny()
    optimizer = adam(model)
    for ids in batches():
        gradients = torch.autograd.grad(model(ids), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        clock.step()


def forking(clock: Clock) -> None:
    """Children that end by themselves, in the middle of the training."""
    model = Tiny()
    optimizer = adam(model)
    for number, ids in enumerate(batches()):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 5:
            child = os.fork()
            if not child:
                model(ids).backward()
                optimizer.step()
                sys.exit()
            os.waitpid(child, 0)
        clock.step(loss, ids.numel())


def profiled(clock: Clock) -> None:
    """Under a profiler of its own from the fourth step on."""
    model = Tiny()
    optimizer, profiler = adam(model), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for number, ids in enumerate(batches()):
        if number == 3:
            profiler.start()
        with suppress(AttributeError, RuntimeError):  # a build without CUDA, a host without a GPU
            torch.cuda.reset_peak_memory_stats()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss, ids.numel())
    profiler.stop()


def to_the_end(clock: Clock) -> None:
    """Goes on after its share is written, and ends with a code of its own."""
    train(clock, Tiny())
    train(Clock(""), Tiny())
    sys.exit(3)


def fetching(clock: Clock) -> None:
    """Waits for each of two micro-batches for five thousandths of a second."""
    model = Tiny()
    optimizer = adam(model)

    def slow(rows: Any) -> torch.Tensor:
        time.sleep(0.005)
        return torch.stack(rows)

    ids = torch.randint(_WORDS, (8 * STEPS, 16))
    losses: list[Any] = []
    for index, batch in enumerate(torch.utils.data.DataLoader(ids, batch_size=4, collate_fn=slow)):
        losses.append(model(batch) / 2)
        losses[-1].backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
            clock.step(sum(losses), 2 * batch.numel())
            losses.clear()


def ahead(clock: Clock) -> None:
    """Two workers fetch: one step may take in both of their batches, and the next one none."""
    train(clock, Tiny(), data=torch.utils.data.DataLoader(torch.randint(_WORDS, (4 * STEPS, 16)), 4, num_workers=2))


def positions(clock: Clock) -> None:
    """More positions than words, as where words are letters; positions are looked up once for all rows."""

    class Placed(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(2 * _WORDS, _WIDTH)
            self.embed.register_forward_hook(
                lambda _, given, hidden: hidden + self.places(torch.arange(given[0].shape[1]))
            )

    train(clock, Placed())


def prepared(clock: Clock) -> None:
    """An optimizer is called before any pass, as torch's checkpoints do to make its state."""
    model = Tiny()
    optimizer = adam(model)
    for _ in range(2):
        optimizer.step()
    train(clock, model, optimizer)


def halved(clock: Clock) -> None:
    """All is made of half the bits, but for the loss."""
    torch.set_default_dtype(torch.bfloat16)
    model = Tiny()
    train(clock, lambda ids: model(ids).float() * 1.01, adam(model))


def short(clock: Clock) -> None:
    """Ends before all steps are traced."""
    model = Tiny()
    optimizer = adam(model)
    for ids in batches(steps=13):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss, ids.numel())


def too_short(clock: Clock) -> None:
    model = Tiny()
    optimizer = adam(model)
    for ids in batches(steps=9):
        model(ids).backward()
        optimizer.step()
        clock.step()


def raising(clock: Clock) -> None:
    too_short(clock)
    raise KeyError("no such file of data")


def captured(clock: Clock) -> None:
    """A step that is captured after a few, and replayed: for a GPU alone."""
    model, ids = Tiny(), torch.randint(_WORDS, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        return loss

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(STEPS):
        graph.replay()
        clock.step(loss)


def many_passes(clock: Clock) -> None:
    """More losses than are kept."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    for _ in range(STEPS):
        for _ in range(600):
            weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_device(DEVICE)
    globals()[sys.argv[1]](Clock())
