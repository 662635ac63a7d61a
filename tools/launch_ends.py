"""The tables of launches that end early in docs/explanation/noise.md: what last steps decide, simulated and replayed.

    python -m tools.launch_ends simulate --gates 2000      # virtual nights of launches with steps, several minutes
    python -m tools.launch_ends replay docs/data/*.jsonl   # the replay of verdicts.py, by both rules
    python -m tools.launch_ends stored baselines/nvidia-h200-140gib   # every stored launch against all others
    python -m tools.launch_ends late --nights 150          # what comes after an early end, on nights of either length

Every row is there twice: of launches that end once their median is known, and of such as runs have, where the first one
of a case also ends once more steps would not keep it from passing. Both are cut from the same steps.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy, Rule, passing_range, passing_ranges, steps_to_settle
from pytest_llmperf.judge.stats import Experience, Noise
from pytest_llmperf.judge.store import parse
from pytest_llmperf.judge.validity import circumstances
from pytest_llmperf.judge.verdict import growth_checks, is_doubted, joined, judge
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.steady_state import PassingRange, looks, why_end
from tests.gpu_nights import TONIGHT, baseline_of, launch_at, spec_of
from tools import tables
from tools.verdicts import POLICY, RATE, Record, World, case, learnt, read, replay, replay_rows, verdict_of

LEAST, MOST, WARMUP = 16, 60, 4

#: Why a launch may end.
RULES = ("known", "decided")

# After so many gates the judge has learnt another machine's noise.
_OF_ONE_MACHINE = 50


def end_of(step_seconds: Sequence[float], passing: PassingRange | None, least: int = LEAST, most: int = MOST) -> int:
    """After how many of its steps a launch ends."""
    ends = (step for step in looks(least, most) if step < len(step_seconds))
    return next((step for step in ends if why_end(step_seconds[:step], WARMUP, passing)), len(step_seconds))


@dataclass(frozen=True)
class Ending:
    """How the first launch of a case ends; what it shows of its step times decides alone."""

    rule: str
    start: int = 0
    """Where the steady state of the baseline's launches began, if they do not tell."""

    def __call__(self, record: Record, baseline: Sequence[Record], noise: Noise, tolerance: float) -> Record:
        return cut(record, self._passing(record, baseline, noise, tolerance) if self.rule == "decided" else None)

    def _passing(self, record: Record, baseline: Sequence[Record], noise: Noise, tolerance: float) -> PassingRange:
        to_come = cast("Launch", replace(record, step_seconds=record.step_seconds[-1:]))
        found = passing_range(
            to_come, stats.difference([to_come], cast("Sequence[Launch]", baseline), noise), tolerance
        )
        return replace(found, stalls=0.005, steps=steps_to_settle([each.start or self.start for each in baseline]))


def cut(record: Record, passing: PassingRange | None) -> Record:
    return replace(record, step_seconds=record.step_seconds[: end_of(record.step_seconds, passing)])


# ---- simulation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Within:
    """How steps of one launch scatter: deviations of the logarithm."""

    name: str
    sd: float
    correlation: float = 0.0
    """Of one step's deviation with the next one's."""
    drift: float = 0.0
    """From the first step to the sixtieth, in a straight line."""
    ramp: float = 0.0
    """By how much the first ``cool`` steps are faster: a chip that is so."""
    cool: int = 10

    def launch(self, level: Record, source: random.Random) -> Record:
        """All the steps that a launch at ``level`` may have."""
        seconds = level.median_step_seconds
        fresh, deviation, found = math.sqrt(1 - self.correlation**2), source.gauss(0, self.sd), []
        for number in range(MOST):
            deviation = self.correlation * deviation + fresh * source.gauss(0, self.sd)
            trend = self.drift * number / MOST - (self.ramp if number < self.cool else 0.0)
            found.append(seconds * math.exp(deviation + trend))
        return replace(level, step_seconds=(5 * found[0], *found[1:]), warmup_steps=WARMUP)


QUIET = Within(name="steps by 0.5 %", sd=0.005)
LIGER = Within(name="by 1 %, AR(1) 0.5", sd=0.01, correlation=0.5, ramp=0.03)
SLOW = Within(name="by 1 %, AR(1) 0.9", sd=0.01, correlation=0.9)
DRIFTS = Within(name="by 0.7 %, drift 1 %", sd=0.007, correlation=0.3, drift=0.01)

LATE = Within(name="by 0.7 %, 3 % faster for 20 steps", sd=0.007, correlation=0.3, ramp=0.03, cool=20)

KNOWN = World(name="known GPU, days 0.3 %", launch=0.003, session=0.003)
ELSEWHERE = World(
    name="another host, sd 1 %", launch=0.003, session=0.003, site=0.006, sites=3, elsewhere=True, host=0.01
)
ALIKE = replace(ELSEWHERE, name="another host, sd 0.3 %", host=0.003, site=0.003)
WORLDS = (
    (KNOWN, LIGER),
    (KNOWN, QUIET),
    *((ELSEWHERE, each) for each in (QUIET, LIGER, SLOW, DRIFTS, LATE)),
    (ALIKE, LIGER),
)

_SLOWER = (0.02, 0.03, 0.05, 0.06)


@dataclass
class Night:
    """What gates of one world came to, by one rule."""

    verdicts: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    steps: int = 0

    def share(self, verdict: str) -> float:
        return self.verdicts[verdict] / self.verdicts.total()


def simulated(gates: int, seed: int) -> Iterator[tuple[str, ...]]:
    """Two rows for each world."""
    yield (
        *("world", "within a launch", "ends once", "steps", "launches", "alarms in 1,000", "inconclusive"),
        *(f"{100 * slower:.0f} % found" for slower in _SLOWER),
        "5 % passed",
    )
    for world, within in WORLDS:
        nothing = nights(world, within, gates, 0.0, seed)
        slowed = [nights(world, within, gates // 4, math.log1p(slower), seed) for slower in _SLOWER]
        for rule in RULES:
            night = nothing[rule]
            yield (
                *(world.name, within.name, rule),
                f"{night.steps / gates:.1f}",
                f"{night.launches / gates:.2f}",
                f"{1000 * night.share('regressed'):.1f}",
                f"{100 * night.share('inconclusive'):.1f} %",
                *(f"{100 * each[rule].share('regressed'):.1f} %" for each in slowed),
                f"{100 * slowed[_SLOWER.index(0.05)][rule].share('pass'):.1f} %",
            )


def nights(world: World, within: Within, gates: int, slower: float, seed: int) -> dict[str, Night]:
    """Gates in which the code got ``slower`` by this logarithm; both rules see the same launches."""
    found = {rule: Night() for rule in RULES}
    source = random.Random(f"{seed} {world.name} {within.name} {slower}")  # noqa: S311 - nobody attacks a simulation
    machine = learnt(world, source)
    for gate in range(1, gates + 1):
        if gate % _OF_ONE_MACHINE == 0:
            machine = learnt(world, source)
        baseline, coming = case(world, slower, source)
        launches = [within.launch(next(coming), source) for _ in range(Rule().budget)]
        for rule, night in found.items():
            # The later ones end as they always did.
            candidates = (each if each is launches[0] else cut(each, None) for each in launches)
            ending = Ending(rule, within.cool if within.ramp else 0)
            verdict, taken = verdict_of(candidates, baseline, machine, Rule(), ending)
            night.verdicts[verdict] += 1
            night.launches += len(taken)
            night.steps += sum(len(each.step_seconds) for each in taken)
    return found


# ---- what comes late or seldom ---------------------------------------------------------------------------------------

_SPEC = replace(spec_of(0), steps=MOST, min_steps=LEAST, warmup_steps=WARMUP)
_MIB = 2**20

#: By which factor a step, from 1 on, takes longer, and how much of 8 GiB each step leaves behind; negative: varies.
Fault = tuple[Callable[[int], float], float]

FAULTS: dict[str, Fault] = {
    "nothing": (lambda _: 1.0, 0.0),
    "5 % slower from step 24": (lambda step: 1.05 if step >= 24 else 1.0, 0.0),  # noqa: PLR2004
    "20 % slower from step 24": (lambda step: 1.2 if step >= 24 else 1.0, 0.0),  # noqa: PLR2004
    "5 % slower from step 40": (lambda step: 1.05 if step >= 40 else 1.0, 0.0),  # noqa: PLR2004
    "20 % slower from step 40": (lambda step: 1.2 if step >= 40 else 1.0, 0.0),  # noqa: PLR2004
    "every 20th step twice as long": (lambda step: 1.0 if step % 20 else 2.0, 0.0),
    "every 50th step 3.5 times": (lambda step: 1.0 if step % 50 else 3.5, 0.0),
    "a leak of 0.05 % a step": (lambda _: 1.0, 0.0005),
    "a leak of 0.1 % a step": (lambda _: 1.0, 0.001),
    "memory that varies by 0.1 %": (lambda _: 1.0, -0.001),
}


def late(nights: int, seed: int) -> Iterator[tuple[str, ...]]:
    """A row for each fault: verdicts of nights in which a launch ends early, and of those with all steps."""
    words = ("pass", "regressed", "invalid", "inconclusive")
    yield ("from tonight on", *(f"{kind}: {word}" for kind in ("early end", "all steps") for word in words))
    for name, (factor, leak) in FAULTS.items():
        found = {True: Counter[str](), False: Counter[str]()}
        for night in range(nights):
            source = random.Random(f"{seed} {night}")  # noqa: S311 - nobody attacks a simulation
            days = {day: source.gauss(0, KNOWN.session) for day in ("2026-01-05", "2026-01-12", "2026-01-19")}
            held = baseline_of([_whole(day, off, source) for day, off in days.items() for _ in range(2)])
            moved = source.gauss(0, KNOWN.session)
            for is_whole, verdicts in found.items():
                verdicts[_night(held, moved, (factor, leak), random.Random(night), is_whole=is_whole)] += 1  # noqa: S311
        yield (name, *(f"{100 * found[kind][word] / nights:.0f} %" for kind in (False, True) for word in words))


def _whole(
    day: str,
    off: float,
    source: random.Random,
    fault: tuple[Callable[[int], float], float] = FAULTS["nothing"],
    more: int = 1,
) -> Launch:
    """A launch of all its steps, or of ``more`` times as many."""
    (factor, leak), level = fault, math.log(0.3) + off + source.gauss(0, KNOWN.launch)
    spec = replace(_SPEC, steps=more * MOST)
    seconds = [math.exp(level + source.gauss(0, QUIET.sd)) * factor(step) for step in range(1, spec.steps + 1)]
    grown = (source.gauss(0, -leak) if leak < 0 else leak * step for step in range(spec.steps))
    held = tuple(int(8 * 1024 * _MIB * (1 + each)) for each in grown)
    launch = launch_at(spec, [0], f"{day}T00:00:00Z", level)
    (rank,) = launch.ranks
    rank = replace(rank, step_seconds=(5 * seconds[0], *seconds[1:]), allocated_bytes=held)
    return replace(launch, ranks=(rank,), spec_id=_SPEC.id, digest=_SPEC.digest)


def _night(held: Baseline, off: float, fault: Fault, source: random.Random, *, is_whole: bool) -> str:
    """The verdict of a night as a run has it: launches until it is decided, one that drifts once more and longer."""
    launches: list[Launch] = []
    passing, budget, judgement = passing_ranges(held, POLICY, TONIGHT), Rule().budget, None
    while judgement is None or (judgement.undecided and len(launches) < budget):
        takes_all = is_whole or (judgement is not None and is_doubted(judgement))
        launch = _whole(TONIGHT, off, source, fault)
        if not takes_all:
            foreseen = passing.at([rank.place for rank in launch.ranks]) if passing and not launches else None
            launch = _first(launch, end_of(launch.step_seconds, foreseen))
        tolerance = POLICY.at([launch], held).tolerances[RATE]
        if circumstances(launch, tolerance).drift:
            launch = _whole(TONIGHT, off, source, fault, 2)
            if circumstances(launch, tolerance).drift:
                return "invalid"
        launches.append(launch)
        growth = growth_checks(launches, held.explained, budget)
        alone = any(check.verdict == "inconclusive" for check in growth)
        judgement = joined(judge(launches, held, POLICY), growth, undecided=alone)
    return judgement.verdict


# ---- replay of injected slowdowns ------------------------------------------------------------------------------------


def replayed(paths: Sequence[Path]) -> Iterator[tuple[str, ...]]:
    """The table of ``verdicts.py replay``, by both rules, but for launches in turns, which always end the same way."""
    measured = read(paths)
    results = {rule: replay(measured, Ending(rule)) for rule in RULES}
    rows = {rule: list(replay_rows(result)) for rule, result in results.items()}
    header = rows["known"].pop(0)
    rows["decided"].pop(0)
    yield (*header[:2], "ends once", "steps", *header[3:])
    steps = {
        rule: [tally.steps for by in (result.same_site, result.elsewhere) for _, tally in sorted(by.items())]
        for rule, result in results.items()
    }
    for number in range(len(steps["known"])):
        for rule in RULES:
            row = rows[rule][number]
            yield (*row[:2], rule, f"{steps[rule][number] / int(row[3]):.1f}", *row[3:])


# ---- replay of the stored baselines ----------------------------------------------------------------------------------

_RUNG = "llama-3.2-1b-bf16-sdpa-liger-mbs14-gpus1"  # 15.8


@dataclass
class Held:
    """Stored launches against the others of their case, by one rule."""

    steps: Counter[str] = field(default_factory=Counter)
    """In all, and of the rung."""
    verdicts: Counter[str] = field(default_factory=Counter)
    set_aside: int = 0


def stored(folder: Path, slowdowns: Sequence[float] = (0.0, *_SLOWER)) -> Iterator[tuple[str, ...]]:
    """Each launch by itself against the others: of other hosts, and, where there are such, also of its own GPU."""
    yield (
        *("held against", "injected", "ends once", "launches", "steps", "of rung 15.8", "set aside"),
        *("pass", "another launch", "other verdicts", "differ"),
    )
    baselines = [
        parse(Baseline, path.read_text(encoding="utf-8"), str(path))
        for path in sorted(folder.rglob("*.json"))
        if "capacity" not in path.parts
    ]
    for kind, where in (("other hosts", "host"), ("its own GPU too", "site")):
        cases = [held for baseline in baselines for held in _held(baseline, baselines, where)]
        for slower in slowdowns:
            yield from _stored_rows(kind, slower, cases)


@dataclass(frozen=True)
class Case:
    """A stored launch, and what it is held against."""

    launch: Launch
    baseline: Baseline
    policy: Policy
    least: int
    most: int


_LEARNT: dict[str, Noise] = {}


def _held(baseline: Baseline, everything: Sequence[Baseline], where: str) -> Iterator[Case]:
    for launch in baseline.launches:
        if where == "host":
            rest = tuple(each for each in baseline.launches if each.host != launch.host)
            left = launch.host
        else:
            rest = tuple(each for each in baseline.launches if each is not launch)
            rest = rest if any(each.site == launch.site for each in rest) else ()
            left = ""
        if not rest:
            continue
        if left not in _LEARNT:
            cases = [[each for each in one.launches if each.host != left] for one in everything]
            _LEARNT[left] = Experience.of([case for case in cases if case], POLICY.noise).noise
        policy = replace(POLICY, noise=_LEARNT[left])
        spec = baseline.spec
        least = min(spec["min_steps"], spec["steps"])
        yield Case(launch, replace(baseline, launches=rest), policy, least, spec["steps"])


def _stored_rows(kind: str, slower: float, cases: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    found = {rule: Held() for rule in RULES}
    differ = 0
    for one in cases:
        launch, said = _scaled(one.launch, 1 + slower), []
        passing = passing_ranges(one.baseline, one.policy, launch.started_at[:10])
        for rule, held in found.items():
            foreseen = passing.at([rank.place for rank in launch.ranks]) if passing and rule == "decided" else None
            # Rank 0 decides, by its own clock.
            steps = end_of(launch.ranks[0].step_seconds, foreseen, one.least, one.most)
            ending = _first(launch, steps)
            judgement = judge([ending], one.baseline, one.policy)
            held.steps["all"] += steps
            held.steps["rung"] += steps if launch.spec_id == _RUNG else 0
            word = "another launch" if judgement.undecided else judgement.verdict
            held.verdicts[word] += 1
            said.append(word)
            tolerance = one.policy.at([ending], one.baseline).tolerances[RATE]
            held.set_aside += bool(circumstances(ending, tolerance).drift)
        differ += said[0] != said[1]
    for rule, held in found.items():
        others = sum(count for word, count in held.verdicts.items() if word not in ("pass", "another launch"))
        yield (
            *(kind, f"{100 * slower:g} %" if slower else "nothing", rule, str(len(cases))),
            *(str(held.steps[name]) for name in ("all", "rung")),
            str(held.set_aside),
            *(str(held.verdicts[word]) for word in ("pass", "another launch")),
            *(str(others), str(differ) if rule == "decided" else ""),
        )


def _scaled(launch: Launch, factor: float) -> Launch:
    ranks = (
        replace(rank, step_seconds=tuple(factor * second for second in rank.step_seconds)) for rank in launch.ranks
    )
    return replace(launch, ranks=tuple(ranks))


def _first(launch: Launch, steps: int) -> Launch:
    ranks = (
        replace(
            rank,
            step_seconds=rank.step_seconds[:steps],
            waiting_seconds=rank.waiting_seconds[:steps],
            allocated_bytes=rank.allocated_bytes[:steps],
        )
        for rank in launch.ranks
    )
    planned = len(launch.step_seconds) if steps < len(launch.step_seconds) else 0
    return replace(launch, ranks=tuple(ranks), losses=launch.losses[:steps], planned_steps=planned)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    simulating = commands.add_parser("simulate")
    simulating.add_argument("--gates", type=int, default=2000)
    simulating.add_argument("--seed", type=int, default=1)
    commands.add_parser("replay").add_argument("files", nargs="+", type=Path)
    commands.add_parser("stored").add_argument("folder", type=Path)
    coming_late = commands.add_parser("late")
    coming_late.add_argument("--nights", type=int, default=150)
    coming_late.add_argument("--seed", type=int, default=1)
    for command in commands.choices.values():
        tables.add_option(command)
    options = parser.parse_args()
    rows = {
        "simulate": lambda: simulated(options.gates, options.seed),
        "late": lambda: late(options.nights, options.seed),
        "replay": lambda: replayed(options.files),
        "stored": lambda: stored(options.folder),
    }[options.command]()
    tables.table(rows, f"early-ends-{options.command}" * options.write)


if __name__ == "__main__":
    main()
