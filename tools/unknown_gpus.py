"""The tables of docs/explanation/unknown-gpus.md: by replay of stored launches, and by simulation.

    python -m tools.unknown_gpus replay baselines/nvidia-h200-140gib                  # several minutes
    python -m tools.unknown_gpus simulate baselines/nvidia-h200-140gib --nights 200   # the same
    python -m tools.unknown_gpus nights baselines/nvidia-h200-140gib --nights 40      # of 40 cases each; ten minutes

Two rules on the same launches: the nested one, by which each case stands for itself and 5 % are tolerated on hardware
that it has not seen, and the joint one, by which all cases of a run tell each other of their GPU. Both call the
functions that decide in a run; nothing is computed twice.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median, pstdev
from typing import Any, cast

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.gpu_knowledge import FEWEST_CASES, Knowledge, learn
from pytest_llmperf.judge.gpu_panel import (
    CALIBRATION,
    CALIBRATION_COPY,
    COPY_ERROR,
    FACTORS,
    Model,
    Observation,
    Unit,
    observations_of,
    unit_of,
)
from pytest_llmperf.judge.policy import CONFIRMED_BY, Policy, Rule, decide, least_tolerance, may_be_its_gpu
from pytest_llmperf.judge.run_effects import common_change, is_laid_to_its_gpu
from pytest_llmperf.judge.stats import Difference, Experience, quantile
from pytest_llmperf.judge.store import parse
from pytest_llmperf.records.calibration import Calibration, Health, Place, host_of, site_of
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import verdict_fails
from pytest_llmperf.records.steady_state import robust_sd
from pytest_llmperf.support.interpreter import one_thread
from tools import tables
from tools.verdicts import POLICY, RATE

RULE = Rule()

#: What is added to a case, or to all.
ADDED = (0.0, 0.01, 0.02, 0.03, 0.05)

#: A night of so many cases tells much of its GPU.
MANY = 10

# A failed test stays as it is.
_FAILED = "regressed"


@dataclass(frozen=True)
class Rank:
    """One of a record."""

    place: Place
    calibration: Calibration | None = None


@dataclass(frozen=True)
class Record:
    """What the judge asks of a launch about its speed and its GPUs."""

    digest: str
    ranks: tuple[Rank, ...]
    started_at: str
    log: float
    """Of its median step time."""
    median_error: float = 0.0
    clock_mhz: float = 0.0
    canary: Mapping[str, float] = field(default_factory=dict)
    is_uneven: bool = False

    @classmethod
    def of(cls, launch: Launch) -> Record:
        return cls(
            digest=launch.digest,
            ranks=tuple(Rank(rank.place, rank.calibration) for rank in launch.ranks),
            started_at=launch.started_at,
            log=math.log(launch.median_step_seconds),
            median_error=launch.median_error,
            clock_mhz=launch.health.sm_clock_mhz,
        )

    @cached_property
    def median_step_seconds(self) -> float:
        return math.exp(self.log)

    @cached_property
    def health(self) -> Health:
        return Health(sm_clock_mhz=self.clock_mhz)

    @cached_property
    def host(self) -> str:
        return host_of(rank.place for rank in self.ranks)

    @cached_property
    def site(self) -> str:
        return site_of(rank.place for rank in self.ranks)

    @cached_property
    def session(self) -> str:
        return f"{self.site} on {self.started_at[:10]}"

    def slower(self, log: float) -> Record:
        return replace(self, log=self.log + log)


def _launches(records: Iterable[Record]) -> list[Launch]:
    """Duck-typed: the judge asks for no more than a Record has."""
    return cast("list[Launch]", list(records))


def by_case(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for each in records:
        found.setdefault(each.digest, []).append(each)
    return found


# ---- one gate --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """As much of a baseline as tolerances ask for."""

    launches: Sequence[Launch]


@dataclass(frozen=True)
class Gate:
    """One case of a night: by what its run knew when it was launched, and again by what it knew in the end."""

    launches: Sequence[Record]
    """That it may take, one after the other."""
    stored: Sequence[Record]
    then: Policy
    end: Policy | None = None
    """``None``: nothing is judged again."""
    _found: dict[tuple[bool, int], tuple[Difference, float, float | None]] = field(default_factory=dict, repr=False)

    def difference(self, num: int, *, at_end: bool) -> tuple[Difference, float, float | None]:
        """After ``num`` launches, the tolerance, and the one on a known GPU where that is closer."""
        key = (at_end, num)
        if key not in self._found:
            policy = self.end if at_end and self.end else self.then
            candidates, stored = _launches(self.launches[:num]), _launches(self.stored)
            difference = policy.difference(candidates, stored)
            here = policy.at(candidates, cast("Baseline", _Stored(stored)))
            self._found[key] = difference, here.tolerances[RATE], here.on_known.get(RATE)
        return self._found[key]

    def outcome(self, slower: float) -> tuple[str, int]:
        """The verdict, and how many launches it took, where the case is slower by this fraction.

        What others tell of the GPU is the same then: ``slower`` moves this case's own logarithms and nothing else.
        """
        return self._judged(slower)[:2]

    def fails_strictly(self, slower: float) -> bool:
        """Whether the case fails under ``--perf-strict``."""
        verdict, _, found = self._judged(slower)
        return verdict_fails(verdict, strict=verdict != "inconclusive" or found.log > found.by_itself)

    def _judged(self, slower: float) -> tuple[str, int, Difference]:
        log, verdict, num = math.log1p(slower), "inconclusive", 0
        tolerance, known = 0.0, None
        for num in range(1, min(RULE.budget, len(self.launches)) + 1):
            found, tolerance, known = self.difference(num, at_end=False)
            moved = shifted(found, log)
            decided = decide(moved, tolerance, RULE).verdict
            verdict = decided or "inconclusive"
            # The nested rule took the word of one launch for a pass.
            is_one = self.then.knowledge is not None and known is not None and num < CONFIRMED_BY
            if decided and not (is_one and known is not None and max(moved.each) > math.log1p(known)):
                break
        found = shifted(self.difference(num, at_end=False)[0], log)
        waits = self.then.waits and may_be_its_gpu(found, tolerance, RULE)
        if self.end is None or (verdict == _FAILED and not waits):
            return verdict, num, found
        found = shifted(self.difference(num, at_end=True)[0], log)
        closest = tolerance if known is None else known
        if known is not None:
            tolerance = min(tolerance, max(known, least_tolerance(found)))
        verdict = decide(found, tolerance, RULE).verdict or "inconclusive"
        is_held = verdict == "pass" or (verdict == "inconclusive" and found.log <= found.by_itself)
        if is_held and is_laid_to_its_gpu(found, closest) and not self._is_gpu_told:
            return "inconclusive", num, replace(found, by_itself=-math.inf)
        return verdict, num, found

    @cached_property
    def _is_gpu_told(self) -> bool:
        knowledge, launch = self.end and self.end.knowledge, self.launches[0]
        return not knowledge or knowledge.tells_of([unit_of(*_launches([launch]))], launch.digest, by_its_cases=False)

    @property
    def prediction(self) -> Difference:
        """Of its first launch, by all that the run knew."""
        return self.difference(1, at_end=True)[0]

    @property
    def detectable(self) -> float:
        found, tolerance, _ = self.difference(1, at_end=True)
        return decide(found, tolerance, RULE).detectable


def shifted(found: Difference, log: float) -> Difference:
    """The same where all its launches are slower."""
    return replace(found, log=found.log + log, each=tuple(each + log for each in found.each))


@dataclass
class Tally:
    """What gates came to."""

    errors: list[tuple[float, float]] = field(default_factory=list)
    """Of predictions, and what was claimed of them."""
    covered: int = 0
    """Predictions of which the 95 % interval has what was seen."""
    detectable: list[float] = field(default_factory=list)
    verdicts: dict[float, Counter[str]] = field(default_factory=dict)
    launches: list[int] = field(default_factory=list)
    """Of unchanged cases."""

    def note(self, gate: Gate, added: Iterable[float]) -> None:
        found = gate.prediction
        self.errors.append((found.log, found.error))
        self.covered += abs(found.log) <= quantile(0.975, found.df) * found.error
        self.detectable.append(gate.detectable)
        for each in added:
            verdict, num = gate.outcome(each)
            self.verdicts.setdefault(each, Counter())[verdict] += 1
            self.launches += [] if each else [num]

    def share(self, verdict: str, added: float) -> float:
        """Per cent."""
        counts = self.verdicts[added]
        return 100 * counts[verdict] / counts.total()

    def beyond(self, errors: float) -> float:
        """Per cent of the predictions."""
        return 100 * sum(abs(log) > errors * error for log, error in self.errors) / len(self.errors)


@dataclass
class CommonTally:
    """What is said of all cases of a night together."""

    verdicts: dict[float, Counter[str]] = field(default_factory=dict)
    told: Counter[float] = field(default_factory=Counter)
    """Of how many nights it was told that all are slower."""

    def note(self, knowledge: Knowledge, launches: Sequence[Record], added: Iterable[float]) -> None:
        calibrations = [each for each in knowledge.seen if each.is_calibration]
        for each in added:
            seen = observations_of(_launches(launch.slower(math.log1p(each)) for launch in launches))
            change = common_change(replace(knowledge, seen=tuple(dict.fromkeys([*seen, *calibrations]))))
            if change is not None:
                verdict = change.verdict(POLICY.tolerances[RATE], RULE)
                self.verdicts.setdefault(each, Counter())[verdict] += 1
                self.told[each] += change.is_news and change.log > 0

    def nights(self, added: float) -> int:
        return self.verdicts[added].total() if added in self.verdicts else 0


# ---- replay ----------------------------------------------------------------------------------------------------------


def stored_records(folder: Path) -> list[Record]:
    """Every launch of the baselines in ``folder``."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        if path.parent.name != "capacity":
            launches = parse(Baseline, path.read_text(encoding="utf-8"), str(path)).launches
            found += [Record.of(launch) for launch in launches]
    return found


@dataclass(frozen=True)
class Kept:
    """What is known where one GPU, or one host, is left out."""

    stored: Sequence[Record]
    nights: Sequence[Sequence[Record]]
    """Of what is left out, one for each day."""


def left_out(records: Sequence[Record], what: str) -> Iterator[Kept]:
    """Each GPU, or each host, in turn; launches on several GPUs are nights of their own."""

    def parts(each: Record) -> set[str]:
        return {rank.place.device for rank in each.ranks} if what == "GPU" else {host_of([r.place]) for r in each.ranks}

    def key(each: Record) -> str:
        return each.site if what == "GPU" else each.host

    for name in dict.fromkeys(map(key, records)):
        mine = [each for each in records if key(each) == name]
        own = set().union(*map(parts, mine))
        days = sorted({each.started_at[:10] for each in mine})
        yield Kept(
            [each for each in records if not own & parts(each)],
            [sorted((e for e in mine if e.started_at[:10] == d), key=lambda e: e.started_at) for d in days],
        )


# Standard deviations of a calibration on the same GPU, and the loadings and the clock that it has: a product of
# bf16 runs at the power limit, one of fp32 hardly, a copy waits for memory.
_CALIBRATION_SD = 0.002
_WORKS: Mapping[str, tuple[float, float, float]] = {
    "bf16_product": (1.0, 0.5, 0.92),
    "fp32_product": (1.0, -0.5, 1.0),
    "copy": (0.2, 0.0, 1.0),
}
_HIGHEST_MHZ = 1980.0


def calibrated(
    units: Iterable[Unit], effects: Mapping[Unit, Sequence[float]], source: random.Random
) -> list[Observation]:
    """Simulated calibrations of ``units`` (of one GPU each), which have these effects."""
    found = []
    for unit in units:
        for work, (general, limited, clock) in _WORKS.items():
            log = general * effects[unit][0] + limited * effects[unit][1] + source.gauss(0, _CALIBRATION_SD)
            mhz = clock * _HIGHEST_MHZ if work == "bf16_product" else 0.0
            error = COPY_ERROR if work == "copy" else 0.0
            found.append(Observation(f"{CALIBRATION}{work} simulated", unit, log, error, mhz))
    return found


def single_units(records: Iterable[Record]) -> list[Unit]:
    """Of one GPU each, by day."""
    return list(
        dict.fromkeys(
            Unit((h,), (d,), u.day)
            for u in map(unit_of, _launches(records))
            for d, h in zip(u.devices, u.hosts, strict=True)
        )
    )


def likely_effects(records: Sequence[Record], seed: int) -> dict[Unit, tuple[float, ...]]:
    """Of each GPU on each of its days, drawn from what all stored launches leave possible.

    Their mean would know of each launch's own error, of which no calibration does.

    Raises:
        ValueError: too little is stored.
    """
    import numpy as np  # noqa: PLC0415

    knowledge = Knowledge.of([_launches(each) for each in by_case(records).values()])
    if knowledge is None:
        raise ValueError("too little is stored to tell GPUs and cases apart")
    units = single_units(records)
    means, covariance = knowledge.told("").of(units)
    drawn = np.random.default_rng(seed).multivariate_normal(means, covariance)
    return {unit: tuple(float(each) for each in drawn[number :: len(units)]) for number, unit in enumerate(units)}


#: Which rule, and what it knows of the GPU beside the case.
NESTED, JOINT, WITH = "nested", "joint", "joint, calibrated"
ALONE, ALONE_WITH = "joint, alone", "joint, alone, calibrated"
_ALONE = "one case alone"


@dataclass
class Replayed:
    """Of one kind of what is left out."""

    gates: dict[tuple[str, str], Tally] = field(default_factory=dict)
    """By how many cases the night had, and by the rule."""
    common: dict[tuple[str, str], CommonTally] = field(default_factory=dict)


def replay(records: Sequence[Record], what: str, seed: int) -> Replayed:
    """Both rules on every launch, as if its GPU, or its host, had never been seen before its night."""
    source, result = random.Random(seed), Replayed()  # noqa: S311 - nobody attacks a replay
    effects = likely_effects(records, seed)
    for kept in left_out(records, what):
        cases = by_case(kept.stored)
        stored = [_launches(each) for each in cases.values()]
        nested = replace(POLICY, noise=Experience.of(stored, POLICY.noise).noise)
        plain = Knowledge.of(stored)
        observations = [*observations_of(_launches(kept.stored))]
        observations += calibrated(single_units(kept.stored), effects, source)
        model = learn(observations)
        if plain is None or model is None:
            continue
        for night in kept.nights:
            tonight = calibrated(single_units(night), effects, source)
            night_of = _Night(night, cases, nested, {JOINT: plain, WITH: Knowledge(model, observations, tonight)})
            night_of.note(result, source)
    return result


@dataclass(frozen=True)
class _Night:
    """One night on what was left out, and all that is stored elsewhere."""

    launches: Sequence[Record]
    cases: Mapping[str, Sequence[Record]]
    nested: Policy
    joint: Mapping[str, Knowledge]

    @cached_property
    def known(self) -> list[Record]:
        """Launches of cases of which there is a baseline."""
        return [each for each in self.launches if each.digest in self.cases]

    @property
    def kind(self) -> str:
        return f"{MANY} cases or more" if len(by_case(self.known)) >= MANY else "fewer cases"

    def note(self, result: Replayed, source: random.Random) -> None:
        """What both rules make of it; ``source``: of launches that were not made."""
        groups: dict[tuple[str, str], list[Record]] = {}
        for each in self.known:
            groups.setdefault((each.digest, each.site), []).append(each)
        for own in groups.values():
            # Half of the variance is the launch's.
            sd = self.joint[JOINT].model.own_spread(own[0].digest).sd / math.sqrt(2)
            fresh = (own[0].slower(source.gauss(0, sd)) for _ in range(RULE.budget))
            for kind_rule, gate in self._gates([*own, *fresh][: RULE.budget]):
                result.gates.setdefault(kind_rule, Tally()).note(gate, ADDED)
        for name, knowledge in self.joint.items():
            result.common.setdefault((self.kind, name), CommonTally()).note(knowledge, self.known, ADDED)

    def _gates(self, launches: Sequence[Record]) -> Iterator[tuple[tuple[str, str], Gate]]:
        stored = self.cases[launches[0].digest]
        before = [each for each in self.known if each.started_at < launches[0].started_at]
        yield (self.kind, NESTED), Gate(launches, stored, self.nested)
        for name, alone in ((JOINT, ALONE), (WITH, ALONE_WITH)):
            knowledge = self.joint[name]
            end = _by(knowledge, self.known)
            waits = len(by_case(self.known)) > FEWEST_CASES
            yield (self.kind, name), Gate(launches, stored, _by(knowledge, before, waits=waits), end)
            yield (_ALONE, alone), Gate(launches, stored, _by(knowledge, []))


def _by(knowledge: Knowledge, launches: Iterable[Record], *, waits: bool = False) -> Policy:
    """Where ``launches`` have been seen tonight, beside calibrations."""
    calibrations = [each for each in knowledge.seen if each.is_calibration]
    seen = dict.fromkeys([*observations_of(_launches(launches)), *calibrations])
    return replace(POLICY, knowledge=replace(knowledge, seen=tuple(seen), _told={}), waits=waits)


_Rows = Iterator[tuple[str, ...]]


def _sorted(tallies: Mapping[tuple[str, str], Any]) -> list[tuple[tuple[str, str], Any]]:
    order = (f"{MANY} cases or more", "fewer cases", _ALONE)
    return sorted(tallies.items(), key=lambda item: order.index(item[0][0]))


def prediction_rows(results: Mapping[str, Replayed]) -> _Rows:
    """How far predictions were off."""
    yield (
        *("left out", "night", "rule", "predictions", "sd of the error", "robust sd", "claimed (median)"),
        *("beyond 2 claimed", "beyond 3", "in 95 % interval", "detectable (median)"),
    )
    for what, result in results.items():
        for (kind, rule), tally in _sorted(result.gates):
            logs = [log for log, _ in tally.errors]
            yield (
                *(what, kind, rule, str(len(logs))),
                _percent(pstdev(logs, 0.0), 2),
                _percent(robust_sd(logs, centre=0.0), 2),
                _percent(median(error for _, error in tally.errors), 2),
                *(f"{tally.beyond(errors):.1f} %" for errors in (2, 3)),
                _percent(tally.covered / len(logs)),
                _percent(median(tally.detectable)),
            )


def verdict_rows(results: Mapping[str, Replayed]) -> _Rows:
    """What was said of cases to which something was added: regressed / pass / inconclusive / improved, per cent."""
    yield ("left out", "night", "rule", "gates", *map(_added, ADDED))
    for what, result in results.items():
        for (kind, rule), tally in _sorted(result.gates):
            cells = [
                " / ".join(
                    f"{tally.share(each, added):.1f}" for each in ("regressed", "pass", "inconclusive", "improved")
                )
                for added in ADDED
            ]
            yield (what, kind, rule, str(len(tally.errors)), *cells)


def common_rows(results: Mapping[str, Replayed]) -> _Rows:
    """What was said of nights in which something was added to all cases: regressed / told as slower, nights."""
    yield ("left out", "night", "calibrations", "nights", *map(_added, ADDED))
    for what, result in results.items():
        for (kind, rule), tally in _sorted(result.common):
            if nights := tally.nights(0.0):
                cells = [f"{tally.verdicts[added]['regressed']} / {tally.told[added]}" for added in ADDED]
                yield (what, kind, "simulated" if rule == WITH else "as stored", str(nights), *cells)


def _percent(fraction: float, digits: int = 1) -> str:
    return f"{100 * fraction:.{digits}f} %"


def _added(fraction: float) -> str:
    return f"{100 * fraction:g} %" if fraction else "nothing"


# ---- simulation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class World:
    """How virtual GPUs and cases differ, beside what was learnt of real ones; standard deviations of the logarithm."""

    name: str
    calibrated: bool = False
    cases: tuple[int, int] = (10, 20)
    """At least, at most."""
    is_alone: bool = False
    """Whether tonight's run is of one case; its baselines are of as many as ever."""
    gpus: int = 1
    """Of tonight's host; the cases have them in turn."""
    effects: float = 1.0
    """How many times more GPUs differ than was learnt."""
    tonight: float = 1.0
    """How many times more tonight's differ from those of the baselines."""
    own: float = 0.0
    """Of what each case has with each GPU by itself, beside what was learnt of it."""
    memory: float = 0.0
    """By how much more a step takes that does nothing but wait for memory, on every other host."""
    bad_stored: float = 0.0
    """By how much one GPU of one of the baselines' hosts is slower."""
    bad_tonight: float = 0.0
    """By how much tonight's first GPU is."""
    others: float = 0.0
    """By how much one other case of the run is slower."""
    upgraded: bool = False
    """Whether tonight's calibrations are made by other versions."""
    tails: float = 0.0
    """Degrees of freedom of all that is drawn (Student's t, of the same variance); 0: it is normal."""
    groups: float = 0.0
    """By how much each of three groups of cases moves apart on each GPU, which no factor of the model knows."""
    is_steady: bool = False
    """Whether no case waits for its host's CPU."""
    is_known: bool = False
    """Whether tonight's GPU is one of those that are stored."""
    hosts: int = 6
    """On which each case is stored, once on each."""
    weather: float = 0.0
    """By how much a day moves all GPUs of all hosts; the next one is much like it."""


WORLDS = (
    World(name="as learnt"),
    World(name="as learnt, calibrated", calibrated=True),
    World(name="one case alone", is_alone=True),
    World(name="one case alone, calibrated", is_alone=True, calibrated=True),
    World(name="on four GPUs of tonight's host", gpus=4),
    World(name="another case is 5 % slower", others=0.05),
    World(name="another case is 5 % faster", others=-0.05),
    World(name="all GPUs differ by twice as much", effects=2.0),
    World(name="tonight's differs by twice what is stored", tonight=2.0),
    World(name="by case as much as between GPUs (0.8 %)", own=0.008),
    World(name="by case 0.8 %, calibrated", own=0.008, calibrated=True),
    World(name="two kinds of memory, 2 % apart", memory=0.02),
    World(name="two kinds of memory, calibrated", memory=0.02, calibrated=True),
    World(name="a stored GPU is bad, by 5 %", bad_stored=0.05),
    World(name="tonight's GPU is bad, by 5 %", bad_tonight=0.05),
    World(name="tonight's GPU is bad, calibrated", bad_tonight=0.05, calibrated=True),
)

_GPUS, _TONIGHT, _GROUPS = 2, "tonight", 3

# A case that scatters by as much waits for its host.
_WAITS = 0.01

# Of a day's weather what the next one has too (AR(1)).
_LASTS = 0.8

# After so many nights another machine, with other cases, has been learnt.
_OF_ONE_MACHINE = 5

#: In the tables of a simulation.
_FOUND = (0.03, 0.05)


@dataclass(frozen=True)
class Case:
    """A virtual one."""

    digest: str
    loading: tuple[float, float]
    own: float
    clock_mhz: float
    memory: float
    """Which share of its step waits for memory."""
    group: int = 0


class Machines:
    """Virtual GPUs of one kind, as ``world`` says, and the cases that are stored of them."""

    def __init__(self, world: World, model: Model, source: random.Random) -> None:
        self._world, self._model, self._source = world, model, source
        self._drawn: dict[tuple[str, ...], float] = {}
        self.cases = [self._case(number) for number in range(source.randint(*world.cases))]
        self.stored = [
            self.launch(each, f"host {host}", source.randrange(_GPUS))
            for each in self.cases
            for host in range(world.hosts)
        ]

    @cached_property
    def by_case(self) -> dict[str, list[Record]]:
        return by_case(self.stored)

    @cached_property
    def nested(self) -> Policy:
        """The policy of the nested rule."""
        cases = [_launches(each) for each in self.by_case.values()]
        return replace(POLICY, noise=Experience.of(cases, POLICY.noise).noise)

    @cached_property
    def knowledge(self) -> Knowledge:
        """From what is stored.

        Raises:
            ValueError: too little is.
        """
        stored = [*observations_of(_launches(self.stored)), *self.calibrations(self.stored)]
        model = learn(stored)
        if model is None:
            raise ValueError(f"{self._world.name}: nothing can be learnt of {len(stored)} observations")
        return Knowledge(model, stored)

    def _case(self, number: int) -> Case:
        # Calibrations are no cases: they hardly scatter by themselves.
        names = [each for each in self._model.loadings if not each.startswith(CALIBRATION)]
        most = _WAITS if self._world.is_steady else math.inf
        name = self._source.choice([each for each in names if self._model.own_spread(each).sd < most])
        loading, own = self._model.loading(name), self._model.own_spread(name)
        limited = float(loading.expected[1]) + 0.5
        general, at_limit = (float(each) for each in loading.mean)
        # The share of the clock that is the limit's: ``learn`` takes a case at 8 % below the highest for limited.
        clock = _HIGHEST_MHZ * (1 - 0.08 * limited)
        return Case(f"case {number}", (general, at_limit), own.sd, clock, self._source.random(), number % _GROUPS)

    def tonight(self, night: int) -> list[tuple[Case, list[Record]]]:
        """The cases of one night in the order of the run, each with the launches that it may take."""
        order = self._source.sample(self.cases, len(self.cases))
        if self._world.is_alone:
            order = order[:1]
        host, day = f"{_TONIGHT} {night}", f"2026-{1 + night // 28:02}-{1 + night % 28:02}"
        if self._world.is_known:
            host = "host 0"
        return [
            (case, [self.launch(case, host, place % self._world.gpus, day) for _ in range(RULE.budget)])
            for place, case in enumerate(order)
        ]

    def launch(self, case: Case, host: str, gpu: int, day: str = "") -> Record:
        weather = day or host
        day = day or f"2025-01-{1 + int(host.split()[1]):02}"
        place = Place(host, f"{host} GPU {gpu}")
        here = Record(case.digest, (Rank(place),), f"{day}T00:00:00Z", 0.0, clock_mhz=case.clock_mhz)
        world, half = self._world, case.own / math.sqrt(2)
        # By the name that the judge has for it, as its calibration is.
        effects = self.effects(unit_of(*_launches([here])))
        log = sum(load * effect for load, effect in zip(case.loading, effects, strict=True))
        log += self._draw(half, "own", case.digest, place.device) + self._source.gauss(0, half)
        log += self._draw(world.own, "by case", case.digest, place.device)
        log += case.memory * self._memory(host)
        if world.groups:
            log += self._draw(world.groups, "group", str(case.group), place.device)
        if world.weather:
            log += self._weather(weather)
        return here.slower(log)

    def effects(self, unit: Unit) -> tuple[float, ...]:
        """Of the GPU of ``unit``, by factor."""
        world, (device,) = self._world, unit.devices
        times = world.effects * (world.tonight if unit.hosts[0].startswith(_TONIGHT) else 1.0)
        found = []
        for factor in FACTORS:
            sds = self._model.effects[factor]
            names = {"host": unit.hosts[:1], "device": (device,), "day": (device, unit.day)}
            found.append(sum(self._draw(times * sds[part], factor, part, *name) for part, name in names.items()))
        is_tonight, number = unit.hosts[0].startswith(_TONIGHT), int(device.rsplit(maxsplit=1)[1])
        bad = world.bad_tonight if is_tonight else world.bad_stored * (unit.hosts[0] == "host 0")
        found[0] += math.log1p(bad) * (number == 0)
        return tuple(found)

    def calibrations(self, records: Sequence[Record]) -> list[Observation]:
        """Of the GPUs of ``records``, if they are made in this world; a copy waits for memory."""
        if not self._world.calibrated:
            return []
        units = single_units(records)
        found = calibrated(units, {unit: self.effects(unit) for unit in units}, self._source)
        found = [
            replace(each, log=each.log + self._memory(each.unit.hosts[0])) if "copy" in each.series else each
            for each in found
        ]
        return [replace(each, series=f"{each.series} anew") if self._is_another(each) else each for each in found]

    def _is_another(self, each: Observation) -> bool:
        is_tonights = each.unit.hosts[0].startswith(_TONIGHT)
        return self._world.upgraded and is_tonights and not each.series.startswith(CALIBRATION_COPY)

    def _weather(self, host: str) -> float:
        """Of the day on which a stored host was launched on, or of tonight, which is long after these."""
        sd, number = self._world.weather, host.rsplit(maxsplit=1)[-1]
        if host in (number, "host 0"):
            return self._draw(sd, "weather", host)
        before = self._weather(f"host {int(number) - 1}")
        return _LASTS * before + math.sqrt(1 - _LASTS**2) * self._draw(sd, "weather", host)

    def _memory(self, host: str) -> float:
        return self._world.memory * (int(host.split()[1]) % 2)

    def _draw(self, sd: float, *name: str) -> float:
        """The same every time for one ``name``."""
        if name not in self._drawn:
            tails, scale = self._world.tails, 1.0
            if tails:  # a normal one over the root of its own mean chi-square is Student's t
                scale = math.sqrt((tails - 2) / (2 * self._source.gammavariate(tails / 2, 1)))
            self._drawn[name] = scale * self._source.gauss(0, sd)
        return self._drawn[name]


@dataclass
class Simulated:
    """What nights of one world came to."""

    nested: Tally = field(default_factory=Tally)
    joint: Tally = field(default_factory=Tally)
    common: CommonTally = field(default_factory=CommonTally)


def simulate_world(world: World, nights: int, model: Model, seed: int) -> Simulated:
    """``nights`` of it; of each every case is a gate."""
    source, result = random.Random(f"{seed} {world.name}"), Simulated()  # noqa: S311
    machines = Machines(world, model, source)
    for night in range(nights):
        if night and night % _OF_ONE_MACHINE == 0:
            machines = Machines(world, model, source)
        run = machines.tonight(night)
        changed = source.randrange(len(run)) if world.others else None
        first = [each[0].slower(math.log1p(world.others) if n == changed else 0.0) for n, (_, each) in enumerate(run)]
        knowledge = replace(machines.knowledge, seen=tuple(machines.calibrations(first)), _told={})
        end = None if world.is_alone else _by(knowledge, first)
        for number, (case, launches) in enumerate(run):
            if number != changed:
                baseline = machines.by_case[case.digest]
                result.nested.note(Gate(launches, baseline, machines.nested), (0.0, *_FOUND))
                then = _by(knowledge, first[:number], waits=len(run) > FEWEST_CASES)
                result.joint.note(Gate(launches, baseline, then, end), (0.0, *_FOUND))
        if changed is None:
            result.common.note(knowledge, first, (0.0, _FOUND[0]))
    return result


def simulate(nights: int, model: Model, seed: int) -> _Rows:
    """A row for each world; by the nested rule and, after the arrow, by the joint one."""
    yield (
        *("world", "gates", "alarms in 1,000", "inconclusive", "launches", "3 % found", "5 % found"),
        *("detectable (median)", "beyond 2 claimed", "all by 3 %: regressed, told", "nothing: regressed, told"),
    )
    for world in WORLDS:
        # One case a night is a gate where others are many.
        found = simulate_world(world, nights * (5 if world.is_alone else 1), model, seed)
        cells = [
            " → ".join(each)
            for each in zip(*(_simulated_cells(tally) for tally in (found.nested, found.joint)), strict=True)
        ]
        said = ["", ""]
        if found.common.nights(0.0):
            said = [_said(found.common, added) for added in (_FOUND[0], 0.0)]
        yield (world.name, str(len(found.joint.errors)), *cells, *said)


#: What the model did not make: heavy tails, groups of cases that move apart by themselves, days that move all GPUs.
_SECOND = World(name="second world", cases=(40, 40), tails=3.0, groups=0.004, weather=0.003)

_NIGHTS = tuple(
    replace(world, name=f"{world.name}{name}", **fields)
    for world in (replace(_SECOND, name="as learnt", tails=0.0, groups=0.0, weather=0.0), _SECOND)
    for name, fields in (
        ("", {}),
        (", calibrated", {"calibrated": True}),
        (", calibrated by other versions", {"calibrated": True, "upgraded": True}),
        (", its GPU 5 % bad", {"bad_tonight": 0.05}),
        (", a GPU that is stored", {"is_known": True}),
        (", no case waits for its host", {"is_steady": True}),
    )
)


#: The columns of a table of them.
NIGHTS = (
    "world",
    "slower",
    "nights",
    "fail",
    "fail if strict",
    "all told slower",
    "cases inconclusive",
    "green, silent",
)


def nights(num: int, model: Model, seed: int) -> _Rows:
    """Of whole nights on a GPU that nobody knows: in how many something fails, or is not shown to hold."""
    yield NIGHTS
    for world in _NIGHTS:
        for added in (0.0, 0.05) if not world.bad_tonight else (0.0,):
            source = random.Random(f"{seed} {world.name}")  # noqa: S311
            machines, counts, undecided = Machines(world, model, source), Counter[str](), 0
            for night in range(num):
                if night and night % _OF_ONE_MACHINE == 0:
                    machines = Machines(world, model, source)
                said, cases = _whole_night(machines, night, math.log1p(added))
                counts.update(said)
                undecided += cases
            share = f"{100 * undecided / num / world.cases[0]:.1f} %"
            cells = [_percent(counts[name] / num, 0) for name in ("fails", "strict", "told")]
            yield (world.name, _added(added), str(num), *cells, share, _percent(counts["silent"] / num, 0))


def young(num: int, model: Model, seed: int) -> _Rows:
    """Of a machine kind whose cases are stored once on each of few hosts: regressed / inconclusive / pass, per cent."""
    yield ("stored on", "gates", *map(_added, (0.0, *_FOUND, 0.08)))
    for hosts in (1, 2, 3):
        source, tally = random.Random(seed), Tally()  # noqa: S311
        world = World(name="young", cases=(40, 40), hosts=hosts)
        for night in range(num):
            machines = Machines(world, model, source)
            run = machines.tonight(night)
            first = [launches[0] for _, launches in run]
            stored = Knowledge.of([_launches(each) for each in machines.by_case.values()])
            for number, (case, launches) in enumerate(run[:10]):
                then = _by(stored, first[:number], waits=True) if stored else machines.nested
                end = _by(stored, first) if stored else None
                tally.note(Gate(launches, machines.by_case[case.digest], then, end), (0.0, *_FOUND, 0.08))
        words = ("regressed", "inconclusive", "pass")
        cells = [" / ".join(f"{tally.share(word, added):.0f}" for word in words) for added in (0.0, *_FOUND, 0.08)]
        yield (f"{hosts} host{'s' * (hosts > 1)}", str(len(tally.errors)), *cells)


def _whole_night(machines: Machines, night: int, log: float) -> tuple[list[str], int]:
    """What is said of it, and of how many cases that they are inconclusive."""
    run = [(case, [each.slower(log) for each in launches]) for case, launches in machines.tonight(night)]
    first = [launches[0] for _, launches in run]
    knowledge = replace(machines.knowledge, seen=tuple(machines.calibrations(first)), _told={})
    end, verdicts, strictly = _by(knowledge, first), list[str](), list[bool]()
    for number, (case, launches) in enumerate(run):
        stored = machines.by_case[case.digest]
        then = _by(knowledge, first[:number], waits=len(run) > FEWEST_CASES)
        gate = Gate(launches, stored, then, end)
        verdicts.append(gate.outcome(0.0)[0])
        # What is undecided waits for the run's end.
        at_launch = replace(gate, then=replace(then, waits=False), end=None).outcome(0.0)[0]
        strictly += [at_launch not in ("pass", "inconclusive"), gate.fails_strictly(0.0)]
    change = common_change(cast("Knowledge", end.knowledge))
    common = change.verdict(POLICY.tolerances[RATE], RULE) if change else "pass"
    fails = any(verdict_fails(verdict, strict=False) for verdict in (*verdicts, common))
    strict = fails or verdict_fails(common, strict=True) or any(strictly)
    told = bool(change and change.log > 0 and (change.is_news or common != "pass"))
    said = {"fails": fails, "strict": strict, "told": told, "silent": not (strict or told)}
    return [name for name, is_said in said.items() if is_said], verdicts.count("inconclusive")


def _simulated_cells(tally: Tally) -> tuple[str, ...]:
    return (
        f"{10 * tally.share('regressed', 0.0):.1f}",
        f"{tally.share('inconclusive', 0.0):.1f} %",
        f"{sum(tally.launches) / len(tally.launches):.2f}",
        *(f"{tally.share('regressed', added):.0f} %" for added in _FOUND),
        *(_percent(median(tally.detectable)), f"{tally.beyond(2):.1f} %"),
    )


def _said(common: CommonTally, added: float) -> str:
    shares = (common.verdicts[added]["regressed"], common.told[added])
    return ", ".join(_percent(share / common.nights(added), 0) for share in shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("replay", "simulate", "nights", "young"):
        command = commands.add_parser(name)
        command.add_argument("baselines", type=Path)
        command.add_argument("--seed", type=int, default=1)
        tables.add_option(command)
        if name != "replay":
            command.add_argument("--nights", type=int, default=100)
    options = parser.parse_args()
    records = stored_records(options.baselines)
    with one_thread():
        if options.command == "replay":
            results = {what: replay(records, what, options.seed) for what in ("GPU", "host")}
            for name, rows in (("predictions", prediction_rows), ("verdicts", verdict_rows), ("common", common_rows)):
                print()
                tables.table(rows(results), f"unknown-gpus-{name}" * options.write)
            return
        model = learn(observations_of(_launches(records)))
        if model is None:
            raise SystemExit(f"{options.baselines}: too little is stored to tell GPUs and cases apart")
        made = {"simulate": simulate, "nights": nights, "young": young}[options.command]
        name = {"simulate": "unknown-gpus-simulated"}.get(options.command, options.command)
        tables.table(made(options.nights, model, options.seed), name * options.write)


if __name__ == "__main__":
    main()
