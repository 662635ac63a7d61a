"""What other versions do to the steps of a run, in a line for each set of them: news before a GPU is paid for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.support.formats import change_of, label


def upgrade_lines(results: Sequence[CaseResult]) -> list[str]:
    """``other versions (transformers: 5.17 -> 5.23): 60 of 74 cases take another step: copies a step +32 in 58, …``."""
    by_versions: dict[tuple[str, ...], list[CaseResult]] = {}
    for result in results:
        if result.differences:
            by_versions.setdefault(result.differences, []).append(result)
    return [f"other versions ({', '.join(versions)}): {_said(cases)}" for versions, cases in by_versions.items()]


def _said(cases: Sequence[CaseResult]) -> str:
    moved = [result for result in cases if result.verdict == "changed"]
    if not moved:
        return f"{len(cases)} case(s) take the same step; record it with --update-baselines"
    words = [_range(metric, moved) for metric in dict.fromkeys(check.metric for check in moved[0].checks)]
    what = f"{len(moved)} of {len(cases)} case(s) take another step: {', '.join(filter(None, words))}"
    return f"{what}; record it with --update-baselines --perf-reason"


def _range(metric: str, cases: Sequence[CaseResult]) -> str:
    """Of those cases where it moved, from the least to the most."""
    found = [check for result in cases if (check := result.check(metric)) is not None and check.baseline is not None]
    changes = sorted({check.value - check.baseline for check in found if check.baseline is not None} - {0.0})
    number = sum(1 for check in found if check.value != check.baseline)
    if not changes:
        return ""
    ends = dict.fromkeys(change_of(change, found[0].unit) for change in (changes[0], changes[-1]))
    return f"{label(metric)} {' to '.join(ends)} in {number}"
