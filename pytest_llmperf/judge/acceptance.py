"""Acceptance: what launches become part of a baseline, and what only a reason makes acceptable. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from pytest_llmperf.judge.baseline import CAPACITY_METRIC, Baseline, CapacityBaseline, size_of
from pytest_llmperf.judge.exact import StoredTrace
from pytest_llmperf.judge.repeats import Repeats
from pytest_llmperf.judge.stats import Noise, Spread, log_of, quantile
from pytest_llmperf.judge.store import Accepted, BaselineChangedError, BaselineError, since_reason
from pytest_llmperf.judge.validity import injected
from pytest_llmperf.judge.verdict import Judgement, alike
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, METRICS, RATE, measured
from pytest_llmperf.records.result import CaseResult, Check, Verdict, joined_reasons
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support.formats import first_n, in_sentence, memory, percent

#: More would only slow reading: what a verdict can see is decided by the first dozen.
MAX_LAUNCHES = 24
# Launches of another speed or memory that take the place of those that are stored.
_PROVEN_BY = 2
#: From here on it is said how many times as long steps of one launch of a case are as another's, on whatever hardware.
FAR_APART = 2.0


def accept(
    old: Baseline | None, *, judged: Baseline | None, spec: Spec, result: CaseResult, entry: Accepted
) -> Baseline:
    """The baseline after the launches of ``result``, held against ``judged``, were accepted as ``entry``. Launches
    within tolerance join those that are there; ones beyond it replace them, since two speeds are not one population.
    BaselineChangedError: there is another baseline than ``judged`` by now. BaselineError: the launches are invalid, or,
    without a reason, worse beyond tolerance or of something that changed."""
    if not (launches := result.launches):
        raise BaselineError(f"{spec.id}: no launch was measured, there is nothing to record")
    if result.verdict == "invalid":
        raise BaselineError(f"{spec.id}: an invalid launch is never recorded")
    refuse_injected(spec.id, launches)
    if old != judged:
        raise BaselineChangedError(spec.id, old)
    if not entry.reason:
        _refuse_unexplained(spec, result)
    new = Baseline(
        id=spec.id,
        digest=spec.digest,
        machine=result.machine,
        spec=spec.to_dict(),
        recorded_by=result.nodeid,
        launches=launches[-MAX_LAUNCHES:],
        anchor=entry,
        history=(entry,),
        trace=StoredTrace.of(launches),
        repeats=Repeats.of(launches) if spec.is_script else None,
    )
    if old is None:
        return new
    # Where a figure left its tolerance old and new launches are not one population. Memory, stalls, a cold first step
    # and what is before it say nothing of the median, and efficiency half of it is another width's.
    splits = [check for check in result.checks if check.metric in METRICS and METRICS[check.metric].splits]
    have_moved = any(_is_beyond(check, worse=worse) for check in splits for worse in (True, False))
    kept = () if have_moved else old.launches
    return replace(
        old,
        spec=new.spec,
        recorded_by=new.recorded_by,
        launches=(*kept, *new.launches)[-MAX_LAUNCHES:],
        history=(*old.history, *new.history),
        # What other launches did says nothing of those that took their place.
        trace=new.trace or (old.trace if kept else None),
        repeats=_repeats(old, new, kept),
    )


def _repeats(old: Baseline, new: Baseline, kept: Sequence[Launch]) -> Repeats | None:
    """What is exact of a script by all launches of the same files; other files are another training."""
    if new.repeats is None or old.repeats is None or not kept or kept[-1].sources != new.launches[-1].sources:
        return new.repeats
    # What is traced behind another number of steps may log, where the other did not.
    is_alike = len(kept[-1].step_seconds) == len(new.launches[-1].step_seconds)
    same = [one for one in kept if one.sources == new.launches[-1].sources]  # before them a change may be accepted
    return Repeats.of(new.launches, old.repeats, same, old.trace.trace if old.trace and is_alike else None)


_MOST_CHANGES = 3


def _refuse_unexplained(spec: Spec, result: CaseResult) -> None:
    checks, by_reason = result.checks, 'accept it with --perf-reason "why"'
    better = [check for check in checks if check.verdict == "inconclusive" and _is_beyond(check, worse=False)]
    other = [check for check in checks if check.verdict == "changed"]
    alone = [check for check in checks if check.verdict == "improved" and len(result.launches) < _PROVEN_BY]
    refused = (
        ("worse beyond tolerance", [check for check in checks if _is_beyond(check, worse=True)], by_reason),
        ("other counts or names than in the baseline", other, by_reason),
        ("better beyond tolerance, and not proven", better, f"let --perf-launches 4 tell, or {by_reason}"),
        ("one launch alone replaces no baseline", alone, f"let --perf-launches {_PROVEN_BY} tell, or {by_reason}"),
    )
    for what, those, how in refused:
        if those:
            figures = ", ".join(
                f"{check.metric} {'none' if check.baseline is None else in_sentence(check.baseline, check.unit)}"
                f" -> {in_sentence(check.value, check.unit)}"
                for check in those
            )
            raise BaselineError(f"{spec.id}: {what} ({figures}); {how}")
    # What is as fast as before and not the same is accepted by who says why.
    if result.changed:
        told = first_n(result.changed, _MOST_CHANGES)
        raise BaselineError(f"{spec.id}: changed since the baseline ({told}); {by_reason}")


def _is_beyond(check: Check, *, worse: bool) -> bool:
    """Whether a gating figure left its tolerance in one direction, be it proven or not."""
    # What was decided stands: a figure below a test's own floor is worse, whichever way it moved.
    if check.verdict != "inconclusive" or check.change is None or check.tolerance is None:
        return check.verdict == ("regressed" if worse else "improved")
    loss = 1 / (1 + check.change) - 1 if check.higher_is_better and check.change > -1 else check.change
    return loss > check.tolerance if worse else 1 / (1 + loss) - 1 > check.tolerance


def refuse_injected(name: str, launches: Sequence[Launch]) -> None:
    """BaselineError: ``launches`` of the case ``name`` were measured under a fault that was asked for."""
    for fault in injected(launches):
        raise BaselineError(f"{name}: measured under {fault}, which is never recorded")


# Creep: losses that are each within tolerance and add up, since somebody last said why.

# Acceptances that make up a level: a sudden gain is one, a noisy one is known by several.
_WINDOWS = (1, 2, 3, 5, 8, 13)
# That noise alone takes one level no further from another; each is compared with many.
_SURE = 1 - 1e-4
# What repeats itself shows its own noise, and none is believed of it before.
_STEADY = Spread(0.0, 6.0)
# Of the variance of one value: that of its distance from the middle of its neighbours, which no steady slope moves.
_NEIGHBOURS = 1.5


def best(history: Sequence[Accepted], metric: str) -> float | None:
    """The best figure that was accepted since the last reason."""
    chosen = max if METRICS[metric].higher_is_better else min
    return chosen((entry.metrics[metric] for entry in since_reason(history) if metric in entry.metrics), default=None)


def creep(baseline: Baseline, checks: Sequence[Check], launches: Sequence[Launch], noise: Noise) -> tuple[str, ...]:
    """A line for each metric of ``launches`` that its gate lets pass, and that has left the best by more than that."""
    # How a speed scatters from one acceptance to the next when nothing changed, as a fraction.
    everyone, parts = (*baseline.launches, *launches), [noise.launch, noise.session]
    parts += [noise.site] if len({launch.site for launch in everyone}) > 1 else []
    parts += [noise.host] if len({launch.host for launch in everyone}) > 1 else []
    of_speed = Spread(math.hypot(*(part.sd for part in parts)), min(part.df for part in parts))
    since = " since the last reason" if since_reason(baseline.history)[0].reason else ""
    lines = []
    passed = (check for check in checks if check.tolerance and check.verdict in ("pass", "inconclusive", "improved"))
    for check in passed:
        entries = list(_creep_figures(baseline, check, launches))
        usual = of_speed if METRICS[check.metric].rule in ("speed", "scaling") else _STEADY
        if (level := _best_level(check, [value for _, value in entries], usual)) is not None:
            start, size, mean = level
            was, now = in_sentence(mean, check.unit), in_sentence(check.value, check.unit)
            whose = f"{was} of {entries[start][0].recorded_at[:10]}" + f" (mean of {size} acceptances)" * (size > 1)
            change = f"{percent(check.value / mean - 1)} from" if mean else "more than"
            lines.append(f"creep: {check.metric} {now} is {change} the best accepted{since}, {whose}")
    return tuple(lines)


def _creep_figures(baseline: Baseline, check: Check, launches: Sequence[Launch]) -> Iterator[tuple[Accepted, float]]:
    """What was accepted of a metric since the last reason, oldest first."""
    since = since_reason(baseline.history)
    metric = METRICS[check.metric]
    if metric.rule != "phase":
        yield from ((entry, entry.metrics[check.metric]) for entry in since if check.metric in entry.metrics)
        return
    # Launches that began in another way are none to be held against, and an acceptance does not say how its own did.
    for entry, own in reversed(baseline.held[: len(since)]):
        if told := [one for one in own if any(alike(metric, one, each) for each in launches)]:
            yield entry, metric.read(told)


def _best_level(check: Check, past: Sequence[float], usual: Spread) -> tuple[int, int, float] | None:
    """Where the neighbours in the ``past`` begin that ``check`` is furthest beyond, how many, and their mean; ``None``:
    beyond none. It has to be beyond what its gate allows; its level, with the last ones, beyond their noise."""
    residuals = [(b - (a + c) / 2) ** 2 / _NEIGHBOURS for a, b, c in zip(past, past[1:], past[2:], strict=False)]
    values, sign = (*past, check.value), 1 if check.higher_is_better else -1
    # What moved by more than its gate allows has begun anew: such a step is no noise.
    moved = [0, *(n for n, pair in enumerate(pairwise(past), 1) if max(pair) - min(pair) > _allowed(check, max(pair)))]
    levels: list[tuple[float, tuple[int, int, float]]] = []
    for size in _WINDOWS:
        for start in range(len(past) - size + 1):
            mean, own = fmean(past[start : start + size]), residuals[max(n for n in moved if n <= start) :]
            beyond = sign * (mean - check.value) - _allowed(check, mean)
            if beyond <= 0:
                continue
            variance = (usual.df * (usual.sd * mean) ** 2 + math.fsum(own)) / (usual.df + len(own))
            far = quantile(_SURE, usual.df + len(own) / 2) * math.sqrt(variance)
            recent = (recent for recent in _WINDOWS if recent <= len(values) - start - size)
            if any(sign * (mean - fmean(values[-each:])) > far * math.sqrt(1 / size + 1 / each) for each in recent):
                levels.append((beyond, (start, size, mean)))
    return max(levels, key=lambda level: level[0])[1] if levels else None


def _allowed(check: Check, level: float) -> float:
    tolerance = check.tolerance or 0.0
    metric = METRICS[check.metric]
    if check.higher_is_better:
        return level * tolerance / (1 + tolerance)
    # Of what is computed elsewhere its own limit says what is next to nothing.
    slack = metric.slack if metric.of else (check.limit or 0.0) - (check.baseline or 0.0)
    return max(level * tolerance, slack)


# Former cases: what a test had stored before its settings changed, which begins a baseline anew.

_MOST_SETTINGS = 3


def test_of(node: str) -> str:
    """A node id without its parameters."""
    file, _, name = node.partition("::")
    return f"{file}::{name.partition('[')[0]}"


def nearest_line(spec: Spec, node: str, stored: Iterable[Baseline], checks: Sequence[Check]) -> str:
    """The stored case of the test ``node`` that has most settings of ``spec``, beside its figures; empty: none."""
    own = [one for one in stored if test_of(one.recorded_by) == test_of(node) and one.digest != spec.digest]
    if not own or "::" not in node:  # a command is no test
        return ""
    near = min(own, key=lambda one: (len(_settings(one, spec)), one.recorded_by != node, one.id))
    return (
        f"nearest stored case of this test: {near.id} ({_former_case_figures(near, checks)}); "
        f"settings: {first_n(_settings(near, spec), _MOST_SETTINGS)}"
    )


def replaced(
    results: Sequence[CaseResult],
    stored: Sequence[Baseline],
    asked: AbstractSet[str],
    whole: AbstractSet[str],
    collected: Collection[str],
) -> Iterator[tuple[CaseResult, list[Baseline]]]:
    """Each result of ``results``, recorded for the first time, in the place of cases that its test no longer has.
    ``asked`` are the digests of the run, ``whole`` the tests that named all they have, ``collected`` all that their
    files have, whichever were chosen. What another choice of tests may still have is no former case."""
    own = {result.digest for result in results}
    recorded_by = {one.recorded_by for one in stored if one.digest not in own}
    for result in (each for each in results if "::" in each.nodeid):  # a command is no test
        test = test_of(result.nodeid)
        siblings = [one for one in stored if test_of(one.recorded_by) == test and one.digest not in own]
        known = all(node in whole or node in recorded_by for node in collected if test_of(node) == test)
        explained = {digest for one in siblings for digest in one.anchor.replaces}  # and kept all the same
        gone = [
            one
            for one in siblings
            if one.digest not in asked | explained
            and (one.recorded_by in whole or (known and one.recorded_by not in collected))
        ]
        if gone:
            yield result, sorted(gone, key=lambda one: (one.recorded_by != result.nodeid, one.id))


def replaced_line(result: CaseResult, former: Baseline) -> str:
    return (
        f"{result.nodeid}: {result.id} is not recorded: it replaces {former.id} of the same test "
        f'({_former_case_figures(former, result.checks)}); accept it with --perf-reason "why"; '
        "delete the files of what is left over"
    )


def _settings(former: Baseline, spec: Spec) -> list[str]:
    """``name: then -> now``; a setting that an older version did not store has its default, which the spec has too."""
    now = spec.to_dict()
    return [f"{name}: {then} -> {now.get(name)}" for name, then in former.spec.items() if then != now.get(name)]


def _former_case_figures(former: Baseline, checks: Sequence[Check]) -> str:
    told = []
    for check in checks:
        if check.metric in (RATE, MEMORY):
            then = METRICS[check.metric].read(former.launches)
            was, now = in_sentence(then, check.unit), in_sentence(check.value, check.unit)
            told.append(f"{check.metric} {was} -> {now}, {percent(check.value / then - 1 if then else None)}")
    return "; ".join(told) or "no figures"


def describe(old: Baseline | CapacityBaseline | None, new: Baseline | CapacityBaseline) -> list[str]:
    """Old, new and anchor side by side, for people."""
    size, held, row = "", list[str](), None
    if isinstance(new, Baseline):
        joined = sum(launch in old.launches for launch in new.launches) if isinstance(old, Baseline) else 0
        of_all = f"; {joined} of them from before, and later runs are held against all" if joined else ""
        size, row = f" ({size_of(new)}{of_all})", measured(new.launches)[RATE]
        held = [f"  {new.repeats.words(new.launches)}; speed in {row.label}"] if new.repeats else []
        times = math.exp(max(logs) - min(logs)) if (logs := [*map(log_of, new.launches)]) else 1.0
        if times > FAR_APART:
            wide = "a smaller loss is not seen; record it again when the machine is quiet"
            held.append(f"  its launches are {times:.1f} times apart: {wide}")

    def figures(entry: Accepted) -> str:
        memory = in_sentence(entry.metrics[MEMORY], "bytes") if MEMORY in entry.metrics else "-"
        if row is None:
            return f"{entry.metrics[CAPACITY_METRIC]:>13.0f} sequences  {memory:>10}"
        rate = in_sentence(entry.metrics[row.name], row.label) if row.name in entry.metrics else "-"
        return f"{rate:>23}  {memory:>10}"

    entries = (
        ("old", old.history[-1] if old else None),
        ("new", new.history[-1]),
        ("anchor", new.anchor if old or new.history[-1] != new.anchor else None),
    )
    lines = [
        f"  {label:6} {figures(entry)}  {entry.recorded_at[:10]}"
        + "  uncommitted" * entry.uncommitted
        + (f"  ({entry.reason})" if entry.reason else "")
        for label, entry in entries
        if entry is not None
    ]
    return [f"recorded {new.id}{size}", *lines, *held]


def judge_capacity(size: int, baseline: CapacityBaseline | None) -> Check:
    """The check of the largest micro-batch: memory is nearly exact, so one that is gone is a loss."""
    stored = baseline.size if baseline else None
    verdict: Verdict = "new"
    if stored is not None:
        verdict = "regressed" if size < stored else "improved" if size > stored else "pass"
    return METRICS[CAPACITY_METRIC].check(size, stored, tolerance=0.0, limit=stored, verdict=verdict)


def judge_fitted(
    launch: Launch, size: int, baseline: CapacityBaseline | None, troubles: Sequence[str]
) -> tuple[Judgement, str]:
    """The verdict on ``size``, which ``launch`` has trained, and what of it is told in any case."""
    check, peak = judge_capacity(size, baseline), launch.peak_reserved_bytes
    reason = f"{check.metric} {check.value:.0f}" + ("" if baseline is None else f", baseline {baseline.size}")
    if troubles:
        check = Check(metric=check.metric, value=check.value, unit=check.unit)
    allocated = METRICS["peak_allocated_bytes"].check(launch.peak_allocated_bytes)
    checks = (check, METRICS["peak_reserved_bytes"].check(peak), allocated)
    verdict: Verdict = "invalid" if troubles else check.verdict or "pass"
    note = f"{size} sequences fit ({memory(peak)} reserved), {size + 1} run out of memory"
    return Judgement(verdict, joined_reasons(troubles) or reason, checks), note


def accept_capacity(old: CapacityBaseline | None, new: CapacityBaseline) -> CapacityBaseline:
    """``new``, of one acceptance, after those of ``old``; BaselineError: it is smaller, and nobody said why."""
    if old is None:
        return new
    if new.size < old.size and not new.anchor.reason:
        sizes = f"{CAPACITY_METRIC} {old.size} -> {new.size}"
        raise BaselineError(f'{new.id}: worse ({sizes}); accept it with --perf-reason "why"')
    return replace(new, anchor=old.anchor, history=(*old.history, *new.history))
