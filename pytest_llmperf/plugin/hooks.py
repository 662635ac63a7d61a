"""The plugin's entry point. Every start of pytest loads it: all that only a perf test needs comes with the first."""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import shlex
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from _pytest.config.findpaths import determine_setup

from pytest_llmperf.plugin import is_case, settings_of
from pytest_llmperf.run.options import (
    PYTEST,
    SLURM_INI,
    UPDATES,
    WORDS,
    OptionError,
    Settings,
    add_to_pytest,
    is_said,
    meant,
    refuse_unknown_update,
    table,
)
from pytest_llmperf.support.user_input import SLIP, nearest

if TYPE_CHECKING:
    from pytest_llmperf.plugin.collector import Collector, PerfSession
    from pytest_llmperf.plugin.perf import Perf
    from pytest_llmperf.settings.train_spec import TrainSpec

_Report = TypeVar("_Report", pytest.CollectReport, pytest.TestReport)

#: As `pytest --markers` shows them.
MARKERS = (*WORDS["markers"].values(),)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config = pluginmanager.get_plugin("pytestconfig")
    try:
        refuse_unknown_update(config.invocation_params.args if config else ())
    except OptionError as error:
        raise pytest.UsageError(str(error)) from None
    with _guarding(parser, config):
        add_options(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> Generator[None, None, None]:
    """Once all options are there: of one that nobody knows pytest would only say so."""
    yield
    flags = [*UPDATES, *(one.flag for _, one in table(Settings) if PYTEST in one.fronts)]
    unknown = parser.parse_known_and_unknown_args(args)[1]
    # What is little like one of ours is another plugin's, which is not installed, say.
    ours = [word for word in unknown if word.startswith(_OURS) or nearest(word.partition("=")[0], flags, SLIP)]
    if told := meant(ours, flags):
        raise pytest.UsageError(f"unrecognized arguments: {' '.join(unknown)}{told}")


# Pytest finds rootdir by the command line before it knows our options: a value of one may have moved it.
_OURS = ("--perf-", "--gpus", "--update-baselines")


@contextmanager
def _guarding(parser: pytest.Parser, config: pytest.Config | None) -> Iterator[None]:
    """Add options inside; pytest.UsageError: pytest took a value of theirs for a test's path, and moved there."""
    words = list[str]()
    # A plugin that pytest.main() is given comes before rootdir, with its options.
    if config is not None and getattr(config, "rootpath", None) is not None:
        words = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *map(str, config.invocation_params.args)]
    if config is None or not any(word.startswith(_OURS) for word in words):
        yield
        return
    before = parser.parse_known_args(words)
    yield
    after = parser.parse_known_args(words)
    tests = list(after.file_or_dir)
    if before.file_or_dir == tests:
        return
    here = config.invocation_params.dir
    found, expected = (_project(each, here) for each in (before, after))
    if found != expected:
        # The option whose value was taken for a test's path; of several, the first whose value is one.
        taken = [value for value in before.file_or_dir if value not in tests]
        pairs = [pair for pair in itertools.pairwise(words) if pair[0].startswith("-") and pair[1] in taken]
        name, value = next((pair for pair in pairs if Path(pair[1]).exists()), pairs[0])
        raise pytest.UsageError(
            f"{name} {value}: pytest takes this path for a test's and went to {_shown(*found)}, with its settings and "
            f"baselines, expected {_shown(*expected)}; write {name}={value}"
        )


def _project(asked: argparse.Namespace, here: Path) -> tuple[Path, Path | None]:
    """Rootdir and ini file, as pytest finds them by these words: by its own function, as nothing public asks it."""
    values = {
        "inifile": asked.inifilename,
        "override_ini": None,  # it decides nothing of where; not every version takes it
        "args": asked.file_or_dir,
        "rootdir_cmd_arg": asked.rootdir or None,
        "invocation_dir": here,
    }
    known = inspect.signature(determine_setup).parameters
    rootdir, ini, *_ = determine_setup(**{name: value for name, value in values.items() if name in known})
    return rootdir, ini


def _shown(rootdir: Path, ini: Path | None) -> str:
    return f"rootdir {rootdir}" + (f" by {ini}" if ini and ini.parent != rootdir else f" ({ini.name})" if ini else "")


def add_options(parser: pytest.Parser) -> None:
    add_to_pytest(parser, (option for _, option in table(Settings)))
    for name, what in SLURM_INI.items():
        parser.addini(f"perf_slurm_{name}", f"SLURM: {what}", default="")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    waiting = config.stash[WAITING] = Waiting(config)
    config.pluginmanager.register(waiting, "llmperf-waiting")
    options = [option for _, option in table(Settings)]
    inis = [f"perf_slurm_{name}" for name in SLURM_INI] + [option.ini for option in options if option.ini]
    # What cannot be used ends the run here, before anything is collected.
    if is_said(options, config.option) or "SLURM_JOB_ID" in os.environ:
        waiting.begin()
    elif any(map(config.getini, inis)) or "LLMPERF_INJECT" in os.environ:
        settings_of(config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A spec that cannot be is refused in one line, also where a test file makes it as it is imported."""
    report = yield
    return _refused_in_a_line(report, getattr(report, "call", None), collector.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _refused_in_a_line(report, call, item.path)


def _refused_in_a_line(report: _Report, call: pytest.CallInfo[Any] | None, source: Path) -> _Report:
    # By its name: nobody loads the class for errors of others.
    if report.failed and call and call.excinfo is not None and call.excinfo.typename.endswith("SpecError"):
        from pytest_llmperf.plugin.reports import refusal_line

        report.longrepr = refusal_line(call.excinfo, source) or report.longrepr
    return report


class Waiting:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._collector: Collector | None = None
        self._uncollected: list[pytest.CollectReport] = []

    def begin(self) -> Collector:
        """The run's own hooks; pytest calls them from here on. pytest.UsageError: as of ``Collector``."""
        if self._collector is None:
            from pytest_llmperf.plugin.collector import Collector

            self._config.pluginmanager.unregister(self)
            self._collector = Collector(self._config)
            for report in self._uncollected:
                self._collector.pytest_collectreport(report)
        return self._collector

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(self) -> Generator[None, Any, Any]:
        made = yield
        if isinstance(made, list) and any(is_case(item) for item in made if isinstance(item, pytest.Item)):
            self.begin().saw(made)
        return made

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._uncollected.append(report)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if is_case(item):  # of a file that is not Python's
            self.begin().pytest_itemcollected(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "llmperf_case") or hasattr(report, "llmperf"):  # of a worker of xdist
            self.begin().pytest_runtest_logreport(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["llmperf_gpus"] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if any(name.startswith("llmperf_") for name in getattr(node, "workeroutput", {})):
            self.begin().pytest_testnodedown(node)

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
    """Whether the run's ranks train on the CPU, over gloo: ``--gpus 0``, or no GPU is visible. pytest.UsageError: the
    hardware that ``--gpus`` asks for is not there, or the plugin takes no part."""
    if not is_active(config):
        raise pytest.UsageError("pytest_llmperf.on_cpu: the plugin llmperf takes no part in this session")
    session = session_of(config)
    with session.outcomes():
        return session.on_cpu


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A built-in name, the path of a configuration, or a cached hub name."""
    session = session_of(request.config)
    with session.outcomes():
        return "llama-tiny" if session.on_cpu else "llama-3.2-1b"


@pytest.fixture
def precision() -> str:
    """One word for weights, autocast and TF32: ``fp32``, ``tf32``, ``bf16-mixed``, ``bf16``, …"""
    return "bf16"


@pytest.fixture
def attention() -> str:
    """``eager``, ``sdpa``, ``flash_attention_2`` or ``flex_attention``."""
    return "sdpa"


@pytest.fixture
def liger() -> bool:
    """Whether Liger's kernels replace the model's."""
    return False


@pytest.fixture
def micro_batch_size() -> int:
    """Sequences per rank and forward pass."""
    return 1


@pytest.fixture
def gpus() -> int:
    """World size of the case: GPUs, or gloo ranks on the CPU."""
    return 1


@pytest.fixture
def train_spec(  # noqa: PLR0913, PLR0917 - one argument for each setting that a test can override
    request: pytest.FixtureRequest,
    model: str,
    precision: str,
    attention: str,
    liger: bool,
    micro_batch_size: int,
    gpus: int,
) -> TrainSpec:
    """The case composed from the six settings, short on the CPU; an impossible one is one line, not a traceback."""
    from pytest_llmperf.plugin.reports import failed
    from pytest_llmperf.settings.train_spec import TrainSpec, precision_fields

    session = session_of(request.config)
    with session.outcomes():
        # Few tokens and steps on a CPU, so that trying a test takes seconds.
        size = {"sequence_length": 64, "steps": 20} if session.on_cpu else {"sequence_length": 1024, "steps": 60}
    try:
        fields: dict[str, Any] = {**precision_fields(precision), **size}
        return TrainSpec(
            model=model, attention=attention, liger=liger, micro_batch_size=micro_batch_size, gpus=gpus, **fields
        )
    except ValueError as error:
        raise failed(str(error)) from None


@pytest.fixture
def perf(request: pytest.FixtureRequest) -> Perf:
    """Measures, judges and asserts: ``perf.check(train_spec)``."""
    from pytest_llmperf.plugin.perf import Perf

    return Perf(request, session_of(request.config))
