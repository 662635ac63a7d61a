"""Waits for data: for how long a step's device did nothing, because its host was inside the loader. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pytest_llmperf.records.launch import Launch

# From here on it is worth a note beside any verdict.
_NOTABLE = 0.05


@dataclass(frozen=True)
class DataWait:
    """Of one step; on a CPU all that its host was there."""

    seconds: float
    share: float
    """Of the step."""

    @property
    def is_notable(self) -> bool:
        return self.share >= _NOTABLE


def data_wait(launches: Sequence[Launch]) -> DataWait | None:
    """The middle one of the launches that have a trace; ``None`` where none has."""
    traces = [launch.trace for launch in launches if launch.trace and launch.trace.step_seconds > 0]
    if not traces:
        return None
    return DataWait(
        seconds=median(trace.data_seconds for trace in traces),
        share=median(trace.data_seconds / trace.step_seconds for trace in traces),
    )
