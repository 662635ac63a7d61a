"""The command line and the ini file, read once into one frozen ``Settings``."""

from __future__ import annotations

import argparse
import math
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
    """``new``, ``all`` or ``None``."""
    reason: str
    baselines: Path
    json: Path | None
    dry_run: bool
    strict: bool
    timeout_seconds: float
    launches: int
    """Launches of each case."""
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
    group.addoption("--perf-strict", action="store_true", help="also fail on improved cases and unused baselines")
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
        help="launches of each case (default: %(default)s)",
    )
    parser.addini("perf_throughput_tolerance", "fraction by which a case may slow down (GPU: 0.05)", default="")
    parser.addini("perf_memory_tolerance", "fraction by which a case's peak memory may grow (GPU: 0.01)", default="")
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
        baselines=_path(config, option.perf_baselines) or config.rootpath / "baselines",
        json=_json_file(_path(config, option.perf_json)),
        dry_run=option.perf_dry_run,
        strict=option.perf_strict,
        timeout_seconds=option.perf_timeout,
        launches=option.perf_launches,
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
        text = str(config.getini(name)).strip()
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise pytest.UsageError(f"ini {name} = {text}: must be a positive fraction, e.g. 0.05 for 5 %")
        found[metric] = value
    return found


def _machine(name: str) -> str:
    if name and (Path(name).name != name or name.startswith(".")):
        raise pytest.UsageError(f"ini perf_machine = {name}: it names a folder; use letters, digits and dashes")
    return name


def _path(config: pytest.Config, value: str | None) -> Path | None:
    return config.invocation_params.dir / value if value else None


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
