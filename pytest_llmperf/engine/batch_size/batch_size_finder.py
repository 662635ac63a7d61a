"""Fitting: finds the largest micro-batch of a spec, first in one process, then by fresh launches, whose word counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pytest_llmperf.engine.batch_size.search_deadline import SearchDeadline
from pytest_llmperf.records.batch_size_search import LARGEST, Search
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.spec.train_spec import TrainSpec

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
    fresh: FreshLaunches,
    search: Search,
    try_sizes: Callable[[TrainSpec, Search], list[tuple[int, int | None]]] | None,
    deadline: SearchDeadline,
    *,
    known: bool = False,
) -> Fitted:
    """Search from where ``search`` begins; ``try_sizes`` tries several in one process, where that can be done.

    ``known``: that size was the answer before. Two launches confirm it; only where it is not any more is it searched.

    What one process tells is a hint: memory that it has used is in other pieces than fresh memory. Once a fresh launch
    contradicts it, fresh launches alone are believed: each of its other sizes would have to be contradicted by itself.

    Raises:
        LaunchFailed: a launch ended for another reason than a lack of memory.
    """
    hinted = not known
    if known:  # as if one process had told it
        search.note(search.guess, 0)
        search.note(search.guess + 1, None)
    elif try_sizes is not None:
        _take_hints(fresh, search, try_sizes)
    while (wanted := _wanted(search, fresh.launches)) is not None:
        deadline.told(search)
        if deadline.is_over:
            return Fitted(search.fits, None, search.fails, given_up=True)
        trained = fresh.launch(wanted)
        told_wrong = wanted in (search.too_large if trained is not None else search.peaks.keys())
        search.note(wanted, None if trained is None else trained.peak_allocated_bytes)
        if told_wrong:
            search.keep(fresh.launches)
            if not hinted and try_sizes is not None:
                hinted = True
                _take_hints(fresh, search, try_sizes)
    return Fitted(search.fits, fresh.launches.get(search.fits), search.fails)


class FreshLaunches:
    """Launches of a spec, a process each, by their size; none where it ran out of memory."""

    def __init__(self, spec: TrainSpec, launch: Callable[[TrainSpec, int], Launch]) -> None:
        self.spec, self._launch, self._number = spec, launch, 0
        self.launches: dict[int, Launch | None] = {}

    def launch(self, size: int) -> Launch | None:
        """Launch ``size``; a rank that died without a word gets a second chance, since memory may have been what ended.

        Raises:
            LaunchFailed: it ended for another reason than a lack of memory.
        """
        try:
            self.launches[size] = self._once(size)
        except LaunchFailed as error:
            if error.failure.kind != "killed":
                raise
            self.launches[size] = self._once(size)
        return self.launches[size]

    def _once(self, size: int) -> Launch | None:
        self._number += 1
        try:
            return self._launch(short(self.spec, size), self._number)
        except LaunchFailed as error:
            if error.failure.kind != "oom":
                raise
            return None


def _take_hints(
    fresh: FreshLaunches, search: Search, try_sizes: Callable[[TrainSpec, Search], list[tuple[int, int | None]]]
) -> None:
    """Let one process go on from where ``search`` is; what fresh launches have told already stays."""
    begin = search.next() or 1
    trained = max((size for size, launch in fresh.launches.items() if launch is not None), default=0)
    failed = min((size for size, launch in fresh.launches.items() if launch is None), default=LARGEST + 1)
    for size, peak in try_sizes(short(fresh.spec, begin), replace(search, guess=begin)):
        if trained < size < failed:
            search.note(size, peak)


def _wanted(search: Search, fresh: dict[int, Launch | None]) -> int | None:
    """The size to launch next; ``None`` once the answer and the size after it are confirmed."""
    size = search.next()
    if size is None and search.fits < LARGEST:
        # The larger one first: where the hint was too careful, the search goes on from there.
        unconfirmed = [size for size in (search.fails, search.fits) if size and size not in fresh]
        size = next(iter(unconfirmed), None)
    return None if size in fresh else size
