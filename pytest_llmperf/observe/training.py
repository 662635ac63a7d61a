"""ObservedTraining: one rank's training, by plain calls where its steps, batches and passes begin and end.

Whoever drives it, a trainer's callbacks or hooks from outside, waits for nothing by any of these calls while steps are
timed. After those come steps that are traced, or looked at in another way."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

import torch
from torch.distributed import PrefixStore, Store, TCPStore
from torch.utils.hooks import RemovableHandle

from pytest_llmperf.observe.device import clock_of, is_gpu, memory_of
from pytest_llmperf.observe.environment import Project, place_of
from pytest_llmperf.observe.measurement import Boundary, Clock, Diary, Measurement, Memory
from pytest_llmperf.observe.tracer import LONG_SECONDS, TRACED_STEPS, Tracer, with_timed_waits
from pytest_llmperf.observe.vital_signs import Heartbeat, Objects, grown
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.ranks import Trained
from pytest_llmperf.records.steady_state import DECIDED, GOES_ON, PassingRanges, looks, why_end
from pytest_llmperf.records.trace import LEFT, UNWANTED, Trace


@dataclass(frozen=True, kw_only=True)
class Plan:
    steps: int
    """Timed ones, at most."""
    min_steps: int
    warmup_steps: int
    ranks: int = 1
    rank: int = 0
    passing: PassingRanges | None = None
    """With which step times it may end before its median is known."""
    all_steps: bool = False
    """It does not look whether it may end."""
    is_traced: bool = True
    exchanges: bool = False
    """Gradients are exchanged as the backward pass ends, and no weights before; FSDP gathers layer by layer."""
    fetches_ahead: bool = False
    """Others than the rank itself prepare its batches."""
    is_ours: bool = True
    """Ranks may talk to one another beside the training, and its steps are alike. Those of nobody's we know count."""
    diary: Path | None = None
    """Where steps are written down, of a training that its launcher ends; ``None``: it takes so many."""
    project: Project | None = None
    """Whose lines of Python a trace names; left out: those of whichever package."""

    @property
    def traced_steps(self) -> int:
        """How many come after the timed ones."""
        return TRACED_STEPS if self.is_traced else 0


class Untimed(Protocol):
    """Steps that come after the timed ones."""

    def begin(self) -> None:
        """With the next step."""

    def end_step(self) -> bool:
        """Whether that was the last one."""


class LeftObjects:
    """What steps leave of the interpreter's objects, where they leave memory behind: what grows in both of two halves,
    since a profiler leaves some once. The first step only comes before."""

    _HALF = 2

    def __init__(self) -> None:
        self._step, self._first, self._middle = 0, Objects(), Objects()
        self.grown: Mapping[str, float] = {}

    def begin(self) -> None:
        """With the next step."""

    def end_step(self) -> bool:
        self._step += 1
        if self._step == 1:
            self._first.look()
        elif self._step == 1 + self._HALF:
            self._middle.look()
        elif self._step == 1 + 2 * self._HALF:
            self.grown = grown(self._middle, self._HALF, among=self._middle.kinds - self._first.kinds)
        return self._step == 1 + 2 * self._HALF


class Exchange:
    """One rank's meetings with the others: how long it waits in each step with nothing of its own left to compute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hooks: list[RemovableHandle] = []
        self._last: torch.Tensor | None = None
        self._passes = 0
        self._arrived: Any = None
        self._meetings: list[tuple[Any, Any]] = []
        self._steps: list[list[tuple[Any, Any]]] = []
        self._is_known = True

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Before the first backward pass, which shows whose gradient is the last."""
        trained = (parameter for parameter in parameters if parameter.requires_grad)
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._has_gradient) for parameter in trained]

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        self._last = parameter
        self.arrive()

    def arrive(self) -> None:
        """From now on this rank may have to wait; what comes before the first backward pass is of no step."""
        if self._hooks:
            self._arrived = self._clock.instant()

    def leave(self) -> None:
        if self._arrived is not None:
            self._meetings.append((self._arrived, self._clock.instant()))
        self._arrived = None

    def end_pass(self) -> None:
        self._is_known = self._is_known and self._arrived is not None
        self.leave()
        if self._passes == 0:  # one hook from now on: a hundred and more in each step would be felt
            for hook in self._hooks:
                hook.remove()
            last = self._last
            self._hooks = [] if last is None else [last.register_post_accumulate_grad_hook(self._has_gradient)]
        self._passes += 1

    def end_step(self) -> None:
        self._steps.append(self._meetings)
        self._meetings = []

    def seconds(self) -> tuple[float, ...]:
        """Seconds that each step waited, once all work has ended; empty where a pass did not tell."""
        if not self._is_known:
            return ()
        return tuple(sum(self._clock.between(*meeting) for meeting in meetings) for meetings in self._steps)


class ObservedTraining:
    """One rank's; made before the model, since its memory counts from then on."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        heartbeat: Heartbeat,
        last: Iterable[tuple[str, Untimed]] = (),
        memory: Memory | None = None,
    ) -> None:
        """``last``: phases after the traced one, and what is done in them; ``memory``, where it counts already."""
        self.clock, self.memory = clock_of(device), memory or memory_of(device)
        heartbeat.reserved_bytes = self.memory.now
        self._plan, self._heartbeat = plan, heartbeat
        self._exchange = Exchange(self.clock) if plan.exchanges and not plan.diary else None
        self._waiting: tuple[float, ...] = ()
        self.measurement = Measurement(self.clock, self.memory)
        if plan.diary:
            heartbeat.steps, self.measurement = 0, Diary(self.clock, self.memory, plan.diary)
        self._place = place_of(device)
        self.ending = Ending(plan, self.clock, self._place)
        how = {"ahead": plan.fetches_ahead, "is_ours": plan.is_ours}
        self._tracer = Tracer(device, **how, project=plan.project) if plan.is_traced else None
        self.burner: Burner | None = None
        self.measured: Callable[[], None] = lambda: None
        """Called once all timed steps are over and others follow."""
        self._coming = [*([("tracing", self._tracer)] if self._tracer else []), *last]
        self._running: Untimed | None = None
        self._left = LeftObjects()

    def begin(self) -> None:
        """With the first step."""
        self._heartbeat.enter("training")  # before what is timed
        self.measurement.begin()

    def batches_asked(self) -> None:
        if self._tracer:
            self._tracer.fetch_begins()

    def fetched(self, start: int, end: int, *, from_workers: bool) -> None:
        """The host was inside a loader, in nanoseconds since 1970: as a loop of nobody's we know says it."""
        if self._tracer and self._tracer.is_running:
            self._tracer.fetched(start, end, from_workers=from_workers)
        elif not self.measurement.is_over:
            self.measurement.fetched((end - start) * 1e-9)

    def ranks_meet(self) -> None:
        """Before the first pass of a step, whose batches are there: from now on this rank may wait for others."""
        if self._tracer:
            self._tracer.batch_arrived()
        if self._exchange:
            self._exchange.arrive()

    def pass_began(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Forward and backward, of a micro-batch."""
        if self._tracer:
            self._tracer.batch_arrived()
        if self._exchange:
            if not self.measurement.is_begun:
                self._exchange.watch(parameters)
            self._exchange.leave()

    def pass_ended(self, loss: torch.Tensor, tokens: int, real_tokens: int | None = None) -> None:
        """``loss`` stays on its device; ``real_tokens`` are those that are no padding, where there may be some."""
        if self._exchange:
            self._exchange.end_pass()
        self.measurement.end_pass(loss, tokens, real_tokens)

    def step_ended(self, step: int, at: Boundary | None = None) -> Literal["goes on", "measured", "over"]:
        """``step``, from 1: all its work has been issued, now or ``at`` a moment before. "measured": it was the last
        timed one. Whoever drives may do what nobody times, and then calls ``go_on``. "over": no step comes any more."""
        if self.burner is not None:
            self.burner.step(step)
        if self._running:
            return "over" if self._running.end_step() and not self.go_on() else "goes on"
        self.measurement.end_step(at)
        if self._exchange:
            self._exchange.end_step()
        self._heartbeat.step = step
        if not self.ending.now(step):
            return "goes on"
        self.measurement.end()
        self._waiting = self._exchange.seconds() if self._exchange else ()
        # Several ranks would have to agree; of a script's steps, which need not be alike, the mean is told.
        is_long = median(self.measurement.step_seconds) >= LONG_SECONDS
        if self._tracer and is_long and self._plan.ranks == 1 and self._plan.is_ours:
            self._tracer.shorten()
        return "measured"

    def go_on(self) -> bool:
        """With what comes next and is not timed; whether anything does."""
        if self._coming and self._running is None:
            self._heartbeat.enter("gathering")
            self.measured()
            # One rank would go on alone; and a Trainer's arguments have the number of its steps.
            alone = self._plan.ranks == 1 and not self._plan.is_ours
            if self._tracer and alone and self.measurement.leaves_memory(self._plan.warmup_steps):
                self._coming.append(("counting", self._left))
        phase, self._running = self._coming.pop(0) if self._coming else ("finishing", None)
        self._heartbeat.enter(phase)
        if self._running:
            self._running.begin()
        return self._running is not None

    def trained(self, rates: Mapping[str, Any], **facts: Any) -> Trained:
        """Return what was seen of the timed steps; see ``Measurement.trained``."""
        told = {**rates, "waiting_seconds": self._waiting}
        return self.measurement.trained(self._place, self._plan.rank, told, **facts)

    def trace(self, failed: BaseException | None = None) -> Trace:
        """Return the traced steps', once all is over; ``failed`` is what has ended them early."""
        if not self._tracer:
            return Trace(none=UNWANTED)
        timed, warmup_steps = self.measurement.step_seconds, self._plan.warmup_steps
        trace = self._tracer.trace(failed, timed, warmup_steps)
        if self._left.grown:
            trace = replace(trace, places={**trace.places, LEFT: self._left.grown})
        own = self._plan.is_ours
        return trace if own else with_timed_waits(trace, self.measurement.fetch_seconds, timed, warmup_steps)


# How often a host that has run ahead of its device asks where that is.
_POLL_SECONDS = 0.005


class Ending:
    """Once more steps would say nothing that matters, every rank ends at the same step: one rank's part in that."""

    def __init__(self, plan: Plan, clock: Clock, place: Place) -> None:
        """``place`` is this rank's; where all of them are chooses from ``plan.passing``."""
        self._plan, self._clock = plan, clock
        self._looks = frozenset(() if plan.all_steps or plan.diary else looks(plan.min_steps, plan.steps))
        self._store: Store | None = None
        self._places = [place]
        self._why = GOES_ON
        if plan.ranks > 1 and plan.is_ours:
            # The server is torchrun's agent, or rank 0's process group; either way it is there.
            server = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            self._store = PrefixStore("llmperf", server)
            self._store.set(f"place-{plan.rank}", json.dumps(asdict(place)))

    @property
    def evidence(self) -> dict[str, str]:
        """The reason of an early end; nothing of a launch that ended as all do."""
        return {"ended": DECIDED} if self._why == DECIDED else {}

    def now(self, step: int) -> bool:
        """Whether ``step``, which this rank has just issued, is the last one."""
        if step >= self._plan.steps:
            return True
        if step not in self._looks:
            return False
        # A host runs several steps ahead of its device. Where each is long, those would be taken only because nobody
        # had yet timed the ones before: so it waits here until the device has but ``step`` left, all of which is
        # issued. That keeps the device busy for longer than the host takes to look and to issue what comes next.
        while len(seconds := self._clock.so_far()) < step - 1 and min(seconds, default=math.inf) >= LONG_SECONDS:
            time.sleep(_POLL_SECONDS)
        self._why = self._look(step) if self._store is None else self._agreed(self._store, step)
        return self._why != GOES_ON

    def _agreed(self, store: Store, step: int) -> str:
        key = f"stop-{step}"
        if self._plan.rank == 0:
            if self._plan.passing is not None and len(self._places) < self._plan.ranks:
                # They were told before the first step, in which all ranks met.
                places = (store.get(f"place-{rank}") for rank in range(self._plan.ranks))
                self._places = [Place(**json.loads(place)) for place in places]
            store.set(key, self._look(step))
        return str(store.get(key).decode())

    def _look(self, step: int) -> str:
        ranges = self._plan.passing
        passing = None if ranges is None else ranges.at(self._places)
        seconds = self._clock.so_far()
        return why_end(seconds, self._plan.warmup_steps, passing, coming=int(len(seconds) == step - 1))


# Injected faults at work: a share of each step burnt, memory held, a rank that hangs. The gate's own test.

# Steps to learn the step time from; all of them warm-up.
_LEARN_FROM, _LEARN_TO = 1, 3

# Burnt by matrix products: a chip at its power limit turns a wait into higher clocks (8 % of it cost 6 %).
_SIDE, _TRIAL_PRODUCTS = 4096, 100


class Burner:
    """Burns a share of each step on ``device``, called at a step's end."""

    def __init__(self, device: torch.device, clock: Clock, *, slow: float, hold: int, hang: int) -> None:
        """``slow`` is a share of the step time, ``hold`` bytes, ``hang`` the step that never ends."""
        self._share, self._hang, self._device, self._clock = slow, hang, device, clock
        self._held = torch.zeros(hold, dtype=torch.uint8, device=device) if hold else None
        self._seconds, self._products = 0.0, 0
        self._matrix = torch.empty(0)

    def step(self, step: int) -> None:
        if step == self._hang:
            _hang()
        if step == _LEARN_TO and self._share:
            self._learn()
        if self._products:
            self._multiply(self._products)
        elif self._seconds:
            end = time.perf_counter() + self._seconds
            while time.perf_counter() < end:
                pass

    def _learn(self) -> None:
        self._clock.wait()
        seconds = self._share * median(self._clock.so_far()[_LEARN_FROM:])
        if not is_gpu(self._device):
            self._seconds = seconds
            return
        self._matrix = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device=self._device)
        start = self._clock.instant()
        self._multiply(_TRIAL_PRODUCTS)
        end = self._clock.instant()
        self._clock.wait()
        self._products = round(seconds * _TRIAL_PRODUCTS / self._clock.between(start, end))

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.matmul(self._matrix, self._matrix)


def _hang() -> None:
    """As a rank that waits for something that never comes; a signal's handler still runs."""
    while True:
        time.sleep(1)
