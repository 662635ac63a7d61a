"""What TensorBoard is told of a run: a folder for each case, a point for each figure at the time of its last launch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from pytest_llmperf.report.consumers.exported_run import ExportedCase, ExportedRun

# TensorBoard's name of a series is its folder's, which has to be one on every file system.
_NO_NAME = re.compile(r"[^A-Za-z0-9._=+-]+")
_LONGEST_NAME = 120
_HASH_DIGITS = 8


@dataclass(frozen=True, kw_only=True)
class EventPoint:
    """One case of one run."""

    folder: PurePosixPath
    """Below the log folder; the same for this case in every run, so that its points are one line."""
    seconds: float
    """Since 1970: its place on both of TensorBoard's axes, step (whole seconds) and wall time."""
    scalars: Mapping[str, float]
    """By tag: ``METRIC/measured``, and ``METRIC/baseline`` and ``METRIC/limit`` where there are such."""
    verdict: str
    """With its reason."""

    @property
    def file_name(self) -> str:
        """Of its time alone: written twice it is one point. TensorBoard reads files in the order of their names."""
        return f"events.out.tfevents.{int(self.seconds):010}.llmperf"


def event_points(run: ExportedRun) -> Iterator[EventPoint]:
    """Of every case that was launched and whose figures can be trusted."""
    for case in run.cases:
        scalars = dict(_scalars(case))
        if case.launched_at is not None and scalars:
            yield EventPoint(
                folder=PurePosixPath(_name(case.machine or "unknown machine"), _name(case.name)),
                seconds=case.launched_at,
                scalars=scalars,
                verdict=": ".join(filter(None, [case.outcome, case.explanation])),
            )


def _scalars(case: ExportedCase) -> Iterator[tuple[str, float]]:
    for figure, value in case.trusted:
        yield f"{figure.metric}/measured", value
        for name, held in (("baseline", figure.baseline), ("limit", figure.limit)):
            if held is not None:
                yield f"{figure.metric}/{name}", held


def _name(text: str) -> str:
    """``text`` where it is a folder's name; what is changed for that stays told apart."""
    name = _NO_NAME.sub("-", text).strip("-.")[:_LONGEST_NAME]
    if name == text:
        return name
    return f"{name or 'unnamed'}-{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:_HASH_DIGITS]}"
