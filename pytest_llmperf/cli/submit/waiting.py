"""``llmperf submit --wait``: a night followed in SLURM's queue until it is merged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from pytest_llmperf.cli.command_error import ClusterError
from pytest_llmperf.cli.merge.notice import Notice
from pytest_llmperf.cli.nights import night_log
from pytest_llmperf.cli.nights.slurm_queue import queued

_SECONDS = 10.0


def waited(notice: Notice, jobs: Sequence[str], merged_by: str) -> Iterator[str]:
    """A line whenever a job's state changes, and at the end how the night went.

    Raises:
        ClusterError: it is not green, or nobody merged it.
    """
    shown: dict[str, str] = {}
    while True:
        found = queued([*jobs, merged_by])
        for job in jobs if found is not None else ():
            state = str(found[job]) if found and job in found else "ended"
            if shown.get(job) != state:
                shown[job] = state
                yield f"{time.strftime('%H:%M:%S')} {job}: {state}"
        if found is not None and not (merged_by in found and found[merged_by].is_open):
            break
        time.sleep(_SECONDS)
    if notice.nights is None or (night := _merged(notice)) is None:
        line = f"{night_log.LOST}job {merged_by}, which merges, is {found.get(merged_by, 'gone')}"
        raise ClusterError("; ".join([f"{notice.night}: {line}", *notice.alarm(line)]))
    if night.startswith("red") or (merged_by in found and found[merged_by].state != "COMPLETED") or "; " in night:
        raise ClusterError(f"{notice.night}: {night}")
    yield night


def _merged(notice: Notice) -> str | None:
    """How it was merged."""
    nights = night_log.read(notice.nights) if notice.nights is not None else []
    return next((night.said for night in nights if night.name == notice.night and night.is_merged), None)
