"""The hardware that a run may use, as its settings ask for it, and the name of its kind."""

from __future__ import annotations

from dataclasses import replace

from pytest_llmperf.launch.device import UNKNOWN
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.site import Site
from pytest_llmperf.run.errors import UsageError
from pytest_llmperf.run.settings import Settings
from pytest_llmperf.support import formats


def found(settings: Settings, site: Site, machine: Machine) -> tuple[Machine, str]:
    """The ``machine`` of ``site`` as this run may use it, and a line about what of it is assumed.

    Raises:
        UsageError: it has fewer GPUs than ``--gpus`` asks for, and this is no dry run; or less memory than the limit.
    """
    asked, assumed = settings.gpus, ""
    if asked is not None and asked > len(machine.gpus):
        have = f"--gpus {asked}: only {len(machine.gpus)} GPU(s) {site.where}"
        if not settings.dry_run:
            raise UsageError(f"{have}; {site.for_more}, or ask for fewer (--gpus 0 is the CPU)")
        machine, assumed = _with_assumed(machine, settings, asked, have)
    least = min((gpu.memory_bytes for gpu in machine.gpus), default=0)
    if asked != 0 and 0 < least < settings.memory_limit_bytes:
        raise UsageError(
            f"--perf-memory-limit {formats.memory(settings.memory_limit_bytes)}: the GPU has {formats.memory(least)}; "
            "a limit can only be lower"
        )
    return machine, assumed


def _with_assumed(machine: Machine, settings: Settings, gpus: int, have: str) -> tuple[Machine, str]:
    """``machine`` with as many GPUs, and a line that says what it has (``have``) and on what the estimates rest.

    A dry run launches nothing, so a login node may tell what a job would do.

    Raises:
        UsageError: a budget is to be kept, and no baseline can tell what a case takes.
    """
    from pytest_llmperf.judge.store import BaselineStore

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


def kind(settings: Settings, machine: Machine, *, on_cpu: bool) -> str:
    """What keys a baseline together with the digest. A limit of memory makes another machine of it.

    Raises:
        UsageError: its GPUs are of several kinds, and nobody has named it.
    """
    limit = settings.memory_limit_bytes
    return _unlimited(settings, machine, on_cpu=on_cpu) + (f"-limit-{limit / 2**30:g}gib" if limit else "")


def _unlimited(settings: Settings, machine: Machine, *, on_cpu: bool) -> str:
    name = settings.machine
    if settings.static:
        return name or "static"
    if on_cpu:  # a site names its machine once, and its CPU's figures must never meet its GPU's
        return f"{name}-cpu" if name else machine.cpu_kind
    if name:
        return name
    try:
        return machine.gpu_kind
    except ValueError as error:
        raise UsageError(str(error)) from error
