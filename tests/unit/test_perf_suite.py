"""The suite itself is collected, on a CPU and as a GPU would have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perf_tests.capacity import CAPACITIES
from perf_tests.families import FAMILIES
from perf_tests.gains import GAINS, specs_of
from perf_tests.optimisations import OPTIMISATIONS
from perf_tests.real_data import REAL_DATA, REAL_DATA_ON_CPU

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.processes
def test_it_is_collected_on_a_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "perf_tests", "--collect-only", "-q", "--gpus", "0"]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    for module in (
        "ladder",
        "gains",
        "scaling",
        "optimisations",
        "capacity",
        "families",
        "real_data",
        "input_pipeline",
    ):
        assert f"perf_tests/test_{module}.py" in done.stdout


def test_no_two_cases_are_the_same() -> None:
    digests = [spec.digest for spec in (*(one.spec for one in OPTIMISATIONS), *(one.spec for one in FAMILIES))]
    assert len(set(digests)) == len(digests)
    for cases in (REAL_DATA, REAL_DATA_ON_CPU):
        assert len({case.spec.digest for case in cases}) == len(cases)
    assert len({spec.capacity_digest for spec in CAPACITIES}) == 4


def test_both_sides_of_every_gain_can_be_made() -> None:
    for gain in GAINS:
        before, after = specs_of(gain, cpu=False)
        assert before.digest != after.digest
        if gain.cpu_bounds:
            assert not any(spec.liger for spec in specs_of(gain, cpu=True))
