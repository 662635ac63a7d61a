"""The suite itself is collected, on a CPU and as a GPU would have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perf_tests.capacity import CAPACITIES
from perf_tests.families import FAMILIES
from perf_tests.gains import GAINS, specs_of
from perf_tests.ladder import LADDER
from perf_tests.optimisations import OPTIMISATIONS
from perf_tests.parity import PARITY, PARITY_ON_CPU
from perf_tests.real_data import REAL_DATA, REAL_DATA_ON_CPU
from pytest_llmperf.settings.attention import ATTENTIONS, SDPA_BACKENDS
from pytest_llmperf.settings.compilation import CHECKPOINTING_POLICIES
from pytest_llmperf.settings.liger import LIGER_KERNELS
from pytest_llmperf.settings.models import resolve
from pytest_llmperf.settings.parallelism import PARALLELISMS
from pytest_llmperf.settings.precision import FP8_RECIPES
from pytest_llmperf.settings.registry import small

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["LLMPERF_TEXT", "LLMPERF_TOKENIZERS"])
def test_a_text_that_is_not_there_is_one_line(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "perf_tests", "--collect-only", "-q", "--gpus", "0"],
        cwd=REPOSITORY,
        env={**os.environ, name: str(tmp_path / "none")},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    said = [line for line in (done.stdout + done.stderr).splitlines() if "no such" in line]
    assert len(said) == 1
    assert said[0].startswith(f"ERROR: {name}={tmp_path / 'none'}: TrainSpec: ")
    assert "Traceback" not in done.stderr
    assert "ImportError" not in done.stderr


def collected(*paths: str) -> str:
    command = [sys.executable, "-m", "pytest", *paths, "--collect-only", "-q", "--gpus", "0"]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@pytest.mark.processes
def test_it_is_collected_on_a_cpu() -> None:
    found = collected("perf_tests", "perf_tests/test_parity.py")
    for module in (
        "ladder",
        "gains",
        "scaling",
        "optimisations",
        "capacity",
        "families",
        "fine_tuning",
        "lengths",
        "real_data",
        "parity",
    ):
        assert f"perf_tests/test_{module}.py" in found


@pytest.mark.processes
def test_parity_is_collected_where_it_is_named_alone() -> None:
    found = collected("perf_tests")
    assert "perf_tests/test_ladder.py" in found
    assert "test_parity" not in found


def test_no_two_cases_are_the_same() -> None:
    digests = [spec.digest for spec in (*(one.spec for one in OPTIMISATIONS), *(one.spec for one in FAMILIES))]
    assert len(set(digests)) == len(digests)
    for cases in (REAL_DATA, REAL_DATA_ON_CPU):
        assert len({case.spec.digest for case in cases}) == len(cases)
    assert len({spec.capacity_digest for spec in CAPACITIES}) == 4


def test_whatever_is_faster_is_held_beside_its_plain_form() -> None:
    small_ones = [small(spec) for spec in PARITY]
    assert len({spec.digest for spec in small_ones}) == len(PARITY)
    assert {small(rung.spec).digest for rung in LADDER if not rung.inactive} <= {spec.digest for spec in small_ones}
    assert {spec.attention for spec in PARITY} == set(ATTENTIONS)
    assert {spec.sdpa_backend for spec in PARITY} == set(SDPA_BACKENDS)
    assert {spec.fp8 for spec in PARITY} == set(FP8_RECIPES)
    # Of sequence transformers weighs the passes of a step alike, which parity tells (docs/explanation/parity.md).
    assert {spec.parallelism for spec in PARITY} == {*PARALLELISMS} - {"sequence"}
    recomputing = {spec.checkpointing_policy for spec in PARITY if spec.gradient_checkpointing}
    assert recomputing == set(CHECKPOINTING_POLICIES)
    alone = {spec.liger_kernels for spec in PARITY if spec.liger and "+" not in spec.liger_kernels}
    assert alone == {"all", *LIGER_KERNELS} - {"layer_norm", "geglu"}  # of other families, whose kernels are one case
    assert {resolve(spec.model).model_type for spec in PARITY} >= {one.spec.architecture.model_type for one in FAMILIES}
    assert not any(spec.liger or spec.architecture.config["vocab_size"] > 10_000 for spec in PARITY_ON_CPU)


def test_both_sides_of_every_gain_can_be_made() -> None:
    for gain in GAINS:
        before, after = specs_of(gain, cpu=False)
        assert before.digest != after.digest
        if gain.cpu_bounds:
            assert not any(spec.liger for spec in specs_of(gain, cpu=True))
