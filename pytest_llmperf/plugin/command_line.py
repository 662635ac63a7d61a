"""What pytest's command line asks for, and whether a value on it moved its rootdir, which pytest finds first."""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.config.findpaths import determine_setup

if TYPE_CHECKING:
    from pytest_llmperf.run.settings import Settings

_OURS = ("--perf-", "--gpus", "--update-baselines")


@contextmanager
def guarding(parser: pytest.Parser, config: pytest.Config | None) -> Iterator[None]:
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


def settings_of(config: pytest.Config) -> Settings:
    """What this session was asked for; pytest.UsageError: an option that cannot be used."""
    from pytest_llmperf.run.options import PYTEST, UsageError
    from pytest_llmperf.run.reading import read_settings

    here, root = config.invocation_params.dir, config.rootpath
    try:
        return read_settings(PYTEST, config.option, here=here, rootdir=root, ini=config.getini)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def baselines_further_up(config: pytest.Config) -> str:
    """A line about baselines further up that this run does not see: pytest took a sub-folder; else empty."""
    from pytest_llmperf.support.folders import baselines_above

    option = config.option
    if config.inipath is not None or option.perf_baselines or config.getoption("rootdir", default=None):
        return ""
    found = baselines_above(config.rootpath / "baselines")
    return (
        ""
        if found is None
        else (
            f"no baselines in {config.rootpath}, which pytest takes for its rootdir, and {found} has some: use them "
            f"with --rootdir={found.parent} or --perf-baselines={found}"
        )
    )
