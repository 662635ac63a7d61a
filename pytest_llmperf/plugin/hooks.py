"""The plugin's entry point. Every start of pytest loads it: all that only a perf test needs comes with the first."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.plugin import command_line
from pytest_llmperf.plugin.fixtures import (  # noqa: F401 - pytest finds fixtures by name in a plugin's module
    attention,
    gpus,
    liger,
    micro_batch_size,
    model,
    perf,
    precision,
    train_spec,
)
from pytest_llmperf.plugin.waiting import WAITING, Waiting
from pytest_llmperf.run.options import OptionError, add_to_pytest, is_said, refuse_unknown_update, table
from pytest_llmperf.run.settings import SLURM_INI, Settings

#: As `pytest --markers` shows them.
MARKERS = (
    "rung(number): the case is this rung of the chapter's ladder, e.g. rung(number='15.9')",
    "perf_tolerance(throughput=…, memory=…): fractions by which this test's cases may get worse",
    "perf_scaling(efficiency_at_least=…, tolerance=…): a floor of the scaling efficiency, and how far it may fall",
    "expects_oom(below_gib): the case must run out of memory on a GPU with less memory than this",
    "expects_inactive(*settings): settings that are asked for and known to change nothing, e.g. 'liger' on OPT",
    "perf_parity: what the case trains is held beside its plain form first, as by --perf-parity",
    "perf_loss_curve(seeds=5): the case's losses are held against those of so many seeds before",
    "reference(source=…, tokens_per_second_per_gpu=…, peak_reserved_gib=…): published figures of the case",
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config = pluginmanager.get_plugin("pytestconfig")
    try:
        refuse_unknown_update(config.invocation_params.args if config else ())
    except OptionError as error:
        raise pytest.UsageError(str(error)) from None
    with command_line.guarding(parser, config):
        add_options(parser)


def add_options(parser: pytest.Parser) -> None:
    """Register every option and ini value."""
    add_to_pytest(parser, (option for _, option in table(Settings)))
    for name, what in SLURM_INI.items():
        parser.addini(f"perf_slurm_{name}", f"SLURM: {what}", default="")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    waiting = config.stash[WAITING] = Waiting(config)
    config.pluginmanager.register(waiting, "llmperf-waiting")
    options = [option for _, option in table(Settings)]
    inis = [*(f"perf_slurm_{name}" for name in SLURM_INI), *(option.ini for option in options if option.ini)]
    # What cannot be used ends the run here, before anything is collected.
    if is_said(options, config.option) or "SLURM_JOB_ID" in os.environ:
        waiting.begin()
    elif any(map(config.getini, inis)) or "LLMPERF_INJECT" in os.environ:
        command_line.settings_of(config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A spec that cannot be is refused in one line, also where a test file makes it as it is imported."""
    report = yield
    _refuse_in_a_line(report, getattr(report, "call", None), collector.path)
    waiting = collector.config.stash[WAITING]
    if not report.passed and waiting.is_idle:
        waiting.uncollected.append(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_in_a_line(report, call, item.path)
    return report


def _refuse_in_a_line(report: Any, call: pytest.CallInfo[Any] | None, source: Path) -> None:
    # By its name: nobody loads the class for errors of others.
    if report.failed and call and call.excinfo is not None and call.excinfo.typename.endswith("SpecError"):
        from pytest_llmperf.plugin.outcomes import refusal_line

        report.longrepr = refusal_line(call.excinfo, source) or report.longrepr
