"""The faulty loop as cases: recorded without a fault, judged with one.

    pytest tools/scripts/faulty_cases.py -k one --perf-launches 2 --update-baselines --perf-baselines /tmp/baselines
    FAULT=slow=2 pytest tools/scripts/faulty_cases.py -k one --perf-baselines /tmp/baselines
    FAULT=leak SOAK_MINUTES=1.5 pytest tools/scripts/faulty_cases.py -k soak

``LLMPERF_SCRIPTS_SIZE`` is the size: tiny, 700m or 1b.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_llmperf import Perf

SIZE = os.environ.get("LLMPERF_SCRIPTS_SIZE", "tiny")
SCRIPT = f"{Path(__file__).with_name('faulty.py')} --size {SIZE}"


def test_one(perf: Perf) -> None:
    """One rank, held as any other case."""
    perf.script(f"{sys.executable} {SCRIPT}", name=f"faulty-{SIZE}")


def test_ranks(perf: Perf) -> None:
    """DDP on two."""
    perf.script(f"torchrun --nproc-per-node 2 {SCRIPT}", name=f"faulty-ranks-{SIZE}")


def test_dpo(perf: Perf) -> None:
    """TRL's DPO, whose own package asks for many tensors' contents a step."""
    script = f"{Path(__file__).with_name('dpo.py')} --size {SIZE} --steps 140"
    # Of 30 steps two launches on an H200 were 3 % apart.
    perf.script(f"{sys.executable} {script}", name=f"dpo-{SIZE}", steps=100)


def test_soak(perf: Perf) -> None:
    """Minutes, judged against themselves."""
    minutes = float(os.environ.get("SOAK_MINUTES", "0.4"))
    perf.soak(f"{sys.executable} {SCRIPT} --steps 1000000", minutes=minutes)
