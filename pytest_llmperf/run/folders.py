"""Old runs: the folders of logs and records that runs leave in ``.llmperf/``, of which the last ones are kept."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

_KEPT_RUNS = 10
_RUN_NAME = re.compile(r"\d{8}-\d{6}-(\w+-)?\d{1,9}")
_UNTOUCHED_SECONDS = 24 * 3600.0


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
