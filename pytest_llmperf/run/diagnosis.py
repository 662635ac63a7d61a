"""Diagnosis: what a case does that the one before did not, in its kernels, lines, files and ranks; a first guess."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_llmperf.analysis.step_difference import points_to, ranked, relevant, step_difference, unseen
from pytest_llmperf.analysis.waits import data_wait, held_up
from pytest_llmperf.judge.beside_baseline import BesideBaseline, steps_notes
from pytest_llmperf.judge.verdict import GROWTH
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.records.trace import COUNTED, Trace, new_places
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.derived_metrics import first_guess
from pytest_llmperf.support.formats import first_n

_MOST_DIFFERENT, _MOST_FILES = 2, 3


def explained(caller: Caller, held: BesideBaseline, result: CaseResult) -> CaseResult:
    """By what the newest trace does that the stored one did not, or a rank that all wait for, if new."""
    run, launches, baseline = caller.run, held.launches, held.baseline
    newest = next((launch.trace for launch in reversed(launches) if launch.trace), None)
    before = baseline.trace.trace if baseline and baseline.trace else None
    if result.verdict in ("new", "pass") and newest and not run.on_cpu:  # whose ranks wait for cores
        result = replace(result, notes=(*result.notes, *unseen(step_difference(before or Trace(), newest))))
    if result.verdict == "new":
        guess = () if run.on_cpu else first_guess(held.spec, run.machine_kind, run.settings.baselines, launches)
        return replace(result, notes=(*result.notes, *guess))
    if baseline is None or result.verdict == "pass":
        return result
    slow = waited_for(caller, launches) if not waited_for(caller, baseline.newest) else ()
    return diagnosed(beside_verdict(result, baseline.launches[-1], before), before, newest, slow)


def of_steps(held: BesideBaseline) -> Iterator[str]:
    return steps_notes(held.launches, held.baseline, held.policy, data_wait(held.launches))


def waited_for(caller: Caller, launches: Sequence[Launch]) -> tuple[str, ...]:
    # A CPU's ranks share its cores, and take them from one another.
    return held_up(launches) if BesideBaseline.is_usable(launches) and not caller.run.on_cpu else ()


def beside_verdict(result: CaseResult, stored: Launch, before: Trace | None) -> CaseResult:
    """``result`` of a script that does not hold, with what keeps a leak, new waits, copies, calls, and other files."""
    newest = result.launches[-1]
    if not newest.is_script or result.verdict == "pass":
        return result
    moved = [check.metric for check in result.checks if check.metric in COUNTED and check.verdict not in (None, "pass")]
    words = []
    if before and newest.trace:
        most = _MOST_DIFFERENT if len(moved) == 1 else 1
        places = [place for metric in moved for place in new_places(metric, before, newest.trace)[:most]]
        # A line that waits, or copies, calls too: it is told by the last.
        words = [*{place.partition(" at ")[2]: place for place in places}.values()]
    then, now = stored.sources, newest.sources
    files = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    kept = [one.detail for one in result.checks if one.metric == GROWTH and one.verdict == "regressed" and one.detail]
    words = [*kept, *words, *([f"different: {first_n(files, _MOST_FILES)}"] if files else [])]
    return replace(result, reason="; ".join([result.reason, *words]))


def diagnosed(result: CaseResult, before: Trace | None, after: Trace | None, held_up: Sequence[str] = ()) -> CaseResult:
    """``result`` with what its step does that the one before did not, and what fits that best first. ``held_up`` says
    of a rank that the others wait for it: a trace is the mean of all ranks, and does not."""
    if not (before and after):
        return replace(result, diagnosis="; ".join(held_up[:1]))
    difference = step_difference(before, after)
    lost = {check.metric for check in result.checks if check.verdict not in (None, "pass")}
    of_speed = any(name in lost and row.rule == "speed" for name, row in METRICS.items())
    told = [*held_up[:1], points_to(difference, of_speed=of_speed)]
    # Of a script's files its reason tells.
    files = {name for launch in result.launches for name in launch.sources}
    lines = [line for line in (*result.changed, *result.differences) if line.partition(": ")[0] not in files]
    if different := relevant(lines, difference)[:_MOST_DIFFERENT]:
        told.append(f"different: {', '.join(different)}")
    return replace(result, diagnosis="; ".join(told), differences=ranked(result.differences, difference))
