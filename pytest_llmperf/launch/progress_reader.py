"""Reading how far a launch is from the file its rank 0 rewrites."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

from pytest_llmperf.records.failure import Progress

_INTERVAL_SECONDS = 0.25


class ProgressReader:
    """Tells ``watch`` of every change, at most four times a second."""

    def __init__(self, path: Path, watch: Callable[[Progress], None]) -> None:
        self.last = Progress(phase="starting")
        self._path, self._watch = path, watch
        self._next = 0.0
        self._marks: list[tuple[float, int]] = []

    def poll(self) -> Progress:
        """Look, unless it was just looked; a file that is absent or broken is no news."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _INTERVAL_SECONDS
            self._watch(self.read())
        return self.last

    def read(self) -> Progress:
        """Look now, and tell nobody."""
        try:
            beat = json.loads(self._path.read_text(encoding="utf-8"))
            reached = {str(phase): _finite(at) for phase, at in beat["reached"].items()}
            self.last = Progress(
                phase=str(beat["phase"]),
                step=int(beat["step"]),
                steps=int(beat["steps"]),
                tokens_per_second=self._rate(float(beat["time"]), int(beat["step"]), int(beat["tokens_per_step"])),
                reserved_bytes=int(beat["reserved_bytes"]),
                reached=reached,
                phase_seconds=max(0.0, float(beat["time"]) - reached.get(str(beat["phase"]), math.inf)),
                compiles=bool(beat["compiles"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return self.last

    def _rate(self, now: float, step: int, tokens_per_step: int) -> float:
        if step > 0 and (not self._marks or step > self._marks[-1][1]):
            self._marks = [*self._marks[-8:], (now, step)]  # the recent past: the first step would weigh on it for long
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:  # noqa: PLR2004 - two ends of a span
            return 0.0
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) * tokens_per_step / (end - start)


def _finite(value: object) -> float:
    seconds = float(str(value))
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} is no time")
    return seconds
