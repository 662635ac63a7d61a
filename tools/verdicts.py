"""The tables of docs/explanation/noise.md: how often a verdict is wrong, by simulation, and by replay of launches.

    python tools/verdicts.py simulate --gates 2000      # virtual nights, several minutes
    python tools/verdicts.py replay docs/data/*.jsonl   # launches measured on H200, some with injected slowdowns
    python tools/verdicts.py pack launches.jsonl …      # what a replay needs of tools/collect_injections.py's output

Both call the functions that decide in a run; nothing is computed twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, cast

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.policy import Policy, Rule, decide
from pytest_llmperf.judge.stats import Experience, Noise
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.steady_state import find_steady
from pytest_llmperf.support import codec
from tools import tables

RATE = "tokens_per_second_per_gpu"

# Slower than the gate's limit, by all the launches that there are, and too few of them for an alarm.
UNCONFIRMED = "unconfirmed"
POLICY = Policy.for_gpu()


@dataclass(frozen=True)
class Record:
    """What the judge asks of a launch about its speed."""

    site: str
    session: str
    step_seconds: tuple[float, ...]
    warmup_steps: int = 4
    host: str = ""
    canary: Mapping[str, float] = field(default_factory=dict)
    is_uneven: bool = False

    @cached_property
    def median_error(self) -> float:
        """As ``Launch.median_error``; a simulated launch's deviation has it in it."""
        return find_steady(self.step_seconds, self.warmup_steps).error if len(self.step_seconds) > 1 else 0.0

    @cached_property
    def start(self) -> int:
        """Index of the first steady step; a simulated launch has no others."""
        return find_steady(self.step_seconds, self.warmup_steps).start if len(self.step_seconds) > 1 else 0

    @cached_property
    def median_step_seconds(self) -> float:
        if len(self.step_seconds) == 1:  # a simulated launch is its median
            return self.step_seconds[0]
        return median(self.step_seconds[find_steady(self.step_seconds, self.warmup_steps).start :])


#: The first launch of a case as it ends against this baseline, with this noise and tolerance.
Ends = Callable[[Record, Sequence[Record], Noise, float], Record]


def as_it_is(record: Record, _baseline: Sequence[Record], _noise: Noise, _tolerance: float) -> Record:
    """A launch that has ended already."""
    return record


def verdict_of(
    candidates: Iterator[Record], baseline: Sequence[Record], noise: Noise, rule: Rule, ends: Ends = as_it_is
) -> tuple[str, list[Record]]:
    """The verdict on launches as they come, and which it took; as ``run/baseline_comparison.py`` does."""
    known = {record.site for record in baseline}
    launches: list[Record] = []
    verdict = "inconclusive"
    for candidate in candidates:
        tolerance = (POLICY.tolerances if candidate.site in known else POLICY.elsewhere)[RATE]
        launches.append(candidate if launches else ends(candidate, baseline, noise, tolerance))
        # Duck-typed: the statistics ask for no more than a Record has.
        now, then = cast("list[Launch]", launches), cast("Sequence[Launch]", baseline)
        difference = stats.difference(now, then, noise)
        decision = decide(difference, tolerance, rule)
        if decision.verdict is not None:
            return decision.verdict, launches
        verdict = UNCONFIRMED if difference.log > decision.alarm_log else "inconclusive"
    return verdict, launches


def paired_verdict(pairs: Iterator[tuple[Record, Record]], noise: Noise, rule: Rule) -> tuple[str, int]:
    """The same for launches that take turns."""
    seen: list[tuple[Record, Record]] = []
    verdict = "inconclusive"
    for pair in pairs:
        seen.append(pair)
        difference = stats.paired_difference(cast("list[tuple[Launch, Launch]]", seen), noise)
        decision = decide(difference, POLICY.paired[RATE], rule)
        if decision.verdict is not None:
            return decision.verdict, len(seen)
        verdict = UNCONFIRMED if difference.log > decision.alarm_log else "inconclusive"
    return verdict, len(seen)


# ---- simulation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class World:
    """How virtual launches scatter; standard deviations of the logarithm."""

    name: str
    launch: float
    session: float = 0.0
    site: float = 0.0
    tail: str = "normal"
    """``t3``: Student's t with 3 degrees of freedom, scaled to the same standard deviation."""
    correlation: float = 0.0
    """Of one launch's deviation with the next one's."""
    prior: float | None = None
    """What the judge believes of ``launch`` before it saw any; ``None``: the default."""
    sessions: int = 3
    """Of the baseline, two launches each; all on one site."""
    elsewhere: bool = False
    """Whether the candidate runs on hardware that the baseline has not seen."""
    learns: bool = True
    """Whether nineteen other cases have taught the judge their noise."""
    host: float = 0.0
    sites: int = 1
    """Of the baseline, in one host, its sessions in turn."""
    of_its_own: Mapping[str, Any] = field(default_factory=dict)
    """Standard deviations of the judged case where they are not those of the cases that taught the judge."""
    odd: float = 0.0
    """Share of launches that went wrong and are 15 % slower."""
    spoilt: bool = False
    """Whether one launch of one of the cases that teach the judge was 30 % slow when it was recorded."""


# Worlds that differ in little: each has a name of its own among the others.
_OWN_DAYS = World(name="", launch=0.003, session=0.003)
_ANOTHER_HOST = World(name="", launch=0.003, session=0.003, site=0.006, sites=3, elsewhere=True)

WORLDS = (
    World(name="one quiet host, launch sd 0.3 %", launch=0.003),
    World(name="launch sd 0.5 %", launch=0.005),
    World(name="launch sd 1 %", launch=0.01),
    World(name="launch sd 2 %", launch=0.02),
    World(name="launch 0.3 %, day sd 0.3 %", launch=0.003, session=0.003),
    World(name="launch 0.3 %, day sd 1 %", launch=0.003, session=0.01),
    World(name="launch 0.3 %, day sd 2 %", launch=0.003, session=0.02),
    World(name="another site, site sd 1 %", launch=0.003, session=0.003, site=0.01, elsewhere=True),
    World(name="another site, site sd 2 %", launch=0.003, session=0.003, site=0.02, elsewhere=True),
    World(name="heavy tails, launch sd 0.5 %", launch=0.005, tail="t3"),
    World(name="AR(1) 0.5 between launches, 0.5 %", launch=0.005, correlation=0.5),
    replace(_OWN_DAYS, name="this case's days differ by 1 %, others' by 0.3 %", of_its_own={"session": 0.01}),
    World(name="this case's launches by 1.5 %, others' by 0.3 %", launch=0.003, of_its_own={"launch": 0.015}),
    World(name="one launch in 50 goes wrong (+15 %), 0.3 %", launch=0.003, odd=0.02),
    World(name="one bad launch stored in another case, 0.3 %", launch=0.003, spoilt=True),
    replace(_ANOTHER_HOST, name="baseline of 3 GPUs of one host, tonight another host", host=0.01),
    replace(_ANOTHER_HOST, name="baseline of 3 GPUs of one host, hosts sd 2 %", host=0.02),
    World(name="one session only, nothing learnt, days 1 %", launch=0.003, session=0.01, sessions=1, learns=False),
    replace(_OWN_DAYS, name="this case's days differ by 2 %, others' by 0.3 %", of_its_own={"session": 0.02}),
    World(name="one session only, nothing learnt, 0.3 %", launch=0.003, sessions=1, learns=False),
    World(name="prior half the truth, 0.8 %, nothing learnt", launch=0.008, sessions=1, learns=False),
    World(name="prior twice the truth, 0.2 %, nothing learnt", launch=0.002, sessions=1, learns=False),
)


def simulate(gates: int, seed: int) -> Iterator[tuple[str, ...]]:
    """A row for each world: false alarms, what is seen, what it costs."""
    yield (
        "world",
        "alarms in 1,000",
        "inconclusive",
        "launches (median, mean)",
        "2 % found",
        "3 % found",
        "5 % found",
    )
    for world in WORLDS:
        source = random.Random(f"{seed} {world.name}")  # noqa: S311 - nobody attacks a simulation
        nothing = Counter[str]()
        spent: list[int] = []
        for verdict, launches in simulate_world(world, gates, 0.0, source):
            nothing[verdict] += 1
            spent.append(launches)
        found = []
        for slower in (0.02, 0.03, 0.05):
            verdicts = Counter(verdict for verdict, _ in simulate_world(world, gates // 4, slower, source))
            found.append(f"{100 * verdicts['regressed'] / verdicts.total():.0f} %")
        yield (
            world.name,
            f"{1000 * nothing['regressed'] / gates:.1f}",
            f"{100 * nothing['inconclusive'] / gates:.1f} %",
            f"{median(spent):.0f}, {sum(spent) / len(spent):.2f}",
            *found,
        )


def simulate_world(world: World, number: int, slower: float, source: random.Random) -> Iterator[tuple[str, int]]:
    """Verdict and launches of each of ``number`` gates in which the code got ``slower`` by this logarithm."""
    machine: Noise | None = None
    judged = replace(world, **world.of_its_own)
    for gate in range(number):
        if machine is None or gate % 50 == 0:  # a machine's cases are learnt together; now and then a new machine
            machine = learnt(world, source)
        baseline, candidates = case(judged, slower, source)
        verdict, launches = verdict_of(candidates, baseline, machine, Rule())
        yield verdict, len(launches)


def learnt(world: World, source: random.Random) -> Noise:
    """What the judge has learnt of its machine's noise."""
    if not world.learns:
        return POLICY.noise
    cases = [case(world, 0.0, source)[0] for _ in range(19)]
    if world.spoilt:
        first = cases[0][0]
        cases[0][0] = replace(first, step_seconds=(1.3 * first.median_step_seconds,))
    return Experience.of(cast("list[list[Launch]]", cases), POLICY.noise).noise


def case(world: World, slower: float, source: random.Random) -> tuple[list[Record], Iterator[Record]]:
    """A baseline, and the launches of a night, one after the other."""
    host = source.gauss(0, world.host)
    sites = [host + source.gauss(0, world.site) for _ in range(world.sites)]
    baseline: list[Record] = []
    for day in range(world.sessions):
        logs = _session(world, sites[day % world.sites], source)
        baseline += [_record(next(logs), "here", f"here {day % world.sites}", f"day {day}") for _ in range(2)]
    if world.elsewhere:
        there = source.gauss(0, world.host) + source.gauss(0, world.site)
        logs, place = _session(world, there, source), ("there", "there 0")
    else:
        logs, place = _session(world, sites[0], source), ("here", "here 0")
    return baseline, (_record(log + slower, *place, "tonight") for log in logs)


def _session(world: World, site: float, source: random.Random) -> Iterator[float]:
    day, deviation = source.gauss(0, world.session), 0.0
    fresh = (1 - world.correlation**2) ** 0.5
    for number in itertools.count():
        new = _deviation(world, source)
        deviation = new if number == 0 else world.correlation * deviation + fresh * new
        odd = 0.14 if source.random() < world.odd else 0.0
        yield site + day + deviation + odd


def _deviation(world: World, source: random.Random) -> float:
    if world.tail == "normal":
        return source.gauss(0, world.launch)
    squares = sum(source.gauss(0, 1) ** 2 for _ in range(3))
    return float(world.launch * source.gauss(0, 1) / squares**0.5)  # t3 has variance 3: √3 / √3


def _record(log: float, host: str, site: str, session: str) -> Record:
    return Record(host=host, site=site, session=f"{site} {session}", step_seconds=(2.718281828459045**log,))


# ---- replay ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One line of a data file."""

    spec: str
    injected: float
    record: Record


def read(paths: Iterable[Path]) -> list[Measured]:
    """The launches in files that ``pack`` wrote."""
    found = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            record = Record(
                host=values["host"],
                site=values["site"],
                session=values["session"],
                step_seconds=tuple(values["step_seconds"]),
                warmup_steps=values["warmup_steps"],
            )
            found.append(Measured(values["spec"], values["injected"], record))
    return found


def pack(paths: Iterable[Path]) -> Iterator[str]:
    """The lines of a data file, from launch records."""
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            values: dict[str, Any] = json.loads(line)
            launch = codec.read(Launch, values["launch"])
            yield json.dumps(
                {
                    "spec": launch.spec_id,
                    "host": launch.host,
                    "site": launch.site,
                    "session": launch.session,
                    "injected": values["injected"],
                    "warmup_steps": launch.warmup_steps,
                    "step_seconds": [float(f"{second:.6g}") for second in launch.step_seconds],
                }
            )


_IN_BASELINE = 3


@dataclass
class Tally:
    """Verdicts, and the launches that they rest on."""

    verdicts: Counter[str] = field(default_factory=Counter)
    records: set[int] = field(default_factory=set)
    steps: int = 0

    def note(self, verdict: str, candidates: Iterable[Record], taken: Iterable[Record] = ()) -> None:
        self.verdicts[verdict] += 1
        self.records |= {id(record) for record in candidates}
        self.steps += sum(len(record.step_seconds) for record in taken)


@dataclass(frozen=True)
class Replays:
    """Verdicts by what was injected."""

    same_site: defaultdict[float, Tally]
    elsewhere: defaultdict[float, Tally]
    paired: defaultdict[float, Tally]
    launches: list[int]
    """That an unchanged case on known hardware took."""


def replay(measured: Sequence[Measured], ends: Ends = as_it_is) -> Replays:
    """Every verdict that these launches allow: baselines of three clean launches, candidates as they were measured.

    The noise is what the clean launches of all cases show, as in a run.
    """
    cases: dict[tuple[str, str], list[Measured]] = {}
    for one in measured:
        cases.setdefault((one.spec, one.record.site), []).append(one)
    clean = {key: [one.record for one in ones if not one.injected] for key, ones in cases.items()}
    noise = Experience.of(cast("list[list[Launch]]", list(clean.values())), POLICY.noise).noise
    result = Replays(defaultdict(Tally), defaultdict(Tally), defaultdict(Tally), [])
    for (spec, site), ones in cases.items():
        shares = sorted({one.injected for one in ones})
        here, there = clean[spec, site], [clean[key] for key in clean if key[0] == spec and key[1] != site]
        for share in shares:
            slowed = [one.record for one in ones if one.injected == share]
            for candidates, baseline in _splits(here, slowed, share):
                verdict, taken = verdict_of(iter(candidates), baseline, noise, Rule(), ends)
                result.same_site[share].note(verdict, candidates, taken)
                result.launches.extend([len(taken)] if not share else [])
            for others in there:
                for baseline in itertools.combinations(others, _IN_BASELINE):
                    verdict, taken = verdict_of(iter(slowed), baseline, noise, Rule(), ends)
                    result.elsewhere[share].note(verdict, slowed, taken)
            for pairs in _pairs(ones, share):
                verdict, _ = paired_verdict(iter(pairs), noise, Rule())
                result.paired[share].note(verdict, (after for _, after in pairs))
    return result


def _splits(
    clean: Sequence[Record], slowed: Sequence[Record], share: float
) -> Iterator[tuple[list[Record], Sequence[Record]]]:
    for baseline in itertools.combinations(clean, _IN_BASELINE):
        if share:
            for first in range(len(slowed)):
                yield [*slowed[first:], *slowed[:first]], baseline
        else:
            rest = [record for record in clean if record not in baseline]
            for first in range(len(rest)):
                yield [*rest[first:], *rest[:first]], baseline


def _pairs(ones: Sequence[Measured], share: float) -> Iterator[list[tuple[Record, Record]]]:
    """Each launch of ``share`` beside the clean one that was measured nearest to it; no launch is in two pairs."""
    free = [index for index, one in enumerate(ones) if not one.injected]
    pairs = []
    for index, one in enumerate(ones):
        if one.injected != share or (not share and index not in free):
            continue
        beside = [other for other in free if other != index]
        if beside:
            nearest = min(beside, key=lambda other: abs(other - index))
            free = [other for other in free if other not in (nearest, index)]
            pairs.append((ones[nearest].record, one.record))
    for first in range(len(pairs)):
        yield [*pairs[first:], *pairs[:first]]


def replay_rows(result: Replays) -> Iterator[tuple[str, ...]]:
    """The table of a replay."""
    yield ("held against", "injected", "launches", "verdicts", *ORDER)
    kinds = {
        "baseline, same GPU": result.same_site,
        "baseline, another GPU": result.elsewhere,
        "in turns": result.paired,
    }
    for kind, by_share in kinds.items():
        for share, tally in sorted(by_share.items()):
            total = tally.verdicts.total()
            shown = [f"{100 * tally.verdicts[name] / total:.1f} %" for name in ORDER]
            yield (kind, f"{share * 100:g} %" if share else "nothing", str(len(tally.records)), str(total), *shown)


#: Of the columns of a replay.
ORDER = ("regressed", UNCONFIRMED, "pass", "inconclusive", "improved")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    simulating = commands.add_parser("simulate")
    simulating.add_argument("--gates", type=int, default=2000)
    simulating.add_argument("--seed", type=int, default=1)
    for name in ("replay", "pack"):
        commands.add_parser(name).add_argument("files", nargs="+", type=Path)
    for command in commands.choices.values():
        tables.add_option(command)
    options = parser.parse_args()
    if options.command == "pack":
        print(*pack(options.files), sep="\n")
        return
    if options.command == "simulate":
        tables.table(simulate(options.gates, options.seed), "simulated-cases" * options.write)
        return
    result = replay(read(options.files))
    name = "-".join(["replay", *(path.stem for path in options.files)])
    tables.table(replay_rows(result), name * options.write)
    if not result.launches:
        return
    print(
        f"\nunchanged, same GPU: decided in {median(result.launches):.0f} launch (median), "
        f"{sum(result.launches) / len(result.launches):.2f} (mean)"
    )


if __name__ == "__main__":
    main()
