"""The exact commands a message offers: run this case again, record it, accept it."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import pytest

from pytest_llmperf.records.results_document import TEST
from pytest_llmperf.report.failure_message import failure_message
from pytest_llmperf.run.options import table
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.settings import Settings

if TYPE_CHECKING:
    from pytest_llmperf.run.findings import Concluded


def rerun(item: pytest.Item, run: Run) -> str:
    """The command that runs this test alone, from where pytest was started; of a SLURM job's run, in one like it."""
    path, separator, name = item.nodeid.partition("::")
    node = os.path.relpath(item.config.rootpath / path, item.config.invocation_params.dir) + separator + name
    return shlex.join(_words(run, item.config, node))


def failure(item: pytest.Item, run: Run, conclusion: Concluded) -> str:
    """Why the test fails, with the commands that run it again and accept it; a loss needs a reason."""
    again, result, accept = rerun(item, run), conclusion.result, ""
    if conclusion.is_acceptable:
        needs_reason = result.verdict in ("regressed", "changed") or result.changed
        accept = f"{again} --update-baselines" + ("=new" if result.verdict == "new" else "")
        accept += ' --perf-reason "why"' if needs_reason else ""
    message = failure_message(result, rerun=again, accept=accept, baseline=conclusion.held_against)
    return "\n".join(filter(None, [message, conclusion.refused]))


def rerun_words(run: Run, config: pytest.Config) -> list[str]:
    """The same of any test, with ``TEST`` where its node id belongs, and in it the way to rootdir."""
    way = os.path.relpath(config.rootpath, config.invocation_params.dir)
    node = TEST if way == os.curdir else os.path.join(way, TEST)  # noqa: PTH118 - as a person types it
    return _words(run, config, node)


def _words(run: Run, config: pytest.Config, node: str) -> list[str]:
    where = ["--gpus", str(run.num_gpus)]
    if run.settings.static:
        where = ["--perf-static", *(where if run.settings.gpus is not None else [])]
    parts = [*run.words_for_as_much(), "pytest", node, *where]
    for _, option in table(Settings):
        value = getattr(config.option, option.dest, None)
        if option.repeated and value is not None:
            parts.append(option.flag if option.is_switch else f"{option.flag}={value}")
    for setting in config.getoption("override_ini", default=None) or ():
        # pytest also keeps --strict-config and the like here, which are in the ini file anyway and decide nothing.
        parts += [] if setting.startswith("strict") else ["-o", setting]
    return parts
