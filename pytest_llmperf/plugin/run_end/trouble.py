"""Trouble: what fails a run and is no test's, shown as red as a test that fails, to people and in JUnit's XML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pytest_llmperf.report.text import leaving

# They remember what failed in order to run it again, and this is no test.
_REMEMBERING = ("lfplugin", "stepwiseplugin")


@dataclass(frozen=True)
class Trouble:
    """One reason why a run fails in which every test may have passed."""

    name: str
    """Of what: ``unused baselines``."""
    lines: Sequence[str]

    def tell(self, config: pytest.Config) -> None:
        """Have every reporter count it as an error of the run's end: an exit code under a green line explains nothing.

        Must run before any of them ends: in a ``pytest_sessionfinish`` that comes first, and in the controller alone.
        """
        report = pytest.TestReport(
            nodeid=f"llmperf::{self.name}",
            location=("llmperf", None, f"the run: {self.name}"),
            keywords={},
            outcome="failed",
            longrepr=leaving("\n".join(self.lines)),
            when="teardown",
        )
        report.llmperf_trouble = ""  # type: ignore[attr-defined]
        plugins = config.pluginmanager
        without = [plugin for name in _REMEMBERING if (plugin := plugins.get_plugin(name)) is not None]
        plugins.subset_hook_caller("pytest_runtest_logreport", without)(report=report)
        report.llmperf_trouble = "ERROR"  # type: ignore[attr-defined]


def status(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """How a trouble's report counts: as an error, and while it is told by no letter, after which 200 % would stand."""
    word = getattr(report, "llmperf_trouble", None)
    return None if word is None else ("error", "", word)
