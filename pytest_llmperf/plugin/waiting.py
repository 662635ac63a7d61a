"""Waiting: the plugin until the first perf test, or the first option of ours: then it loads the rest, and steps back.

Every start of pytest loads this: it imports nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llmperf.plugin import is_case

if TYPE_CHECKING:
    from pytest_llmperf.plugin.collector import Collector
    from pytest_llmperf.plugin.session import PerfSession


class Waiting:
    """Of one session."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._collector: Collector | None = None
        self.uncollected: list[pytest.CollectReport] = []
        """What could not be collected so far."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody has asked for a run yet."""
        return self._collector is None

    def begin(self) -> Collector:
        """The run's own hooks; pytest calls them from here on. pytest.UsageError: as of ``Collector``."""
        if self._collector is None:
            from pytest_llmperf.plugin.collector import Collector

            self._config.pluginmanager.unregister(self)
            self._collector = Collector(self._config)
            for report in self.uncollected:
                self._collector.pytest_collectreport(report)
        return self._collector

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(self) -> Generator[None, Any, Any]:
        made = yield
        if isinstance(made, list) and any(is_case(item) for item in made if isinstance(item, pytest.Item)):
            self.begin().saw(made)
        return made

    @pytest.hookimpl
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if is_case(item):  # of a file that is not Python's
            self.begin().pytest_itemcollected(item)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "llmperf_case") or hasattr(report, "llmperf"):  # of a worker of xdist
            self.begin().pytest_runtest_logreport(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["llmperf_gpus"] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        if any(name.startswith("llmperf_") for name in output):
            self.begin().pytest_testnodedown(node)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["llmperf"] = None  # it saw no perf test, and did not crash


WAITING = pytest.StashKey[Waiting]()


def session_of(config: pytest.Config) -> PerfSession:
    """The run of this session, which begins with the first that asks for it."""
    return config.stash[WAITING].begin().session


def is_active(config: pytest.Config) -> bool:
    """Whether the plugin takes part in this session: ``-p no:llmperf`` leaves it out."""
    return WAITING in config.stash


def on_cpu(config: pytest.Config) -> bool:
    """Whether the run's ranks train on the CPU, over gloo: ``--gpus 0``, or no GPU is visible.

    Raises:
        pytest.UsageError: the hardware that ``--gpus`` asks for is not there, or the plugin takes no part.
    """
    if not is_active(config):
        raise pytest.UsageError("pytest_llmperf.on_cpu: the plugin llmperf takes no part in this session")
    session = session_of(config)
    with session.outcomes():
        return session.on_cpu
