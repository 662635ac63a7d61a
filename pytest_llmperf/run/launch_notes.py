"""What a verdict does not say of its launches: notes for people, and what their traces point to. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_llmperf.analysis.step_difference import ranked, relevant, step_difference
from pytest_llmperf.analysis.step_words import points_to
from pytest_llmperf.analysis.waits import data_wait
from pytest_llmperf.judge import learning_checks, validity
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.exact import trace_notes
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.verdict import horizon
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, METRICS
from pytest_llmperf.records.result import USUAL, CaseResult
from pytest_llmperf.records.trace import COUNTED, Trace, new_places
from pytest_llmperf.support.formats import first_n, memory

_MOST_STALLED = 0.01

# Of a line that has to say more.
_MOST_DIFFERENT, _MOST_FILES = 2, 3


def steps_notes(launches: Sequence[Launch], baseline: Baseline | None, policy: Policy) -> Iterator[str]:
    """How the steps of ``launches`` went, as far as that is no news of a change."""
    if seen := horizon(launches)[1]:  # no launch took all its steps
        yield f"{seen}: stalls, drift and growth of memory that come later are not judged"
    was_bimodal = baseline and any(launch.steady.bimodal for launch in baseline.launches)
    if any(launch.steady.bimodal for launch in launches) and not was_bimodal:
        yield f"step times are bimodal (noise or a periodic task); {USUAL}"
    stalls = max((launch.steady.stalls for launch in launches), default=0.0)
    if stalls > _MOST_STALLED:
        yield f"slow steps lost {stalls * 100:.1f} % of a launch; the median leaves them out"
    wait = data_wait(launches)
    if wait and wait.is_notable:
        yield f"waits for data: {wait.seconds * 1000:.3g} ms a step ({wait.share * 100:.0f} % of it)"
    least, most = (choose(launch.peak_reserved_bytes for launch in launches) for choose in (min, max))
    if most > least * (1 + policy.tolerances.get(MEMORY, math.inf)):
        yield f"peak memory of its launches: {memory(least, 2)} to {memory(most, 2)}; the leanest counts"


def compiler_notes(launches: Sequence[Launch]) -> list[str]:
    """Tell what torch.compile had to do and should not, a line each."""
    noted = {row.note: row.evidence for row in METRICS.values() if row.note}
    found = {did: max(launch.evidence.get(name, 0) for launch in launches) for did, name in noted.items()}
    return [f"torch_compile {did} {count} time(s)" for did, count in found.items() if count]


def seen_notes(launches: Sequence[Launch], baseline: Baseline | None) -> Iterator[str]:
    """Tell what else was seen: of learning, by libraries, in traces, of faults and calibrations."""
    yield from learning_checks.notes(launches)
    known = (baseline.launches[-1].seen.run.remarks if baseline else None) or ()
    remarks = dict.fromkeys(line for launch in launches for line in launch.seen.run.remarks or ())
    yield from (line for line in remarks if line not in known)
    if launches[-1].is_script:
        told, then = (
            [*validity.disagreements(one.evidence, one.seen)] if one else []
            for one in (launches[-1], baseline.launches[-1] if baseline else None)
        )
        yield from [line for line in told if line not in then][:_MOST_DIFFERENT]
    yield from trace_notes(launches, baseline.trace if baseline else None)
    yield from (f"measured under {fault}" for fault in validity.injected(launches))
    made = (rank.calibration for launch in launches for rank in launch.ranks if rank.calibration)
    yield from dict.fromkeys(f"its GPU's calibration is not used: {each.trouble}" for each in made if each.trouble)


def beside_verdict(result: CaseResult, stored: Launch, before: Trace | None) -> CaseResult:
    """``result`` of a script that does not hold, with the lines that wait or copy anew and the files that are other.

    ``stored`` is what it is held against, and ``before`` what a step of that did.
    """
    newest = result.launches[-1]
    if not newest.is_script or result.verdict == "pass":
        return result
    moved = [check.metric for check in result.checks if check.metric in COUNTED and check.verdict not in (None, "pass")]
    words = []
    if before and newest.trace:
        words = [place for metric in moved for place in new_places(metric, before, newest.trace)]
    then, now = stored.sources, newest.sources
    files = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    words = [*words[:_MOST_DIFFERENT], *([f"different: {first_n(files, _MOST_FILES)}"] if files else [])]
    return replace(result, reason="; ".join([result.reason, *words]))


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
