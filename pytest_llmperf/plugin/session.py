"""PerfSession: what one pytest process knows while it runs: settings, machine, run folder, results.

Under pytest-xdist every worker has one, and what they found reaches the controller's on the test reports.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llmperf.judge.experience import Experience
from pytest_llmperf.judge.sequential import Rule
from pytest_llmperf.judge.store import BaselineStore
from pytest_llmperf.judge.verdict import Policy
from pytest_llmperf.launch.machine import Machine, find_machine
from pytest_llmperf.plugin.options import Settings
from pytest_llmperf.plugin.revision import Revision, find_revision
from pytest_llmperf.result import CaseResult

_KEPT_RUNS = 10
_RUN_NAME = re.compile(r"\d{8}-\d{6}-\d{1,9}")
_UNTOUCHED_SECONDS = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One case that a dry run would have launched."""

    id: str
    launches: int
    gpus: int
    seconds: float | None
    """Expected wall seconds of all its launches, from its baseline; ``None`` where there is none."""
    skipped: str = ""
    """Why it would not run here."""


@dataclass
class Findings:
    """What one test found; travels on its report."""

    results: list[CaseResult] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Of every spec it asked about, also where it was skipped: their baselines are in use."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "results": [result.to_dict() for result in self.results],
            "planned": [vars(planned) for planned in self.planned],
            "digests": self.digests,
        }

    def take(self) -> dict[str, Any] | None:
        """What was found since the last time, to be sent away; ``None`` where nothing was."""
        if not (self.results or self.planned or self.digests):
            return None
        values = self.to_dict()
        self.results, self.planned, self.digests = [], [], []
        return values

    def add(self, values: Mapping[str, Any]) -> None:
        """Take in what another process sent."""
        self.results += [CaseResult.from_dict(result) for result in values["results"]]
        self.planned += [Planned(**planned) for planned in values["planned"]]
        self.digests += values["digests"]


class PerfSession:
    """One pytest process's state."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config, self.settings = config, settings
        self.findings = Findings()
        self.collected_files: set[Path] = set()
        self.notes: list[str] = []
        self.deselected = False
        self.perf_nodes: set[str] = set()
        self.named: set[str] = set()
        """Perf tests that said which specs they run; of the others nobody knows whose baseline is in use."""
        self.num_gates = 1

    @cached_property
    def experience(self) -> Experience:
        """What all baselines of this machine kind show; read once, before anything of this run is recorded."""
        policy = Policy.for_cpu() if self.on_cpu else Policy.for_gpu()
        return Experience.of(BaselineStore(self.settings.baselines).launches(self.machine_kind), policy.noise)

    @cached_property
    def revision(self) -> Revision:
        """Of the tree under rootdir; asked for only where something is recorded."""
        return find_revision(self.config.rootpath, self.settings.baselines)

    @property
    def rule(self) -> Rule:
        """How strict this run's verdicts are."""
        return Rule.allowing(self.settings.alarms_a_month, self.num_gates, self.settings.max_launches)

    @cached_property
    def machine(self) -> Machine:
        """Found on first use: a run without a perf test never asks the driver.

        Raises:
            pytest.UsageError: fewer GPUs than ``--gpus`` asks for: a nightly job must not go green on a dead GPU.
        """
        try:
            machine = find_machine()
        except ValueError as error:
            raise pytest.UsageError(f"--gpus: {error}") from error
        asked = self.settings.gpus
        if asked is not None and asked > len(machine.gpus):
            raise pytest.UsageError(
                f"--gpus {asked}: only {len(machine.gpus)} GPU(s) visible here; "
                "check nvidia-smi and CUDA_VISIBLE_DEVICES, or ask for fewer (--gpus 0 is the CPU)"
            )
        return machine

    @property
    def num_gpus(self) -> int:
        """GPUs this run may use; 0 is the CPU."""
        asked = self.settings.gpus
        return len(self.machine.gpus) if asked is None else min(asked, len(self.machine.gpus))

    @property
    def on_cpu(self) -> bool:
        return self.num_gpus == 0

    @property
    def machine_kind(self) -> str:
        """What keys a baseline together with the digest."""
        name = self.settings.machine
        if self.on_cpu:  # a site names its machine once, and its CPU's figures must never meet its GPU's
            return f"{name}-cpu" if name else self.machine.cpu_kind
        if name:
            return name
        try:
            return self.machine.gpu_kind
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error

    @cached_property
    def run_folder(self) -> Path:
        """Where this run keeps its launches' logs and records: ``.llmperf/`` under rootdir, or a temporary folder."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        home = self.config.rootpath / ".llmperf"
        try:
            home.mkdir(exist_ok=True)
            (home / ".gitignore").write_text("*\n", encoding="ascii")
            _prune(home)
            (home / name).mkdir()
        except OSError:  # a read-only checkout
            return Path(tempfile.mkdtemp(prefix="llmperf-"))
        return home / name


def _prune(home: Path) -> None:
    runs = sorted(path for path in home.iterdir() if _RUN_NAME.fullmatch(path.name))
    for old in runs[: -_KEPT_RUNS + 1]:
        if _is_over(old):
            shutil.rmtree(old, ignore_errors=True)


def _is_over(run: Path) -> bool:
    """Whether nobody writes in this run's folder any more, as far as this host can tell."""
    if psutil.pid_exists(int(run.name.rpartition("-")[2])):
        return False
    # It may be of another host or container, where its pid is another's: then only what was written tells.
    try:
        changed = max(path.stat().st_mtime for path in (run, *run.iterdir()))
    except OSError:  # somebody else prunes it
        return False
    return time.time() - changed > _UNTOUCHED_SECONDS


SESSION = pytest.StashKey[PerfSession]()
FINDINGS = pytest.StashKey[Findings]()
