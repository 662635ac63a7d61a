"""``--perf-static``: judged without a launch, on any machine."""

from __future__ import annotations

import pytest

# What asks for launches, or for a look at them, by its name on the command line.
_LAUNCHING = {
    "perf_dry_run": "--perf-dry-run",
    "perf_against": "--perf-against",
    "perf_budget": "--perf-budget",
    "perf_resume": "--perf-resume",
    "perf_width": "--perf-width",
}


def add_options(group: pytest.OptionGroup) -> None:
    """Register the command line's."""
    what = "judge without launching or a GPU: operators, arithmetic and predicted memory of each case's step"
    group.addoption("--perf-static", action="store_true", help=what)


def read(config: pytest.Config) -> bool:
    """Whether it was asked for.

    Raises:
        pytest.UsageError: with an option that is about launches.
    """
    option = config.option
    if not option.perf_static:
        return False
    found = [name for destination, name in _LAUNCHING.items() if getattr(option, destination)]
    if option.perf_update == "prune":
        found.append("--update-baselines=prune")
    if found:
        raise pytest.UsageError(f"--perf-static launches nothing; it goes with no {found[0]}")
    return True
