"""Settings: everything that one run was asked for, read once, whoever asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_llmperf.analysis.cost import Price
from pytest_llmperf.launch.slurm.site_options import SlurmOptions
from pytest_llmperf.run.width import Width

#: Launches of a case at most, where fewer do not decide and nobody says otherwise.
MAX_LAUNCHES = 4

#: Nights from one in which a case takes all its steps to the next.
ALL_STEPS = 10

#: How a launch on this machine begins.
STARTS = ("auto", "warm", "cold")

#: Whether GPUs are calibrated.
CALIBRATIONS = ("auto", "no")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything this run was asked for."""

    gpus: int | None = None
    """GPUs this run may use; 0 is the CPU; ``None`` is all visible ones, else the CPU."""
    update: str | None = None
    """``new``, ``all``, ``prune`` or ``None``."""
    reason: str = ""
    baselines: Path
    json: Path | None = None
    report: Path | None = None
    """Where the run's page goes."""
    dry_run: bool = False
    strict: bool = False
    against: str = ""
    """Another Python to take turns with; empty holds cases against their baselines."""
    launcher: str = "auto"
    """``auto``, ``local`` or ``slurm``."""
    start: str = "auto"
    """One of ``STARTS``; ``auto`` is warm where it can be."""
    trace: bool = True
    """Whether launches trace a few steps after those that they time."""
    all_steps: int = ALL_STEPS
    """Every so many nights a case takes all its steps; 1: always, 0: only where it is recorded."""
    calibration: bool = True
    """Whether GPUs are calibrated, once a day each, by the launches that are held against baselines."""
    static: bool = False
    """Whether cases are judged by what fake tensors tell of their steps, and nothing is launched."""
    parity: bool = False
    """Whether each case that is held against a baseline is held beside its plain form first."""
    loss_curve: bool = False
    """Whether each case that is held against a baseline has its losses held against those before, where it can."""
    markdown: Path | None = None
    """Where the run's page of Markdown goes."""
    step_summary: Path | None = None
    """To which the same page is added, as far as there is room."""
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    width: Width | None = None
    """Of which tests alone are run; ``None``: all."""
    resume: bool = False
    """Whether what this SLURM job concluded before a requeue is taken as concluded."""
    budget_gpu_hours: float | None = None
    against_itself: bool = False
    """Whether that Python is of the environment that runs pytest, under whatever name."""
    timeout_seconds: float = 1800.0
    memory_limit_bytes: int = 0
    """What each rank may hold, where that is less than the card's; 0: all of it."""
    launches: int = 1
    """Launches of each case at least."""
    max_launches: int = MAX_LAUNCHES
    """Launches of a case at most, where fewer do not decide."""
    alarms_a_month: float = 1.0
    """False alarms that a nightly run of the collected cases may raise."""
    machine: str = ""
    """A site's own name for its machine kind; empty where the hardware's name serves."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """By metric, what the ini file sets."""
    history: Path | None = None
    """The store to which the run adds what its cases took; ``None``: none."""
    price: Price | None = None
    """Of a GPU-hour; ``None``: costs are told in GPU-hours."""
