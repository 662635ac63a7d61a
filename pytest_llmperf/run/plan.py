"""Whether a case is launched here, and what one takes: in a dry run's plan, in GPU-hours and in money.

Runs that launch nothing (``--perf-dry-run``, ``--update-baselines=prune``) go on through a test: they have to know its
later specs too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_llmperf.analysis.cost import Price, price_per_million, tokens_per_price
from pytest_llmperf.records.metrics import METRICS, RATE
from pytest_llmperf.records.result import CaseResult, Check
from pytest_llmperf.records.results_document import Elsewhere, Planned, Skipped
from pytest_llmperf.report.summary_table import merged_reasons
from pytest_llmperf.run.findings import CannotRunError
from pytest_llmperf.settings.registry import missing_package, why_skip

if TYPE_CHECKING:
    from pytest_llmperf.judge.baseline import Baseline
    from pytest_llmperf.run.case import Caller, Case

_HOUR = 3600
_MOST_SKIPS = 4


def ask(caller: Caller, case: Case, launches: int, baseline: Baseline | None = None, shares: str = "") -> str:
    """Why ``case`` is not launched; empty where it is.

    A run that launches ends the test here where one of its specs cannot run. It costs nothing where it ``shares`` what
    another test launches.
    """
    settings, findings = caller.run.settings, caller.findings
    if not settings.launches_nothing:
        need(caller, case, baseline)
        return ""
    _, hindrance = _hindrance(caller, case)
    if settings.update != "prune":
        walls = [launch.wall_seconds for launch in baseline.launches] if baseline else []
        planned = Planned(
            id=case.id,
            nodeid=caller.nodeid,
            width=case.width,
            launches=launches,
            gpus=0 if caller.run.on_cpu else case.width,
            seconds=launches * sum(walls) / len(walls) if walls else None,
            skipped=hindrance or shares,
            judges=case.judges,
        )
        findings.planned.append(planned)
    if not hindrance or not findings.withheld:
        findings.withheld = hindrance or settings.launches_nothing
    return hindrance or settings.launches_nothing


def need(caller: Caller, case: Case, baseline: Baseline | None) -> None:
    """End the test here where one of the specs of ``case`` cannot run; a run that launches nothing goes on."""
    if caller.run.settings.launches_nothing:
        return
    elsewhere, hindrance = _hindrance(caller, case)
    if hindrance:
        lost = baseline is not None and hindrance in map(missing_package, case.specs)
        skip(caller, case, hindrance, lost=lost, elsewhere=elsewhere)


def name(caller: Caller, case: Case) -> None:
    """The baselines of ``case`` are in use, whatever becomes of the test."""
    findings = caller.findings
    findings.digests += [digest for digest in case.baselines if digest not in findings.digests]
    findings.named = True


def skip(caller: Caller, case: Case, why: str, *, lost: bool = False, elsewhere: Elsewhere = "") -> NoReturn:
    """End the test at ``case``, and keep why. ``lost``: it ran before, as its baseline shows.

    Raises:
        CannotRunError: always.
    """
    name(caller, case)
    skipped = Skipped(id=case.id, nodeid=caller.nodeid, width=case.width, reason=why, lost=lost, elsewhere=elsewhere)
    caller.findings.stopped = True
    caller.findings.skipped.append(skipped)
    raise CannotRunError(why)


def _hindrance(caller: Caller, case: Case) -> tuple[Elsewhere, str]:
    """Say what is of another width, and why the case cannot run here; empty where it can."""
    run = caller.run
    num_gpus, num_cores = run.num_gpus, run.machine.cores
    elsewhere, why = _of_another_width(caller, case, num_gpus or num_cores)
    if elsewhere:
        return elsewhere, f"{case.id}: {why}"
    found = next(filter(None, (why_skip(spec, num_gpus=num_gpus, num_cores=num_cores) for spec in case.specs)), "")
    if case.needs_memory_limit and not found and not run.memory_bytes:
        found = "a CPU's memory is everybody's: give this run a limit with --perf-memory-limit, e.g. 2GiB"
    return "", found


def _of_another_width(caller: Caller, case: Case, most: int) -> tuple[Elsewhere, str]:
    """Say what is not of this run's width where specs that belong together are, and why.

    At ``most`` so many GPUs, or ranks on the CPU, are here: a night's job may hold fewer than its width.
    """
    width, asked = caller.run.settings.width, case.width
    if width is None:
        return "", ""
    first = not caller.findings.begun and not width.knows(caller.nodeid)
    caller.findings.begun = True
    if first and asked != width.gpus:
        return "test", f"asks for {asked} GPU(s), and this run is for tests of {width.gpus} (--perf-width)"
    if asked > width.gpus:
        why = f"asked for {asked} GPUs after {width.gpus}, at whose width the test runs: ask for the widest first"
        return "case", why
    if asked > most:
        return "case", f"asks for {asked} GPUs or ranks, and its job has {most}"
    return "", ""


def planned_gpu_seconds(planned: Sequence[Planned]) -> float:
    """Return what the launches would take, of cases that have a baseline."""
    return sum((case.seconds or 0.0) * case.gpus for case in planned if not case.skipped)


def gpu_hours(planned: Sequence[Planned]) -> float:
    """The same."""
    return planned_gpu_seconds(planned) / _HOUR


def exceeds(planned: Sequence[Planned], budget_gpu_hours: float | None) -> bool:
    """Whether the launches would take more than the budget, if there is one."""
    return budget_gpu_hours is not None and gpu_hours(planned) > budget_gpu_hours


def plan_lines(planned: Sequence[Planned], budget_gpu_hours: float | None = None) -> list[str]:
    """Each case in the order it would run, what all of them would cost, and which would be skipped and why."""
    hours = gpu_hours(planned)
    reasons = merged_reasons((case.id, case.skipped) for case in planned if case.skipped)
    skipped = [f"      skipped: {line}" for line in reasons]
    planned = [case for case in planned if not case.skipped]
    lines = []
    for number, case in enumerate(planned, 1):
        where = f"{case.gpus} GPU(s)" if case.gpus else "CPU"
        seconds = "unknown" if case.seconds is None else f"{case.seconds:.0f} s"
        lines.append(f"{number:4d}. {case.id}  {case.launches} launch(es) on {where}, {seconds}")
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


def priced(results: Sequence[CaseResult], price: Price | None) -> list[CaseResult]:
    """``results`` of GPUs with what their tokens cost; not when they are judged, since no baseline knows a price."""
    if price is None:
        return list(results)
    return [replace(result, checks=(*result.checks, *_costs(result, price))) for result in results]


def _costs(result: CaseResult, price: Price) -> tuple[Check, ...]:
    rate = result.check(RATE)
    if rate is None or rate.value <= 0:
        return ()
    per_million, tokens = price_per_million(rate.value, price.gpu_hour), tokens_per_price(rate.value, price.gpu_hour)
    return (
        replace(METRICS["price_per_million_tokens"].check(per_million), unit=price.currency),
        Check(metric="tokens_per_price", value=tokens, unit=f"tokens/{price.currency}"),
    )


def cost_lines(gpu_seconds: float, price: Price | None) -> list[str]:
    """``0.42 GPU-hours in launches, 0.88 EUR at 2.10 EUR a GPU-hour``; nothing where no GPU was used."""
    if gpu_seconds <= 0:
        return []
    hours = gpu_seconds / _HOUR
    line = f"{hours:.3g} GPU-hours in launches"
    if price is not None:
        each = f"{price.gpu_hour:.2f} {price.currency} a GPU-hour"
        line += f", {hours * price.gpu_hour:.2f} {price.currency} at {each}"
    return [line]


def cost_document(gpu_seconds: float, price: Price | None) -> dict[str, Any]:
    """The same for ``--perf-json``: its key ``cost``, or nothing."""
    if gpu_seconds <= 0:
        return {}
    hours = gpu_seconds / _HOUR
    cost: dict[str, Any] = {"gpu_hours": hours}
    if price is not None:
        cost |= {"gpu_hour": price.gpu_hour, "currency": price.currency, "total": hours * price.gpu_hour}
    return {"cost": cost}
