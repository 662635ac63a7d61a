"""``--perf-history`` and the ini value: where runs keep what their cases took."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmperf.run.usual_history import usual_history

#: In place of a file.
OFF = "off"


def add_options(group: pytest.OptionGroup, parser: pytest.Parser) -> None:
    """Register the command line's and the ini file's."""
    what = f"the store to which this run adds what its cases took, or {OFF} (history.sqlite of the user's state)"
    group.addoption("--perf-history", metavar=f"FILE|{OFF}", help=what)
    parser.addini("perf_history", "as --perf-history; a relative path is looked up from the rootdir", default="")


def read(config: pytest.Config) -> Path | None:
    """The store; ``None``: none is kept.

    Raises:
        pytest.UsageError: it is a folder, or there is none for it.
    """
    said, from_ini = config.option.perf_history, str(config.getini("perf_history")).strip()
    if said == "":  # a shell's variable that is not set
        raise pytest.UsageError(f"--perf-history '': expected a file, or {OFF}")
    name, home = ("--perf-history", config.invocation_params.dir) if said else ("ini perf_history =", config.rootpath)
    word = said or from_ini
    if word == OFF:
        return None
    if not word:
        return usual_history()
    path = home / Path(word).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise pytest.UsageError(f"{name} {path}: not a file in a folder that exists; or {OFF}, which keeps no history")
    return path
