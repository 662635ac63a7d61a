"""The bridge to pytest-benchmark: each measured case is one entry of its storage, with its step times as rounds.

It replays stored times through the documented ``timer`` and ``pedantic``; nothing is run again. Where pytest-benchmark
is absent, disabled or already used by the test, nothing is recorded and no verdict changes.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_llmperf.records.result import CaseResult


class ReplayClock:
    """A timer that pytest-benchmark reads at each round's begin and end: it tells the stored step times."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def set(self, seconds: float) -> None:
        """Make this the time: each round begins at 0 and ends at its duration, so that no digit is lost."""
        self._now = seconds


_CLOCK = pytest.StashKey[ReplayClock]()


def prepare(item: pytest.Item) -> None:
    """Have a perf test's ``benchmark`` fixture read a clock of ours, should it be asked for later."""
    fixtures: list[str] = item.fixturenames  # type: ignore[attr-defined]
    if not item.config.pluginmanager.hasplugin("benchmark") or "benchmark" in fixtures:
        return  # a test that uses benchmark itself keeps it
    marker = item.get_closest_marker("benchmark")
    clock = ReplayClock()
    item.stash[_CLOCK] = clock
    options = {**(marker.kwargs if marker else {}), "timer": clock}
    # In front of the marker that is there: the closest one wins, and without our timer it would record microseconds.
    item.add_marker(pytest.mark.benchmark(**options), append=False)
    if item.config.getoption("benchmark_only"):
        # It selects by this list. A new one: the one that is there is shared by all cases of a function.
        item.fixturenames = [*fixtures, "benchmark"]  # type: ignore[attr-defined]


def record(request: pytest.FixtureRequest, result: CaseResult) -> None:
    """Store the case's steady step times as rounds, and what else was found as ``extra_info``."""
    clock = request.node.stash.get(_CLOCK, None)
    steps = [second for launch in result.launches for second in launch.steady_step_seconds]
    if clock is None or not steps or request.config.getoption("benchmark_skip"):
        return
    if (
        result.verdict == "invalid"
    ):  # its times may be no numbers, which would end pytest-benchmark, and the run with it
        return
    del request.node.stash[_CLOCK]  # one entry a test: pytest-benchmark keeps no more
    # Asked for only now: a test that is skipped or fails to launch would leave it unused, which it warns of.
    benchmark: Any = request.getfixturevalue("benchmark")
    pending = iter(steps)
    # One more call than rounds: pytest-benchmark runs the target once more for its return value.
    benchmark.pedantic(
        lambda: clock.set(next(pending, 0.0)), setup=lambda: clock.set(0.0), rounds=len(steps), iterations=1
    )
    benchmark.extra_info.update(
        {
            "spec": result.id,
            "digest": result.digest,
            "machine": result.machine,
            "verdict": result.verdict,
            "metrics": {check.metric: check.value for check in result.checks},
        }
    )


def drop_from_table(config: pytest.Config, groups: list[Any], fullnames: set[str]) -> list[Any]:
    """pytest-benchmark's groups without our cases, which have a table of ours; all of them where the user asked."""
    asked = ("benchmark_histogram", "benchmark_compare", "benchmark_verbose")
    if any(config.getoption(name, default=None) for name in asked):
        return groups
    kept = [(name, [entry for entry in entries if entry["fullname"] not in fullnames]) for name, entries in groups]
    return [(name, entries) for name, entries in kept if entries]


def unwritten(config: pytest.Config) -> list[str]:
    """A line where pytest-benchmark was asked for a file and writes none: beside pytest-xdist it only warns, or not."""
    if config.getoption("dist", default="no") == "no":
        return []
    asked = {name: config.getoption(f"benchmark_{name}", default=None) for name in ("json", "save", "autosave")}
    flags = [f"--benchmark-{name}" for name, value in asked.items() if value]
    why = "not written, pytest-benchmark records nothing under pytest-xdist (-n); leave out -n, or take --perf-json"
    return [f"{' '.join(flags)}: {why}"] if flags else []
