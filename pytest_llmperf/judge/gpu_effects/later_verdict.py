"""The verdict on a case by what its whole run knows of its GPU, in place of what the run knew when it was launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_llmperf.judge.gpu_effects.knowledge import Knowledge
from pytest_llmperf.judge.policy import METRICS
from pytest_llmperf.judge.sequential_test import Rule, least_tolerance
from pytest_llmperf.judge.verdict import sentence, speed_check, within_tolerance
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Check, worst_of

# What failed has failed: a test cannot pass afterwards.
_OPEN = frozenset({"pass", "inconclusive", "changed", "improved"})


def judged_later(result: CaseResult, stored: Sequence[Launch], knowledge: Knowledge, rule: Rule) -> CaseResult:
    """``result`` with its checks of speed made again against ``stored``; as it is where there is nothing to add."""
    gating = [check for check in result.checks if check.verdict is not None]
    is_open = result.verdict in _OPEN and not result.updated and not result.launches_before
    if not is_open or not result.launches or worst_of(check.verdict for check in gating) != result.verdict:
        return result
    difference = knowledge.difference(result.launches, stored)

    def again(check: Check) -> Check:
        if check.metric not in METRICS or METRICS[check.metric].rule != "speed":
            return check
        if check.tolerance is not None and check.known_tolerance is not None:
            closest = max(check.known_tolerance, least_tolerance(difference))
            check = replace(check, tolerance=min(check.tolerance, closest))
        return speed_check(replace(check, detail=""), difference, rule).check

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
