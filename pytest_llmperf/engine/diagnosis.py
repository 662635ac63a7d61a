"""Diagnosis: what a result points to, of two traces and of what else is not as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_llmperf.insight.tracing.relevant_differences import ranked, relevant
from pytest_llmperf.insight.tracing.step_difference import step_difference
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.report.step_words import points_to

# Of a line that has to say more.
_MOST_DIFFERENT = 2


def diagnosed(result: CaseResult, before: Trace | None, after: Trace | None, held_up: Sequence[str] = ()) -> CaseResult:
    """``result`` with what its step does that the one before did not, and what fits that best first.

    ``held_up`` says of a rank that the others wait for it: a trace is the mean of all ranks, and does not. As it is
    where one of the two has no trace.
    """
    if not (before and after):
        return replace(result, diagnosis="; ".join(held_up[:1]))
    difference = step_difference(before, after)
    told = [*held_up[:1], points_to(difference)]
    different = relevant((*result.changed, *result.differences), difference)[:_MOST_DIFFERENT]
    if different:
        told.append(f"different: {', '.join(different)}")
    return replace(result, diagnosis="; ".join(told), differences=ranked(result.differences, difference))
