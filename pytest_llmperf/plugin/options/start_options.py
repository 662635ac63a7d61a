"""The options that say how a launch begins, what it measures of its GPUs before, and what it traces at its end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_llmperf.run.settings import ALL_STEPS, CALIBRATIONS, STARTS
from pytest_llmperf.support import quantities
from pytest_llmperf.support.quantities import argument
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
    group.addoption(
        "--perf-calibration",
        choices=CALIBRATIONS,
        help="whether each GPU is calibrated once a day, for some seconds inside a launch (auto: where GPUs train)",
    )
    group.addoption(
        "--perf-all-steps",
        type=argument(quantities.whole, "a number of nights, 0 or more"),
        metavar="NIGHTS",
        help=f"a case takes all its steps once in so many nights; 1: always, 0: only when recorded ({ALL_STEPS})",
    )
    parser.addini("perf_all_steps", "as --perf-all-steps", default="")
    parser.addini("perf_calibration", "whether GPUs are calibrated: auto or no (auto)", default="auto")
    parser.addini("perf_start", "how a launch begins: auto, warm or cold (auto)", default="auto")


def read(config: pytest.Config) -> str:
    """What was said; the command line before the ini file.

    Raises:
        pytest.UsageError: the ini file says another word.
    """
    return _chosen(config, "perf_start", STARTS)


def read_calibration(config: pytest.Config) -> bool:
    """Whether GPUs are to be calibrated; the command line before the ini file.

    Raises:
        pytest.UsageError: the ini file says another word.
    """
    return _chosen(config, "perf_calibration", CALIBRATIONS) == "auto"


def read_all_steps(config: pytest.Config) -> int:
    """Once in how many nights a case takes all its steps; the command line before the ini file.

    Raises:
        pytest.UsageError: the ini file says another word.
    """
    said = config.option.perf_all_steps
    if said is not None:
        return int(said)
    word = str(config.getini("perf_all_steps")).strip()
    nights = quantities.whole(word) if word else ALL_STEPS
    if nights is None:
        raise pytest.UsageError(f"ini perf_all_steps = {word}: expected a number of nights, 0 or more")
    return nights


def _chosen(config: pytest.Config, name: str, words: Sequence[str]) -> str:
    said = getattr(config.option, name)
    if said is None:
        said = str(config.getini(name)).strip() or "auto"
        if said not in words:
            raise pytest.UsageError(f"ini {name} = {said}: expected {', '.join(words)}{hint(said, words)}")
    return str(said)
