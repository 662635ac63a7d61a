"""From launches and a baseline to a verdict: numbers in, a decision and its reason out.

First version: a tolerance for each metric. What a tolerance means, and in which direction a metric gets worse, is
decided here and nowhere else.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.figures import figure, percent
from pytest_llmperf.judge.validity import unusable
from pytest_llmperf.measurement import Launch
from pytest_llmperf.result import VERDICTS, Check


@dataclass(frozen=True)
class Metric:
    """How a metric is read off launches, and which way is worse."""

    unit: str
    of: Callable[[Sequence[Launch]], float]
    higher_is_better: bool = False


#: In the order in which they are shown; the names are the design's.
METRICS: Mapping[str, Metric] = {
    "tokens_per_second_per_gpu": Metric(
        "tokens/s", lambda runs: stats.pooled_tokens_per_second(runs) / len(runs[0].ranks), higher_is_better=True
    ),
    "tokens_per_second": Metric("tokens/s", stats.pooled_tokens_per_second, higher_is_better=True),
    "step_seconds": Metric("s", stats.pooled_step_seconds),
    "first_step_seconds": Metric("s", stats.pooled_first_step_seconds),
    # The highest of all launches: a ceiling that one of them broke is broken.
    "peak_reserved_bytes": Metric("bytes", lambda runs: float(max(launch.peak_reserved_bytes for launch in runs))),
    "peak_allocated_bytes": Metric("bytes", lambda runs: float(max(launch.peak_allocated_bytes for launch in runs))),
    "final_loss": Metric("1", lambda runs: runs[-1].losses[-1]),
}

_GPU_TOLERANCES = {"tokens_per_second_per_gpu": 0.05, "peak_reserved_bytes": 0.01}

# Identical runs on a CPU spread 20 % and more, twice that beside a busy neighbour, and the resident memory of a small
# process is mostly libraries and allocator: a tight gate would cry wolf every day.
_CPU_TOLERANCES = {"tokens_per_second_per_gpu": 3.0, "peak_reserved_bytes": 0.5}


@dataclass(frozen=True)
class Policy:
    """Tolerances, as fractions, by metric; a metric without one is shown and gates nothing.

    Raises:
        ValueError: an unknown metric (with the nearest known one), or a tolerance that is not a positive fraction.
    """

    tolerances: Mapping[str, float]

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
        return cls(_GPU_TOLERANCES)

    @classmethod
    def for_cpu(cls) -> Policy:
        return cls(_CPU_TOLERANCES)

    def merged(self, tolerances: Mapping[str, float]) -> Policy:
        """This policy with these tolerances in place of its own."""
        return replace(self, tolerances={**self.tolerances, **tolerances})


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
        return Judgement("invalid", "; ".join(line.replace("; ", ", ") for line in found), ())
    checks = [_check(name, metric, launches, baseline, policy) for name, metric in METRICS.items()]
    gating = [check for check in checks if check.verdict is not None]
    if baseline is None:
        return Judgement("new", "no baseline yet", (*checks, *extra))
    verdict = min((check.verdict or "pass" for check in gating), key=VERDICTS.index, default="pass")
    reason = ", ".join(_sentence(check) for check in gating if check.verdict == verdict)
    if verdict == "pass":
        reason = "within tolerance" if gating else "no metric gates this case"
    return Judgement(verdict, reason, (*checks, *extra))


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
        elif check.metric == "mfu" and check.value > 1:
            yield f"mfu {check.value * 100:.0f} % is more than the chip can do"


def _check(name: str, metric: Metric, launches: Sequence[Launch], baseline: Baseline | None, policy: Policy) -> Check:
    value = metric.of(launches)
    check = Check(metric=name, value=value, unit=metric.unit, detail=_detail(name, launches))
    tolerance = policy.tolerances.get(name)
    if baseline is None:
        return replace(check, tolerance=tolerance, verdict=None if tolerance is None else "new")
    reference = metric.of(baseline.launches)
    change = value / reference - 1 if reference else None
    check = replace(check, baseline=reference, change=change, tolerance=tolerance)
    if tolerance is None:
        return check
    worse, better = reference * (1 + tolerance), reference / (1 + tolerance)
    if metric.higher_is_better:
        worse, better = better, worse
    return replace(check, limit=worse, verdict=_compare(value, worse, better, metric.higher_is_better))


def _compare(value: float, worse: float, better: float, higher_is_better: bool) -> str:
    sign = 1 if higher_is_better else -1
    if sign * value < sign * worse:
        return "regressed"
    return "improved" if sign * value > sign * better else "pass"


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
