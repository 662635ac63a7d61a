"""The exact commands a message offers: run this case again, record it, accept it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

import pytest

from pytest_llmperf.plugin.session import PerfSession
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.results_json import TEST

# Options that decide what a case is held against, or how, and their defaults.
_DECIDING = {
    "--perf-baselines": None,
    "--perf-against": None,
    "--perf-memory-limit": None,
    "--perf-launcher": "auto",
    "--perf-timeout": 1800.0,
    "--perf-launches": 1,
    "--perf-max-launches": None,
    "--perf-trace": "yes",
    "--perf-all-steps": None,
    "--perf-calibration": None,
}


def rerun(item: pytest.Item, session: PerfSession) -> str:
    """The command that runs this test alone, from where pytest was started; of a SLURM job's run, in one like it."""
    return _command(item, session)


def accept(item: pytest.Item, session: PerfSession, result: CaseResult) -> str:
    """The command that records this test's figure; one that got worse, or is of something else, has to say why."""
    flags = "--update-baselines=new" if result.verdict == "new" else "--update-baselines"
    needs_reason = result.verdict in ("regressed", "changed") or result.changed
    return f"{_command(item, session)} {flags}" + (' --perf-reason "why"' if needs_reason else "")


def rerun_words(session: PerfSession) -> list[str]:
    """The same of any test, with ``TEST`` where its node id belongs, and in it the way to rootdir."""
    way = os.path.relpath(session.config.rootpath, session.config.invocation_params.dir)
    return _words(session, TEST if way == os.curdir else os.path.join(way, TEST))  # noqa: PTH118 - as a person types it


def rerun_of(session: PerfSession, nodes: Sequence[str]) -> str:
    """The command that runs these tests again, by their node ids."""
    words = rerun_words(session)
    return shlex.join(named for word in words for named in _named(word, nodes))


def _named(word: str, nodes: Sequence[str]) -> list[str]:
    return [word.replace(TEST, node) for node in nodes] if TEST in word else [word]


def _command(item: pytest.Item, session: PerfSession) -> str:
    path, separator, name = item.nodeid.partition("::")
    node = os.path.relpath(item.config.rootpath / path, item.config.invocation_params.dir) + separator + name
    return shlex.join(_words(session, node))


def _words(session: PerfSession, node: str) -> list[str]:
    config = session.config
    where = ["--gpus", str(session.num_gpus)]
    if session.settings.static:
        where = ["--perf-static", *(where if session.settings.gpus is not None else [])]
    where += ["--perf-parity"] if config.getoption("--perf-parity") else []
    where += ["--perf-loss-curve"] if config.getoption("--perf-loss-curve") else []
    parts = [*session.words_for_as_much(), "pytest", node, *where]
    for name, usual in _DECIDING.items():
        value = config.getoption(name)
        parts += [f"{name}={value}"] if value != usual else []
    for setting in config.getoption("override_ini", default=None) or ():
        # pytest also keeps --strict-config and the like here, which are in the ini file anyway and decide nothing.
        parts += [] if setting.startswith("strict") else ["-o", setting]
    return parts
