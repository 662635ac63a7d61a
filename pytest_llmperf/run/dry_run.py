"""Runs that launch nothing (``--perf-dry-run``, ``--update-baselines=prune``): every test says what it would launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_llmperf.records.results_document import Elsewhere, Planned, Skipped
from pytest_llmperf.report.summary_table import merged_reasons
from pytest_llmperf.run.coverage import WidthCheck
from pytest_llmperf.run.errors import CannotRunError
from pytest_llmperf.settings.requirements import missing_package, why_skip

if TYPE_CHECKING:
    from pytest_llmperf.judge.baseline import Baseline
    from pytest_llmperf.run.caller import Caller
    from pytest_llmperf.run.case import Case

_MOST_SKIPS = 4


class Planner:
    """What one caller asks for, before anything is launched.

    Where nothing is, the test goes on: whoever plans or prunes has to know its later specs too.
    """

    def __init__(self, caller: Caller) -> None:
        self._context, self._settings, self._findings = caller.context, caller.context.settings, caller.findings
        self._nodeid, self._width_check = caller.nodeid, WidthCheck(self._settings.width, caller.nodeid)

    def name(self, case: Case) -> None:
        """The baselines of ``case`` are in use, whatever becomes of the test."""
        self._findings.digests += [digest for digest in case.baselines if digest not in self._findings.digests]
        self._findings.named = True

    def goes_on(self) -> None:
        """The test asks for more after what its SLURM job concluded before: that was not the first."""
        self._width_check.begun = True

    def ask(self, case: Case, launches: int, baseline: Baseline | None = None, shares: str = "") -> str:
        """Why ``case`` is not launched; empty where it is.

        A run that launches ends the test here where one of its specs cannot run. It costs nothing where it ``shares``
        what another test launches.
        """
        launches_nothing = _launches_nothing(self._settings.update, dry_run=self._settings.dry_run)
        if not launches_nothing:
            self.need(case, baseline)
            return ""
        _, hindrance = self._hindrance(case)
        if self._settings.update != "prune":
            planned = Planned(
                id=case.id,
                nodeid=self._nodeid,
                width=case.width,
                launches=launches,
                gpus=0 if self._context.on_cpu else case.width,
                seconds=_expected_seconds(baseline, launches),
                skipped=hindrance or shares,
                judges=case.judges,
            )
            self._findings.planned.append(planned)
        if not hindrance or not self._findings.withheld:
            self._findings.withheld = hindrance or launches_nothing
        return hindrance or launches_nothing

    def need(self, case: Case, baseline: Baseline | None) -> None:
        """End the test here where one of the specs of ``case`` cannot run; a run that launches nothing goes on.

        Raises:
            CannotRunError: it cannot.
        """
        if _launches_nothing(self._settings.update, dry_run=self._settings.dry_run):
            return
        elsewhere, hindrance = self._hindrance(case)
        if not hindrance:
            return
        skipped = Skipped(
            id=case.id,
            nodeid=self._nodeid,
            width=case.width,
            reason=hindrance,
            lost=baseline is not None and hindrance in map(missing_package, case.specs),
            elsewhere=elsewhere,
        )
        self._findings.stopped = True
        self._findings.skipped.append(skipped)
        raise CannotRunError(hindrance)

    def _hindrance(self, case: Case) -> tuple[Elsewhere, str]:
        """What is of another width, and why the case cannot run here; empty where it can."""
        num_gpus, num_cores = self._context.num_gpus, self._context.machine.cores
        elsewhere, why = self._width_check.elsewhere(case.specs, num_gpus or num_cores)
        if elsewhere:
            return elsewhere, f"{case.id}: {why}"
        found = next(filter(None, (why_skip(spec, num_gpus=num_gpus, num_cores=num_cores) for spec in case.specs)), "")
        if case.needs_memory_limit and not found and not self._context.memory_bytes:
            found = "a CPU's memory is everybody's: give this run a limit with --perf-memory-limit, e.g. 2GiB"
        return "", found


def gpu_hours(planned: Sequence[Planned]) -> float:
    """What the launches would take, of cases that have a baseline."""
    return sum((case.seconds or 0.0) * case.gpus for case in planned if not case.skipped) / 3600


def exceeds(planned: Sequence[Planned], budget_gpu_hours: float | None) -> bool:
    """Whether the launches would take more than the budget, if there is one."""
    return budget_gpu_hours is not None and gpu_hours(planned) > budget_gpu_hours


def plan_lines(planned: Sequence[Planned], budget_gpu_hours: float | None = None) -> list[str]:
    """Each case in the order it would run, what all of them would cost, and which would be skipped and why."""
    hours = gpu_hours(planned)
    reasons = merged_reasons((case.id, case.skipped) for case in planned if case.skipped)
    skipped = [f"      skipped: {line}" for line in reasons]
    planned = [case for case in planned if not case.skipped]
    lines = [_line(number, case) for number, case in enumerate(planned, 1)]
    known = [case for case in planned if case.seconds is not None]
    wall = sum(case.seconds or 0.0 for case in known)
    launches = sum(case.launches for case in planned)
    budget = f" of {budget_gpu_hours:g}" if budget_gpu_hours is not None else ""
    total = (
        f"{len(planned)} case(s), {launches} launch(es), {hours:.2f}{budget} GPU-hours, {wall / 60:.0f} min in a row"
    )
    unknown = len(planned) - len(known)
    if not known and planned and budget_gpu_hours is None:
        total = f"{len(planned)} case(s), {launches} launch(es); none has a baseline that tells how long it takes"
    elif unknown:
        total += f"; {unknown} case(s) without a baseline are not counted in the time"
    over = exceeds(planned, budget_gpu_hours)
    return [*lines, *skipped, total, *(["over the budget of --perf-budget"] if over else [])]


def skip_lines(skipped: Sequence[Skipped]) -> list[str]:
    """Why cases did not run: all that ran before, and some of the others."""
    lost = [f"skipped, and has a baseline: {case.reason}" for case in skipped if case.lost]
    others = [f"skipped: {line}" for line in merged_reasons((one.id, one.reason) for one in skipped if not one.lost)]
    more = len(others) - _MOST_SKIPS
    return [*lost, *others[:_MOST_SKIPS], *([f"skipped: {more} more; -rs shows why"] if more > 0 else [])]


def _line(number: int, case: Planned) -> str:
    where = f"{case.gpus} GPU(s)" if case.gpus else "CPU"
    seconds = "unknown" if case.seconds is None else f"{case.seconds:.0f} s"
    return f"{number:4d}. {case.id}  {case.launches} launch(es) on {where}, {seconds}"


def _launches_nothing(update: str | None, *, dry_run: bool) -> str:
    if update == "prune":
        return "--update-baselines=prune: nothing is launched"
    return "dry run: nothing is launched" if dry_run else ""


def _expected_seconds(baseline: Baseline | None, launches: int) -> float | None:
    if baseline is None:
        return None
    walls = [launch.wall_seconds for launch in baseline.launches]
    return launches * sum(walls) / len(walls)
