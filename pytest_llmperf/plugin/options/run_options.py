"""The command line and the ini file, read once into one frozen ``Settings``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_llmperf.plugin.options import (
    cost_options,
    history_options,
    markdown_options,
    slurm_options,
    start_options,
    static_options,
    width_options,
)
from pytest_llmperf.plugin.second import refuse_second
from pytest_llmperf.report.page.html_page import missing
from pytest_llmperf.run.settings import MAX_LAUNCHES, Settings
from pytest_llmperf.settings.fault_injection import Injection
from pytest_llmperf.support import quantities
from pytest_llmperf.support.files import refused_at
from pytest_llmperf.support.quantities import argument
from pytest_llmperf.support.suggestions import hint

# A Python on a network's file system, at its first start.
_ASK_SECONDS = 120.0

_UPDATES = ("new", "all", "prune")

_TOLERANCES = {"throughput": "tokens_per_second_per_gpu", "memory": "peak_reserved_bytes"}


def refuse_unknown_update(config: pytest.Config | None) -> None:
    """Say what ``--update-baselines=`` takes; argparse would only say that it ignores the value.

    Raises:
        pytest.UsageError: it was given another value.
    """
    flag = "--update-baselines="
    for word in config.invocation_params.args if config else ():
        value = str(word).removeprefix(flag)
        if str(word).startswith(flag) and value not in _UPDATES:
            raise pytest.UsageError(f"{flag}{value}: expected {', '.join(_UPDATES)}{hint(value, _UPDATES)}")


def _size(text: str) -> str | None:
    # Kept as typed: the commands that a message offers repeat it.
    return text if quantities.size_bytes(text) else None


_num_gpus = argument(quantities.whole, "a number of GPUs, 0 (the CPU) or more")
_num_launches = argument(quantities.count, "a number of launches, 1 or more")
_seconds = argument(quantities.positive, "a time in seconds above 0")
_memory = argument(_size, "a size of memory with its unit, e.g. 64GiB")


def add_options(parser: pytest.Parser) -> None:
    """Register every option and ini value."""
    group = parser.getgroup("llmperf", "LLM training performance (pytest-llmperf)")
    what = "GPUs this run may use; 0 = the CPU (gloo); default: all visible GPUs, else 0"
    group.addoption("--gpus", type=_num_gpus, metavar="N", help=what)
    _add_baselines(group)
    _add_run(group)
    start_options.add_options(group, parser)
    slurm_options.add_options(group)
    width_options.add_options(group)
    static_options.add_options(group)
    markdown_options.add_options(group)
    cost_options.add_options(group, parser)
    history_options.add_options(group, parser)
    _add_launches(group)
    parser.addini("perf_throughput_tolerance", "fraction by which a case may slow down (GPU: 0.02)", default="")
    parser.addini("perf_memory_tolerance", "fraction by which a case's peak memory may grow (GPU: 0.01)", default="")
    parser.addini("perf_alarms_per_month", "false alarms allowed to a nightly run (1)", default="1")
    parser.addini("perf_loss_curve", "as --perf-loss-curve", type="bool", default=False)
    slurm_options.add_ini(parser)
    parser.addini("perf_machine", "your name for this machine kind, instead of the hardware's", default="")


def _add_baselines(group: pytest.OptionGroup) -> None:
    add = group.addoption
    # Spelled out, because an option with an optional value would take the path that follows it for its value.
    for flag, value, what in (
        ("--update-baselines", "all", "record every selected case that ran clean"),
        ("--update-baselines=all", "all", "the same"),
        ("--update-baselines=new", "new", "record only cases that have no baseline"),
        ("--update-baselines=prune", "prune", "launch nothing; remove baselines that no case of the suite has"),
    ):
        add(flag, dest="perf_update", action="store_const", const=value, help=what)
    add("--perf-reason", default="", metavar="TEXT", help="why; required where an update makes a figure worse")
    add("--perf-baselines", metavar="DIR", help="where baselines are kept (default: baselines/ under rootdir)")


def _add_run(group: pytest.OptionGroup) -> None:
    add = group.addoption
    add("--perf-json", metavar="FILE", help="write every result, machine-readable")
    add("--perf-report", metavar="FILE.html", help="write the run as one page that needs no network")
    what = "show what would run, in what order, and its GPU-hours; run nothing"
    add("--perf-dry-run", action="store_true", help=what)
    what = "hold what each case trains beside its plain form first: losses, gradients and updates of a small model"
    add("--perf-parity", action="store_true", help=what)
    what = "hold the losses of each case on a text against those of the same seeds before"
    add("--perf-loss-curve", action="store_true", help=what)
    what = "also fail on improved or inconclusive cases and unused baselines"
    add("--perf-strict", action="store_true", help=what)
    what = "hold each case against the same case under this interpreter, in turns on the same GPUs; no baselines"
    add("--perf-against", metavar="PYTHON", help=what)


def _add_launches(group: pytest.OptionGroup) -> None:
    add = group.addoption
    what = "per launch, and for a whole search of perf.max_micro_batch (default: %(default)s)"
    add("--perf-timeout", type=_seconds, default=1800.0, metavar="SECONDS", help=what)
    what = "launches of each case at least (default: %(default)s)"
    add("--perf-launches", type=_num_launches, default=1, metavar="N", help=what)
    what = (
        f"launches of a case at most, where fewer do not decide (default: {MAX_LAUNCHES}, or --perf-launches if more)"
    )
    add("--perf-max-launches", type=_num_launches, metavar="N", help=what)
    what = "give each GPU no more memory than this, e.g. 64GiB, as a smaller card has"
    add("--perf-memory-limit", type=_memory, metavar="SIZE", help=what)


def read_settings(config: pytest.Config) -> Settings:
    """The settings of this run.

    Raises:
        pytest.UsageError: a value that cannot be used, in one line.
    """
    option = config.option
    _refuse_unknown_fault()
    if option.perf_reason.strip() and option.perf_update is None:
        raise pytest.UsageError("--perf-reason says why a baseline changes; it goes with --update-baselines")
    if option.perf_update in {"new", "all"}:
        refuse_second(config)
    is_static = static_options.read(config)
    against = _python(option.perf_against, updating=option.perf_update is not None)
    return Settings(
        gpus=option.gpus,
        update=option.perf_update,
        reason=option.perf_reason.strip(),
        baselines=_baselines(_path(config, "--perf-baselines", option.perf_baselines)) or config.rootpath / "baselines",
        json=_file(config, "--perf-json", option.perf_json),
        report=_page(_file(config, "--perf-report", option.perf_report)),
        dry_run=option.perf_dry_run,
        strict=option.perf_strict,
        against=against,
        # Nothing is launched, so an allocation is as good as any other place.
        launcher="local" if is_static else option.perf_launcher,
        start=start_options.read(config),
        trace=config.option.perf_trace == "yes",
        calibration=start_options.read_calibration(config),
        all_steps=start_options.read_all_steps(config),
        static=is_static,
        parity=option.perf_parity,
        loss_curve=option.perf_loss_curve or config.getini("perf_loss_curve"),
        markdown=_file(config, "--perf-markdown", option.perf_markdown),
        step_summary=markdown_options.step_summary(),
        slurm=slurm_options.read(config),
        width=width_options.read(option.perf_width, _path(config, "--perf-plan", option.perf_plan)),
        resume=option.perf_resume,
        budget_gpu_hours=option.perf_budget,
        against_itself=bool(against) and _environment(against) == _environment(sys.executable),
        timeout_seconds=option.perf_timeout,
        memory_limit_bytes=quantities.size_bytes(option.perf_memory_limit or "") or 0,
        launches=option.perf_launches,
        max_launches=_max_launches(option.perf_launches, option.perf_max_launches),
        alarms_a_month=_number(
            config, "perf_alarms_per_month", "a number of alarms above 0, e.g. 1", quantities.positive
        ),
        machine=_machine(str(config.getini("perf_machine"))),
        tolerances=_tolerances(config),
        price=cost_options.read(config),
        history=history_options.read(config),
    )


def _refuse_unknown_fault() -> None:
    """Found out now, not by the first rank of each case."""
    try:
        Injection.from_environment()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def tolerance_metric(word: str) -> str:
    """The metric that ``throughput`` or ``memory`` stands for.

    Raises:
        ValueError: any other word.
    """
    if word not in _TOLERANCES:
        raise ValueError(f"unknown tolerance {word!r}; known: {', '.join(_TOLERANCES)}")
    return _TOLERANCES[word]


def _tolerances(config: pytest.Config) -> dict[str, float]:
    found = {}
    for word, metric in _TOLERANCES.items():
        name = f"perf_{word}_tolerance"
        if str(config.getini(name)).strip():
            found[metric] = _number(config, name, quantities.A_WRITTEN_TOLERANCE, quantities.tolerance)
    return found


def _max_launches(least: int, most: int | None) -> int:
    """``most`` if it was given; else the usual number, or ``least`` where that is more."""
    if most is not None and least > most:
        raise pytest.UsageError(
            f"--perf-launches {least} is more than --perf-max-launches {most}; lower the one or raise the other"
        )
    return max(least, MAX_LAUNCHES) if most is None else most


def _python(path: str | None, *, updating: bool) -> str:
    if not path:
        return ""
    if updating:
        raise pytest.UsageError("--perf-against holds against another environment; it goes with no --update-baselines")
    found = shutil.which(path)
    if found is None:
        raise pytest.UsageError(f"--perf-against {path}: no such interpreter; expected e.g. old-venv/bin/python")
    return str(Path(found).absolute())


def _environment(python: str) -> str:
    """What tells its environment from others: one may be reached by several paths, and two may share an interpreter."""
    script = "import os, sys; print(os.path.realpath(sys.prefix), sys.implementation.cache_tag)"
    # Isolated, since it is none of this folder's; asked, since a link says nothing of the prefix.
    command = [python, "-I", "-c", script]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise pytest.UsageError(f"--perf-against {python}: {error}; expected a Python that runs") from error
    answer = asked.stdout.splitlines()  # whatever the environment prints at its start comes before
    if asked.returncode or not answer:
        said = (asked.stderr.splitlines() or ["it did not answer"])[-1]
        raise pytest.UsageError(f"--perf-against {python}: {said}; expected a Python that runs")
    return answer[-1]


def _number(config: pytest.Config, name: str, what: str, read: Callable[[str], float | None]) -> float:
    text = str(config.getini(name)).strip()
    value = read(text)
    if value is None:
        raise pytest.UsageError(f"ini {name} = {text}: must be {what}")
    return value


def _machine(name: str) -> str:
    if name and (Path(name).name != name or name.startswith(".")):
        raise pytest.UsageError(f"ini perf_machine = {name}: it names a folder; use letters, digits and dashes")
    return name


def _path(config: pytest.Config, name: str, value: str | None) -> Path | None:
    if value == "":  # a shell's variable that is not set
        raise pytest.UsageError(f"{name} '': expected a path")
    return config.invocation_params.dir / value if value else None


def _baselines(path: Path | None) -> Path | None:
    if path is not None and path.exists() and not path.is_dir():
        raise pytest.UsageError(f"--perf-baselines {path}: it is a file; name the folder that holds the baselines")
    return path


def _file(config: pytest.Config, name: str, value: str | None) -> Path | None:
    # Found out now, not after hours of training.
    path = _path(config, name, value)
    if path is None:
        return None
    if path.is_dir() or not path.parent.is_dir():
        raise pytest.UsageError(f"{name} {path}: not a file in a folder that exists")
    if why := refused_at(path):
        raise pytest.UsageError(f"{name} {path}: cannot be written ({why}); name a file where you may write")
    return path


def _page(path: Path | None) -> Path | None:
    if path is not None and (why := missing()):
        raise pytest.UsageError(f"--perf-report {path}: {why}")
    return path
