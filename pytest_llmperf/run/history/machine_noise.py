"""How launches of a machine kind scatter, as far as its baselines tell; else what is usual."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pytest_llmperf.judge.case_histories import Scattering
from pytest_llmperf.judge.noise import Experience, Noise
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.store import BaselineStore

# As runs name the kinds of CPUs.
_CPU = re.compile(r"^cpu-|-cpu(-limit-|$)")


def scattering(machines: Iterable[str], baselines: Path) -> dict[str, Scattering]:
    """By machine kind."""
    return {one: Scattering(_noise(one, baselines), are_gpus=not _CPU.search(one)) for one in sorted(set(machines))}


def _noise(machine: str, baselines: Path) -> Noise:
    usual = (Policy.for_cpu() if _CPU.search(machine) else Policy.for_gpu()).noise
    if not machine or Path(machine).name != machine:
        return usual  # a name that leads elsewhere is nobody's folder
    return Experience.of(BaselineStore(baselines).launches(machine), usual).noise
