"""What ``--perf-dry-run`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmperf.plugin.session import Planned


def plan_lines(planned: Sequence[Planned]) -> list[str]:
    """Each case in the order it would run, what all of them would cost, and which would be skipped and why."""
    skipped = [f"      skipped: {case.skipped}" for case in planned if case.skipped]
    planned = [case for case in planned if not case.skipped]
    lines = [_line(number, case) for number, case in enumerate(planned, 1)]
    known = [case for case in planned if case.seconds is not None]
    hours = sum((case.seconds or 0.0) * case.gpus for case in known) / 3600
    wall = sum(case.seconds or 0.0 for case in known)
    launches = sum(case.launches for case in planned)
    total = f"{len(planned)} case(s), {launches} launch(es), {hours:.2f} GPU-hours, {wall / 60:.0f} min in a row"
    unknown = len(planned) - len(known)
    if unknown:
        total += f"; {unknown} case(s) without a baseline are not counted in the time"
    return [*lines, *skipped, total]


def _line(number: int, case: Planned) -> str:
    where = f"{case.gpus} GPU(s)" if case.gpus else "CPU"
    seconds = "unknown" if case.seconds is None else f"{case.seconds:.0f} s"
    return f"{number:4d}. {case.id}  {case.launches} launch(es) on {where}, {seconds}"
