"""The tables of docs/explanation/history.md: false and missed change points, beside Apache Otava's.

    python -m tools.history_replay simulate baselines/nvidia-h200-140gib --histories 50   # several minutes
    python -m tools.history_replay replay baselines/nvidia-h200-140gib                    # one minute
    python -m tools.history_replay example baselines/nvidia-h200-140gib --store FILE      # what the how-to page shows

Simulated nights have the GPUs, loadings and scatter that the stored launches show; replayed ones are the stored
launches, host by host as they came. Otava is asked by its own function, as its command asks it (``pip install --no-deps
apache-otava``; without it its rows are left out). Ours is what ``llmperf history`` calls.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from importlib.util import find_spec
from pathlib import Path

from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.judge.case_histories import CaseHistory, Scattering, histories
from pytest_llmperf.judge.gpu_knowledge import Knowledge
from pytest_llmperf.judge.gpu_panel import FACTORS, Model
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import PastLaunch, PastResult
from pytest_llmperf.run.history import scattering
from pytest_llmperf.run.history_store import HistoryStore
from tools import tables

#: Fractions by which a case is slower from some night on.
ADDED = (0.01, 0.02, 0.03, 0.05)

#: A change point so many runs from the change is that change.
NEAR = 2

_MACHINE = "replayed"
_NIGHTS, _CASES = 60, 20
# Of a stored case that is replayed: half of them before a change, half after it.
_LEAST_NIGHTS = 8
# Of an H200, at the power limit and not.
_LIMITED_MHZ, _HIGHEST_MHZ = 1700.0, 1980.0

_FORTNIGHT = "another host every 14 nights"
_BAD = "every 14 nights, one of them 5 % slow"

#: On which hosts a night runs: a new one each night, one for two weeks, always the same.
HOSTS: Mapping[str, Callable[[int], int]] = {
    "another host each night": lambda night: night,
    _FORTNIGHT: lambda night: night // 14,
    _BAD: lambda night: night // 14,
    "always the same host": lambda _: 0,
}
_BAD_HOST, _BAD_BY = 2, 0.05

# Of the example.
_SHOWN_NIGHTS, _SHOWN_CASES, _UPGRADE = 40, 5, 22

#: By digest, where a case changes: the number of the result among its own from which on it is on another level.
Changes = Mapping[str, Sequence[int]]


# ---- rules -----------------------------------------------------------------------------------------------------------


def compared(results: Sequence[PastResult], known: Scattering) -> Iterator[tuple[str, Changes]]:
    """Each rule by its name, with the changes that it finds."""
    told = {_MACHINE: known}
    together = histories(results, told)
    yield "llmperf history", _levels(together)
    yield "each case alone", _levels(one for own in by_case(results).values() for one in histories(own, told))
    yield "told with another host", {one.latest.digest: _host_steps(one) for one in together}
    if find_spec("otava") is not None:
        yield "Otava", _otava(results)
        yield "Otava, 2 % and more", _otava(results, least=0.02)


def _levels(found: Iterable[CaseHistory]) -> Changes:
    return {one.latest.digest: [one.results.index(segment.results[0]) for segment in one.segments[1:]] for one in found}


def _host_steps(history: CaseHistory) -> list[int]:
    """What is no change point of ours, and is told as a step that came with another host."""
    began = {step.began for step in history.steps}
    return [number for number, each in enumerate(history.results) if each.began in began]


def _otava(results: Sequence[PastResult], least: float = 0.0) -> Changes:
    from otava.analysis import compute_change_points  # noqa: PLC0415

    series = {digest: [one.step_seconds for one in own] for digest, own in by_case(results).items()}
    found = {digest: compute_change_points(own, min_magnitude=least)[0] for digest, own in series.items()}
    return {digest: [change.index for change in changes] for digest, changes in found.items()}


def by_case(results: Sequence[PastResult]) -> dict[str, list[PastResult]]:
    found: dict[str, list[PastResult]] = {}
    for each in results:
        found.setdefault(each.digest, []).append(each)
    return found


# ---- what they find --------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Of one rule."""

    unchanged: int = 0
    """Histories of cases that did not change."""
    false: int = 0
    """Change points in these, and those of changed ones that are not near the change."""
    spoilt: int = 0
    """Unchanged cases that show one."""
    changed: int = 0
    found: int = 0

    def note(self, changes: Sequence[int], at: int | None) -> None:
        """The change points of one case, which changed at ``at``, or did not."""
        if at is None:
            self.unchanged += 1
            self.false += len(changes)
            self.spoilt += bool(changes)
            return
        near = [change for change in changes if abs(change - at) <= NEAR]
        self.changed += 1
        self.found += bool(near)
        self.false += max(0, len(changes) - 1) if near else len(changes)

    @property
    def row(self) -> tuple[str, ...]:
        histories_of = self.unchanged + self.changed
        share = f"{100 * self.found / self.changed:.0f} %" if self.changed else ""
        spoilt = f"{100 * self.spoilt / self.unchanged:.1f} %" if self.unchanged else ""
        return share, f"{100 * self.false / max(1, histories_of):.1f}", spoilt


@dataclass
class Tallies:
    """By rule."""

    known: Scattering
    of: dict[str, Tally] = field(default_factory=dict)

    def note(self, results: Sequence[PastResult], at: Mapping[str, int]) -> None:
        """What each rule makes of a history; ``at``: of those that changed, the number of the first result after it."""
        digests = by_case(results)
        for name, found in compared(results, self.known):
            for digest in digests:
                self.of.setdefault(name, Tally()).note(found.get(digest, ()), at.get(digest))


_HEADINGS = ("rule", "found", "false in 100 histories", "unchanged cases with one")


# ---- simulated -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Nights of cases on GPUs as the baselines show them."""

    model: Model
    hosts: str
    source: random.Random

    def history(self) -> list[PastResult]:
        """Of cases that never change."""
        loadings = self._loadings()
        # What a case is on one unit by itself: half of it is the launch's, half the unit's.
        own = self.model.usual.sd / math.sqrt(2)
        hosts: dict[int, Sequence[float]] = {}
        found = []
        for night in range(_NIGHTS):
            host = HOSTS[self.hosts](night)
            place = hosts.setdefault(host, self._drawn("host", "device"))
            bad = math.log1p(_BAD_BY) if self.hosts == _BAD and host == _BAD_HOST else 0.0
            effects = [a + b for a, b in zip(place, self._drawn("day"), strict=True)]
            for case, (loading, is_limited) in enumerate(loadings):
                moved = sum(load * effect for load, effect in zip(loading, effects, strict=True))
                log = math.log(0.1) + moved + bad + self.source.gauss(0, own) + self.source.gauss(0, own)
                found.append(_result(night, host, case, log, is_limited=is_limited))
        return found

    def _loadings(self) -> list[tuple[Sequence[float], bool]]:
        """Of stored cases, chosen anew."""
        stored = sorted(self.model.loadings.items())
        stored = [(name, one) for name, one in stored if not name.startswith("calibration")]
        chosen = self.source.choices(stored, k=_CASES)
        return [([float(each) for each in one.mean], float(one.expected[1]) > 0) for _, one in chosen]

    def _drawn(self, *components: str) -> list[float]:
        return [
            sum(self.source.gauss(0, self.model.effects[factor][component]) for component in components)
            for factor in FACTORS
        ]


def _result(night: int, host: int, case: int, log: float, *, is_limited: bool) -> PastResult:
    day = (date(2026, 1, 1) + timedelta(night)).isoformat()
    uuid = f"NVIDIA H200 GPU-{host:08x}-0000-0000-0000-000000000000"
    clock = _LIMITED_MHZ if is_limited else _HIGHEST_MHZ
    launch = PastLaunch(f"{day}T03:{case:02d}:00Z", math.exp(log), 0.001, clock, (Place(f"host {host}", uuid),))
    return PastResult(
        run=str(night),
        machine=_MACHINE,
        id=f"case{case}",
        digest=f"{case:016x}",
        nodeid="",
        verdict="pass",
        launches=(launch,),
        tokens_per_step=1024,
        ranks=1,
    )


def slower(results: Sequence[PastResult], at: Mapping[str, int], times: float) -> list[PastResult]:
    """The same where steps of these cases take so many ``times`` as long, each from its result with this number on."""
    late = {(digest, one.run) for digest, own in by_case(results).items() for one in own[at.get(digest, len(own)) :]}
    return [_times(one, times) if (one.digest, one.run) in late else one for one in results]


def _times(one: PastResult, times: float) -> PastResult:
    launches = tuple(replace(each, step_seconds=each.step_seconds * times) for each in one.launches)
    return replace(one, launches=launches)


def simulated(model: Model, known: Scattering, num: int, seed: int) -> Iterator[tuple[str, ...]]:
    """Rows: nothing changes, one case does, all do; somewhere, and five nights before the end."""
    yield ("hosts", "what changes", *_HEADINGS)
    for hosts in HOSTS:
        plan = [("nothing", 0.0, False, 0), *((f"one case, {x:.0%}", x, False, 0) for x in ADDED)]
        plan += [(f"one case, {x:.0%}, 5 nights ago", x, False, 5) for x in (0.02, 0.03)]
        plan += [(f"all cases, {x:.0%}", x, True, 0) for x in (0.02, 0.03)]
        plan += [("all cases, 5%, with another host", 0.05, True, _NIGHTS - 28)] * (hosts == _FORTNIGHT)
        for what, added, is_all, ago in plan:
            source, tallies = random.Random(f"{seed} {hosts} {what}"), Tallies(known)  # noqa: S311 - nobody attacks
            for _ in range(num):
                results = World(model, hosts, source).history()
                at = _NIGHTS - ago if ago else source.randrange(5, _NIGHTS - 5)
                digests = sorted({result.digest for result in results})
                changed = digests if is_all else [source.choice(digests)] if added else []
                where = dict.fromkeys(changed, at)
                tallies.note(slower(results, where, 1 + added), where)
            for name, tally in tallies.of.items():
                yield (hosts, what, name, *tally.row)


# ---- an example ------------------------------------------------------------------------------------------------------


def example(model: Model, machine: str, seed: int) -> list[PastResult]:
    """Nights of some cases on another host each, of which the last one is slower since an upgrade and a commit."""
    results = World(model, next(iter(HOSTS)), random.Random(seed)).history()  # noqa: S311 - nobody attacks
    shown = [one for one in results if int(one.run) < _SHOWN_NIGHTS and int(one.digest, 16) < _SHOWN_CASES]
    last = f"{_SHOWN_CASES - 1:016x}"
    return [
        replace(one, machine=machine, versions={"torch": torch}, revision=revision)
        for one in slower(shown, {last: _UPGRADE}, 1.03)
        for torch, revision in [("2.12.0", "b" * 12) if int(one.run) >= _UPGRADE else ("2.11.0", "a" * 12)]
    ]


# ---- replayed --------------------------------------------------------------------------------------------------------


def replayed(cases: Sequence[Sequence[Launch]], known: Scattering, seed: int) -> Iterator[tuple[str, ...]]:
    """Rows: the stored launches, each host's of a day as a night; then with one case slower from some night on."""
    results = nights(cases)
    enough = {digest: own for digest, own in by_case(results).items() if len(own) >= _LEAST_NIGHTS}
    kept = [one for one in results if one.digest in enough]
    yield ("what changes", *_HEADINGS)
    for added in (0.0, *ADDED):
        source, tallies = random.Random(seed), Tallies(known)  # noqa: S311
        if not added:
            tallies.note(kept, {})
        for digest, own in enough.items() if added else ():
            at = {digest: source.randrange(_LEAST_NIGHTS // 2, len(own) - _LEAST_NIGHTS // 2 + 1)}
            tallies.note(slower(kept, at, 1 + added), at)
        for name, tally in tallies.of.items():
            yield ("nothing" if not added else f"one case, {added:.0%}", name, *tally.row)


def nights(cases: Sequence[Sequence[Launch]]) -> list[PastResult]:
    """What each host launched of each case on a day, as a result of a night; in the order of time."""
    groups: dict[tuple[str, str, str], list[Launch]] = {}
    for launch in (launch for launches in cases for launch in launches):
        groups.setdefault((f"{launch.started_at[:10]} {launch.host}", launch.digest, launch.spec_id), []).append(launch)
    found = []
    for (run, digest, spec_id), launches in groups.items():
        own = sorted(launches, key=lambda launch: launch.started_at)
        past = tuple(
            PastLaunch(
                launch.started_at,
                launch.median_step_seconds,
                launch.median_error,
                launch.health.sm_clock_mhz,
                tuple(rank.place for rank in launch.ranks),
            )
            for launch in own
        )
        found.append(
            PastResult(
                run=run,
                machine=_MACHINE,
                id=spec_id,
                digest=digest,
                nodeid="",
                verdict="pass",
                launches=past,
                tokens_per_step=own[0].tokens_per_step,
                ranks=len(own[0].ranks),
            )
        )
    began: dict[str, str] = {}
    for one in found:
        began[one.run] = min(one.began, began.get(one.run, one.began))
    return sorted(found, key=lambda one: (began[one.run], one.began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulate", "replay", "example"))
    parser.add_argument("baselines", type=Path, help="of one machine kind, e.g. baselines/nvidia-h200-140gib")
    parser.add_argument("--histories", type=int, default=50, help="of each kind; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", type=Path, help="of the example: made anew")
    tables.add_option(parser)
    arguments = parser.parse_args()
    folder: Path = arguments.baselines
    cases = [one.launches for one in BaselineStore(folder.parent).baselines(folder.name)]
    known = scattering([folder.name], folder.parent)[folder.name]
    knowledge = Knowledge.of(cases)
    if knowledge is None:
        parser.error(f"{folder}: too little is stored to tell GPUs and cases apart")
    if arguments.what == "example":
        arguments.store.unlink(missing_ok=True)
        HistoryStore(arguments.store).append(example(knowledge.model, folder.name, arguments.seed))
        return
    if arguments.what == "simulate":
        rows = simulated(knowledge.model, known, arguments.histories, arguments.seed)
    else:
        rows = replayed(cases, known, arguments.seed)
    tables.table(rows, f"history-{arguments.what}" * arguments.write)


if __name__ == "__main__":
    main()
