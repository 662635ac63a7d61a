"""From launches and a baseline to a verdict: numbers in, a decision and its reason out.

What a tolerance means, and in which direction a metric gets worse, is decided here and nowhere else. How speed is
decided is ``sequential.py``'s.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.experience import Experience
from pytest_llmperf.judge.figures import figure, percent
from pytest_llmperf.judge.noise import Noise, Spread
from pytest_llmperf.judge.sequential import Decision, Rule, decide
from pytest_llmperf.judge.stats import Difference
from pytest_llmperf.judge.validity import unusable
from pytest_llmperf.measurement import Launch
from pytest_llmperf.result import VERDICTS, Check


@dataclass(frozen=True)
class Metric:
    """How a metric is read off launches, which way is worse, and by which rule it is decided."""

    unit: str
    of: Callable[[Sequence[Launch]], float]
    higher_is_better: bool = False
    rule: str = "exact"
    """``speed``: by statistics (``sequential.py``). ``confirmed``: the best of the launches, and never one alone.
    ``exact``: as measured. Both are held against the middle one of the baseline's launches, of those accepted last
    where it is exact: an odd one that was stored must not move the limit."""
    slack: float = 0.0
    """In the metric's own unit: a smaller change is no change, whatever fraction it is."""


#: In the order in which they are shown; the names are the design's.
METRICS: Mapping[str, Metric] = {
    "tokens_per_second_per_gpu": Metric(
        "tokens/s",
        lambda runs: stats.pooled_tokens_per_second(runs) / len(runs[0].ranks),
        higher_is_better=True,
        rule="speed",
    ),
    "tokens_per_second": Metric("tokens/s", stats.pooled_tokens_per_second, higher_is_better=True, rule="speed"),
    "step_seconds": Metric("s", stats.pooled_step_seconds, rule="speed"),
    # Kernels compile, caches fill, autotuners try: the best launch says what the code takes.
    "first_step_seconds": Metric(
        "s", lambda runs: min(launch.first_step_seconds for launch in runs), rule="confirmed", slack=1.0
    ),
    # A median hides what only some steps lose. A hiccup in one launch is nobody's fault; one in every launch is. The
    # steadiest H200 launch lost nothing, the least steady of 300 half of this.
    "stall_share": Metric("1", lambda runs: min(launch.steady.stalls for launch in runs), rule="confirmed", slack=0.01),
    # The highest of all launches: a ceiling that one of them broke is broken.
    "peak_reserved_bytes": Metric("bytes", lambda runs: float(max(launch.peak_reserved_bytes for launch in runs))),
    "peak_allocated_bytes": Metric("bytes", lambda runs: float(max(launch.peak_allocated_bytes for launch in runs))),
    "final_loss": Metric("1", lambda runs: runs[-1].losses[-1]),
}

# 2 % on hardware that the baseline knows. Eight GPUs of one host differ by 0.6 % (sd), hosts by 2 %.
_GPU_TOLERANCES = {
    "tokens_per_second_per_gpu": 0.02,
    "first_step_seconds": 2.0,
    "stall_share": 0.02,
    "peak_reserved_bytes": 0.01,
}
_GPU_ELSEWHERE = 0.05
_GPU_PAIRED = 0.01
_GPU_NOISE = Noise(host=Spread(0.008, 6), site=Spread(0.008, 10), session=Spread(0.004, 6), launch=Spread(0.004, 8))

# Identical runs on a CPU spread 20 % and more, twice that beside a busy neighbour, and the resident memory of a small
# process is mostly libraries and allocator: a tight gate would cry wolf every day.
_CPU_TOLERANCES = {
    "tokens_per_second_per_gpu": 3.0,
    "first_step_seconds": 9.0,
    "peak_reserved_bytes": 0.5,
}
# Of a quiet one: it matters only to who sets a tolerance of their own, and a busy one soon teaches more.
_CPU_NOISE = Noise(host=Spread(0.10, 8), site=Spread(0.10, 8), session=Spread(0.05, 8), launch=Spread(0.05, 8))


@dataclass(frozen=True)
class Policy:
    """Tolerances, as fractions, by metric; a metric without one is shown and gates nothing.

    Raises:
        ValueError: an unknown metric (with the nearest known one), or a tolerance that is not a positive fraction.
    """

    tolerances: Mapping[str, float]
    noise: Noise = _CPU_NOISE
    """What is believed of the machine's noise before its baselines have shown it."""
    elsewhere: Mapping[str, float] = field(default_factory=dict)
    """Tolerances in place of those above on hardware that a baseline has not seen; none where a user chose."""
    paired: Mapping[str, float] = field(default_factory=dict)
    """The same, where launches of both sides took turns on the same hardware."""

    def __post_init__(self) -> None:
        for metric, tolerance in self.tolerances.items():
            if metric not in METRICS:
                nearest = difflib.get_close_matches(metric, METRICS, n=1)
                hint = f", did you mean {nearest[0]!r}?" if nearest else f"; known: {', '.join(METRICS)}"
                raise ValueError(f"tolerance for unknown metric {metric!r}{hint}")
            if not _is_positive_number(tolerance):
                raise ValueError(f"tolerance {metric}={tolerance!r} must be a positive fraction, e.g. 0.05 for 5 %")

    @classmethod
    def for_gpu(cls) -> Policy:
        rate = "tokens_per_second_per_gpu"
        return cls(_GPU_TOLERANCES, _GPU_NOISE, {rate: _GPU_ELSEWHERE}, {rate: _GPU_PAIRED})

    @classmethod
    def for_cpu(cls) -> Policy:
        return cls(_CPU_TOLERANCES, _CPU_NOISE)

    def merged(self, tolerances: Mapping[str, float]) -> Policy:
        """This policy with these tolerances in place of its own."""
        elsewhere, paired = (
            {metric: value for metric, value in special.items() if metric not in tolerances}
            for special in (self.elsewhere, self.paired)
        )
        return replace(self, tolerances={**self.tolerances, **tolerances}, elsewhere=elsewhere, paired=paired)

    def at(self, launches: Sequence[Launch], baseline: Baseline) -> Policy:
        """This policy where ``launches`` ran: on hardware that ``baseline`` knows, or elsewhere."""
        known = {launch.site for launch in baseline.launches}
        if all(launch.site in known for launch in launches):
            return self
        return replace(self, tolerances={**self.tolerances, **self.elsewhere})

    def in_pairs(self) -> Policy:
        """This policy for launches that took turns."""
        return replace(self, tolerances={**self.tolerances, **self.paired})


def _is_positive_number(value: object) -> bool:
    # Tolerances come from users' own files too, where text and yes are easily written.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True)
class Judgement:
    """What was decided, and why."""

    verdict: str
    reason: str
    """Reasons of an ``invalid`` case are separated by ``"; "``."""
    checks: tuple[Check, ...]
    undecided: bool = False
    """Whether another launch is worth its cost; the verdict is then what these launches alone would give."""


def judge(  # noqa: PLR0913, PLR0917 - what there is to know
    launches: Sequence[Launch],
    baseline: Baseline | None,
    policy: Policy,
    troubles: Sequence[str] = (),
    extra: Sequence[Check] = (),
    rule: Rule | None = None,
    experience: Experience | None = None,
) -> Judgement:
    """The verdict on a measurement; ``extra`` are figures from elsewhere (MFU), shown with the rest.

    ``troubles`` are what ``validity.troubles`` found against the spec; what is wrong whatever the spec says is found
    here too, so that no figure which is none ever passes. ``invalid`` comes before everything: a figure that cannot be
    trusted is neither good nor bad, and is not shown, since somebody would quote it.
    """
    found = dict.fromkeys([*troubles, *_not_comparable(launches, baseline), *_impossible(extra)])
    if found:
        return Judgement("invalid", "; ".join(line.replace("; ", ", ") for line in found), ())
    if baseline is None:
        checks = [_new(name, metric, launches, policy.tolerances.get(name)) for name, metric in METRICS.items()]
        return Judgement("new", "no baseline yet", (*checks, *extra))
    noise = experience.noise if experience else policy.noise
    court = _Court(
        launches,
        (baseline.launches, baseline.newest),
        stats.difference(launches, baseline.launches, noise),
        policy.at(launches, baseline),
        rule or Rule(),
    )
    return _judged(court, extra)


def judge_pairs(  # noqa: PLR0913, PLR0917 - what there is to know
    pairs: Sequence[tuple[Launch, Launch]],
    policy: Policy,
    troubles: Sequence[str] = (),
    extra: Sequence[Check] = (),
    rule: Rule | None = None,
    experience: Experience | None = None,
) -> Judgement:
    """The verdict on the second of each pair against the first, which took turns on the same hardware."""
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    found = dict.fromkeys([*troubles, *_not_comparable([*before, *after], None), *_impossible(extra)])
    if found:
        return Judgement("invalid", "; ".join(line.replace("; ", ", ") for line in found), ())
    noise = experience.noise if experience else policy.noise
    difference = stats.paired_difference(pairs, noise)
    return _judged(_Court(after, (before, before), difference, policy.in_pairs(), rule or Rule()), extra)


def _judged(court: _Court, extra: Sequence[Check]) -> Judgement:
    checks = [court.check(name, metric) for name, metric in METRICS.items()]
    gating = [check for check in checks if check.verdict is not None]
    verdict = min((check.verdict or "pass" for check in gating), key=VERDICTS.index, default="pass")
    reason = ", ".join(_sentence(check) for check in gating if check.verdict == verdict)
    if verdict == "pass":
        reason = "within tolerance" if gating else "no metric gates this case"
    # A ceiling that is broken stays broken: no launch could mend it.
    undecided = court.undecided and not any(
        check.verdict == "regressed" and METRICS[check.metric].rule == "exact" for check in gating
    )
    return Judgement(verdict, reason, (*checks, *extra), undecided)


def joined(judgement: Judgement, checks: Sequence[Check], *, undecided: bool) -> Judgement:
    """``judgement`` with ``checks`` that were decided elsewhere; the case is as bad as its worst."""
    everything = (*judgement.checks, *checks)
    told = [check for check in checks if check.verdict not in (None, "pass", "new")]
    worst = min([judgement.verdict, *(check.verdict or "pass" for check in told)], key=VERDICTS.index)
    sentences = [_sentence(check) for check in told if check.verdict == worst]
    if worst == judgement.verdict:
        sentences.insert(0, judgement.reason)
    if worst == "regressed":
        undecided = False  # no launch of one check mends another's loss
    return Judgement(worst, ", ".join(sentences), everything, judgement.undecided or undecided)


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


# Shares of what the chip's datasheet promises.
_OF_THE_CHIP = frozenset({"mfu", "least_memory_traffic"})


def _impossible(extra: Sequence[Check]) -> Iterator[str]:
    for check in extra:
        if not math.isfinite(check.value):
            yield f"{check.metric} is {check.value}"
        elif check.metric in _OF_THE_CHIP and check.value > 1:
            yield f"{check.metric} {check.value * 100:.0f} % is more than the chip can do"


def _new(name: str, metric: Metric, launches: Sequence[Launch], tolerance: float | None) -> Check:
    return Check(
        metric=name,
        value=metric.of(launches),
        unit=metric.unit,
        detail=_detail(name, launches),
        tolerance=tolerance,
        verdict=None if tolerance is None else "new",
    )


class _Court:
    """One measurement against what it is held against, metric by metric."""

    def __init__(
        self,
        launches: Sequence[Launch],
        reference: tuple[Sequence[Launch], Sequence[Launch]],
        difference: Difference,
        policy: Policy,
        rule: Rule,
    ) -> None:
        self._launches, self._policy, self._rule = launches, policy, rule
        self._reference = {"confirmed": reference[0], "exact": reference[1]}
        self._difference = difference
        self.undecided = False

    def check(self, name: str, metric: Metric) -> Check:
        """The check of one metric; notes where another launch is wanted."""
        bare = _new(name, metric, self._launches, self._policy.tolerances.get(name))
        by_rule = {"speed": self._speed, "confirmed": self._confirmed, "exact": self._exact}
        return by_rule[metric.rule](metric, bare)

    def _speed(self, metric: Metric, check: Check) -> Check:
        ratio = math.exp(-self._difference.log if metric.higher_is_better else self._difference.log)
        check = replace(check, baseline=check.value / ratio, change=ratio - 1)
        if check.tolerance is None:
            return check
        decision = decide(self._difference, check.tolerance, self._rule)
        self.undecided |= decision.verdict is None
        sign = -1 if metric.higher_is_better else 1
        # Told as the metric changes: a step that takes twice as long is half the rate.
        slower = decision.detectable
        return replace(
            check,
            limit=check.value / ratio * math.exp(sign * decision.alarm_log),
            detectable=slower / (1 + slower) if metric.higher_is_better else slower,
            verdict=decision.verdict or "inconclusive",
            detail=check.detail or _blind(decision, check.tolerance),
        )

    def _confirmed(self, metric: Metric, check: Check) -> Check:
        check, reference = self._beside(metric, check)
        if check.tolerance is None:
            return check
        limit = max(reference * (1 + check.tolerance), reference + metric.slack)
        if check.value <= limit:
            return replace(check, limit=limit, verdict="pass")
        if len(self._launches) < min(2, self._rule.budget):
            self.undecided = True
            return replace(check, limit=limit, verdict="inconclusive")
        return replace(check, limit=limit, verdict="regressed")

    def _exact(self, metric: Metric, check: Check) -> Check:
        check, reference = self._beside(metric, check)
        if check.tolerance is None:
            return check
        worse, better = reference * (1 + check.tolerance), reference / (1 + check.tolerance)
        verdict = "regressed" if check.value > worse else "improved" if check.value < better else "pass"
        return replace(check, limit=worse, verdict=verdict)

    def _beside(self, metric: Metric, check: Check) -> tuple[Check, float]:
        reference = median(metric.of([launch]) for launch in self._reference[metric.rule])
        change = check.value / reference - 1 if reference else None
        return replace(check, baseline=reference, change=change), reference


# What a gate sees nine times in ten is always somewhat more than its tolerance.
_BLIND = 1.5


def _blind(decision: Decision, tolerance: float) -> str:
    if decision.detectable <= _BLIND * tolerance:
        return ""
    return f"this gate sees {decision.detectable * 100:.1f} %, not its tolerance of {tolerance * 100:.1f} %"


def _detail(name: str, launches: Sequence[Launch]) -> str:
    if name != "peak_reserved_bytes" or len(launches[0].ranks) == 1:
        return ""
    worst = max(launches, key=lambda launch: launch.peak_reserved_bytes)
    return f"rank {worst.worst_memory_rank} of {len(worst.ranks)}"


def _sentence(check: Check) -> str:
    beside = [f"{check.metric} {figure(check.value, check.unit)}"]
    for word, value in (("baseline", check.baseline), ("limit", check.limit)):
        beside += [] if value is None else [f"{word} {figure(value, check.unit)}"]
    return ", ".join(beside) + ("" if check.change is None else f" ({percent(check.change)})")
