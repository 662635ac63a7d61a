"""Folders of runs: the logs and records that each leaves in ``.llmperf/``, of which the last ones are kept."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from pytest_llmperf.run.errors import CaseFailedError
from pytest_llmperf.support.guarded_paths import private_folder

_KEPT_RUNS = 10
_RUN_NAME = re.compile(r"\d{8}-\d{6}-(\w+-)?\d{1,9}")
_UNTOUCHED_SECONDS = 24 * 3600.0


def new_run_folder(home: Path, job: str | None) -> Path:
    """In ``home``, or a temporary one where that cannot be; ``job`` names the SLURM job whose nodes all have to see it.

    Raises:
        CaseFailedError: a job's cannot be in ``home``.
    """
    # Two hosts that share this folder may have the same pid in the same second, and not the same job.
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{'' if job is None else f'{job}-'}{os.getpid()}"
    try:
        home.mkdir(exist_ok=True)
        (home / ".gitignore").write_text("*\n", encoding="ascii")
        prune(home)
        (home / name).mkdir()
    except OSError as error:  # a read-only checkout
        if job is not None:
            raise CaseFailedError(
                f"{home}: not usable ({error}); a SLURM run keeps its files where all nodes see them"
            ) from None
        return _temporary(name)
    return home / name


def _temporary(name: str) -> Path:
    """A run's folder where its checkout cannot have one: beside the user's others, of which the last ones are kept."""
    try:
        home = private_folder(Path(tempfile.gettempdir()) / f"pytest-llmperf-runs-{os.getuid()}")
        prune(home)
        (home / name).mkdir()
    except OSError:  # somebody else has prepared it
        return Path(tempfile.mkdtemp(prefix="llmperf-"))
    return home / name


def prune(home: Path) -> None:
    """Remove all but the newest that are over; the run that begins is one of those kept."""
    runs = sorted(path for path in home.iterdir() if _RUN_NAME.fullmatch(path.name))
    for old in runs[: -_KEPT_RUNS + 1]:
        if _is_over(old):
            shutil.rmtree(old, ignore_errors=True)


def _is_over(run: Path) -> bool:
    """Whether nobody writes in this run's folder any more, as far as this host can tell."""
    import psutil

    if psutil.pid_exists(int(run.name.rpartition("-")[2])):
        return False
    # It may be of another host or container, where its pid is another's: then only what was written tells.
    try:
        changed = max(path.stat().st_mtime for path in (run, *run.iterdir()))
    except OSError:  # somebody else prunes it
        return False
    return time.time() - changed > _UNTOUCHED_SECONDS
