"""Tuner: one search, from the candidates that fit by predicted memory, by trials, to a winner shown to be one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from pytest_llmperf.judge.tuning import AUTOTUNED, COMPILED, PLAIN, Field, Outcome, Search
from pytest_llmperf.launch import machine
from pytest_llmperf.launch.prediction import PredictionProcess, step_request, why_none
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.findings import CaseFailedError, RunEndedError
from pytest_llmperf.run.tuning.trials import STEPS, Trials, Tried, Tuning, TuningOrder
from pytest_llmperf.run.tuning.winner import FULL_STEPS, Final, proof_seconds
from pytest_llmperf.settings.batch import SIZE
from pytest_llmperf.settings.compilation import is_autotuned
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec, known_failure

# Of the time given, what the trials leave for the end at least, and at most; and the launches of its turns.
_END_SHARE, _END_MOST, _TURNS_LAUNCHES = 0.15, 0.5, 2
# Of it, what one trial may take, and the seconds that it may take in any case: a compiler may have much to do.
_TRIAL_SHARE, _TRIAL_LEAST = 0.2, 60.0
# Seconds that a trial may take of those that were kept for the end; and that the search's own end takes.
_OVERTIME, _CLOSING = 10.0, 3.0
# While one is launched, the memory of so many that may come next is predicted.
_AHEAD = 6

# Of a model whose weights, gradients and Adam's two states, in 16 bits, take more of a CPU's host, memory is predicted.
_STATE_BYTES, _LARGE_SHARE = 8, 0.4
# Multiplied and added, forwards and twice backwards.
_FLOPS_OF_A_WEIGHT = 6

# Others train on this host meanwhile.
_NICENESS = 10
# Of a card, what its driver and libraries leave.
_LEFT = 0.985
# fp8 takes tokens in sixteens, and so may be refused for one sequence.
_FP8_SIZE = 16


@dataclass
class _Bounds:
    """Where only the micro-batch differs: it fits up to one size, and not from another on."""

    fits: float = 0
    fails: float = math.inf


class MemoryForecast:
    """Which configurations fit on cards with so many bytes, as a process beside this one predicts; 0: all fit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._process = limit_bytes, PredictionProcess(_NICENESS)
        self._asked: dict[TrainSpec, int] = {}
        self._bounds: dict[TrainSpec, _Bounds] = {}
        self.peaks: dict[TrainSpec, int] = {}
        """Predicted bytes of one rank."""

    def close(self) -> None:
        self._process.close()

    def ask(self, specs: Iterable[TrainSpec]) -> None:
        """Let the peaks be predicted that will be asked for, but for those that other sizes tell."""
        for spec in specs:
            if self._known(spec) is None:
                self._ask(spec)

    def _ask(self, spec: TrainSpec) -> None:
        if self._limit and spec not in self._asked and why_none(spec) is None:
            with suppress(SpecError):  # fp8 keeps 16-bit values, or fewer, and may be all that makes it a spec
                self._asked[spec] = self._process.send(step_request(replace(spec, fp8="no")))

    def fits(self, spec: TrainSpec) -> bool:
        """Whether a launch of ``spec`` is worth its seconds."""
        known = self._known(spec)
        if known is None and (peak := self.peak_bytes(spec)) is not None:
            known = self.is_enough_for(peak)
            self.note(spec, fits=known)
        return known is not False

    def note(self, spec: TrainSpec, *, fits: bool) -> None:
        bounds, size = self._bounds_of(spec), spec.micro_batch_size
        if fits:
            bounds.fits = max(bounds.fits, size)
        else:
            bounds.fails = min(bounds.fails, size)

    def peak_bytes(self, spec: TrainSpec) -> int | None:
        """Predicted of one rank; ``None`` where it cannot be, or no limit makes it worth knowing."""
        self._ask(spec)
        if spec in self._asked and spec not in self.peaks:
            answer = self._process.receive(self._asked[spec])
            if "parts" in answer:
                self.peaks[spec] = sum(answer["parts"].values())
        return self.peaks.get(spec)

    def is_enough_for(self, peak_bytes: int) -> bool:
        """Whether what there is holds a rank that is predicted to take so many bytes."""
        return peak_bytes <= self._limit * _LEFT

    def _known(self, spec: TrainSpec) -> bool | None:
        """Whether it fits, as far as other sizes tell: of more sequences none takes less."""
        bounds, size = self._bounds_of(spec), spec.micro_batch_size
        return False if size >= bounds.fails else size <= bounds.fits or None

    def _bounds_of(self, spec: TrainSpec) -> _Bounds:
        size, passes = 1 if spec.fp8 == "no" else _FP8_SIZE, min(2, spec.gradient_accumulation_steps)
        shape = replace(spec, micro_batch_size=size, gradient_accumulation_steps=passes)
        return self._bounds.setdefault(shape, _Bounds())

    def least_of(
        self, space: Space, specs: Sequence[TrainSpec], able: Callable[[TrainSpec], bool], until: float
    ) -> tuple[TrainSpec, int] | None:
        """What takes the least of ``space``, of which ``specs`` can be, and its predicted bytes; ``None``: of nothing.
        To predict all would take minutes. As long as there is time each axis is asked for the choice that takes the
        least beside the others' own."""
        spec = by_settings(specs)
        if (peak := self.peak_bytes(spec)) is None:
            return None
        for axis in space.axes:
            if SIZE not in axis.fields and time.monotonic() < until:  # of more sequences none takes less
                others = [*filter(able, replace(space, axes=(axis,)).neighbours(spec))]
                for other in others:
                    self._ask(other)
                for other in others:
                    if (found := self.peak_bytes(other)) is not None and found < peak:
                        peak, spec = found, other
        return spec, peak


def by_settings(specs: Iterable[TrainSpec]) -> TrainSpec:
    """The one whose settings ask for the least, where nothing can be predicted. A loss of Liger's holds no logits."""

    def asks_for(spec: TrainSpec) -> tuple[int, ...]:
        recomputes = spec.gradient_checkpointing * (1 + (spec.checkpointing_policy == "full"))
        tokens, is_whole = spec.micro_batch_size * spec.sequence_length, spec.parallelism == "ddp"
        return (tokens, is_whole, -recomputes, -spec.liger, spec.torch_compile)

    return min(specs, key=asks_for)


# What sparing memory costs at least, as a logarithm: a part or all of the forward pass made again, and scores that are
# written and read, which a CPU does as fast.
_SELECTIVE, _FULL, _EAGER = 0.08, 0.25, 0.3


def compiles(spec: TrainSpec) -> int:
    """How much a launch of it does; flex attention has a compiler of its own."""
    if spec.torch_compile and is_autotuned(spec.torch_compile_mode):
        return AUTOTUNED
    return COMPILED if spec.torch_compile or spec.attention == "flex_attention" else PLAIN


def field_of(space: Space, specs: Sequence[TrainSpec], *, spares_memory: bool = True, on_cpu: bool = False) -> Field:
    """The ``specs`` of ``space`` as they are searched; ``spares_memory``: nothing else is worth recomputing."""

    def waste(spec: TrainSpec) -> float:
        recomputed = _FULL if spec.checkpointing_policy == "full" else _SELECTIVE
        scores = _EAGER * (spec.attention == "eager" and not on_cpu)
        return spares_memory * (recomputed * spec.gradient_checkpointing + scores)

    numbers = {spec: number for number, spec in enumerate(specs)}
    recipes = space.recipes() if spares_memory and not on_cpu else ()
    beginnings = [[numbers[spec] for spec in one if spec in numbers] for one in recipes]
    return Field(
        choices=[space.choices_of(spec) for spec in specs],
        size_axis=next((axis.name for axis in space.axes if SIZE in axis.fields), ""),
        sizes=[spec.micro_batch_size for spec in specs],
        tokens=[spec.sequences_per_step * spec.sequence_length for spec in specs],
        compiles=[compiles(spec) for spec in specs],
        wastes=[waste(spec) for spec in specs],
        beginnings=[one for one in beginnings if one],
    )


#: Is told what is found, what is done next in words (empty: a trial has ended), and the seconds left.
Watch = Callable[[Tuning, str, float], None]


class Tuner:
    """One caller's search: trials as long as there is time for them and for what comes after them, and its end."""

    _numbers: dict[TrainSpec, int]
    _search: Search
    _forecast: MemoryForecast

    def __init__(self, caller: Caller, order: TuningOrder, watch: Watch = lambda *_: None) -> None:
        self._caller, self._run, self._order, self._watch = caller, caller.run, order, watch
        self._until = 0.0
        self._specs: Sequence[TrainSpec] = ()
        self._too_large: set[int] = set()
        self._found = Tuning(begun_at=order.space.base)

    def run(self) -> Tuning:
        """Search until nothing is worth its seconds, time is over, or Ctrl-C; CaseFailedError: nothing can run here."""
        order, found, begun = self._order, self._found, time.monotonic()
        self._until = self._run.until = begun + order.seconds - min(_CLOSING, order.seconds / 10)
        trials = Trials(self._caller, max(_TRIAL_LEAST, _TRIAL_SHARE * order.seconds))
        found.limit_bytes = self._limit_bytes()
        self._forecast = MemoryForecast(found.limit_bytes)
        try:
            with suppress(SpecError):  # then something else comes first
                self._forecast.ask([order.space.first])  # beside what follows: to look at a large space takes seconds
            self._begin(self._runnable())
            self._find(trials)
        except KeyboardInterrupt:
            found.ended = "interrupted"
        except RunEndedError as error:
            found.ended = str(error)
        finally:
            self._forecast.close()
            self._run.until = math.inf
        if self._specs:
            self._count()
            if not found.left and all(one.trial.is_too_large for one in found.tried):
                unpredicted = (by_settings(self._specs), 0)
                found.least = min(self._forecast.peaks.items(), key=lambda one: one[1], default=unpredicted)
        if not found.ended and not found.tried and found.left:
            found.ended = "its time was over before anything was found that fits"
        found.unkept, found.seconds = trials.store.unkept, time.monotonic() - begun
        return found

    def _begin(self, specs: Sequence[TrainSpec]) -> None:
        order, self._specs, self._found.begun_at = self._order, specs, specs[0]
        self._numbers = {spec: number for number, spec in enumerate(specs)}
        spares = order.objective.name != "memory"
        self._search = Search(field_of(order.space, specs, spares_memory=spares, on_cpu=self._run.on_cpu), STEPS)
        # Told of as a reason; whoever wants one can name it in a space of its own.
        failing = {number for number, spec in enumerate(specs) if known_failure(spec)}
        self._search.excluded |= failing if len(failing) < len(specs) else set()

    def _find(self, trials: Trials) -> None:
        """The first trial is made whatever time there is: of what takes the least, if the first does not fit."""
        forecast, tried, least = self._forecast, self._found.tried, None
        if not forecast.fits(self._specs[0]):
            self._tell("predicting the least memory")

            def able(spec: TrainSpec) -> bool:
                return self._caller.why_not(spec) is None and not known_failure(spec)

            least = forecast.least_of(self._order.space, self._specs, able, self._until)
        if least is not None and not forecast.is_enough_for(least[1]):
            self._exclude(range(len(self._specs)))
            return
        if least is not None and least[0] not in self._numbers:  # they are a sample of a large space
            self._begin([*self._specs, least[0]])
        for spec, trial in trials.known(self._specs).items():
            self._note(Tried(spec, trial, was_kept=True))
        while (number := self._next()) is not None:
            spec = self._specs[number] if least is None or tried else least[0]
            trial = trials.make(spec, self._until - self._end_seconds() + _OVERTIME)
            self._note(Tried(spec, trial))
            if trial.kind == "never-started":
                raise CaseFailedError(f"{spec.id}: {trial.failure}")
        if order := self._search.in_order():
            final = Final(self._caller, self._order, self._found, self._until, self._tell)
            num_close = len(self._search.close_to_best())
            final.decide([self._specs[number] for number in order], forecast.fits, num_close=num_close)

    def _exclude(self, numbers: Iterable[int]) -> None:
        self._too_large |= {*numbers}
        self._search.excluded |= self._too_large

    def _next(self) -> int | None:
        search, tried, seconds = self._search, self._found.tried, self._until - time.monotonic() - self._end_seconds()
        if seconds <= 0 and tried:
            return None
        if tried and all(one.trial.is_too_large for one in tried) and not self._too_large:
            # Next of all what asks for the least: where that ran out of memory too nothing fits.
            least = self._numbers[by_settings(self._specs)]
            if least in search.outcomes:
                self._exclude(search.left)
            return least if least in search.left else None
        # What does not fit changes what is worth a trial; memory of what may come next is predicted beside a launch.
        while order := list(islice(search.promising(max(seconds, 0.0)), 1 + _AHEAD)):
            self._forecast.ask(self._specs[number] for number in order)
            if self._forecast.fits(self._specs[order[0]]):
                return order[0]
            self._exclude(order[:1])
            if time.monotonic() >= self._until:
                break
        return None

    def _note(self, tried: Tried) -> None:
        trial, search = tried.trial, self._search
        self._found.tried.append(tried)
        outside = max(0.0, trial.wall_seconds - trial.steps * trial.step_seconds)
        outcome = Outcome(
            self._order.objective.log_of(trial),
            trial.step_seconds,
            outside_seconds=outside if trial.is_measured and not tried.was_kept else None,
            is_spoilt=bool(trial.disturbances),
        )
        search.tell(self._numbers[tried.spec], outcome)
        if trial.is_too_large:
            self._forecast.note(tried.spec, fits=False)
        self._found.winner = next((self._specs[number] for number in search.in_order()), None)
        self._tell("")

    def _limit_bytes(self) -> int:
        """Return what each rank may hold, as far as predictions are asked for it; 0: everything fits. A CPU's host is
        asked of large models alone, whose launch would take the memory of all others on it."""
        if not self._run.on_cpu:
            return self._run.memory_bytes
        base, host = self._order.space.base, machine.host_memory_bytes()
        geometry = base.architecture.geometry
        states = _STATE_BYTES * geometry.flops_per_token(0) / _FLOPS_OF_A_WEIGHT if geometry is not None else 0.0
        return host // base.gpus if states * base.gpus > _LARGE_SHARE * host else 0

    def _runnable(self) -> Sequence[TrainSpec]:
        """The candidates that this machine can run; the reasons of the others are noted."""
        space, found, specs = self._order.space, self._found, list[TrainSpec]()
        candidates = space.candidates()
        found.refused, found.unseen = candidates.refused, candidates.unseen
        for spec in candidates.specs:
            why = self._caller.why_not(spec)
            if why is None:
                specs.append(spec)
            if why := why or known_failure(spec):
                found.refused[why.removeprefix(f"{spec.id}: ").replace(spec.id, "it")] += 1
        if not specs:
            reasons = "; ".join(f"{why} ({number})" for why, number in found.refused.most_common(3))
            raise CaseFailedError(f"{space.base.id}: nothing of this space can be trained here: {reasons}")
        return specs

    def _end_seconds(self) -> float:
        """Return the seconds that the end takes: turns of the best, the proof that the winner is sound."""
        least, most, best = _END_SHARE * self._order.seconds, _END_MOST * self._order.seconds, self._found.winner
        trial = None if best is None else self._found.trial_of(best)
        if best is None or trial is None:
            return least
        each = self._search.outside(compiles(best)) + FULL_STEPS * trial.step_seconds
        return min(most, max(least, _TURNS_LAUNCHES * each + proof_seconds(each)))

    def _count(self) -> None:
        found = self._found
        found.left = len(self._search.left)
        found.too_large = len(self._too_large) + sum(one.trial.is_too_large for one in found.tried)

    def _tell(self, doing: str) -> None:
        self._count()
        self._watch(self._found, doing, self._until - time.monotonic())
