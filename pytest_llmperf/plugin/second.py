"""A second folder of baselines: none is begun in silence where the work tree has one further up."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmperf.support.folders import baselines_above


def refuse_second(config: pytest.Config) -> None:
    """Before a run records: without an ini file, pytest takes a sub-folder for its rootdir.

    Raises:
        pytest.UsageError: what it records would be held against nothing of what is there.
    """
    found = first(config)
    if found is not None:
        raise pytest.UsageError(f"{told(config, found)}; --perf-baselines=baselines begins a second one here")


def first(config: pytest.Config) -> Path | None:
    """The baselines further up that this run does not see; ``None`` where somebody said what its rootdir is."""
    option = config.option
    if config.inipath is not None or option.perf_baselines or config.getoption("rootdir", default=None):
        return None
    return baselines_above(config.rootpath / "baselines")


def told(config: pytest.Config, found: Path) -> str:
    """One line about them."""
    return (
        f"no baselines in {config.rootpath}, which pytest takes for its rootdir, and {found} has some: use them with "
        f"--rootdir={found.parent} or --perf-baselines={found}"
    )
