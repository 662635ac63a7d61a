"""``--perf-static``: judged without a launch, on any machine."""

from __future__ import annotations

import pytest

# What asks for launches, or for a look at them, by its name on the command line.
_LAUNCHING = {
    "perf_dry_run": "--perf-dry-run",
    "perf_against": "--perf-against",
    "perf_parity": "--perf-parity",
    "perf_loss_curve": "--perf-loss-curve",
    "perf_budget": "--perf-budget",
    "perf_resume": "--perf-resume",
    "perf_width": "--perf-width",
}

# What says how launches are made, with what it is where nobody says anything.
_OF_LAUNCHES = {
    "perf_launches": ("--perf-launches", 1),
    "perf_max_launches": ("--perf-max-launches", None),
    "perf_timeout": ("--perf-timeout", 1800.0),
    "perf_memory_limit": ("--perf-memory-limit", None),
    "perf_start": ("--perf-start", None),
    "perf_trace": ("--perf-trace", "yes"),
    "perf_launcher": ("--perf-launcher", "auto"),
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


def without_effect(config: pytest.Config) -> str:
    """A line about what was said of launches, where there are none; empty: nothing was."""
    option = config.option
    said = [name for destination, (name, unsaid) in _OF_LAUNCHES.items() if getattr(option, destination) != unsaid]
    return f"{', '.join(said)}: without effect, since nothing is launched" if said and option.perf_static else ""
