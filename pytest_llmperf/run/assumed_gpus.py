"""A dry run for GPUs that are not here: it launches nothing, so a login node may tell what a job would do."""

from __future__ import annotations

from dataclasses import replace

from pytest_llmperf.judge.store import BaselineStore
from pytest_llmperf.launch.machine import UNKNOWN, Machine
from pytest_llmperf.run.errors import UsageError
from pytest_llmperf.run.settings import Settings


def with_assumed(machine: Machine, settings: Settings, gpus: int, have: str) -> tuple[Machine, str]:
    """``machine`` with as many GPUs, and a line that says what it has (``have``) and on what the estimates rest.

    Raises:
        UsageError: a budget is to be kept, and no baseline can tell what a case takes.
    """
    missing = gpus - len(machine.gpus)
    like = machine.gpus[0] if machine.gpus else UNKNOWN
    kinds = [kind for kind in BaselineStore(settings.baselines).machines() if "cpu" not in kind.split("-")]
    if settings.machine in kinds or (machine.gpus and not settings.machine):
        line = f"{have}; {missing} assumed, with the times of {settings.machine or 'those'}"
    else:
        choice = f" ({', '.join(kinds)})" if kinds else ""
        nobodys = f"; there are none of {settings.machine}" if settings.machine else ""
        line = f"{have}, and so no baseline tells how long a case takes{nobodys}"
        line += f"; say which do with -o perf_machine=KIND{choice}"
        if settings.budget_gpu_hours is not None:
            raise UsageError(line)
    return replace(machine, gpus=(*machine.gpus, *([like] * missing))), line
