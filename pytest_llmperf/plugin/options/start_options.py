"""The options that say how a launch begins, and whether it traces a few steps at its end."""

from __future__ import annotations

import pytest

from pytest_llmperf.run.settings import STARTS
from pytest_llmperf.support.suggestions import hint


def add_options(group: pytest.OptionGroup, parser: pytest.Parser) -> None:
    """Register the command line's and the ini file's."""
    what = (
        "how a launch begins: forked from a process that has imported everything, or by an interpreter of its own "
        "(auto: warm where it can be)"
    )
    group.addoption("--perf-start", choices=STARTS, help=what)
    group.addoption(
        "--perf-trace",
        choices=("yes", "no"),
        default="yes",
        help="whether each launch traces three steps after those that it times, for exact counts (yes)",
    )
    parser.addini("perf_start", "how a launch begins: auto, warm or cold (auto)", default="auto")


def read(config: pytest.Config) -> str:
    """What was said; the command line before the ini file.

    Raises:
        pytest.UsageError: the ini file says another word.
    """
    said = config.option.perf_start
    if said is None:
        said = str(config.getini("perf_start")).strip() or "auto"
        if said not in STARTS:
            raise pytest.UsageError(f"ini perf_start = {said}: expected {', '.join(STARTS)}{hint(said, STARTS)}")
    return str(said)
