"""What a whole run says of its cases: each verdict by what all tell of its GPU, and what all have in common. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.gpu_knowledge import Knowledge, compared
from pytest_llmperf.judge.gpu_panel import Panel, cell_variances, design_of, doubted, residuals, unit_of
from pytest_llmperf.judge.pairs import keeps
from pytest_llmperf.judge.policy import Decision, Policy, Rule, decide, least_tolerance
from pytest_llmperf.judge.verdict import Decided, speed_check, within_tolerance
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, RATE, centre
from pytest_llmperf.records.result import VERDICTS, CaseResult, Check, Verdict, worst_of
from pytest_llmperf.support.formats import percent
from pytest_llmperf.support.interpreter import np, one_thread

# What failed has failed: a test cannot pass afterwards.
_OPEN = frozenset({"pass", "inconclusive", "changed", "improved"})
# A case by itself, of whose GPU nothing tells, is judged by the wider tolerance of that; logarithm.
_LEAST_TAKEN = 0.005
#: Of a loss that the run's own cases alone lay to their GPU: a library or a driver that all of them use looks the same.
ONLY_ITS_GPU = "slower beyond its tolerance, which only its GPU would explain, and nothing else tells of that"


def judged_later(result: CaseResult, stored: Sequence[Launch], knowledge: Knowledge, rule: Rule) -> CaseResult:
    """``result`` with its checks of speed made again against ``stored``; as it is where there is nothing to add."""
    gating = [check for check in result.checks if check.verdict is not None]
    is_open = result.verdict in _OPEN and not result.updated and not result.launches_before
    if not is_open or not result.launches or worst_of(check.verdict for check in gating) != result.verdict:
        return result
    difference = stats.difference(result.launches, stored, knowledge)
    is_told = knowledge.tells_of(map(unit_of, result.launches), result.digest, by_its_cases=False)

    def again(check: Check) -> Check:
        if check.metric not in METRICS or METRICS[check.metric].rule != "speed":
            return check
        if check.tolerance is not None and check.known_tolerance is not None:
            least = max(check.known_tolerance, least_tolerance(difference))
            check = replace(check, tolerance=min(check.tolerance, least))
        found = speed_check(replace(check, detail=""), difference, rule).check
        closest = found.known_tolerance or found.tolerance
        is_held = found.verdict == "pass" or found.is_by_itself
        if is_told or not is_held or closest is None or not is_laid_to_its_gpu(difference, closest):
            return found
        return replace(found, verdict="inconclusive", detail=ONLY_ITS_GPU, by_itself=None)

    checks = tuple(map(again, result.checks))
    verdict = worst_of(check.verdict for check in checks)
    if verdict == result.verdict and verdict in ("pass", "changed"):
        return replace(result, checks=checks)
    said = ", ".join(check.sentence for check in checks if check.verdict == verdict)
    reason = said or within_tolerance(result.launches)
    if verdict == result.verdict:
        return replace(result, checks=checks, reason=reason)
    note = f"{result.verdict} when it was launched, {verdict} by what the run knows of its GPU now"
    return replace(result, checks=checks, verdict=verdict, reason=reason, notes=(*result.notes, note))


def is_laid_to_its_gpu(difference: stats.Difference, tolerance: float) -> bool:
    """Whether a loss beyond ``tolerance``, the closest, passes for what its GPU is believed to do."""
    beyond = max(math.log1p(tolerance), difference.by_itself)
    return difference.of_gpus >= _LEAST_TAKEN and difference.log + difference.of_gpus > beyond


# The change that all cases of a run have in common, once what their GPUs are known to do is taken off.

# Of fewer cases "all" means nothing.
_FEWEST = 4
#: So many of them have to have moved by like amounts.
MOST = 0.75
# Of the change: a case that lies further from it has not moved so; one that has not moved at all lies all of it away.
_ALIKE = 0.5
# Of both sides together, in the interval that is told.
_INTERVAL = 0.95
# A smaller one is no news: hosts of one kind differ by more in what no factor tells.
_NEWS = 0.005
# As of one case on a GPU that is not known.
_UNCALIBRATED = 0.05
# Before anything is seen a change may be as large as it likes.
_ANY = 1.0


@dataclass(frozen=True)
class CommonChange:
    log: float
    error: float
    df: float
    cases: int
    gpus: int
    is_known: bool
    """Whether a calibration, or stored launches of the very GPUs, tell what each of these would have done."""
    is_calibrated: bool
    """Whether calibrations of the same day do."""
    together: float
    """Share of the cases that moved so, by like amounts."""

    def verdict(self, tolerance: float, rule: Rule) -> Verdict:
        """By the rule of a single case: beyond ``tolerance`` and the noise; a loss beyond the one is no pass. A GPU of
        which nothing tells may move all cases alike: then no less is gated than GPUs of a kind were ever seen apart."""
        least = max(tolerance, 0.0 if self.is_known else _UNCALIBRATED)
        beyond = max(math.log1p(least), stats.quantile(1 - rule.alpha, self.df) * self.error)
        if self.together < MOST:
            return "pass"
        if abs(self.log) > beyond:
            return "regressed" if self.log > 0 else "improved"
        return "inconclusive" if self.log > math.log1p(tolerance) else "pass"

    @property
    def ratio(self) -> float:
        """By which fraction steps take longer."""
        return math.expm1(self.log)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the slow-down, 95 %; fractions."""
        wide = stats.quantile((1 + _INTERVAL) / 2, self.df) * self.error
        return math.expm1(self.log - wide), math.expm1(self.log + wide)

    @property
    def is_news(self) -> bool:
        """Whether a change that somebody would look for is likely."""
        low, high = self.interval
        return self.together >= MOST and min(abs(low), abs(high)) > _NEWS and low * high > 0


@one_thread()
def common_change(knowledge: Knowledge) -> CommonChange | None:
    """Of what the run has seen; ``None``: too few cases that are known from before. A change is a shift of all of the
    run's launches, and of no calibration, estimated by generalised least squares beside the effects of all GPUs."""
    known = {each.series for each in knowledge.stored}
    seen = [each for each in knowledge.seen if each.series in known]
    launched = [each for each in seen if not each.is_calibration]
    cases = {each.series for each in launched}
    if len(cases) < _FEWEST:
        return None
    model, panel = knowledge.model, Panel.of(knowledge.stored, seen)
    shifted = panel.may_have_changed
    design = np.column_stack([design_of(model, panel), shifted])
    prior = np.zeros((design.shape[1],) * 2)
    prior[:-1, :-1], prior[-1, -1] = model.covariance(panel.units), _ANY**2
    found = doubted(panel, design, prior, cell_variances(model, panel))
    left = residuals(panel, design, found)
    log = float(found.means[-1])
    places = {(device, each.unit.day) for each in launched for device in each.unit.devices}
    calibrated = knowledge.calibrated_places(seen)
    by_launches = {device for device, _ in compared([each for each in knowledge.stored if not each.is_calibration])}
    return CommonChange(
        log=log,
        error=math.sqrt(float(found.covariance[-1, -1])),
        df=model.effects_df,
        cases=len(cases),
        gpus=len({device for device, _ in places}),
        is_known=all(place in calibrated or place[0] in by_launches for place in places),
        is_calibrated=places <= calibrated,
        together=float((abs(left[shifted]) <= _ALIKE * abs(log)).mean()),
    )


# Scaling efficiency: a GPU's rate in a wide case over its rate at a narrow width, and the verdict on it.

METRIC = "scaling_efficiency"


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """The width that a case's efficiency is over."""

    gpus: int
    launches: tuple[Launch, ...]
    """Of this run; where it measured none, those of the baseline."""
    baseline: Baseline | None
    """As it was before this run recorded anything."""
    in_this_run: bool

    @property
    def name(self) -> str:
        """``1 GPU of this run``."""
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)} {'of this run' if self.in_this_run else 'as stored'}"


@dataclass(frozen=True)
class Terms:
    at_least: float | None = None
    tolerance: float | None = None
    """Fraction by which it may fall below the baseline's; ``None``: as throughput may."""


def judge_efficiency(
    launches: Sequence[Launch], baseline: Baseline | None, narrow: Narrow, policy: Policy, terms: Terms
) -> Decided:
    """The efficiency of ``launches`` over ``narrow``, held against a floor and against both widths' baselines. It is
    ``regressed`` against these only where the ratio fell and the wide case itself is slower. Where the narrow width was
    not measured in this run the ratio says no more than throughput does, and gates by its floor alone."""
    value = METRICS[RATE].read(launches) / METRICS[RATE].read(narrow.launches)
    check = METRICS[METRIC].check(value, detail=f"over {narrow.name}")
    verdicts: list[Verdict] = []
    undecided = False
    if baseline is not None and narrow.baseline is not None:
        found = _beside_baselines(check, launches, (baseline, narrow), policy, terms)
        check, undecided = found.check, found.undecided
        verdicts += [check.verdict] if check.verdict else []
    if terms.at_least is not None:
        # On this host, and step times compare work of one size; widths that share a global batch differ in it.
        apart = _apart(launches, narrow.launches, policy.noise, here=narrow.in_this_run)
        shift = math.log(stats.work_of(launches[0]) / stats.work_of(narrow.launches[0])) - math.log(terms.at_least)
        kept = keeps(shift - apart.log, [shift - each for each in apart.each], apart, policy.rule)
        verdicts.append(kept or "inconclusive")
        floor = f"; its test asks for {terms.at_least * 100:g} %"
        check = replace(check, limit=max(terms.at_least, check.limit or 0.0), detail=check.detail + floor)
        undecided |= kept is None
    verdict = worst_of(verdicts) if verdicts else None
    return Decided(replace(check, verdict=verdict), undecided and verdict != "regressed")


def _beside_baselines(
    check: Check, launches: Sequence[Launch], widths: tuple[Baseline, Narrow], policy: Policy, terms: Terms
) -> Decided:
    baseline, narrow = widths
    own = policy.difference(launches, baseline.launches)
    if not narrow.in_this_run or narrow.baseline is None:
        ratio = math.exp(-own.log)
        return Decided(replace(check, baseline=check.value / ratio, change=ratio - 1))
    other = policy.difference(narrow.launches, narrow.baseline.launches)
    both = less(own, other)
    tolerance = terms.tolerance or max(
        policy.at(launches, baseline).tolerances.get(RATE, 0.0),
        policy.at(narrow.launches, narrow.baseline).tolerances.get(RATE, 0.0),
    )
    ratio = math.exp(-both.log)
    check = replace(check, baseline=check.value / ratio, change=ratio - 1)
    if not tolerance:  # a user's policy without one: shown, and gates nothing
        return Decided(check)
    of_ratio, of_own = decide(both, tolerance, policy.rule), decide(own, tolerance, policy.rule)
    verdict = milder(of_ratio.verdict or "inconclusive", of_own.verdict or "inconclusive")
    check = replace(
        check,
        tolerance=tolerance,
        limit=check.value / ratio * math.exp(-of_ratio.alarm_log),
        detectable=of_ratio.detectable / (1 + of_ratio.detectable),
        verdict=verdict,
        detail=check.detail + _cause(of_ratio, of_own, math.exp(-other.log) - 1),
    )
    return Decided(check, undecided=verdict == "inconclusive" and None in (of_ratio.verdict, of_own.verdict))


def less(wide: stats.Difference, narrow: stats.Difference) -> stats.Difference:
    """By how much more ``wide`` slowed down than ``narrow``, with the noise of both, taken to be independent: a host or
    a day that moved both alike would make it better known. Degrees of freedom: Satterthwaite (1946)."""
    variance, df = stats.variance_of([(wide.error**2, wide.df), (narrow.error**2, narrow.df)])
    each = tuple(each - narrow.log for each in wide.each)
    return stats.Difference(wide.log - narrow.log, math.sqrt(variance), df, wide.launch_sd, each)


def milder(ratio: Verdict, own: Verdict) -> Verdict:
    """The verdict on which both words agree: a loss needs both to say so, and so does a gain."""
    if ratio == own == "improved":
        return "improved"
    plain: list[Verdict] = ["pass" if verdict == "improved" else verdict for verdict in (ratio, own)]
    return max(plain, key=VERDICTS.index)


def _cause(of_ratio: Decision, of_own: Decision, narrow_change: float) -> str:
    lost = [decision.verdict == "regressed" for decision in (of_ratio, of_own)]
    if all(lost) or not any(lost):
        return ""
    told = f"; that width's own rate changed by {percent(narrow_change)}"
    if lost[0]:
        return f"{told}, this case's is not shown to be slower"
    return told + (": it is not scaling that was lost" if of_ratio.verdict == "pass" else "")


def _apart(wide: Sequence[Launch], narrow: Sequence[Launch], noise: stats.Noise, *, here: bool) -> stats.Difference:
    """The step times of one width against another's; of one host (``here``) by what its launches and days scatter."""
    if not here:
        return stats.difference(wide, narrow, noise)
    spread = noise.launch.moderated(stats.within_sessions(wide, narrow))
    # A launch that ended before its median was known scatters by that much more.
    squares = [fmean(max(spread.sd, launch.median_error) ** 2 for launch in group) for group in (wide, narrow)]
    # A day may move one width alone. And two widths of one run need not have had the same GPUs, nor the same host.
    ranks = [[rank for launch in group for rank in launch.ranks] for group in (wide, narrow)]
    gpus, hosts = (
        [{tuple(getattr(rank, name) for name in names) for rank in each} for each in ranks]
        for names in (("host", "boot", "device"), ("host", "boot"))
    )
    levels = [noise.session]
    levels += [] if gpus[0] & gpus[1] else [noise.site]
    levels += [] if hosts[0] & hosts[1] else [noise.host]
    of_launches = squares[0] / len(wide) + squares[1] / len(narrow)
    variance, df = stats.variance_of([(of_launches, spread.df), *((2 * level.sd**2, level.df) for level in levels)])
    expected = centre([stats.log_of(launch) for launch in narrow])
    each = tuple(stats.log_of(launch) - expected for launch in wide)
    slower = centre([stats.log_of(launch) for launch in wide]) - expected
    return stats.Difference(slower, math.sqrt(variance), df, math.sqrt(squares[0]), each)
