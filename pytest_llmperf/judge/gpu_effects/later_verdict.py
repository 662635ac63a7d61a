"""The verdict on a case by what its whole run knows of its GPU, in place of what the run knew when it was launched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pytest_llmperf.judge.gpu_effects.knowledge import Knowledge
from pytest_llmperf.judge.gpu_effects.observation import unit_of
from pytest_llmperf.judge.policy import METRICS
from pytest_llmperf.judge.sequential_test import Rule, least_tolerance
from pytest_llmperf.judge.stats import Difference
from pytest_llmperf.judge.verdict import sentence, speed_check, within_tolerance
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Check, worst_of

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
    difference = knowledge.difference(result.launches, stored)
    is_told = knowledge.tells_independently_of(map(unit_of, result.launches), result.digest)

    def again(check: Check) -> Check:
        if check.metric not in METRICS or METRICS[check.metric].rule != "speed":
            return check
        if check.tolerance is not None and check.known_tolerance is not None:
            closest = max(check.known_tolerance, least_tolerance(difference))
            check = replace(check, tolerance=min(check.tolerance, closest))
        found = speed_check(replace(check, detail=""), difference, rule).check
        return found if is_told else _unless_a_gpu_took_it(found, difference)

    checks = tuple(map(again, result.checks))
    verdict = worst_of(check.verdict for check in checks)
    if verdict == result.verdict and verdict in ("pass", "changed"):
        return replace(result, checks=checks)
    reason = ", ".join(sentence(check) for check in checks if check.verdict == verdict) or within_tolerance(
        result.launches
    )
    if verdict == result.verdict:
        return replace(result, checks=checks, reason=reason)
    note = f"{result.verdict} when it was launched, {verdict} by what the run knows of its GPU now"
    return replace(result, checks=checks, verdict=verdict, reason=reason, notes=(*result.notes, note))


def _unless_a_gpu_took_it(check: Check, difference: Difference) -> Check:
    tolerance = check.known_tolerance or check.tolerance
    if check.verdict != "pass" or tolerance is None or not is_laid_to_its_gpu(difference, tolerance):
        return check
    return replace(check, verdict="inconclusive", detail=ONLY_ITS_GPU)


def is_laid_to_its_gpu(difference: Difference, tolerance: float) -> bool:
    """Whether a loss beyond ``tolerance``, the closest, passes for what its GPU is believed to do."""
    return difference.of_gpus >= _LEAST_TAKEN and difference.log + difference.of_gpus > math.log1p(tolerance)
