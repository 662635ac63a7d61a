"""The whole run: what its cases say of each other once all of them are over, and what they cost, or would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from pytest_llmperf.judge.gpu_knowledge import Knowledge
from pytest_llmperf.judge.policy import Rule
from pytest_llmperf.judge.run_effects import MOST, ONLY_ITS_GPU, CommonChange, common_change, judged_later
from pytest_llmperf.judge.verdict import AT_THE_END
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import RATE
from pytest_llmperf.records.result import FAILING, CaseResult, Verdict, verdict_fails
from pytest_llmperf.records.results_document import Planned, Skipped
from pytest_llmperf.report.summary_table import merged_reasons
from pytest_llmperf.report.text import one_line
from pytest_llmperf.run.run import Run

# Of a loss that is not told apart, and what tells it.
_UNTOLD = "by their software or by a GPU that nothing else tells of"
_ASK = "compare with the old environment on this GPU: --perf-against=PYTHON"


@dataclass(frozen=True)
class LateVerdict:
    """A case that its test passed, and that does not hold by what the whole run knows."""

    result: CaseResult
    was: Verdict | Literal["planned"]

    @property
    def line(self) -> str:
        return f"{self.result.nodeid}: {self.result.id}: {self.result.reason}; its test ended as {self.was}"


@dataclass(frozen=True)
class WholeRun:
    results: Sequence[CaseResult]
    """Each by what all of the run knows."""
    regressed: Sequence[LateVerdict] = ()
    undecided: Sequence[LateVerdict] = ()
    """Those that a strict run fails for what is not shown."""
    change: CommonChange | None = None
    """What all cases have in common; ``None``: they are too few, or on GPUs of which too little is known."""
    verdict: Verdict = "pass"
    """On that change; ``inconclusive`` also where cases lost what only their GPU would explain."""
    is_strict: bool = False
    unjudged: str = ""
    """Why nothing of this is known, where that went wrong."""

    @property
    def fails(self) -> bool:
        return verdict_fails(self.verdict, strict=self.is_strict)

    @property
    def line(self) -> str:
        """Empty where it is no news."""
        change, unclear = self.change, sum(map(_is_its_gpus_alone, self.results))
        if change is None or not (change.is_news or self.verdict != "pass") or change.together < MOST:
            told = f"{unclear} of {len(self.results)} cases inconclusive: slower beyond tolerance, {_UNTOLD}; {_ASK}"
            return told if unclear else ""
        low, high = sorted(abs(each) * 100 for each in change.interval)
        by = f"by {abs(change.ratio) * 100:.1f} % ({low:.1f} to {high:.1f})"
        cases = f"{change.cases} cases on {change.gpus} GPU{'s' * (change.gpus > 1)}"
        if self.verdict == "inconclusive":
            return f"all cases slower, {by}, {_UNTOLD}: {cases}, {unclear} inconclusive; {_ASK}"
        way, told = ("slower" if change.log > 0 else "faster"), "which their GPUs alone may do (not calibrated)"
        if change.is_known:
            told = "after calibration" if change.is_calibrated else "on GPUs that their baselines know"
        return (
            f"all cases {way}, {by}, {told}: {cases}; "
            "look at what they share: a library, the driver, the host; --perf-against compares with another "
            "environment on the same hardware"
        )

    def document(self) -> dict[str, Any]:
        """For ``--perf-json``; nothing where no change was looked for."""
        if self.unjudged:
            return {"unjudged": self.unjudged}
        if self.change is None:
            return {"all_cases": {"verdict": self.verdict, "told": self.line}} if self.line else {}
        low, high = self.change.interval
        found = {"verdict": self.verdict, "told": self.line, "slower_by": self.change.ratio, "low": low, "high": high}
        facts = ("cases", "gpus", "is_known", "is_calibrated", "together")
        return {"all_cases": found | {name: getattr(self.change, name) for name in facts}}


def judged_together(run: Run, results: Sequence[CaseResult]) -> WholeRun:
    """``results`` of a run that is over. What goes wrong here leaves them as they are, and fails the run by a line."""
    try:
        return _judged_together(run, results)
    except Exception as error:  # noqa: BLE001 - whatever it is, what was measured is written and told
        why = one_line(f"{type(error).__name__}: {error}")
        return WholeRun(results, unjudged=f"the whole run was not judged: {why}; each case stands by itself")


def _judged_together(run: Run, results: Sequence[CaseResult]) -> WholeRun:
    stored = run.stored.knowledge if any(result.launches for result in results) else None
    if stored is None or run.settings.static:
        return WholeRun(results)
    judged = [result for result in results if _is_judged(result, run.machine_kind)]
    launches = [launch for result in judged for launch in result.launches]
    # Workers of xdist may have recorded some of them since: nothing is held against itself.
    own = set(map(_identity, launches))
    before = [[one for one in each if _identity(one) not in own] for each in run.stored.launches]
    if list(map(len, before)) != list(map(len, run.stored.launches)):
        stored = Knowledge.of(before)
    if stored is None:
        return WholeRun(results)
    knowledge = stored.with_seen(launches)
    settings, baselines = run.settings, {each[0].digest: each for each in before if each}
    rule = Rule.allowing(settings.alarms_a_month, max(run.num_gates, len(results)), settings.max_launches)
    # As for a case by itself; what failed by itself has failed.
    found, regressed, undecided = list[CaseResult](), list[LateVerdict](), list[LateVerdict]()
    for result in results:
        baseline = baselines.get(result.digest) if _is_judged(result, run.machine_kind) else None
        later = judged_later(result, baseline, knowledge, rule) if baseline else result
        has_failed = result.fails(strict=settings.strict, is_over=AT_THE_END not in result.notes)
        is_late = later.fails(strict=settings.strict) and not has_failed
        if is_late and not _is_its_gpus_alone(later):  # one line tells of all these
            (regressed if later.verdict in FAILING else undecided).append(LateVerdict(later, result.verdict))
        found.append(later)
    change = common_change(knowledge)
    compared = [result for result in judged if result.digest in baselines]
    rates = filter(None, (result.check(RATE) for result in compared))
    held = [each for check in rates if (each := check.known_tolerance or check.tolerance) is not None]
    # Whoever records what is there already has accepted what it does.
    is_held = change is not None and held and not any(result.updated for result in compared)
    verdict = change.verdict(median(held), rule) if change and is_held else "pass"
    if verdict not in FAILING and any(map(_is_its_gpus_alone, found)):
        verdict = "inconclusive"
    undecided = [] if verdict_fails(verdict, strict=settings.strict) else undecided  # which the line of all cases tells
    return WholeRun(found, regressed, undecided, change, verdict, settings.strict)


def _is_its_gpus_alone(result: CaseResult) -> bool:
    """Undecided, for a loss that only its GPU would explain."""
    return result.verdict == "inconclusive" and any(check.detail == ONLY_ITS_GPU for check in result.checks)


def _is_judged(result: CaseResult, machine: str) -> bool:
    """Whether its launches are figures, of this machine kind, that are held against a baseline."""
    return result.verdict != "invalid" and result.machine == machine and not result.launches_before


def _identity(launch: Launch) -> tuple[str, str, str]:
    """What a baseline, which rounds figures, keeps as it was."""
    return launch.digest, launch.site, launch.started_at


_MOST_SKIPS = 4


def plan_lines(planned: Sequence[Planned]) -> list[str]:
    """Each case in the order it would run, what all of them would cost, and which would be skipped and why."""
    reasons = merged_reasons((case.id, case.skipped) for case in planned if case.skipped)
    skipped = [f"      skipped: {line}" for line in reasons]
    planned = [case for case in planned if not case.skipped]
    hours = sum((case.seconds or 0.0) * case.gpus for case in planned) / 3600  # of those that have a baseline
    lines = []
    for number, case in enumerate(planned, 1):
        where = f"{case.gpus} GPU(s)" if case.gpus else "CPU"
        seconds = "unknown" if case.seconds is None else f"{case.seconds:.0f} s"
        lines.append(f"{number:4d}. {case.id}  {case.launches} launch(es) on {where}, {seconds}")
    known = [case.seconds for case in planned if case.seconds is not None]
    wall = sum(known)
    launches = sum(case.launches for case in planned)
    total = f"{len(planned)} case(s), {launches} launch(es), {hours:.2f} GPU-hours, {wall / 60:.0f} min in a row"
    unknown = len(planned) - len(known)
    if not known and planned:
        total = f"{len(planned)} case(s), {launches} launch(es); none has a baseline that tells how long it takes"
    elif unknown:
        total += f"; {unknown} case(s) without a baseline are not counted in the time"
    return [*lines, *skipped, total]


def skip_lines(skipped: Sequence[Skipped]) -> list[str]:
    """Why cases did not run: all that ran before, and some of the others."""
    lost = [f"skipped, and has a baseline: {case.reason}" for case in skipped if case.lost]
    others = [f"skipped: {line}" for line in merged_reasons((one.id, one.reason) for one in skipped if not one.lost)]
    more = len(others) - _MOST_SKIPS
    return [*lost, *others[:_MOST_SKIPS], *([f"skipped: {more} more; -rs shows why"] if more > 0 else [])]


def unjudged_line(skipped: Sequence[Skipped]) -> str:
    """Why a run without a GPU, which is green all the same, has judged nothing."""
    first, *others = merged_reasons((one.id, one.reason) for one in skipped)
    more = f"; and {len(others)} other reason(s)" if others else ""
    return f"--perf-static: nothing was judged, all {len(skipped)} case(s) were skipped: {first}{more}"
