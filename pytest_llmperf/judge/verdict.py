"""From launches and a baseline to a verdict: numbers in, a decision and its reason out, by ``policy.py``. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_high, median_low
from typing import Any

from pytest_llmperf.judge import policy as policies
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import CONFIRMED_BY, Held, Policy, Reference, Rule, decide, lasting, limit, middle
from pytest_llmperf.judge.stats import Difference, Pairs, paired_difference
from pytest_llmperf.judge.validity import excused, unusable
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, Metric, measured, phases, rate_of
from pytest_llmperf.records.result import Check, Verdict, joined_reasons, left_by_each_step, worst_of
from pytest_llmperf.records.steady_state import MOST_GROWTH
from pytest_llmperf.records.trace import LEFT
from pytest_llmperf.support.formats import in_sentence


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    reason: str
    """Reasons of an ``invalid`` case are separated by ``"; "``."""
    checks: tuple[Check, ...]
    undecided: bool = False
    """Whether another launch is worth its cost; the verdict is then what these launches alone would give."""


def judge(
    launches: Sequence[Launch],
    baseline: Baseline | None,
    policy: Policy,
    troubles: Sequence[str] = (),
    extra: Sequence[Check] = (),
) -> Judgement:
    """The verdict on a measurement; ``extra`` are figures from elsewhere (MFU), shown with the rest. ``troubles`` are
    what ``validity.troubles`` found against the spec; what is wrong whatever the spec says is found here too, so that
    no figure which is none ever passes. ``invalid`` comes before everything: a figure that cannot be trusted is neither
    good nor bad, and is not shown, since somebody would quote it."""
    if found := dict.fromkeys([*troubles, *_not_comparable(launches, baseline), *_impossible(extra)]):
        return Judgement("invalid", joined_reasons(found), ())
    if baseline is None:
        checks = [_new(metric, launches, policy.tolerances.get(name)) for name, metric in measured(launches).items()]
        return Judgement("new", NEW, (*checks, *extra))
    difference = policy.difference(launches, baseline.launches)
    return _judged(launches, baseline, difference, policy.at(launches, baseline, difference), extra)


def judge_pairs(pairs: Pairs, policy: Policy, troubles: Sequence[str] = (), extra: Sequence[Check] = ()) -> Judgement:
    """The verdict on the second of each pair against the first, which took turns on the same hardware."""
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    if found := dict.fromkeys([*troubles, *_not_comparable([*before, *after], None), *_impossible(extra)]):
        return Judgement("invalid", joined_reasons(found), ())
    difference = paired_difference(pairs, policy.noise)
    return _judged(after, Reference(before, before, before), difference, policy.in_pairs(), extra)


def _judged(
    launches: Sequence[Launch], held: Held, difference: Difference, policy: Policy, extra: Sequence[Check]
) -> Judgement:
    found = []
    for name, metric in measured([*launches, *held.launches]).items():
        check = _new(metric, launches, policy.tolerances.get(name))
        if metric.alike is not None and check.tolerance is not None:
            narrowest = check.tolerance if name in policy.chosen else metric.alike
            tolerance = _of_alike(metric, launches, held, check.tolerance, narrowest)
            check = replace(check, tolerance=tolerance, verdict=None if tolerance is None else check.verdict)
        if metric.rule == "speed":
            speed = _speed(check, launches, difference, policy, policy.on_known.get(name))
            found.append(_as_stored(metric, speed, held))
        else:
            found.append((_confirmed if metric.rule == "confirmed" else _exact)(metric, check, launches, held, policy))
        told = excused(found[-1].check, metric.read, launches, held.launches, min(CONFIRMED_BY, policy.rule.budget))
        found[-1] = replace(found[-1], check=told)
    found = _told(found)
    checks = [each.check for each in found]
    gating = [check for check in checks if check.verdict is not None]
    verdict = worst_of(check.verdict for check in gating)
    reason = ", ".join(check.sentence for check in gating if check.verdict == verdict)
    if verdict == "pass":
        reason = within_tolerance(launches) if gating else "no metric gates this case"
    # What is lost was shown by as many launches as it takes: another metric's would not mend it.
    undecided = any(each.undecided for each in found) and verdict != "regressed"
    return Judgement(verdict, reason, (*checks, *extra), undecided)


def joined(judgement: Judgement, checks: Sequence[Check], *, undecided: bool) -> Judgement:
    """``judgement`` with ``checks`` that were decided elsewhere; the case is as bad as its worst."""
    told = [check for check in checks if check.verdict not in (None, "pass", "new")]
    worst = worst_of([judgement.verdict, *(check.verdict for check in told)])
    sentences = [check.sentence for check in told if check.verdict == worst]
    if worst == judgement.verdict:
        sentences.insert(0, judgement.reason)
    # No launch of one check mends another's loss.
    undecided = (judgement.undecided or undecided) and worst != "regressed"
    return Judgement(worst, ", ".join(sentences), (*judgement.checks, *checks), undecided)


def _not_comparable(launches: Sequence[Launch], baseline: Baseline | None) -> Iterator[str]:
    if not launches:
        yield "no launch was measured"
    for launch in launches:
        yield from unusable(launch)
    tokens = sorted({launch.tokens_per_step for launch in launches})
    if len(tokens) > 1 and not launches[0].is_uneven:
        yield f"launches differ in their tokens a step: {', '.join(map(str, tokens))}"
    stored = baseline.launches if baseline else ()
    rates = dict.fromkeys(rate_of([launch]) for launch in (*stored, *launches))
    if len(rates) > 1:
        how = "say tokens=, or delete its baseline and record it anew"
        yield f"{' and '.join(rates)} do not compare, since its tokens were not counted in each launch: {how}"
    for launch in stored:
        yield from (f"the baseline cannot serve: {line}" for line in unusable(launch))


def _impossible(extra: Sequence[Check]) -> Iterator[str]:
    for check in extra:
        if not math.isfinite(check.value):
            yield f"{check.metric} is {check.value}"
        elif check.value > 1 and check.metric in METRICS and METRICS[check.metric].of_the_chip:
            yield f"{check.metric} {check.value * 100:.0f} % is more than the chip can do"


def _new(metric: Metric, launches: Sequence[Launch], tolerance: float | None) -> Check:
    detail = metric.detail(launches) if metric.detail else ""
    verdict = None if tolerance is None else "new"
    return metric.check(metric.read(launches), detail=detail, tolerance=tolerance, verdict=verdict)


#: The reason of a case that nothing is stored of.
NEW = "no baseline yet"
#: What is said of a figure that one alone has shown.
OF_ONE_LAUNCH = "of one launch alone"
#: The same of a loss that is decided at the run's end.
WAITS = (
    "slower than its limit when it was launched, on a GPU that nothing told of (no baseline, no comparable calibration,"
    " few other cases): decided at the run's end; a calibration (--perf-calibration auto, the default) tells at once"
)

#: Of memory that is reserved, where what is allocated is as before.
PLACED = "peak memory changes by where the allocator places the same blocks: the peak of allocated bytes is as before"
#: Which of a check's details are notes of its case too.
NOTED = (WAITS, PLACED)
# So many times its tolerance is no more told alone.
_MUCH = 5.0

#: Of a speed that is undecided, in a strict run.
AT_THE_END = "its speed was undecided when it was launched: the run's end decides, by what other cases tell of its GPU"


@dataclass(frozen=True)
class Decided:
    """One check, and whether another launch is worth its cost."""

    check: Check
    undecided: bool = False


def _speed(
    check: Check, launches: Sequence[Launch], difference: Difference, policy: Policy, known: float | None
) -> Decided:
    rule = policy.rule
    speed = speed_check(replace(check, known_tolerance=known), difference, rule)
    is_lost = speed.check.verdict == "regressed" and check.tolerance is not None
    if is_lost and policy.waits and policies.may_be_its_gpu(difference, check.tolerance or 0.0, rule):
        # No launch of its own tells more.
        return Decided(replace(speed.check, verdict="inconclusive", detail=WAITS))
    # One launch that would not pass if its GPU were known: once it is, one alone condemns nobody.
    is_alone = known is not None and len(launches) < min(CONFIRMED_BY, rule.budget)
    is_beyond = is_alone and max(difference.each) > math.log1p(known or 0.0)
    return Decided(speed.check, speed.undecided or is_beyond)


def _as_stored(metric: Metric, found: Decided, held: Held) -> Decided:
    """``found``, which says so where its baseline is not the stored figure, but what that would be here and today."""
    check, stored = found.check, metric.read(held.launches) if isinstance(held, Baseline) else 0.0
    if not stored or abs((check.baseline or stored) / stored - 1) * 100 < _LEAST_TOLD:
        return found
    told = f"its baseline is predicted for this GPU and day; stored: {in_sentence(stored, check.unit)}"
    return replace(found, check=replace(check, detail="; ".join(filter(None, [check.detail, told]))))


def _confirmed(metric: Metric, check: Check, launches: Sequence[Launch], held: Held, policy: Policy) -> Decided:
    reference = lasting(metric, held)
    if check.tolerance is None:
        return Decided(_beside(check, reference))
    most = limit(metric, reference, check.tolerance, elsewhere=policy.is_elsewhere)
    whole, seen = horizon(launches) if metric.whole else (launches, "")
    check = _beside(replace(check, value=metric.read(whole), detail=seen or check.detail, limit=most), reference)
    if check.value <= most:
        return Decided(replace(check, verdict=None if seen else "pass"))
    if sum(metric.read([launch]) > most for launch in launches) >= CONFIRMED_BY:
        return Decided(replace(check, verdict="regressed"))
    # A fresh host compiles every kernel anew, once. Where the budget is one launch, it stays at that.
    check = replace(check, verdict="inconclusive", detail=check.detail or OF_ONE_LAUNCH)
    return Decided(check, policy.rule.budget >= CONFIRMED_BY)


def _of_alike(metric: Metric, launches: Sequence[Launch], held: Held, tolerance: float, least: float) -> float | None:
    """The tolerance of a figure that repeats itself where versions and kind of GPU are the same; ``None`` where what it
    is held against shows that it does not. One that somebody chose stays: it is the ``least`` then."""

    def kind(launch: Launch) -> tuple[Any, ...]:
        return (launch.environment.gpu, *sorted(launch.environment.versions.items()))

    last = kind(held.newest[-1])
    values = [metric.read([launch]) for launch in held.launches if kind(launch) == last]
    if len(values) < CONFIRMED_BY or median_high(values) > limit(metric, min(values), metric.alike or 0.0):
        return None
    return least if all(kind(launch) == last for launch in launches) else tolerance


def _told(found: Sequence[Decided]) -> list[Decided]:
    """``found``, where what has changed beside an unchanged one that it depends on is told, and fails nothing."""
    verdicts = {each.check.metric: each.check.verdict for each in found}

    def told(each: Decided) -> Decided:
        check, row = each.check, METRICS[each.check.metric]
        if check.verdict in (None, "pass") or verdicts.get(row.told_by) != "pass":
            return each
        is_much = (check.change or 0.0) > _MUCH * (check.tolerance or 0.0)
        return Decided(replace(check, verdict="changed" if is_much else "pass", detail=PLACED))

    return [told(each) for each in found]


def _exact(metric: Metric, check: Check, launches: Sequence[Launch], held: Held, policy: Policy) -> Decided:
    # Of two that differ the rest tells which one is odd.
    newest = [metric.read([launch]) for launch in held.newest]
    reference = sorted((median_low(newest), middle(metric, held.launches), median_high(newest)))[1]
    check = _beside(check, reference)
    if check.tolerance is None:
        return Decided(check)
    worse = limit(metric, reference, check.tolerance)
    better = min(reference / (1 + check.tolerance), reference - metric.slack)
    values = [metric.read([launch]) for launch in launches]
    beyond, leaner = (sum(value > worse for value in values), sum(value < better for value in values))
    enough = min(CONFIRMED_BY, policy.rule.budget)
    verdict: Verdict = "pass"
    undecided = False
    if beyond == len(values):
        # Memory is the same to the byte in every launch of one rank, where no compiler tries kernels.
        repeats = all(len(one.ranks) == 1 and not one.seen.compilation.compiled_graphs for one in launches)
        undecided = len(values) < (enough if repeats else policy.rule.budget)
        verdict = "inconclusive" if undecided else "regressed"
    elif beyond >= CONFIRMED_BY:
        verdict = "inconclusive"  # neither one odd launch nor all of them
    elif leaner:  # one alone becomes no reference
        undecided = len(values) < enough
        verdict = "inconclusive" if undecided else "improved" if leaner >= enough else "pass"
    return Decided(replace(check, limit=worse, verdict=verdict), undecided)


def horizon(launches: Sequence[Launch]) -> tuple[Sequence[Launch], str]:
    """Those that took all their steps; where none did all of them, and how many of its steps one has seen."""
    whole = [launch for launch in launches if not launch.planned_steps]
    seen = f"{len(launches[-1].step_seconds)} of {launches[-1].planned_steps} steps seen"
    return (whole, "") if whole else (launches, seen)


def within_tolerance(launches: Sequence[Launch]) -> str:
    """Why they pass, and over how many of their steps where that is not all."""
    seen = horizon(launches)[1]
    return f"within tolerance ({seen})" if seen else "within tolerance"


def speed_check(check: Check, difference: Difference, rule: Rule) -> Decided:
    """``check``, of which the value and the tolerance are known, by how much slower its launches are."""
    ratio = math.exp(-difference.log if check.higher_is_better else difference.log)
    low, high = sorted(math.expm1(-log if check.higher_is_better else log) for log in policies.interval(difference))
    check = replace(check, baseline=check.value / ratio, change=ratio - 1, low=low, high=high)
    if check.tolerance is None:
        return Decided(check)
    decision, slower, told = decide(difference, check.tolerance, rule), math.expm1(abs(difference.of_gpus)) * 100, []
    if slower >= _LEAST_TOLD:
        way = "slower" if difference.of_gpus > 0 else "faster"
        told.append(f"its GPU is {way} by {slower:.1f} %, as other cases and calibrations tell: no part of the change")
    seen, tolerance = decision.detectable, check.tolerance
    if seen > _BLIND * tolerance:
        if seen < 1:
            told.append(f"this gate sees {seen * 100:.1f} %, not its tolerance of {tolerance * 100:.1f} %")
        else:
            told.append(f"equal launches scatter: only what is some {1 + seen:.0f} times slower is seen")
    sign = -1 if check.higher_is_better else 1
    check = replace(
        check,
        by_itself=abs(math.expm1(sign * difference.by_itself)) if difference.by_itself > 0 else None,
        limit=check.value / ratio * math.exp(sign * decision.alarm_log),
        # Told as the metric changes: a step that takes twice as long is half the rate.
        detectable=seen / (1 + seen) if check.higher_is_better else seen,
        verdict=decision.verdict or "inconclusive",
        detail=check.detail or "; ".join(told),
    )
    return Decided(check, undecided=decision.verdict is None)


# Per cent; and what a gate sees nine times in ten is always somewhat more than its tolerance.
_LEAST_TOLD, _BLIND = 0.2, 1.5


def _beside(check: Check, reference: float) -> Check:
    return replace(check, baseline=reference, change=check.value / reference - 1 if reference else None)


# Phases: start, imports, the model: each twice as long and some seconds more is a loss, never by one
# launch (decision 31). Only like is compared with like: a warm launch imports nothing, and its start takes what was
# left of a fork server's imports; a cold one reads a model family's code while it builds the model.


@dataclass(frozen=True)
class PhaseChecks:
    """What was found; ``notes``: what one launch alone had too much of."""

    checks: tuple[Check, ...] = ()
    """One for each phase that the launches tell of; without a verdict where nothing like it is stored."""
    undecided: bool = False
    notes: tuple[str, ...] = ()


def phase_checks(launches: Sequence[Launch], held: Held | None, policy: Policy) -> PhaseChecks:
    """The phases of ``launches`` against those of launches that are like them in ``held``."""
    checks, notes, undecided = [], [], False
    for name, metric in phases().items():
        if not (told := [launch for launch in launches if _tells(metric, launch)]):
            continue
        tolerance = policy.tolerances.get(name)
        # Seconds of one launch, what launches like it usually take, and what they may.
        weighed: list[tuple[float, float, float]] = []
        for launch in told if held and tolerance is not None else ():
            sides = (held.launches, held.newest, held.explained) if held else ()
            stored, newest, explained = ([each for each in side if alike(metric, launch, each)] for side in sides)
            if stored:
                usual = lasting(metric, Reference(stored, newest or stored, explained or stored))
                weighed.append((metric.read([launch]), usual, limit(metric, usual, tolerance or 0.0)))
        if not weighed:
            checks.append(metric.check(metric.read(told)))
            continue
        weighed.sort(key=lambda each: each[0] / each[2])
        (seconds, usual, most), worst = weighed[0], weighed[-1]
        verdict: Verdict = "pass"
        if not seconds <= most:  # also true of NaN
            verdict = "regressed" if len(weighed) >= CONFIRMED_BY else "inconclusive"
        undecided |= verdict == "inconclusive" and len(launches) < policy.rule.budget
        detail = OF_ONE_LAUNCH if verdict == "inconclusive" else ""
        check = metric.check(seconds, usual, tolerance=tolerance, limit=most, verdict=verdict, detail=detail)
        checks.append(excused(check, metric.read, told, held.launches if held else (), CONFIRMED_BY))
        if verdict == "pass" and not worst[0] <= worst[2]:
            notes.append(f"{name} {worst[0]:.3g} s in one launch, {seconds:.3g} s in another: the shortest counts")
    return PhaseChecks(tuple(checks), undecided, tuple(notes))


def _tells(metric: Metric, launch: Launch) -> bool:
    # Of a launch that began warm how far a server was with its imports says nothing.
    return metric.phase in launch.phases and not (launch.evidence.get("start") == "warm" and metric.only_cold)


def alike(metric: Metric, a: Launch, b: Launch) -> bool:
    """Whether both tell of a phase, and began in one way."""
    return a.evidence.get("start") == b.evidence.get("start") and _tells(metric, a) and _tells(metric, b)


# Growth check: whether steps leave memory behind, which ends a long training and not a launch.

GROWTH = "allocated_growth_bytes"
# Of a growth that was accepted.
_TOLERANCE = 0.1


def growth_checks(launches: Sequence[Launch], accepted: Sequence[Launch], budget: int) -> tuple[Check, ...]:
    """The check of what ``launches`` leave behind a step; none where nothing counted it. More than the limit is a loss
    also where nothing is stored. ``accepted`` are the baseline's with the last reason."""
    if not (grown := [launch for launch in launches if launch.allocated_growth is not None]):
        return ()
    usual = min((launch.allocated_growth or 0.0 for launch in accepted), default=0.0)
    limit = max(MOST_GROWTH, usual * (1 + _TOLERANCE))
    whole, seen = horizon(grown)
    value = min(launch.allocated_growth or 0.0 for launch in whole)
    is_held = bool(accepted) or value > limit  # a new case has figures to show, and no loss
    verdict: Verdict | None = "pass" if is_held and not seen else None
    if value > limit:
        is_confirmed = sum((each.allocated_growth or 0.0) > limit for each in grown) >= min(CONFIRMED_BY, budget)
        verdict = "regressed" if is_confirmed else "inconclusive"
    left = next((each.trace.places[LEFT] for each in whole if each.trace and LEFT in each.trace.places), {})
    detail = seen or (OF_ONE_LAUNCH if verdict == "inconclusive" else "")
    detail = "; ".join(filter(None, (detail, left_by_each_step(left))))
    held = {"tolerance": _TOLERANCE if is_held else None, "limit": limit, "verdict": verdict, "detail": detail}
    return (METRICS[GROWTH].check(value, usual if accepted else None, change=None, **held),)


def is_doubted(judgement: Judgement) -> bool:
    """Whether something was seen that a launch of all its steps has to show too."""
    whole = [name for name, metric in METRICS.items() if metric.whole]
    return any(check.verdict == "inconclusive" and check.metric in whole for check in judgement.checks)
