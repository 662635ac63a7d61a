"""A soak judged against itself: its first part against the rest. Pure, but for what is read of a folder.

Levels of step time are found between change points; what stalls a step is told by its cause; what only grows is a
leak. Nothing is held that other work on the host may do: a wait for a core is no step's own time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pytest_llmperf.judge.change_points import EFFICIENCY, NORMAL, Covariance, find_changes, levels_between
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.stats import Spread
from pytest_llmperf.records.launch import environment_of
from pytest_llmperf.records.metrics import COUNTED, MEMORY, METRICS, RATE
from pytest_llmperf.records.ranks import Entry, Sensed, diaries, sensed
from pytest_llmperf.records.result import Soak, joined_reasons, left_by_each_step
from pytest_llmperf.settings.data import is_uneven
from pytest_llmperf.settings.spec import ScriptSpec, Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats
from pytest_llmperf.support.interpreter import Array, np

# Left out at the begin: this share of the time, and no more than so many seconds, in which a chip comes to its clocks.
_WARM_UP, _WARM_UP_SECONDS = 0.1, 60.0
# Windows of which levels are found, and steps of each at least; how many windows a chip's or a host's mood lasts.
_MOST_WINDOWS, _LEAST_WINDOWS, _LEAST_STEPS, _LASTING = 60, 12, 8, 8
# The share of a window's steps that are the shortest, and how little windows differ at least.
_LOW, _LEAST_SD = 0.1, 1e-4
# Of its window's median, what a stall is beyond it; its least seconds; of the time, what stalls may cost.
_STALL, _LEAST_STALL_SECONDS, STALL_TOLERANCE = 0.5, 0.005, 0.02
# Of the part of a difference that names its cause; of equal distances that make stalls periodic, and how many.
_MOST_OF_IT, _ALIKE, _LEAST_STALLS = 0.5, 0.7, 4
# Bytes that a checkpoint has at least, and times what is written usually.
_CHECKPOINT_BYTES, _CHECKPOINT_TIMES = 2**20, 4
# What only grows is higher in each part than in the one before, and goes on so: late by so much of what it did early.
_PARTS, _GOES_ON, _LEAST_ENTRIES = 6, 0.5, 24
_POINTS = 120
# A level or a stall is no finding that is longer for want of a core: others have it.
_OTHERS, _A_CORE = ", most of it waiting for a core", "a wait for a core"
# What only happens, a busy host does, but for these.
_OWN = ("garbage collection", "its loader", "a checkpoint")
# What is none of these: the thread that trains was asleep, or it computed. While it waits for its GPU it does either.
_A_WAIT, _WORK, _EITHER = "a wait (a file, a lock, a peer)", "more work", "more work of its host or GPU"
_OF_A_GPU = "a wait (its GPU, a file, a lock, a peer)"
_CPU_TOLERANCE = 0.5


@dataclass(frozen=True)
class SoakRule:
    tolerance: float
    """By which steps may become longer, a fraction."""
    noise: Spread
    """How much a level moves by itself."""
    on_cpu: bool

    @classmethod
    def of(cls, policy: Policy, *, on_cpu: bool) -> SoakRule:
        """By the tolerance of a rate; a CPU's is one against hanging, where nobody says otherwise."""
        tolerance = policy.tolerances[RATE]
        return cls(min(tolerance, _CPU_TOLERANCE) if on_cpu else tolerance, policy.noise.launch, on_cpu)


@dataclass(frozen=True)
class Diary:
    entries: Sequence[Entry]

    @cached_property
    def steps(self) -> Array:
        """A row for each: seconds, of a loader, of garbage collection; its wait for a core; its end; its entry; of
        computing, NaN where nobody knows."""
        rows = list[tuple[float, ...]]()
        for number, entry in enumerate(self.entries):
            whole, end = sum(step[0] for step in entry.steps) or 1.0, entry.time
            found, computed = list[tuple[float, ...]](), entry.computed
            for step in reversed(entry.steps):
                share = step[0] / whole
                found.append((*step, entry.waited_seconds * share, end, number, computed * share))
                end -= step[0]
            rows += reversed(found)
        return np.array(rows, dtype=float).reshape(-1, 7)

    @property
    def began(self) -> float:
        return float(self.steps[0, 4] - self.steps[0, 0])

    @property
    def seconds(self) -> float:
        return float(self.entries[-1].time - self.began) if len(self.steps) else 0.0

    @property
    def steady_from(self) -> float:
        return self.began + min(_WARM_UP * self.seconds, _WARM_UP_SECONDS)

    @cached_property
    def kept(self) -> Array:
        """The steps after its warm-up."""
        return self.steps[self.steps[:, 4] > self.steady_from]

    @cached_property
    def windows(self) -> list[Array]:
        """Numbers of these, in equal parts; none of too few."""
        number = min(_MOST_WINDOWS, len(self.kept) // _LEAST_STEPS)
        return np.array_split(np.arange(len(self.kept)), number) if number >= _LEAST_WINDOWS else []

    def lows(self, name: str) -> list[float]:
        """The least of what entries from then on have by this name, in parts of as many steps; none of too few."""
        both = zip(np.cumsum([len(entry.steps) for entry in self.entries]), self.entries, strict=True)
        kept = ((number, entry) for number, entry in both if entry.time > self.steady_from)
        found = [(number, value) for number, entry in kept if (value := getattr(entry, name)) is not None]
        if len(found) < _LEAST_ENTRIES:
            return []
        numbers, values = np.array(found, dtype=float).T
        parts = np.split(values, np.searchsorted(numbers, np.linspace(numbers[0], numbers[-1], _PARTS + 1)[1:-1]))
        return [float(part.min()) for part in parts] if all(map(len, parts)) else []


#: What has ended one that nobody wanted to see to its end.
INTERRUPTED = "interrupted"


def judge_folder(
    folder: Path, asked_seconds: float, spec: Spec, rule: SoakRule, why_ended: str = ""
) -> Mapping[str, Any]:
    """The fields of a result, of what a launch of ``spec`` left in ``folder``; ``why_ended``: before its time."""
    if not (ranks := [Diary(entries) for entries in diaries(folder)]):
        return {"verdict": "invalid", "reason": why_ended or "no step was written down"}
    soak = judge_soak(asked_seconds, ranks, [*sensed(folder)], rule)
    at = f"{formats.elapsed(soak.seconds)} of {formats.elapsed(asked_seconds)}"
    cut = [f"ended after {at}: {why_ended}"] if why_ended else []
    wanted, kept = _LEAST_WINDOWS * _LEAST_STEPS, len(ranks[0].kept)
    few = [f"only {kept} steps after the warm-up, too few to judge their speed: {wanted} are wanted, in more minutes"]
    few *= kept < wanted
    clean = f"{soak.steps:,} steps in {formats.elapsed(soak.seconds)} show nothing that became worse"
    undecided = "inconclusive" if few or why_ended == INTERRUPTED else "pass"
    return {
        "verdict": "regressed" if soak.findings else "invalid" if why_ended not in ("", INTERRUPTED) else undecided,
        "reason": joined_reasons([*soak.findings, *cut, *few] or [clean]),
        "checks": tuple(METRICS[name].check(value) for name, value in _figures(ranks, spec).items()),
        "notes": soak.unheld,
        "soak": replace(soak, environment=environment_of(folder)),
    }


def _figures(ranks: Sequence[Diary], spec: Spec) -> dict[str, float]:
    """Those of a launch that a soak has too, by metric."""
    seconds = float(np.median(ranks[0].steps[:, 0]))
    rate, work = RATE, 0.0
    if isinstance(spec, TrainSpec) and not is_uneven(spec):
        work = spec.sequences_per_step * spec.sequence_length / spec.gpus
    elif isinstance(spec, ScriptSpec):
        rate = COUNTED.get(spec.rate_unit if spec.given_tokens else "unknown", RATE)
        work = (spec.given_tokens or len(ranks)) / len(ranks)
    peaks = {name: max(getattr(rank.entries[-1], name) for rank in ranks) for name in (MEMORY, "peak_allocated_bytes")}
    found = {rate: work / seconds, "step_seconds": seconds, **peaks, "steps": float(len(ranks[0].steps))}
    return {name: value for name, value in found.items() if value}


def judge_soak(asked_seconds: float, ranks: Sequence[Diary], sensed: Sequence[Sensed], rule: SoakRule) -> Soak:
    """The soak whose ``ranks`` left these diaries, rank 0's first; none of them is empty."""
    first = ranks[0]
    judged = _Steps(first, sensed, rule)
    held, unheld = list[str](), list[str]()
    for line, is_held in (*judged.slower(), *judged.stalls()) if first.windows else ():
        (held if is_held else unheld).append(line)
    held += _growth(ranks, on_cpu=rule.on_cpu)
    return Soak(
        asked_seconds=asked_seconds,
        seconds=round(first.seconds, 1),
        steps=len(first.steps),
        findings=tuple(held),
        unheld=tuple(unheld),
        series=_series(first, sensed),
    )


@dataclass(frozen=True)
class _Steps:
    """Those of rank 0 after its warm-up."""

    diary: Diary
    sensed: Sequence[Sensed]
    rule: SoakRule

    def slower(self) -> Sequence[tuple[str, bool]]:
        """Levels beyond the first, and whether each is a finding: by each window's shortest steps, which a host moves
        least; where these stay, by its median, which some of the steps move too."""
        low, middle = ([*self._levels(share)] for share in (_LOW, 0.5))
        return low if any(is_held for _, is_held in low) or not middle else middle

    def _levels(self, share: float) -> Iterator[tuple[str, bool]]:
        """The level that is furthest above the first, and the last one; whether each is beyond tolerance."""
        logs = [math.log(np.quantile(self.diary.kept[each, 0], share)) for each in self.diary.windows]
        scatter = self._scatter(logs)
        first, *others = levels_between(logs, scatter, find_changes(logs, scatter, range(len(logs))))
        # A host moves medians up and down again.
        is_a_hosts = share > _LOW and any(b.log < a.log for a, b in pairwise([first, *others]))
        for level in dict.fromkeys([max(others, key=lambda level: level.log), others[-1]] if others else ()):
            before, after = (np.concatenate(self.diary.windows[each.start : each.end]) for each in (first, level))
            a, b = (float(np.quantile(self.diary.kept[each, 0], share)) for each in (before, after))
            if b <= a:
                continue
            start = int(after[0]) + len(self.diary.steps) - len(self.diary.kept) + 1
            is_last, lost = level.end == len(logs), (b - a) * len(after) / float(self.diary.kept[:, 0].sum())
            until = "on" if is_last else f"to {start + len(after) - 1:,}"
            minute, loss = (self.diary.kept[after[0], 4] - self.diary.began) / 60, b / a - 1
            line = f"steps take {formats.share(loss)} longer from step {start:,} {until} (minute {minute:.1f}): "
            line += f"{formats.seconds(a)} -> {formats.seconds(b)}"
            # What is over, or has just begun, a host's mood may be: it is held by what it cost, as stalls are.
            is_long = is_last and level.end - level.start >= len(logs) / _PARTS
            why, costs = self._why(before, after, share), is_long or lost > STALL_TOLERANCE
            line += why if is_last else f"{why}, {formats.share(lost)} of the time"
            yield line, loss > self.rule.tolerance and costs and why != _OTHERS and not is_a_hosts

    def _scatter(self, logs: Sequence[float]) -> Covariance:
        """Of windows by themselves, as their differences show it, and of what lasts for several of them."""
        number = len(logs)
        sd = max(_LEAST_SD, NORMAL / math.sqrt(2) * float(np.median(np.abs(np.diff(logs)))))
        apart = np.abs(np.subtract.outer(np.arange(number), np.arange(number)))
        lasting = self.rule.noise.sd**2 * np.exp(-apart * _LASTING / number)
        return Covariance(((sd**2 * np.eye(number), EFFICIENCY * (number - 1)), (lasting, self.rule.noise.df)))

    def _why(self, before: Array, after: Array, share: float) -> str:
        """Where most of the difference is, as far as that is known: of the shortest steps, where these tell of it."""
        both = [self.diary.kept[each] for each in (before, after)]
        a, b = (rows[rows[:, 0] <= np.quantile(rows[:, 0], 2 * share)].mean(axis=0) for rows in both)
        for column, what in ((3, _OTHERS), (1, ", in its loader"), (2, ", in garbage collection")):
            if b[column] - a[column] >= _MOST_OF_IT * (b[0] - a[0]):
                return what
        clocks = [self._clock(self.diary.kept[each, 4]) for each in (before, after)]
        if all(clocks) and math.log(clocks[0] / clocks[1]) >= _MOST_OF_IT * math.log(b[0] / a[0]):
            return f", at a GPU clock of {clocks[1]:.0f} MHz after {clocks[0]:.0f}"
        what = self._work_or_wait(b[6] - a[6], b[0] - a[0])
        return f", in {what}{', at the same clock' if all(clocks) and what == _EITHER else ''}" if what else ""

    def _work_or_wait(self, computed: float, longer: float) -> str:
        """Which of both made it so much ``longer``, of which it ``computed`` for some; empty where nobody knows."""
        if math.isnan(computed):
            return ""
        work, wait = (_WORK, _A_WAIT) if self.rule.on_cpu else (_EITHER, _OF_A_GPU)
        return work if computed >= _MOST_OF_IT * longer else wait

    def _clock(self, times: Array) -> float:
        start, end = times.min(), times.max()
        known = [one.clock_mhz for one in self.sensed if one.clock_mhz and start <= one.time <= end]
        return float(np.median(known)) if known else 0.0

    def stalls(self) -> Iterator[tuple[str, bool]]:
        """By cause: how often, how long and what of the time they cost; whether that is beyond tolerance."""
        seconds = self.diary.kept[:, 0]
        usual = np.concatenate([np.full(len(each), np.median(seconds[each])) for each in self.diary.windows])
        excess, fetched = seconds - usual, float(np.median(self.diary.kept[:, 1]))
        found: dict[str, list[int]] = {}
        written, stalled = self._checkpoints(), (excess > _STALL * usual) & (excess > _LEAST_STALL_SECONDS)
        for number in sorted(np.flatnonzero(stalled).tolist(), key=lambda each: -float(excess[each])):
            row, least = self.diary.kept[number], _MOST_OF_IT * excess[number]
            cause = "garbage collection" if row[2] >= least else "its loader" if row[1] - fetched >= least else ""
            meanwhile = written & {row[5], row[5] - 1}  # whose line may have been written within the step
            if not cause and meanwhile:  # by the longest stall of that time
                written -= meanwhile
                cause = "a checkpoint"
            found.setdefault(cause or self._unnamed(int(row[5]), excess[number]), []).append(number)
        for cause, numbers in found.items():
            lost = float(excess[numbers].sum() / seconds.sum())
            large = sorted(each for each in numbers if excess[each] >= _MOST_OF_IT * np.quantile(excess[numbers], 0.75))
            gaps = [b - a for a, b in pairwise(large)]
            gap, times = Counter(gaps).most_common(1)[0] if gaps else (0, 0)
            # Steps in a row are one stretch of time, which a busy host may have.
            is_periodic = gap > 1 and len(large) >= _LEAST_STALLS and times >= _ALIKE * len(gaps)
            often = f"each {gap} steps" if is_periodic else formats.counted(len(numbers), "time")
            each = formats.seconds(float(np.median(excess[large])))
            what = f"{cause or 'something unknown'} stalls a step {often}, by {each} each time"
            is_held = cause in _OWN or (is_periodic and cause != _A_CORE)
            yield f"{what}: {formats.share(lost)} of the time in all", lost > STALL_TOLERANCE and is_held

    def _unnamed(self, number: int, longer: float) -> str:
        """What its thread did in the entry of this ``number``, in which a step took so much ``longer``."""
        entry = self.diary.entries[number]
        if entry.waited_seconds >= _MOST_OF_IT * longer:
            return _A_CORE
        usual = float(np.median(self.diary.kept[:, 6] / self.diary.kept[:, 0]))
        others = sum(step[0] for step in entry.steps) - longer
        return self._work_or_wait(entry.computed - usual * others, longer)

    def _checkpoints(self) -> set[float]:
        """Entries in whose time much was written."""
        entries = self.diary.entries
        written = np.diff([each.written_bytes for each in entries], prepend=entries[0].written_bytes)
        least = max(_CHECKPOINT_BYTES, _CHECKPOINT_TIMES * float(np.median(written)))
        return set(np.flatnonzero(written >= least).tolist())


# What is watched for growth: how it is called, its unit, and how much is none.
_WATCHED: Mapping[str, tuple[str, str, float]] = {
    "allocated_bytes": ("memory of tensors", "bytes", 2**20),
    "host_bytes": ("memory of the process", "bytes", 16 * 2**20),
    "open_files": ("open files", "", 12),
    "threads": ("threads", "", 6),
}
# On a CPU the first is what malloc gave away, which moves by itself; of the second so much of it does.
_MALLOC_BYTES, _HOST_SHARE, _EXPLAINED = 8 * 2**20, 0.005, 1.25


def _growth(ranks: Sequence[Diary], *, on_cpu: bool) -> Iterator[str]:
    """A line for each thing that only grows, of the rank where it grows most."""
    of_tensors, told = 0.0, ""
    for name, (what, unit, usual) in _WATCHED.items():
        least = _MALLOC_BYTES if on_cpu and name == "allocated_bytes" else usual
        grown = {number: found for number, diary in enumerate(ranks) if (found := _grown(diary, name, least))}
        if (rank := max(grown, key=lambda number: grown[number][2], default=None)) is None:
            continue
        first, last, each = grown[rank]
        if on_cpu and name == "host_bytes" and each <= _EXPLAINED * of_tensors:
            continue  # a CPU's tensors are the process's
        of_tensors = each if name == "allocated_bytes" else of_tensors
        where = "" if len(ranks) == 1 else " on all ranks" if len(grown) == len(ranks) else f" on rank {rank}"
        if unit:
            an_hour = each * 3600 / float(np.median(ranks[rank].steps[:, 0]))
            size = f"{formats.in_sentence(each, unit)} a step, {formats.memory(an_hour)} an hour"
            objects = " and objects" if on_cpu and name == "allocated_bytes" else ""  # malloc gives both
            left = "" if told else _left_by(ranks[rank].entries[-1], on_cpu=on_cpu)
            told = told or left
            yield f"{what}{objects} only grows{where}: {size}{left}"
        else:
            yield f"{what} only grow{where}: {first:.0f} -> {last:.0f}, {each:.2g} a step"


def _left_by(last: Entry, *, on_cpu: bool) -> str:
    """What each step leaves behind, or what would tell it, as far as objects were counted."""
    if last.grown is None:
        return ""
    if last.grown:
        return f"; {left_by_each_step(last.grown)}"
    tool = "memray" if on_cpu else "PyTorch's memory history"
    return f"; no kind of Python object grows with it: {tool} tells which line allocates"


def _grown(diary: Diary, name: str, least: float) -> tuple[float, float, float] | None:
    """The least of the first part, of the last one, and what a step adds; ``None``: it does not only grow."""
    if not (lows := diary.lows(name)):
        return None
    if name == "host_bytes":
        least = max(least, _HOST_SHARE * lows[0])
    half, whole = _PARTS // 2, lows[-1] - lows[0]
    goes_on = lows[-1] - lows[half] >= _GOES_ON * (lows[half - 1] - lows[0])
    if not (whole >= least and goes_on and all(a < b for a, b in pairwise(lows))):
        return None
    return lows[0], lows[-1], whole / (len(diary.kept) * (_PARTS - 1) / _PARTS)


def _series(diary: Diary, sensed: Sequence[Sensed]) -> dict[str, tuple[float | None, ...]]:
    steps, entries = diary.steps, diary.entries
    ends = np.linspace(diary.began, entries[-1].time, min(_POINTS, len(entries)) + 1)
    parts = np.split(steps[:, 0], np.searchsorted(steps[:, 4], ends[1:-1]))
    found: dict[str, list[float | None]] = {
        "minutes": [round((end - diary.began) / 60, 3) for end in ends[1:].tolist()],
        "step_seconds": [float(np.median(part)) if len(part) else None for part in parts],
        "slowest_step_seconds": [float(part.max()) if len(part) else None for part in parts],
    }
    for name, rows in (*((name, entries) for name in _WATCHED), ("clock_mhz", sensed), ("joules", sensed)):
        found[name] = _binned(ends, rows, name)
    spans = zip(pairwise(found.pop("joules")), np.diff(ends[1:]).tolist(), strict=True)
    found["watts"] = [None, *(None if a is None or b is None else (b - a) / seconds for (a, b), seconds in spans)]
    return {name: tuple(each) for name, each in found.items() if any(value is not None for value in each)}


def _binned(ends: Array, rows: Sequence[Any], name: str) -> list[float | None]:
    """The last value of each part that has one."""
    found: list[float | None] = [None] * (len(ends) - 1)
    for at, row in zip(np.searchsorted(ends[1:-1], [row.time for row in rows]).tolist(), rows, strict=True):
        value = getattr(row, name)
        found[at] = value if value is None else round(float(value), 3)
    return found
