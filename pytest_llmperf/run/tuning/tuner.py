"""Tuner: one search, from the candidates that fit by predicted memory, by trials, to a winner shown to be one."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from pytest_llmperf.judge.tuning import AUTOTUNED, COMPILED, PLAIN, WHOLE, Beliefs, Field, Outcome, Search
from pytest_llmperf.launch import machine
from pytest_llmperf.launch.prediction import PredictionProcess, step_request, why_none
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.findings import CaseFailedError, RunEndedError
from pytest_llmperf.run.tuning.trials import OF_ITS_OWN, STEPS, Trials, Tried, Tuning
from pytest_llmperf.run.tuning.winner import CASE_LAUNCHES, FULL_STEPS, RIVALS, Final, proof_seconds, trial_seconds
from pytest_llmperf.settings.compilation import is_autotuned
from pytest_llmperf.settings.optimizer import least_copies
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec, known_failure, lacks_rows

# Of the time given, what the trials leave for the end: of a model, whose choices are asked for, at least; and at most.
_END_SHARE, _END_MOST = 0.15, 0.5
#: Of it, what one trial may take, and the seconds that it may take in any case: a compiler may have much to do.
TRIAL_SHARE, TRIAL_LEAST = 1 / 3, 60.0
# Seconds that a trial may take of those that were kept for the end; and that the search's own end takes.
_OVERTIME, _CLOSING = 10.0, 3.0
_AHEAD = 6  # of those that may come next, whose memory is predicted while one is launched

# Bytes of a weight, its gradient and Adam's states, in 16 bits; and the share of a CPU's host from which one predicts.
_STATE_BYTES, _LARGE_SHARE = 8, 0.4
# Others train on this host while memory is predicted; and of a card, what its driver and libraries leave.
_NICENESS, _LEFT = 10, 0.985


class MemoryForecast:
    """Which configurations fit on cards with so many bytes, as a process beside this one predicts; 0: all fit."""

    def __init__(self, limit_bytes: int) -> None:
        self._most, self.process = limit_bytes * _LEFT, PredictionProcess(_NICENESS)
        self._asked: dict[Spec, int] = {}
        self._held: dict[Spec, float] = {}
        self.peaks: dict[Spec, int] = {}
        """Predicted bytes of one rank."""

    def ask(self, specs: Iterable[Spec]) -> None:
        """Let the peaks be predicted that will be asked for."""
        for spec in (one for one in specs if isinstance(one, TrainSpec)):
            if self._most and spec not in self._asked and why_none(spec) is None:
                with suppress(SpecError):  # fp8 keeps 16-bit values, or fewer, and may be all that makes it a spec
                    self._asked[spec] = self.process.send(step_request(replace(spec, fp8="no")))

    def fits(self, spec: Spec) -> bool:
        """Whether a launch of ``spec`` is worth its seconds: it is where nothing can be predicted."""
        self.ask([spec])
        if spec in self._asked and spec not in self.peaks:
            answer = self.process.receive(self._asked[spec])
            if "parts" in answer:
                self.peaks[spec] = sum(answer["parts"].values())
        return self.peaks.get(spec, 0) * self._held.get(_of_any_size(spec), 1.0) <= self._most

    def learn(self, spec: Spec, peak_bytes: int) -> bool:
        """Hold other sizes of ``spec`` to its share of what is predicted, as if not compiled. Whether that is news."""
        if is_news := peak_bytes > 0 and spec in self.peaks and compiles(spec) != PLAIN:
            key = _of_any_size(spec)
            self._held[key] = max(min(1.0, peak_bytes / self.peaks[spec]), self._held.get(key, 0.0))
        return is_news


def _of_any_size(spec: Spec) -> Spec:
    return replace(spec, micro_batch_size=1, gradient_accumulation_steps=1) if isinstance(spec, TrainSpec) else spec


def by_settings(specs: Iterable[Spec]) -> Spec:
    """The one whose settings ask for the least memory: to predict all would take minutes."""

    def asks_for(spec: Spec) -> tuple[float, ...]:
        if not isinstance(spec, TrainSpec):
            return (spec.micro_batch_size,)
        recomputes = spec.gradient_checkpointing * (1 + (spec.checkpointing_policy == "full"))
        tokens, is_whole = spec.micro_batch_size * spec.sequence_length, spec.parallelism == "ddp"
        states, scores = (1 + (spec.model_precision == "fp32")) * least_copies(spec), spec.attention == "eager"
        return (tokens, is_whole, -recomputes, states, -spec.liger, scores, spec.torch_compile)

    return min(specs, key=asks_for)


# What sparing memory costs at least, as a logarithm: a forward pass made again, in part or whole, and written scores.
_SELECTIVE, _FULL, _EAGER = 0.08, 0.25, 0.3


def compiles(spec: Spec) -> int:
    """How much a launch of it does, as far as is known; flex attention has a compiler of its own."""
    if not isinstance(spec, TrainSpec):
        return PLAIN
    if spec.torch_compile and is_autotuned(spec.torch_compile_mode):
        return AUTOTUNED
    if spec.torch_compile and spec.torch_compile_scope == "model":
        return WHOLE
    return COMPILED if spec.torch_compile or spec.attention == "flex_attention" else PLAIN


def begun_by(space: Space, numbers: Mapping[Spec, int], best: Spec | None, *, wastes: bool) -> Sequence[Sequence[int]]:
    """The numbers of what follows each recipe of ``space``: with all else that ``best`` has, and with what the search
    began with. The former come first, unless ``best`` gives up speed to spare memory (``wastes``), or is ``None``; and
    alone where ``best`` follows the recipe."""
    own, plain = (space.recipes(best) if best is not None else ()), space.recipes()
    both = zip(*((plain, own) if wastes else (own, plain)) if own else (plain,), strict=True)
    wanted = [next((one for one in each if best in one), dict.fromkeys(chain(*each))) for each in both]
    return [[numbers[spec] for spec in each if spec in numbers] for each in wanted]


def field_of(space: Space, specs: Sequence[Spec], *, spares_memory: bool = True, on_cpu: bool = False) -> Field:
    """The ``specs`` of ``space`` as they are searched; ``spares_memory``: nothing else is worth recomputing."""

    numbers = {spec: number for number, spec in enumerate(specs)}
    follows = begun_by(space, numbers, None, wastes=False) if spares_memory and not on_cpu else ()

    def waste(spec: Spec) -> float:
        if not isinstance(spec, TrainSpec):
            return 0.0
        recomputed = _FULL if spec.checkpointing_policy == "full" else _SELECTIVE
        scores = _EAGER * (spec.attention == "eager" and not on_cpu)
        return spares_memory * (recomputed * spec.gradient_checkpointing + scores)

    def tokens(spec: Spec) -> int:
        return spec.sequences_per_step * spec.sequence_length if isinstance(spec, TrainSpec) else spec.micro_batch_size

    return Field(
        choices=[space.choices_of(spec) for spec in specs],
        size_axis=next((axis.name for axis in space.axes if space.sized in axis.fields), ""),
        sizes=[spec.micro_batch_size for spec in specs],
        tokens=[tokens(spec) for spec in specs],
        compiles=[compiles(spec) for spec in specs],
        wastes=[waste(spec) for spec in specs],
        scales=space.scales,
        beginnings=follows if spares_memory else [[numbers[by_settings(specs)]]],
    )


# How a launch refuses a value that no model of the family has, whatever else a configuration chooses.
_LACKS = re.compile(r" has no .*?\b(\w+)='(\w+)'")

#: Is told what is found, what is done next in words (empty: a trial has ended), and the seconds left.
Watch = Callable[[Tuning, str, float], None]


class Tuner:
    """One caller's search: trials as long as there is time for them and for what comes after them, and its end."""

    def __init__(self, caller: Caller, found: Tuning, watch: Watch = lambda *_: None) -> None:
        self._caller, self._run, self._found, self._watch = caller, caller.run, found, watch
        self._specs: Sequence[Spec] = ()
        self._numbers: dict[Spec, int] = {}
        self._lacking: dict[tuple[str, str], str] = {}  # why launches refused a value of a field
        self._beside: Spec | None = None
        """The best beside which was looked last."""
        self._held: Tried | None = None
        """The first of a script that trained: all others have losses like it."""

    def run(self) -> Tuning:
        """Search until nothing is worth its seconds, time is over, or Ctrl-C; CaseFailedError: nothing can run here."""
        found, begun = self._found, time.monotonic()
        self._until = self._run.until = begun + found.seconds_given - min(_CLOSING, found.seconds_given / 10)
        trials = Trials(self._caller, *([str(self._run.rootdir)] if found.space.base.is_script else []))
        found.limit_bytes = self._limit_bytes()
        self._forecast = MemoryForecast(found.limit_bytes)
        try:
            with suppress(SpecError):  # then something else comes first
                self._forecast.ask([found.space.first])  # beside what follows: to look at a large space takes seconds
            specs, spares, on_cpu = self._runnable(), found.objective.name != "memory", self._run.on_cpu
            found.begun_at, self._numbers = specs[0], {spec: at for at, spec in enumerate(specs)}
            self._field_of = partial(field_of, found.space, spares_memory=spares, on_cpu=on_cpu)
            self._field = self._field_of(specs)
            beliefs = Beliefs() if spares else Beliefs(fixed=0.0)  # of memory more is no less
            self._search, self._specs, self._follows = Search(self._field, STEPS, beliefs), specs, spares and not on_cpu
            self._find(trials)
        except KeyboardInterrupt:
            found.ended = "interrupted"
        except RunEndedError as error:
            found.ended = str(error)
        finally:
            self._forecast.process.close()
            self._run.until = math.inf
        if self._specs:
            self._count()
            if not found.left and all(one.trial.is_too_large for one in found.tried):
                least = by_settings(self._specs)
                found.least = least, self._forecast.peaks.get(least, 0)
        if not found.ended and found.left and not any(one.trial.is_measured for one in found.tried):
            found.ended = f"its time was over before anything was found that {'trains' if found.tried else 'fits'}"
        if trials.unkept:
            found.notes.append(f"its trials are not kept, and the next search makes them anew ({trials.unkept})")
        found.seconds = time.monotonic() - begun
        return found

    def _find(self, trials: Trials) -> None:
        most = max(TRIAL_LEAST, TRIAL_SHARE * self._found.seconds_given)
        self._known = partial(trials.known, most_seconds=min(most, self._trial_seconds(COMPILED) + _OVERTIME))
        self._waiting = [*self._known(self._specs).items()]
        while (number := self._next()) is not None:
            spec, limit = self._specs[number], self._trial_seconds(self._field.compiles[number]) + _OVERTIME
            if all(one.was_kept for one in self._found.tried):
                self._tell(f"{spec.id} is launched, and waits for imports first; trials are kept in {trials.folder}")
            # The winner's own case takes two launches more.
            within = (self._until - time.monotonic()) / 2 if spec.is_script and self._held is None else 0.0
            trial = trials.make(spec, min(most, limit), twice_within=within)
            self._note(Tried(spec, trial), trials.alone)
            is_wrong = not self._held and trial.kind not in OF_ITS_OWN  # another flag of a command may be known
            if is_wrong if spec.is_script else trial.kind == "never-started":
                raise CaseFailedError(f"{spec.id}: {trial.failure}")
        self._tell_of_one_trial()
        if order := self._search.in_order():
            final = Final(self._caller, self._found, self._until, self._tell)
            final.decide([self._specs[number] for number in order], self._forecast.fits)

    def _tell_of_one_trial(self) -> None:
        """Where a command had time for no other: which minutes would do."""
        tried, left = self._found.tried, len(self._search.left)
        if self._held is None or len(tried) != 1 or tried[0].was_kept or not left:
            return
        start = (each := (trial := tried[0].trial).wall_seconds) - trial.steps * trial.step_seconds
        # The first is launched twice, and the winner's own case takes as many.
        two, all_ = (math.ceil((1 + CASE_LAUNCHES + trials) * each / 60) + 1 for trials in (2, 1 + left))
        told = f"only one trial fitted: a launch takes {each:.0f} s, {start:.0f} of them its start"
        self._found.notes.append(f"{told}; --minutes {two} is enough for two, {all_} for all {1 + left}")

    def _fits(self, number: int) -> bool:
        fits = self._forecast.fits(self._specs[number])
        self._search.excluded |= {*(() if fits else self._search.as_large(number))}
        return fits

    def _exclude(self) -> None:
        """Leave out what is as large as what ran out of memory."""
        too_large = (self._numbers[one.spec] for one in self._found.tried if one.trial.is_too_large)
        self._search.excluded.update(*map(self._search.as_large, too_large))

    def _next(self) -> int | None:
        """The first trial, whatever time there is: of what asks for the least memory if the first does not fit. What
        earlier searches found is noted before."""
        while self._waiting:
            self._note(Tried(*self._waiting.pop(0), was_kept=True))
        search, tried = self._search, self._found.tried
        if self._trial_seconds() <= 0 and tried:
            return None
        if all(one.trial.is_too_large for one in tried) and not (0 in search.left and self._fits(0)):
            least = self._numbers[by_settings(self._specs)]
            if least in search.left and self._fits(least):
                return least
            search.excluded |= {*search.left}  # where that does not fit nothing does
        # What does not fit changes what is worth a trial; memory of what may come next is predicted beside a launch.
        ahead = _AHEAD if tried else len(self._field.beginnings)
        while order := list(islice(search.promising(self._trial_seconds), 1 + ahead)):
            self._forecast.ask(self._specs[number] for number in order)
            if self._fits(order[0]):
                return order[0]
            if time.monotonic() >= self._until:
                break
        return None

    def _note(self, tried: Tried, alone: str = "an earlier search launched it once") -> None:
        trial, search = tried.trial, self._search
        if tried.spec.is_script and trial.is_measured:
            if not self._held and trial.losses and not trial.losses_again:
                self._found.notes.append(f"only the band of losses is held, no first loss: {trial.id}: {alone}")
            self._held = self._held or tried
            # A command that has other numbers may draw, or split, its batches otherwise.
            mine, its = (re.findall(r"\d+", " ".join(one.spec.argv)) for one in (tried, self._held))
            if why := trial.unlike(self._held.trial, is_same_batch=mine == its):
                why = f"it learns otherwise than {self._held.trial.id}: {why}"
                self._found.notes.append(f"{trial.id} is no winner: {why}")
                trial = trial.contradicted(why)
                tried = replace(tried, trial=trial)
        self._found.tried.append(tried)
        number, objective = self._numbers[tried.spec], self._found.objective
        if trial.is_too_large:  # no choice of it is to blame
            self._exclude()
        else:
            is_timed = trial.is_measured and not tried.was_kept
            outside = max(0.0, trial.wall_seconds - trial.steps * trial.step_seconds) if is_timed else None
            scatter = self._caller.policy(tried.spec).noise.launch.sd
            error = math.hypot(scatter, trial.step_error) if objective.is_of_time else 0.0
            log, is_spoilt = objective.log_of(trial), bool(trial.disturbances)
            search.tell(number, Outcome(log, trial.step_seconds, outside, error, is_spoilt))
            if trial.kind == "refused" and (named := _LACKS.search(trial.failure)):
                self._refuse(named[1], named[2], trial.failure)
            if self._forecast.learn(tried.spec, trial.peak_reserved_bytes):
                search.excluded.clear()
                self._exclude()
        # Who else computes on a CPU is not seen, and a trial may be anything: turns are asked of the next ones anyway.
        order = search.in_order()
        close = {*search.close_to_best(), *order[: 1 + RIVALS if self._run.on_cpu and objective.is_of_time else 0]}
        self._found.winner, *self._found.rivals = [self._specs[n] for n in order if n in close] or (None,)
        if tried.was_kept:  # it may have been the best of its time
            self._look_beside(tried.spec)
        if (best := self._found.winner) is not None and best != self._beside:
            self._beside, recipes = best, self._found.space.recipes(best) if self._follows else ()
            self._look_beside(best, *chain(*recipes))
            if recipes:
                wastes = self._field.wastes[self._numbers[best]] > 0
                begun = begun_by(self._found.space, self._numbers, best, wastes=wastes)
                self._field = replace(self._field, beginnings=begun)
                search.over(self._field)
        self._tell("")

    def _refuse(self, name: str, value: str, why: str) -> None:
        self._lacking[name, value] = why  # nothing that has it is launched again
        alike = {number for number in self._search.left if getattr(self._specs[number], name, None) == value}
        self._found.refused[why] += len(alike)
        self._search.refused |= alike

    def _look_beside(self, spec: Spec, *others: Spec) -> None:
        """Search what differs from ``spec`` by one choice, and ``others``, too where the candidates are a sample of a
        large space."""
        found = self._found
        beside = dict.fromkeys([*found.space.neighbours(spec), *others] if found.unseen else ())
        more = [one for one in beside if one not in self._numbers and not self._why_not(one)[1]]
        if not more:
            return
        self._numbers |= {one: at for at, one in enumerate(more, len(self._specs))}
        self._specs, found.unseen = [*self._specs, *more], found.unseen - len(more)
        self._field += self._field_of(more)
        self._search.over(self._field)
        self._exclude()
        self._waiting += self._known(more).items()

    def _limit_bytes(self) -> int:
        """Return what each rank may hold, as far as predictions are asked for it; 0: everything fits. A CPU's host is
        asked of large models alone, whose launch would take the memory of all others on it."""
        if not self._run.on_cpu:
            return self._run.memory_bytes
        base, host = self._found.space.base, machine.host_memory_bytes()
        geometry = base.architecture.geometry if isinstance(base, TrainSpec) else None
        states = _STATE_BYTES * geometry.weights * base.gpus if geometry is not None else 0
        return host // base.gpus if states > _LARGE_SHARE * host else 0

    def _runnable(self) -> Sequence[Spec]:
        """The candidates that this machine can run, if possible without a known failure; others' reasons are noted."""
        found, runnable, sound = self._found, list[Spec](), list[Spec]()
        candidates = found.space.candidates()
        found.refused, found.unseen = candidates.refused, candidates.unseen
        for spec in candidates.specs:
            is_runnable, why = self._why_not(spec)
            runnable += [spec] if is_runnable else []
            if why:
                found.refused[why.removeprefix(f"{spec.id}: ").replace(spec.id, "it")] += 1
            else:
                sound.append(spec)
        if not runnable:
            reasons = "; ".join(f"{why} ({number})" for why, number in found.refused.most_common(3))
            raise CaseFailedError(f"{found.space.base.id}: nothing of this space can be trained here: {reasons}")
        return sound or runnable

    def _why_not(self, spec: Spec) -> tuple[bool, str]:
        """Whether this machine can run it, and why it is not tried."""
        lacking = (why for (name, value), why in self._lacking.items() if getattr(spec, name, None) == value)
        if why := self._caller.why_not(spec) or (isinstance(spec, TrainSpec) and lacks_rows(spec)) or next(lacking, ""):
            return False, why
        return True, (isinstance(spec, TrainSpec) and known_failure(spec)) or ""

    def _trial_seconds(self, compiled: int = PLAIN) -> float:
        """The seconds that one more trial, which compiles so much, may take before the end: turns with rivals, if any,
        and proofs."""
        left, found, needed = self._until - time.monotonic(), self._found, 0.0
        if found.tried and found.winner is None:
            return left
        if found.winner is not None and (trial := found.trial_of(found.winner)) is not None:
            each, rivals = self._search.outside(compiles(found.winner)) + FULL_STEPS * trial.step_seconds, found.rivals
            needed = (1 + len(rivals[:RIVALS])) * bool(rivals) * each + proof_seconds(found.winner, each)
        share = max(0.0 if found.space.base.is_script else _END_SHARE, min(_END_MOST, needed / found.seconds_given))
        before = trial_seconds(found.space.base, left, compiles=compiled != PLAIN)
        return min(left - share * found.seconds_given, before)

    def _count(self) -> None:
        self._found.left, self._found.too_large = len(self._search.left), len(self._search.excluded)

    def _tell(self, doing: str) -> None:
        self._count()
        self._watch(self._found, doing, self._until - time.monotonic())
