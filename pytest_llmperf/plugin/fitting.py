"""Fitting: finds the largest micro-batch of a spec, first in one process, then by fresh launches, whose word counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pytest_llmperf.capacity import LARGEST, Search
from pytest_llmperf.course import LaunchFailed
from pytest_llmperf.measurement import Launch
from pytest_llmperf.plugin.patience import Patience
from pytest_llmperf.spec import TrainSpec

# The third step is the first with nothing new: kernels are compiled, the optimizer has its states.
_STEPS = 3


@dataclass(frozen=True)
class Fitted:
    """The largest micro-batch that a fresh launch trained, where one with a sequence more ran out of memory."""

    size: int
    """0: not even one sequence fits."""
    launch: Launch | None
    """Of that size."""
    fails: int | None = None
    """The smallest size seen not to train."""
    given_up: bool = False
    """Whether time was over before the answer was known: ``size`` is what was seen to fit by then."""


def short(spec: TrainSpec, size: int) -> TrainSpec:
    """``spec`` at this micro-batch size, for as many steps as tell whether it fits."""
    return replace(spec, micro_batch_size=size, steps=_STEPS, min_steps=_STEPS, warmup_steps=1)


def fit(
    spec: TrainSpec,
    search: Search,
    try_sizes: Callable[[TrainSpec, Search], list[tuple[int, int | None]]] | None,
    launch: Callable[[TrainSpec, int], Launch],
    patience: Patience,
) -> Fitted:
    """Search from where ``search`` begins; ``try_sizes`` tries several in one process, where that can be done.

    What one process tells is a hint: memory that it has used is in other pieces than fresh memory. Once a fresh launch
    contradicts it, fresh launches alone are believed: each of its other sizes would have to be contradicted by itself.

    Raises:
        LaunchFailed: a launch ended for another reason than a lack of memory.
    """
    if try_sizes is not None:
        for size, peak in try_sizes(short(spec, search.next() or 1), search):
            search.note(size, peak)
    fresh: dict[int, Launch | None] = {}
    while (wanted := _wanted(search, fresh)) is not None:
        patience.told(search)
        if patience.is_over:
            return Fitted(search.fits, None, search.fails, given_up=True)
        try:
            fresh[wanted] = launch(short(spec, wanted), len(fresh) + 1)
        except LaunchFailed as error:
            if error.failure.kind != "oom":
                raise
            fresh[wanted] = None
        trained = fresh[wanted]
        hinted = search.too_large if trained is not None else search.peaks.keys()
        told_wrong = wanted in hinted
        search.note(wanted, None if trained is None else trained.peak_allocated_bytes)
        if told_wrong:
            search.keep(fresh)
    return Fitted(search.fits, fresh.get(search.fits), search.fails)


def _wanted(search: Search, fresh: dict[int, Launch | None]) -> int | None:
    """The size to launch next; ``None`` once the answer and the size after it are confirmed."""
    size = search.next()
    if size is None and search.fits < LARGEST:
        # The larger one first: where the hint was too careful, the search goes on from there.
        unconfirmed = [size for size in (search.fails, search.fits) if size and size not in fresh]
        size = next(iter(unconfirmed), None)
    return None if size in fresh else size
