"""The scripts of this folder as cases: ``pytest tools/scripts/recorded.py --perf-launches 2 --update-baselines``.

``LLMPERF_SCRIPTS_SIZE`` is their size: tiny, 700m or 1b.
"""

from __future__ import annotations

import os

import pytest

from pytest_llmperf import Perf
from tools.script_overhead import commands


@pytest.mark.parametrize(("name", "command"), commands(os.environ.get("LLMPERF_SCRIPTS_SIZE", "tiny")).items())
def test_script(perf: Perf, name: str, command: str) -> None:
    """Held as any other case."""
    perf.script(command, name=name)
