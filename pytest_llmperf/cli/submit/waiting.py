"""``llmperf submit --wait``: a night followed in SLURM's queue until it is merged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from pytest_llmperf.cli.command_error import ClusterError
from pytest_llmperf.cli.merge.notice import Notice
from pytest_llmperf.cli.nights import night_log
from pytest_llmperf.cli.nights.slurm_queue import QueuedJob, queued

_SECONDS = 10.0
# An empty answer may be a controller's that has just begun; one that gives none for so long is spoken of.
_EMPTY, _SILENT_SECONDS = 3, 600.0


def waited(notice: Notice, jobs: Sequence[str], merged_by: str) -> Iterator[str]:
    """A line whenever a job's state changes, and at the end how the night went.

    Raises:
        ClusterError: it is not green, or nobody merged it.
    """
    shown: dict[str, str] = {}
    last: Mapping[str, QueuedJob] = {}
    empty, answered_at = 0, time.monotonic()
    for number in count():
        time.sleep(_SECONDS if number else 0)
        found = queued([*jobs, merged_by])
        empty = empty + 1 if found == {} else 0
        if found is not None:
            answered_at = time.monotonic()
        elif time.monotonic() - answered_at >= _SILENT_SECONDS:
            answered_at = time.monotonic()
            yield f"{time.strftime('%H:%M:%S')} squeue does not answer; still waiting"
        for job in jobs if found is not None else ():
            state = str(found[job]) if found and job in found else "ended"
            if shown.get(job) != state:
                shown[job] = state
                yield f"{time.strftime('%H:%M:%S')} {job}: {state}"
        if found is None or (merged_by in found and found[merged_by].is_open):
            continue
        if found or empty >= _EMPTY or _merged(notice) is not None:
            last = found
            break
    if notice.nights is None or (night := _merged(notice)) is None:
        line = f"{night_log.LOST}job {merged_by}, which merges, is {last.get(merged_by, 'gone')}"
        raise ClusterError("; ".join([f"{notice.night}: {line}", *notice.alarm(line)]))
    if night.startswith("red") or (merged_by in last and last[merged_by].state != "COMPLETED") or "; " in night:
        raise ClusterError(f"{notice.night}: {night}")
    yield night


def _merged(notice: Notice) -> str | None:
    """How it was merged."""
    nights = night_log.read(notice.nights) if notice.nights is not None else []
    return next((night.said for night in nights if night.name == notice.night and night.is_merged), None)
