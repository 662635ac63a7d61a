"""The command line and the ini file, read once into one frozen ``Settings``."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

_TOLERANCES = {"throughput": "tokens_per_second_per_gpu", "memory": "peak_reserved_bytes"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything this run was asked for."""

    gpus: int | None
    """GPUs this run may use; 0 is the CPU; ``None`` is all visible ones, else the CPU."""
    update: str | None
    """``new``, ``all``, ``prune`` or ``None``."""
    reason: str
    baselines: Path
    json: Path | None
    dry_run: bool
    strict: bool
    against: str
    """Another Python to take turns with; empty holds cases against their baselines."""
    timeout_seconds: float
    launches: int
    """Launches of each case at least."""
    max_launches: int
    """Launches of a case at most, where fewer do not decide."""
    alarms_a_month: float
    """False alarms that a nightly run of the collected cases may raise."""
    machine: str
    """A site's own name for its machine kind; empty where the hardware's name serves."""
    tolerances: Mapping[str, float]
    """By metric, what the ini file sets."""


def add_options(parser: pytest.Parser) -> None:
    """Register every option and ini value."""
    group = parser.getgroup("llmperf", "LLM training performance (pytest-llmperf)")
    group.addoption(
        "--gpus",
        type=_num_gpus,
        metavar="N",
        help="GPUs this run may use; 0 = the CPU (gloo); default: all visible GPUs, else 0",
    )
    # Spelled out, because an option with an optional value would take the path that follows it for its value.
    for flag, value, what in (
        ("--update-baselines", "all", "record every selected case that ran clean"),
        ("--update-baselines=all", "all", "the same"),
        ("--update-baselines=new", "new", "record only cases that have no baseline"),
        ("--update-baselines=prune", "prune", "launch nothing; remove baselines that no case of the suite has"),
    ):
        group.addoption(flag, dest="perf_update", action="store_const", const=value, help=what)
    group.addoption(
        "--perf-reason", default="", metavar="TEXT", help="why; required where an update makes a figure worse"
    )
    group.addoption(
        "--perf-baselines", metavar="DIR", help="where baselines are kept (default: baselines/ under rootdir)"
    )
    group.addoption("--perf-json", metavar="FILE", help="write every result, machine-readable")
    group.addoption(
        "--perf-dry-run", action="store_true", help="show what would run, in what order, and its GPU-hours; run nothing"
    )
    group.addoption(
        "--perf-strict",
        action="store_true",
        help="also fail on improved or inconclusive cases and unused baselines",
    )
    group.addoption(
        "--perf-against",
        metavar="PYTHON",
        help="hold each case against the same case under this interpreter, in turns on the same GPUs; no baselines",
    )
    group.addoption(
        "--perf-timeout",
        type=_seconds,
        default=1800.0,
        metavar="SECONDS",
        help="per launch (default: %(default)s)",
    )
    group.addoption(
        "--perf-launches",
        type=_num_launches,
        default=1,
        metavar="N",
        help="launches of each case at least (default: %(default)s)",
    )
    group.addoption(
        "--perf-max-launches",
        type=_num_launches,
        default=4,
        metavar="N",
        help="launches of a case at most, where fewer do not decide (default: %(default)s)",
    )
    parser.addini("perf_throughput_tolerance", "fraction by which a case may slow down (GPU: 0.02)", default="")
    parser.addini("perf_memory_tolerance", "fraction by which a case's peak memory may grow (GPU: 0.01)", default="")
    parser.addini("perf_alarms_per_month", "false alarms allowed to a nightly run (1)", default="1")
    parser.addini("perf_machine", "your name for this machine kind, instead of the hardware's", default="")


def read_settings(config: pytest.Config) -> Settings:
    """The settings of this run.

    Raises:
        pytest.UsageError: a value that cannot be used, in one line.
    """
    option = config.option
    return Settings(
        gpus=option.gpus,
        update=option.perf_update,
        reason=option.perf_reason.strip(),
        baselines=_baselines(_path(config, option.perf_baselines)) or config.rootpath / "baselines",
        json=_json_file(_path(config, option.perf_json)),
        dry_run=option.perf_dry_run,
        strict=option.perf_strict,
        against=_python(option.perf_against, updating=option.perf_update is not None),
        timeout_seconds=option.perf_timeout,
        launches=option.perf_launches,
        max_launches=max(option.perf_launches, option.perf_max_launches),
        alarms_a_month=_positive(config, "perf_alarms_per_month", "a number of alarms above 0, e.g. 1"),
        machine=_machine(str(config.getini("perf_machine"))),
        tolerances=_tolerances(config),
    )


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
            found[metric] = _positive(config, name, "a positive fraction, e.g. 0.05 for 5 %")
    return found


def _python(path: str | None, *, updating: bool) -> str:
    if not path:
        return ""
    if updating:
        raise pytest.UsageError("--perf-against holds against another environment; it goes with no --update-baselines")
    found = shutil.which(path)
    if found is None:
        raise pytest.UsageError(f"--perf-against {path}: no such interpreter; expected e.g. old-venv/bin/python")
    if Path(found).absolute() == Path(sys.executable).absolute():
        raise pytest.UsageError(f"--perf-against {path}: it is the Python that runs pytest; expected another one")
    return str(Path(found).absolute())


def _positive(config: pytest.Config, name: str, what: str) -> float:
    text = str(config.getini(name)).strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise pytest.UsageError(f"ini {name} = {text}: must be {what}")
    return value


def _machine(name: str) -> str:
    if name and (Path(name).name != name or name.startswith(".")):
        raise pytest.UsageError(f"ini perf_machine = {name}: it names a folder; use letters, digits and dashes")
    return name


def _path(config: pytest.Config, value: str | None) -> Path | None:
    return config.invocation_params.dir / value if value else None


def _baselines(path: Path | None) -> Path | None:
    if path is not None and path.exists() and not path.is_dir():
        raise pytest.UsageError(f"--perf-baselines {path}: it is a file; name the folder that holds the baselines")
    return path


def _json_file(path: Path | None) -> Path | None:
    # Found out now, not after hours of training.
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise pytest.UsageError(f"--perf-json {path}: not a file in a folder that exists")
    return path


def _num_gpus(text: str) -> int:
    return _whole_number(text, minimum=0, what="a number of GPUs: 0 (the CPU) or more")


def _num_launches(text: str) -> int:
    return _whole_number(text, minimum=1, what="a number of launches: 1 or more")


def _whole_number(text: str, *, minimum: int, what: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return value
