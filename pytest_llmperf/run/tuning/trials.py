"""Trials: configurations launched for a few steps, one by one or in turns; what a search is asked for, and finds."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.objective import Objective, Trial, Turns, turns_of
from pytest_llmperf.judge.verdict import Judgement
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.run.paired_comparison import PairedComparison, Pairs, Side
from pytest_llmperf.run.runner import Runner
from pytest_llmperf.run.search_store import driven, search_folder, surroundings
from pytest_llmperf.settings.space import Space
from pytest_llmperf.settings.spec import ScriptSpec, Spec
from pytest_llmperf.support import codec

#: Of a trial: the median of five steps after the two first is known to half a per cent.
STEPS, LEAST_STEPS, WARM_UP = 7, 7, 2

_NO_TIME = "no time for a second launch"
_NO_TOKENS = "the tokens of a step were not found; say those of a step at the start: tokens=sequences:8"
# What says nothing of the configuration, and may end otherwise the next time.
_NOT_KEPT = frozenset({"killed", "never-started", "unwritable", "rendezvous", "node-failure"})
# So many times the seconds may be enough for what was ended by its limit; what a warm start takes at most; and what a
# launch is given, however little time there is: it may begin.
_FAR_MORE, _WARM_SECONDS, _LEAST_SECONDS = 1.5, 2.0, 20.0

#: What a neighbour may make of a launch that trains without it, as it takes memory and time; and what is one
#: configuration's, and not that of all of its command.
OF_ITS_OWN = frozenset({"oom", "timeout"})


class Trials:
    """Kept in the user's cache for this machine kind and what is installed now: a file each, whoever writes it."""

    def __init__(self, caller: Caller, *place: str) -> None:
        """``place`` is a command's, which may be another elsewhere."""
        gpus = sorted(gpu.uuid for gpu in caller.run.gpus)  # others may be a per cent faster
        key = [*surroundings(), *driven(gpus), STEPS, *place]
        self.folder = search_folder(f"trials/{caller.run.machine_kind}", key)
        self.unkept = ""
        """Why what was made is not kept; empty where it is."""
        self.alone = _NO_TIME
        """Why the last trial was launched once."""
        self._caller, self._runner = caller, Runner(caller, bare=True)

    def known(self, specs: Sequence[Spec], most_seconds: float) -> Mapping[Spec, Trial]:
        """Return what earlier searches found of ``specs``. Made anew is what cannot be read, is of other files, or was
        ended by its limit where one may take ``most_seconds`` now, which are far more."""
        known = [(spec, self._kept[spec.content]) for spec in specs if spec.content in self._kept] if self._kept else []
        return {spec: trial for spec, trial in known if self._stands(spec, trial, most_seconds)}

    @cached_property
    def _kept(self) -> Mapping[str, Trial]:
        found = ((path.stem, codec.load(Trial, path)) for path in sorted(self.folder.glob("*.json")))
        return {content: trial for content, trial in found if trial is not None}

    def _stands(self, spec: Spec, trial: Trial, most_seconds: float) -> bool:
        if trial.kind == "timeout" and _FAR_MORE * trial.wall_seconds < most_seconds:
            return False
        folder = spec.folder(self._caller.run.rootdir) if isinstance(spec, ScriptSpec) else Path()
        files = [(folder / name, digest) for name, digest in trial.sources.items()]
        return all(path.is_file() and sha256(path.read_bytes()).hexdigest().startswith(it) for path, it in files)

    def make(self, spec: Spec, most_seconds: float = math.inf, *, twice_within: float = 0.0) -> Trial:
        """Launch ``spec``, for so long: what hangs must not take the time of all others. It is kept unless it may end
        otherwise. Once more, for what of its losses repeats, where both end ``twice_within`` so many seconds."""
        short, began = lasting(spec, STEPS, LEAST_STEPS, WARM_UP), time.monotonic()
        before = self._runner.seconds
        self._runner.most_seconds = max(_LEAST_SECONDS, most_seconds)
        outcome = self._runner.launch(short, 1)
        if isinstance(outcome, Launch):
            found = validity.troubles(short, outcome, inactive=self._caller.terms.inactive)
            if outcome.evidence.get("tokens") == "unknown":
                found = (*found, _NO_TOKENS)
            troubles = tuple(dict.fromkeys(found))
            # So few steps have no drift to speak of.
            known = self._caller.run.stored.experience
            around = () if troubles else validity.circumstances(outcome, math.inf, known).lines
            trial = Trial.of(outcome, troubles, around)
            if outcome.evidence.get("start") == "warm":  # the first one waits for imports
                waited = max(0.0, outcome.phases.get("start", 0.0) - _WARM_SECONDS)
                trial = replace(trial, wall_seconds=outcome.wall_seconds - waited)
            is_time = time.monotonic() + outcome.wall_seconds < began + twice_within
            again = self._runner.launch(short, 2) if is_time else None
            if isinstance(again, Launch):
                trial = replace(trial, losses_again=again.losses)
            else:
                self.alone = f"a second launch failed: {again.message}" if again else _NO_TIME
        else:
            is_cut = outcome.kind == "timeout" and self._runner.most_seconds < self._caller.run.settings.timeout_seconds
            trial = Trial(
                digest=short.digest,
                id=short.id,
                # A first one waits for imports, which its limit leaves out.
                wall_seconds=round(min(self._runner.seconds - before, self._runner.most_seconds), 3),
                failure=outcome.message + "; its limit was a trial's share of --minutes, give more" * is_cut,
                kind=outcome.kind,
                disturbances=validity.neighbours(outcome.health) if outcome.kind in OF_ITS_OWN else (),
            )
        # Of a command that fails nobody knows the files.
        if trial.kind not in _NOT_KEPT and not trial.disturbances and not (spec.is_script and trial.failure):
            why = codec.keep(self.folder / f"{short.content}.json", trial)
            self.unkept = f"{self.folder}: {why}" if why else self.unkept
        return trial


def lasting(spec: Spec, steps: int, least: int, warm_up: int) -> Spec:
    """``spec`` for so many steps, of which a script takes all."""
    return spec.changed(steps=steps, warmup_steps=warm_up, **({} if spec.is_script else {"min_steps": least}))


@dataclass(frozen=True)
class InTurns:
    turns: Turns | None
    """``None``: the launches do not tell what the objective is about, or are in trouble, or nobody asked."""
    pairs: Pairs
    """Of each round the launches, in the order of the specs."""
    troubles: Sequence[str] = ()
    wrong: Sequence[Sequence[str]] = ((), ())
    """What of that is wrong with each."""


def take_turns(
    caller: Caller, specs: Sequence[Spec], objective: Objective, goes_on: Callable[[Turns], bool] | None = None
) -> InTurns:
    """Launch each in turns, of timed steps alone; or two, until their pairs are enough for what they show."""
    sides, found = [Side(name=one.id, spec=one, sides=len(specs)) for one in specs], list[str]()
    noise = caller.policy(specs[-1]).noise

    def decide(pairs: Pairs, troubles: Sequence[str]) -> Judgement:
        found[:] = troubles
        turns = turns_of(pairs, objective, noise) if goes_on and not troubles else None
        return Judgement("pass", "", (), undecided=bool(goes_on and turns and goes_on(turns)))

    comparison = PairedComparison(caller, specs[-1], bare=True)
    pairs = comparison.take_turns(sides, decide).pairs
    if found:  # no figure of such launches counts
        wrong = [comparison.troubles(*one) for one in zip(sides, zip(*pairs, strict=True), strict=True)]
        return InTurns(None, pairs, found, wrong)
    return InTurns(turns_of(pairs, objective, noise) if goes_on else None, pairs)


@dataclass(frozen=True)
class Tried:
    spec: Any
    trial: Trial
    was_kept: bool = False
    """Whether an earlier search made it."""


@dataclass(kw_only=True)
class Tuning:
    """One search: what it is asked for, and what it has found so far, which is all there whatever ends it."""

    space: Space
    objective: Objective
    seconds_given: float
    """For all of it, from its first candidate to its last word."""
    begun_at: Any
    tried: list[Tried] = field(default_factory=list)
    winner: Any = None
    """The best trial's, and later that of turns and proofs."""
    rivals: list[Any] = field(default_factory=list)
    """Those close to it in their trials that turns have not told from it so far, the closest first."""
    compared: dict[tuple[Any, Any], Turns] = field(default_factory=dict)
    """Of those that took turns with the winner on the same hardware, first, how it did."""
    unsound: list[Any] = field(default_factory=list)
    """Those that were faster, and of which their proofs showed that they are no winner."""
    parity: Concluded | None = None
    """Whether the winner trains as its plain form does; ``None`` where no time was left for it."""
    case: Concluded | None = None
    """The winner launched, and judged, as a case; ``None`` as above."""
    refused: Counter[str] = field(default_factory=Counter)
    """How many combinations cannot be, by the reason."""
    too_large: int = 0
    """By predicted memory, or as they ran out of it."""
    left: int = 0
    unseen: int = 0
    """How many of a large space were not even looked at."""
    limit_bytes: int = 0
    """What each rank may hold; 0: nobody looked."""
    ended: str = ""
    """Why before its end."""
    least: tuple[Any, int] | None = None
    """Where nothing was measured: what takes the least memory, and its predicted bytes; 0: nothing can be predicted."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def trial_of(self, spec: Spec) -> Trial | None:
        """The last trial of ``spec``: what spoilt the one before it may have been over."""
        return next((one.trial for one in reversed(self.tried) if one.spec == spec), None)
