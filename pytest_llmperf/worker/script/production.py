"""A real run of a user's own training, watched to its end: its row of history, kept in bounded memory and rewritten.

Nothing is set, nothing is ended, and no step waits: instants that the device has passed become seconds as steps go by,
and a thread writes the row, so that a run that is killed leaves one too."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.observe.environment import environment, place_of
from pytest_llmperf.observe.tracer import Tracer
from pytest_llmperf.records.ranks import write_json
from pytest_llmperf.records.result import OBSERVED, PastLaunch, PastResult, counts_of
from pytest_llmperf.settings.spec import ScriptSpec, literal
from pytest_llmperf.support.redaction import without_secrets
from pytest_llmperf.worker.script.model import Model
from pytest_llmperf.worker.script.torch_hooks import Hooks
from pytest_llmperf.worker.script.watched_rank import AnotherRankError, Watched, place

# Steps of one window, and windows that are kept: where there would be more, neighbours become one.
_STEPS, _MOST = 64, 256
_LEAST = 8  # steps of which a row says something
_WRITE_SECONDS = 30.0


class Ring:
    """Values of however long a run, as medians of windows."""

    def __init__(self, each: int) -> None:
        """``each``: how many values are a window, at first."""
        self.each, self.windows = each, list[float]()
        self._open: list[float] = []

    def add(self, value: float) -> bool:
        """Whether a window is full with it."""
        self._open.append(value)
        if len(self._open) < self.each:
            return False
        self.windows.append(median(self._open))
        self._open.clear()
        if len(self.windows) == _MOST:
            self.windows = [fmean(self.windows[at : at + 2]) for at in range(0, _MOST, 2)]
            self.each *= 2
        return True

    @property
    def middle(self) -> float:
        return median(self.windows or self._open)

    @property
    def ends(self) -> tuple[float, float] | None:
        """The means of the first and the last quarter; ``None`` of fewer than four windows."""
        quarter = len(self.windows) // 4
        return (fmean(self.windows[:quarter]), fmean(self.windows[-quarter:])) if quarter else None


class Production(Watched):
    """Rank 0 of a run: it hears what a ``Rank`` hears."""

    def __init__(self, folder: Path, order: Mapping[str, Any], device: torch.device, resident: int) -> None:
        command = literal(without_secrets(shlex.join(sys.orig_argv)))
        self._spec = ScriptSpec(**(order.get("spec") or {"command": command, "gpus": place()[1]}))
        super().__init__(self._spec)
        if self.number:
            raise AnotherRankError
        self._order, self._device = order, device
        self._started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._file = folder / f"{OBSERVED}-{self._started.replace(':', '')}-{os.uname().nodename}-{os.getpid()}.json"
        self._clock, self._memory = gpu.clock_of(device), gpu.memory_of(device, resident)
        self._seconds, self._held = Ring(_STEPS), Ring(1)
        self._instants: deque[Any] = deque()
        self._tracer = Tracer(device, is_ours=False)
        self._tokens = self._counted_steps = 0
        self._trace_at = order.get("trace_at") or 0
        self._gpu_bytes = gpu.memory_bytes(device) if gpu.is_gpu(device) else 0
        self.has_stepped, self.fetched = True, lambda *_, **__: None
        self._counts, self._where = dict[str, float](), environment(device)
        self._written, self._writer = time.monotonic(), threading.Thread()

    def pass_begins(self, _: torch.Tensor | None) -> None:
        self._passes += 1
        self._tokens += self._new_tokens()

    def pass_ended(self, **_: bool) -> None:
        self._new_tokens()  # what was computed a second time

    def called(self, calls: Sequence[tuple[Any, bool]]) -> bool:
        """Optimizers have been called; no step is the last one."""
        for optimizer, _ in calls:
            if ended := self._ended_by(optimizer):
                self._num_steps += len(ended)
                self._step_ended()
        return False

    def _step_ended(self) -> None:
        self._counted_steps += self._model is not None
        self._model = self._model or Model.found()
        if self._tracer.is_running or 0 < self._trace_at <= self._num_steps:
            if not self._tracer.is_running:
                self._tracer.begin()
                self._trace_at = 0
            elif self._tracer.end_step():
                self._counts = counts_of(self._tracer.trace(None, (), 0))
            self._instants.clear()
            return
        self._instants.append(self._clock.instant())
        for _ in range(2):  # no step pays for many
            if len(self._instants) < 2 or not self._clock.has_passed(self._instants[1]):  # noqa: PLR2004 - a distance
                break
            if self._seconds.add(self._clock.between(self._instants.popleft(), self._instants[0])):
                self._held.add(float(self._memory.allocated() or self._memory.now()))
        if time.monotonic() - self._written > _WRITE_SECONDS and not self._writer.is_alive():
            self._written = time.monotonic()
            self._writer = threading.Thread(target=self.write, daemon=True)
            self._writer.start()

    def script_ended(self, _remarks: Iterable[str]) -> None:
        self.write("")
        if self._counted_steps < _LEAST:
            sys.stderr.write(f"llmperf: no row: fewer than {_LEAST} steps were timed\n")
        elif self._trace_at:
            sys.stderr.write(f"llmperf: step {self._trace_at} was not reached: nothing was traced\n")

    def may_tell(self, error: BaseException) -> bool:
        """Also where the script itself raised."""
        self.write(type(error).__name__)
        return True

    def write(self, ended: str = "still running, or ended from outside") -> None:
        """Its row so far; ``ended``: what has ended the run before its end."""
        if self._counted_steps >= _LEAST:
            with suppress(OSError):  # a disk is full: the training goes on, and so does the last row
                write_json(self._file, self._row(ended))

    def _row(self, ended: str) -> Mapping[str, Any]:
        tokens = self._spec.given_tokens or round(self._world * self._tokens / self._counted_steps)
        ends, held = self._seconds.ends, self._held.ends
        told = {"steps": self._num_steps, "drift": ends and ends[1] / ends[0] - 1, "held": held and held[1] - held[0]}
        where = self._where
        result = PastResult(
            run=self._file.stem,
            machine="",
            id=self._spec.id,
            digest=self._spec.digest,
            nodeid="llmperf script --observe",
            verdict=OBSERVED,
            launches=(PastLaunch(self._started, self._seconds.middle, places=(place_of(self._device),)),),
            tokens_per_step=tokens,
            ranks=self._world,
            peak_reserved_bytes=self._memory.peaks()[0],
            versions={**where.versions, **({"driver": where.driver} if where.driver else {})},
            revision=self._order.get("revision", ""),
            project=self._order.get("project", ""),
            counts=self._counts,
            unfinished=ended,
            observed={name: value for name, value in told.items() if value is not None},
        )
        device = {"name": where.gpu, "memory_bytes": self._gpu_bytes, "cores": len(os.sched_getaffinity(0))}
        windows = {"steps": self._seconds.each, "seconds": self._seconds.windows, "held_bytes": self._held.windows}
        return {OBSERVED: result, "device": device, "windows": windows, "notes": self._steps.notes}


def watch(folder: str) -> None:
    """Torch has been imported in this process: hear of what trains in it, until it ends by itself."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    file = path / "request.json"
    order = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    Hooks(path, partial(Production, path, order)).install()
