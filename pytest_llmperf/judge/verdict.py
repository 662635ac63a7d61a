"""From launches and a baseline to a verdict: numbers in, a decision and its reason out.

What is held against what, and how much it may change, is ``policy.py``'s; how speed is decided is ``stats.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_high, median_low

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.stats import Decision, Difference, Rule, decide, interval, may_be_its_gpu
from pytest_llmperf.judge.validity import unusable
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, Metric, measured
from pytest_llmperf.records.result import Check, Verdict, joined_reasons, worst_of
from pytest_llmperf.support.formats import in_sentence, percent


@dataclass(frozen=True)
class Judgement:
    """What was decided, and why."""

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
    """The verdict on a measurement; ``extra`` are figures from elsewhere (MFU), shown with the rest.

    ``troubles`` are what ``validity.troubles`` found against the spec; what is wrong whatever the spec says is found
    here too, so that no figure which is none ever passes. ``invalid`` comes before everything: a figure that cannot be
    trusted is neither good nor bad, and is not shown, since somebody would quote it.
    """
    found = dict.fromkeys([*troubles, *_not_comparable(launches, baseline), *_impossible(extra)])
    if found:
        return Judgement("invalid", joined_reasons(found), ())
    if baseline is None:
        checks = [_new(metric, launches, policy.tolerances.get(name)) for name, metric in measured().items()]
        return Judgement("new", NEW, (*checks, *extra))
    metrics = MetricChecks(
        launches,
        Reference.of(baseline),
        policy.difference(launches, baseline.launches),
        policy.at(launches, baseline),
    )
    return _judged(metrics, extra)


def judge_pairs(
    pairs: Sequence[tuple[Launch, Launch]],
    policy: Policy,
    troubles: Sequence[str] = (),
    extra: Sequence[Check] = (),
) -> Judgement:
    """The verdict on the second of each pair against the first, which took turns on the same hardware."""
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    found = dict.fromkeys([*troubles, *_not_comparable([*before, *after], None), *_impossible(extra)])
    if found:
        return Judgement("invalid", joined_reasons(found), ())
    difference = stats.paired_difference(pairs, policy.noise)
    return _judged(MetricChecks(after, Reference(before, before, before), difference, policy.in_pairs()), extra)


def _judged(metrics: MetricChecks, extra: Sequence[Check]) -> Judgement:
    checks = [metrics.check(metric) for metric in measured().values()]
    gating = [check for check in checks if check.verdict is not None]
    verdict = worst_of(check.verdict for check in gating)
    reason = ", ".join(sentence(check) for check in gating if check.verdict == verdict)
    if verdict == "pass":
        reason = within_tolerance(metrics.launches) if gating else "no metric gates this case"
    # What is lost was shown by as many launches as it takes: another metric's would not mend it.
    return Judgement(verdict, reason, (*checks, *extra), metrics.undecided and verdict != "regressed")


def joined(judgement: Judgement, checks: Sequence[Check], *, undecided: bool) -> Judgement:
    """``judgement`` with ``checks`` that were decided elsewhere; the case is as bad as its worst."""
    everything = (*judgement.checks, *checks)
    told = [check for check in checks if check.verdict not in (None, "pass", "new")]
    worst = worst_of([judgement.verdict, *(check.verdict for check in told)])
    sentences = [sentence(check) for check in told if check.verdict == worst]
    if worst == judgement.verdict:
        sentences.insert(0, judgement.reason)
    # No launch of one check mends another's loss.
    undecided = (judgement.undecided or undecided) and worst != "regressed"
    return Judgement(worst, ", ".join(sentences), everything, undecided)


def _not_comparable(launches: Sequence[Launch], baseline: Baseline | None) -> Iterator[str]:
    if not launches:
        yield "no launch was measured"
    for launch in launches:
        yield from unusable(launch)
    tokens = sorted({launch.tokens_per_step for launch in launches})
    if len(tokens) > 1:
        yield f"launches differ in their tokens a step: {', '.join(map(str, tokens))}"
    for launch in baseline.launches if baseline else ():
        yield from (f"the baseline cannot serve: {line}" for line in unusable(launch))


def _impossible(extra: Sequence[Check]) -> Iterator[str]:
    for check in extra:
        if not math.isfinite(check.value):
            yield f"{check.metric} is {check.value}"
        elif check.value > 1 and check.metric in METRICS and METRICS[check.metric].of_the_chip:
            yield f"{check.metric} {check.value * 100:.0f} % is more than the chip can do"


def _new(metric: Metric, launches: Sequence[Launch], tolerance: float | None) -> Check:
    return metric.check(
        metric.read(launches),
        detail=metric.detail(launches) if metric.detail else "",
        tolerance=tolerance,
        verdict=None if tolerance is None else "new",
    )


def highest(metric: Metric, baseline: Baseline, policy: Policy) -> float:
    """With how much of ``metric``, which is ``confirmed``, a launch passes."""
    return limit(metric, lasting(metric, Reference.of(baseline)), policy.tolerances[metric.name])


#: The reason of a case that nothing is stored of.
NEW = "no baseline yet"
#: Launches: one alone condemns nobody (decision 9).
CONFIRMED_BY = 2
#: What is said of a figure that one alone has shown.
OF_ONE_LAUNCH = "of one launch alone"
#: The same of a loss that is decided at the run's end.
WAITS = (
    "slower than its limit when it was launched, on a GPU that nothing told of (no baseline, no comparable calibration,"
    " few other cases): decided at the run's end; a calibration (--perf-calibration auto, the default) tells at once"
)


@dataclass(frozen=True)
class Reference:
    """The launches that a measurement is held against; ``Baseline`` says which each are."""

    stored: Sequence[Launch]
    newest: Sequence[Launch]
    explained: Sequence[Launch]

    @classmethod
    def of(cls, baseline: Baseline) -> Reference:
        return cls(baseline.launches, baseline.newest, baseline.explained)


class MetricChecks:
    """One measurement against what it is held against, metric by metric."""

    def __init__(
        self,
        launches: Sequence[Launch],
        reference: Reference,
        difference: Difference,
        policy: Policy,
    ) -> None:
        self.launches = launches
        self._policy, self._rule = policy, policy.rule
        self._reference = reference
        self._difference = difference
        self.undecided = False

    def check(self, metric: Metric) -> Check:
        """The check of one metric; notes where another launch is wanted."""
        bare = _new(metric, self.launches, self._policy.tolerances.get(metric.name))
        by_rule = {"speed": lambda _, check: self._speed(check), "confirmed": self._confirmed, "exact": self._exact}
        return by_rule[metric.rule](metric, bare)

    def _speed(self, check: Check) -> Check:
        check = replace(check, known_tolerance=self._policy.on_known.get(check.metric))
        speed = speed_check(check, self._difference, self._rule)
        if speed.check.verdict == "regressed" and check.tolerance is not None and self._waits(check.tolerance):
            return replace(speed.check, verdict="inconclusive", detail=WAITS)  # no launch of its own tells more
        self.undecided |= speed.undecided or self._wants_confirmation(check)
        return speed.check

    def _waits(self, tolerance: float) -> bool:
        return self._policy.waits and may_be_its_gpu(self._difference, tolerance, self._rule)

    def _wants_confirmation(self, check: Check) -> bool:
        """Whether this one launch would not pass if its GPU were known: once it is, one alone condemns nobody."""
        if check.known_tolerance is None or len(self.launches) >= min(CONFIRMED_BY, self._rule.budget):
            return False
        return max(self._difference.each) > math.log1p(check.known_tolerance)

    def _confirmed(self, metric: Metric, check: Check) -> Check:
        reference = lasting(metric, self._reference)
        if check.tolerance is None:
            return _beside(check, reference)
        most = limit(metric, reference, check.tolerance)
        launches, seen = horizon(self.launches) if metric.whole else (self.launches, "")
        check = replace(check, value=metric.read(launches), detail=seen or check.detail)
        check = _beside(check, reference)
        if check.value <= most:
            return replace(check, limit=most, verdict=None if seen else "pass")
        if sum(metric.read([launch]) > most for launch in self.launches) < CONFIRMED_BY:
            # A fresh host compiles every kernel anew, once. Where the budget is one launch, it stays at that.
            self.undecided |= self._rule.budget >= CONFIRMED_BY
            return replace(check, limit=most, verdict="inconclusive", detail=check.detail or OF_ONE_LAUNCH)
        return replace(check, limit=most, verdict="regressed")

    def _exact(self, metric: Metric, check: Check) -> Check:
        # Of two that differ the rest tells which one is odd.
        newest = [metric.read([launch]) for launch in self._reference.newest]
        reference = sorted((median_low(newest), _middle(metric, self._reference.stored), median_high(newest)))[1]
        check = _beside(check, reference)
        if check.tolerance is None:
            return check
        worse, better = reference * (1 + check.tolerance), reference / (1 + check.tolerance)
        values = [metric.read([launch]) for launch in self.launches]
        beyond, leaner = (sum(value > worse for value in values), sum(value < better for value in values))
        if beyond == len(values):
            verdict: Verdict = self._lost(len(values))
        elif beyond >= CONFIRMED_BY:
            verdict = "inconclusive"  # neither one odd launch nor all of them
        else:
            verdict = self._gained(leaner, len(values))
        return replace(check, limit=worse, verdict=verdict)

    def _gained(self, leaner: int, launches: int) -> Verdict:
        """Of so many launches some are leaner: whether that is a gain; one alone becomes no reference."""
        enough = min(CONFIRMED_BY, self._rule.budget)
        if leaner and launches < enough:
            self.undecided = True
            return "inconclusive"
        return "improved" if leaner >= enough else "pass"

    def _lost(self, launches: int) -> Verdict:
        """Of so many launches each is beyond a limit: whether that is a loss, or another one has to say so too."""
        enough = CONFIRMED_BY if all(map(_repeats_itself, self.launches)) else self._rule.budget
        if launches >= min(enough, self._rule.budget):
            return "regressed"
        self.undecided = True
        return "inconclusive"


def horizon(launches: Sequence[Launch]) -> tuple[Sequence[Launch], str]:
    """Those that took all their steps; where none did all of them, and how many of its steps one has seen."""
    whole = [launch for launch in launches if not launch.planned_steps]
    return (whole, "") if whole else (launches, launches[-1].seen_steps)


def within_tolerance(launches: Sequence[Launch]) -> str:
    """Why they pass, and over how many of their steps where that is not all."""
    seen = horizon(launches)[1]
    return f"within tolerance ({seen})" if seen else "within tolerance"


@dataclass(frozen=True)
class Decided:
    """One check, and whether another launch is worth its cost."""

    check: Check
    undecided: bool


def speed_check(check: Check, difference: Difference, rule: Rule) -> Decided:
    """``check``, of which the value and the tolerance are known, by how much slower its launches are."""
    ratio = math.exp(-difference.log if check.higher_is_better else difference.log)
    low, high = sorted(math.expm1(-log if check.higher_is_better else log) for log in interval(difference))
    check = replace(check, baseline=check.value / ratio, change=ratio - 1, low=low, high=high)
    if check.tolerance is None:
        return Decided(check, undecided=False)
    decision = decide(difference, check.tolerance, rule)
    sign = -1 if check.higher_is_better else 1
    # Told as the metric changes: a step that takes twice as long is half the rate.
    slower = decision.detectable
    check = replace(
        check,
        limit=check.value / ratio * math.exp(sign * decision.alarm_log),
        detectable=slower / (1 + slower) if check.higher_is_better else slower,
        verdict=decision.verdict or "inconclusive",
        detail=check.detail or "; ".join(filter(None, [_of_gpus(difference), _blind(decision, check.tolerance)])),
    )
    return Decided(check, undecided=decision.verdict is None)


def lasting(metric: Metric, held: Reference) -> float:
    """How much of a metric of which more is worse, and that one launch alone may show, a launch usually has."""
    # A loss that was accepted is none any more while it lasts, however many launches are stored from before it.
    lasting = min(_middle(metric, held.explained), _middle(metric, held.newest))
    return max(_middle(metric, held.stored), lasting)


def limit(metric: Metric, reference: float, tolerance: float) -> float:
    """With how much of it a launch passes."""
    return max(reference * (1 + tolerance), reference + metric.slack)


def _middle(metric: Metric, launches: Sequence[Launch]) -> float:
    return median_low(metric.read([launch]) for launch in launches)


def _beside(check: Check, reference: float) -> Check:
    return replace(check, baseline=reference, change=check.value / reference - 1 if reference else None)


# Per cent.
_LEAST_TOLD = 0.2

# What a gate sees nine times in ten is always somewhat more than its tolerance.
_BLIND = 1.5


def _blind(decision: Decision, tolerance: float) -> str:
    if decision.detectable <= _BLIND * tolerance:
        return ""
    return f"this gate sees {decision.detectable * 100:.1f} %, not its tolerance of {tolerance * 100:.1f} %"


def _of_gpus(difference: Difference) -> str:
    percent = math.expm1(abs(difference.of_gpus)) * 100
    if percent < _LEAST_TOLD:
        return ""
    way = "slower" if difference.of_gpus > 0 else "faster"
    return f"its GPU is {way} by {percent:.1f} %, as other cases and calibrations tell: no part of the change"


def _repeats_itself(launch: Launch) -> bool:
    """Whether its memory is the same to the byte in every launch: one rank's, where no compiler tries kernels."""
    return len(launch.ranks) == 1 and not launch.seen.compilation.compiled_graphs


def sentence(check: Check) -> str:
    """What a check says, for a reason: the figure, and what it is held against."""
    beside = [f"{check.metric} {in_sentence(check.value, check.unit)}"]
    if check.verdict == "changed" and check.value == check.baseline:
        return f"{beside[0]} as in the baseline, others by name ({check.detail})"
    for word, value in (("baseline", check.baseline), ("limit", check.limit)):
        beside += [] if value is None else [f"{word} {in_sentence(value, check.unit)}"]
    return ", ".join(beside) + ("" if check.change is None else f" ({percent(check.change)})")
