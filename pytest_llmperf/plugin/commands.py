"""The exact commands a message offers: run this case again, record it, accept it."""

from __future__ import annotations

import os
import shlex

import pytest

from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.result import CaseResult

# Options that decide what a case is held against, or how, and their defaults.
_DECIDING = {
    "--perf-baselines": None,
    "--perf-against": None,
    "--perf-memory-limit": None,
    "--perf-launcher": "auto",
    "--perf-timeout": 1800.0,
    "--perf-launches": 1,
    "--perf-max-launches": None,
}


def rerun(item: pytest.Item, session: PerfSession) -> str:
    """The command that runs this test alone, from where pytest was started."""
    return _command(item, session)


def accept(item: pytest.Item, session: PerfSession, result: CaseResult) -> str:
    """The command that records this test's figure; one that got worse, or is of something else, has to say why."""
    flags = "--update-baselines=new" if result.verdict == "new" else "--update-baselines"
    needs_reason = result.verdict == "regressed" or result.changed
    return f"{_command(item, session)} {flags}" + (' --perf-reason "why"' if needs_reason else "")


def _command(item: pytest.Item, session: PerfSession) -> str:
    path, separator, name = item.nodeid.partition("::")
    node = os.path.relpath(item.config.rootpath / path, item.config.invocation_params.dir) + separator + name
    parts = ["pytest", node, "--gpus", str(session.num_gpus)]
    for name, usual in _DECIDING.items():
        value = item.config.getoption(name)
        parts += [f"{name}={value}"] if value != usual else []
    for setting in item.config.getoption("override_ini", default=None) or ():
        # pytest also keeps --strict-config and the like here, which are in the ini file anyway and decide nothing.
        parts += [] if setting.startswith("strict") else ["-o", setting]
    return shlex.join(parts)
