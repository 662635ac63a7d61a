"""The tables of a script's gate in docs/explanation/noise.md: false alarms and what is found, by 30 steps a launch.

    python -m tools.script_power simulate --gates 1000               # virtual nights, some minutes
    python -m tools.script_power replay docs/data/h200-products.jsonl docs/data/h200-waits.jsonl
    python -m tools.script_power losses --gates 2000                 # the band of losses that do not repeat themselves

Each case is by itself: nothing is learnt but from its own baseline, as in a project with one script. Each first
baseline is two launches of one session. Intervals are Wilson's, 95 %.
"""

from __future__ import annotations

import argparse
import math
import random
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path
from statistics import median
from typing import cast

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Rule
from pytest_llmperf.judge.repeats import Repeats
from pytest_llmperf.judge.stats import Experience
from pytest_llmperf.judge.validity import circumstances
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.records.launch import Launch
from tests.gpu_nights import TONIGHT, baseline_of, launch_at, spec_of
from tools import tables
from tools.verdicts import ORDER, POLICY, RATE, Measured, Tally, read
from tools.verdicts import verdict_of as verdict_of_records

STEPS, WARMUP = 30, 4
_SLOWER = (0.0, 0.01, 0.02, 0.03, 0.05)
_SPEC = replace(spec_of(0), steps=STEPS, min_steps=STEPS, warmup_steps=WARMUP)
_GPUS_PER_HOST, _HOSTS = 8, 64


@dataclass(frozen=True, kw_only=True)
class World:
    """How steps, launches, days and GPUs of one script scatter: standard deviations of the logarithm."""

    name: str
    step: float = 0.007
    correlation: float = 0.3
    """Of one step's deviation with the next one's."""
    launch: float = 0.003
    day: float = 0.003
    gpu: float = 0.0
    """Of a GPU, and as much again of its host; each night is on another."""


WORLDS = (
    World(name="one GPU: launches by 0.3 %, days by 0.3 %"),
    # So did 22 launches of six scripts on H100s in nine sessions: 0.52 % about their means (13 degrees of freedom).
    World(name="one GPU: launches by 0.5 %, days by 0.3 %", launch=0.005),
    World(name="each night another GPU, of hosts and GPUs by 0.6 %", gpu=0.006),
    World(name="one GPU: launches by 0.3 %, days by 1 %", day=0.01),
    World(name="one GPU: launches by 1 %", launch=0.01),
    World(name="one GPU, a slow host: launches by 3 %, steps by 2 %", launch=0.03, step=0.02),
)
#: Nights of which a baseline has two launches each.
RECORDED = (1, 2, 3)


class Script:
    """One virtual script: its launches of any night, all ``slower`` by this logarithm from tonight on."""

    def __init__(self, world: World, seed: str) -> None:
        self._world, self._seed, self._source = world, seed, random.Random(seed)  # noqa: S311 - nobody attacks a simulation

    def night(self, day: str, slower: float = 0.0) -> Iterator[Launch]:
        """As many as are asked for."""
        world, gauss = self._world, self._source.gauss
        gpu = self._source.randrange(_HOSTS * _GPUS_PER_HOST) if world.gpu else 0
        level = math.log(0.3) + gauss(0, world.day) + slower
        for name in (f"GPU {gpu}", f"host {gpu // _GPUS_PER_HOST}"):
            level += random.Random(f"{self._seed} {name}").gauss(0, world.gpu)  # noqa: S311 - the same each time
        while True:
            launch = launch_at(_SPEC, [gpu], f"{day}T00:00:00Z", level)
            (rank,) = launch.ranks
            yield replace(launch, ranks=(replace(rank, step_seconds=self._steps(level + gauss(0, world.launch))),))

    def _steps(self, level: float) -> tuple[float, ...]:
        world, gauss, found = self._world, self._source.gauss, list[float]()
        deviation, fresh = gauss(0, world.step), math.sqrt(1 - world.correlation**2)
        for _ in range(STEPS):
            deviation = world.correlation * deviation + fresh * gauss(0, world.step)
            found.append(math.exp(level + deviation))
        return (5 * found[0], *found[1:])


def verdict_of(held: Baseline, coming: Iterator[Launch]) -> tuple[str, int]:
    """The verdict of a night as a run has it, and how many launches it took; one that drifts is made once more."""
    policy = replace(POLICY, noise=Experience.of([held.launches], POLICY.noise).noise)
    launches: list[Launch] = []
    judgement, taken, retried = None, 0, False
    while judgement is None or (judgement.undecided and len(launches) < Rule().budget):
        launch = next(coming, None)
        if launch is not None and not retried:  # once a case; what drifts again counts
            drift = 2 * max(abs(each.steady.drift) for each in held.launches)
            tolerance = max(drift, policy.at([launch], held).tolerances[RATE])
            if circumstances(launch, tolerance).drift:
                launch, retried, taken = next(coming, None), True, taken + 1
        if launch is None:  # no more of it was measured
            return "inconclusive", taken
        taken += 1
        launches.append(launch)
        judgement = judge(launches, held, policy)
    return judgement.verdict, taken


def share(count: int, of: int) -> str:
    """``12 % (9 to 15)``: with Wilson's interval."""
    z, p = 1.96, count / of
    centre, half = p + z**2 / (2 * of), z * math.sqrt(p * (1 - p) / of + z**2 / (4 * of**2))
    low, high = ((centre + sign * half) / (1 + z**2 / of) for sign in (-1, 1))
    return f"{_percent(p)} % ({_percent(max(0.0, low))} to {_percent(high)})"


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share > _ROUND else 1}f}"


_ROUND = 0.1
_FOUND = tuple(f"{100 * each:g} % found" for each in _SLOWER[1:])
_HEADER = ("gates", "alarms", "inconclusive", "launches", *_FOUND)


def _cells(found: Sequence[Counter[str]], launches: float) -> tuple[str, ...]:
    nothing, *slowed = found
    gates = nothing.total()
    return (
        *(str(gates), share(nothing["regressed"], gates), f"{100 * nothing['inconclusive'] / gates:.1f} %"),
        f"{launches:.2f}",
        *(share(each["regressed"], each.total()) for each in slowed),
    )


def simulated(gates: int, seed: int) -> Iterator[tuple[str, ...]]:
    """A row for each world and number of recorded nights."""
    yield ("world", "recorded", *_HEADER)
    for world in WORLDS:
        for nights in RECORDED:
            found, launches = [], 0.0
            for slower in _SLOWER:
                number, verdicts, spent = gates // (3 if slower else 1), Counter[str](), 0
                for gate in range(number):
                    script = Script(world, f"{seed} {world.name} {nights} {slower} {gate}")
                    days = (script.night(f"2026-01-{5 + 7 * night:02d}") for night in range(nights))
                    held = baseline_of([launch for day in days for launch in islice(day, 2)])
                    verdict, taken = verdict_of(held, script.night(TONIGHT, math.log1p(slower)))
                    verdicts[verdict] += 1
                    spent += taken
                launches = launches or spent / number
                found.append(verdicts)
            yield (world.name, f"{nights} night{'s' * (nights > 1)}", *_cells(found, launches))


# ---- replay of stored launches ---------------------------------------------------------------------------------------


def replayed(paths: Sequence[Path]) -> Iterator[tuple[str, ...]]:
    """Verdicts on launches that were really slowed: each two clean launches of a session are a baseline."""
    yield ("held against", "injected", "launches", "verdicts", *ORDER)
    cases: dict[tuple[str, str], list[Measured]] = {}
    for one in read(paths):
        record = replace(one.record, step_seconds=one.record.step_seconds[:STEPS])
        cases.setdefault((one.spec, record.site), []).append(replace(one, record=record))
    tallies: dict[tuple[str, float], Tally] = {}
    for (spec, site), ones in cases.items():
        for (other, where), theirs in cases.items():
            if other != spec:
                continue
            kind = "its own GPU" if where == site else "another GPU"
            for held in combinations([one.record for one in theirs if not one.injected], 2):
                noise = Experience.of([cast("Sequence[Launch]", held)], POLICY.noise).noise
                for share in sorted({one.injected for one in ones}):
                    coming = [one.record for one in ones if one.injected == share and one.record not in held]
                    for first in range(len(coming)):
                        turned = [*coming[first:], *coming[:first]]
                        verdict, _ = verdict_of_records(iter(turned), held, noise, Rule())
                        tallies.setdefault((kind, share), Tally()).note(verdict, coming)
    for (kind, share), tally in sorted(tallies.items(), reverse=False):
        total = tally.verdicts.total()
        shown = (f"{100 * tally.verdicts[name] / total:.1f} %" for name in ORDER)
        yield (kind, f"{100 * share:g} %" if share else "nothing", str(len(tally.records)), str(total), *shown)


# ---- losses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Losses:
    """How the losses of two launches differ that train the same."""

    name: str
    walk: float = 0.0
    """What one step adds, by chance, to how far a launch's loss is off: atomics add in another order."""
    step: float = 0.0
    """By how much each step's loss scatters by itself, in nat: other rows, other dropout."""
    start: float = 0.0
    """By how much a launch is off from its first step on: other weights."""

    def of(self, source: random.Random, shift: float = 0.0) -> tuple[float, ...]:
        """Of one launch: from 12.19 down, as in a pretraining that begins; ``shift``: a share of all but the first."""
        off, found = source.gauss(0, self.start), list[float]()
        for step in range(STEPS):
            off += source.gauss(0, self.walk) if step else 0.0
            loss = 12.19 - 0.0006 * step + off + source.gauss(0, self.step)
            found.append(_float32(loss * (1 + shift) if step else loss))
        return tuple(found)


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


LOSSES = (
    Losses(name="atomics: apart by 2e-5 after 24 steps", walk=4e-6),
    Losses(name="ten times as far apart", walk=4e-5),
    Losses(name="unseeded: each step by 0.02 nat, each launch by 0.01", step=0.02, start=0.01),
    Losses(name="unseeded, small batches: by 0.2 nat and 0.02", step=0.2, start=0.02),
)
# How exactly the band's width is sought, and of how many recordings.
_NARROW, _WIDTHS = 1e-4, 100
_SHIFTS = (0.0, 0.0005, 0.002, 0.01, 0.05)


def banded(gates: int, seed: int) -> Iterator[tuple[str, ...]]:
    """A row for each way to scatter, and each number of recordings."""
    shifts = (f"{100 * each:g} % found" for each in _SHIFTS[1:])
    yield ("losses of two launches", "recordings", "gates", "false alarms", "the band: half of it", *shifts)
    for losses in LOSSES:
        for recordings in (2, 6):
            told, widths = [], list[float]()
            for shift in _SHIFTS:
                number, count = gates // (3 if shift else 1), 0
                for gate in range(number):
                    source = random.Random(f"{seed} {losses.name} {recordings} {shift} {gate}")  # noqa: S311
                    plain = next(Script(WORLDS[0], "").night(TONIGHT))
                    known = [replace(plain, losses=losses.of(source)) for _ in range(recordings)]
                    now = replace(plain, losses=losses.of(source, shift))
                    lines = [*Repeats.of(known).changes([now], known)]
                    count += bool(lines)
                    widths += [_half(known)] if not shift and gate < _WIDTHS else []
                told.append(share(count, number))
            nothing, *found = told
            yield (losses.name, str(recordings), str(gates), nothing, f"{median(widths):.2g} nat", *found)


def _half(known: Sequence[Launch]) -> float:
    """Half of the band's width: by how much all losses but the first may be off."""
    repeats, (first, *rest) = Repeats.of(known), known[0].losses
    low, high = 0.0, rest[0]
    while high - low > _NARROW:
        off = (low + high) / 2
        moved = replace(known[0], losses=(first, *(loss + off for loss in rest)))
        low, high = (low, off) if any(repeats.changes([moved], known)) else (off, high)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, gates in (("simulate", 1000), ("losses", 2000)):
        commands.add_parser(name).add_argument("--gates", type=int, default=gates)
        commands.choices[name].add_argument("--seed", type=int, default=1)
    commands.add_parser("replay").add_argument("files", nargs="+", type=Path)
    for command in commands.choices.values():
        tables.add_option(command)
    options = parser.parse_args()
    rows = {
        "simulate": lambda: simulated(options.gates, options.seed),
        "losses": lambda: banded(options.gates, options.seed),
        "replay": lambda: replayed(options.files),
    }[options.command]()
    tables.table(rows, f"scripts-{options.command}" * options.write)


if __name__ == "__main__":
    main()
