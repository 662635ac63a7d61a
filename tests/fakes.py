"""A launcher that trains nothing: the plugin's own behaviour, without a torchrun for each case.

A pytester project installs it with ``from tests.fakes import install; install()`` in its conftest and says in
``fake.json`` what the next launches yield. The worker is tested with real torchrun in ``tests/worker``.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from pytest_llmperf.launch import local, machine, prediction
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.prediction import PredictionError
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.failure import SOAKED, Failure, Progress
from pytest_llmperf.records.launch import DIARY_FILE, ENVIRONMENT_FILE, OLDER, Environment, Launch, RankRecord
from pytest_llmperf.records.trace import WORK, StaticStep, Trace, TraceRow
from pytest_llmperf.run import runner
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.evidence import evidence_of

MACHINE = Machine(gpus=(), cpu_name="Fake CPU", cores=8)

ENVIRONMENT = Environment(
    gpu="Fake CPU", driver="", versions={"torch": "2.0", "python": "3.11.7"}, variables={}, platform="Linux x86_64"
)


_WALL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Fake:
    """What a launch yields: the fields of ``fake.json``."""

    step_seconds: float = 0.1
    first_step_seconds: float = 0.0
    """0: five times as long as the others."""
    reserved_bytes: int = 2**30
    loss: float = 6.0
    losses: tuple[float, ...] | None = None
    """In place of ``loss``; empty: nobody knows them."""
    fail: str = ""
    """Kind of failure; empty for success."""
    evidence: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    foreign_processes: tuple[str, ...] = ()
    power_watts: float = 0.0
    leak_bytes: int = 0
    """Of a soak, a step."""
    most: int = 0
    """The largest micro-batch that trains; 0: any."""
    trace: dict[str, dict[str, float]] = field(default_factory=dict)
    """Kind to name to count, a millisecond each; untraced where empty."""
    phases: dict[str, float] = field(default_factory=dict)
    """Where its seconds went; untold where empty."""

    @property
    def wall_seconds(self) -> float:
        return sum(self.phases.values()) or _WALL_SECONDS


def launch_of(spec: Spec, fake: Fake | None = None) -> Launch:
    """A clean launch of ``spec`` with these figures."""
    fake = fake or Fake()
    ranks = tuple(
        RankRecord(
            rank=rank,
            host="host",
            device="Fake CPU",
            tokens_per_step=spec.sequences_per_step * spec.sequence_length // spec.gpus
            if isinstance(spec, TrainSpec)
            else 64,
            step_seconds=(
                fake.first_step_seconds or 5 * fake.step_seconds,
                *(fake.step_seconds for _ in range(spec.steps - 1)),
            ),
            peak_reserved_bytes=fake.reserved_bytes,
            peak_allocated_bytes=fake.reserved_bytes,
        )
        for rank in range(spec.gpus)
    )
    environment = Environment(**{**vars(ENVIRONMENT), "versions": {**ENVIRONMENT.versions, **fake.versions}})
    return Launch(
        spec_id=spec.id,
        digest=spec.digest,
        started_at="2026-01-01T00:00:00Z",
        wall_seconds=fake.wall_seconds,
        phases=fake.phases,
        train_seconds=spec.steps * fake.step_seconds,
        warmup_steps=spec.warmup_steps,
        parameters=1000,
        losses=(fake.loss,) * spec.steps if fake.losses is None else tuple(fake.losses),
        ranks=ranks,
        evidence={**(evidence_of(spec) if isinstance(spec, TrainSpec) else {"tokens": "counted"}), **fake.evidence},
        environment=environment,
        health=Health(foreign_processes=fake.foreign_processes, power_watts=fake.power_watts),
        trace=trace_of(fake.trace) if fake.trace else Trace(none=OLDER),
    )


def trace_of(counts: Mapping[str, Mapping[str, float]]) -> Trace:
    """One with these rows, a millisecond for each of their calls."""
    rows = [
        TraceRow(kind, name, float(count), count / 1000)
        for kind, names in counts.items()
        for name, count in names.items()
    ]
    busy = sum(row.seconds for row in rows if row.kind in WORK)
    return Trace(rows=tuple(sorted(rows)), steps=3, step_seconds=busy, busy_seconds=busy)


class FakeLauncher:
    """Yields what ``fake.json`` in the working directory says, and counts its launches in ``launches.txt``."""

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        with Path("launches.txt").open("a", encoding="utf-8") as log:
            log.write(f"{request.spec.id} {os.getpid()}\n")
        path = Path("fake.json")
        values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        # By a part of the spec's id or of the interpreter; and by the number of the launch, the last one for the rest.
        for part, more in values.pop("by", {}).items():
            values |= more if part in f"{request.spec.id} {request.python}" else {}
        sequence = values.pop("sequence", [])
        number = len(Path("launches.txt").read_text(encoding="utf-8").splitlines())
        values |= sequence[min(number, len(sequence)) - 1] if sequence else {}
        values["foreign_processes"] = tuple(values.get("foreign_processes", ()))
        fake = Fake(**values)
        request.meter.seconds += fake.wall_seconds
        watch(Progress(phase="training", step=1, steps=request.spec.steps, tokens_per_second=1000.0))
        if request.soak_seconds:
            write_diary(request.folder, request.soak_seconds / (10 if fake.fail else 1), leak_bytes=fake.leak_bytes)
        if fake.fail == "interrupt":
            raise KeyboardInterrupt
        if fake.fail == "SIGTERM":
            signal.raise_signal(signal.SIGTERM)
        kind = (
            fake.fail
            or (SOAKED if request.soak_seconds else "")
            or ("oom" if 0 < fake.most < request.spec.micro_batch_size else "")
        )
        if kind:
            return Failure(
                kind=kind,
                message="rank 0: it broke",
                tail=("last line",),
                folder=str(request.folder),
                rank=0,
                health=Health(foreign_processes=fake.foreign_processes),
                environment=launch_of(request.spec, fake).environment,
            )
        return launch_of(request.spec, fake)


def write_diary(folder: Path, seconds: float, *, leak_bytes: int) -> None:
    """What rank 0 writes down in so many seconds of steps of 50 ms."""
    folder.mkdir(parents=True)
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(codec.plain(ENVIRONMENT)), encoding="utf-8")
    lines = []
    for number in range(1, int(2 * seconds) + 1):
        held = 2**30 + 10 * number * leak_bytes
        process: dict[str, Any] = {"peak_reserved_bytes": held, "peak_allocated_bytes": held - 2**20}
        process |= {"allocated_bytes": held, "host_bytes": 2**31, "open_files": 20, "threads": 9, "written_bytes": 0}
        steps = [[0.05, 0.0, 0.0]] * 10
        lines.append(json.dumps({"time": 1e9 + number / 2, "steps": steps, **process, "waited_seconds": 0.0}))
    # Whoever wrote it was ended within its last line.
    (folder / DIARY_FILE.format(0, 1)).write_text("\n".join([*lines, '{"time": 1']), encoding="utf-8")


#: What fake tensors tell where nobody says otherwise.
STEP: dict[str, Any] = {
    "operators": {"aten::mm": 45, "aten::_to_copy": 26, "aten::item": 1},
    "flops": {"aten::mm": 12_000_000},
    "memory": {"weights": 2**30, "activations": 2**31},
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
}


class FakeStaticSteps:
    """Tells of every spec what ``static.json`` in the working directory says, ``STEP`` where it says nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        self.asked: list[TrainSpec] = []

    def ask(self, specs: Iterable[TrainSpec]) -> None:
        self.asked += specs

    def check(self) -> None:
        if "missing" in self._values():
            raise PredictionError(self._values()["missing"], is_lost=True)

    @staticmethod
    def _values() -> dict[str, Any]:
        path = Path("static.json")
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def of(self, spec: TrainSpec) -> StaticStep | PredictionError:
        values = self._values()
        if "error" in values:
            why = f"{spec.id}: its step cannot be told without a launch: {values['error']}"
            return PredictionError(why, is_lost=values.get("is_lost", False))
        merged: dict[str, Any] = {name: {**STEP[name], **values.get(name, {})} for name in STEP}
        return StaticStep(**{**merged, "operators": {name: n for name, n in merged["operators"].items() if n}})

    def close(self) -> None: ...


def write_static(folder: Path, **values: Any) -> None:
    """What fake tensors tell in ``folder`` from now on, beside ``STEP``."""
    (folder / "static.json").write_text(json.dumps(values), encoding="utf-8")


def write_fake(folder: Path, **values: Any) -> None:
    """What launches in ``folder`` yield from now on."""
    (folder / "fake.json").write_text(json.dumps(values), encoding="utf-8")


def install() -> None:
    """Put the fakes in the place of the launcher and of the hardware."""
    mock.patch.object(local, "LocalLauncher", FakeLauncher).start()
    mock.patch.object(local.LocalSite, "prepare").start()
    mock.patch.object(runner, "_PAUSE_SECONDS", 0.0).start()
    mock.patch.object(prediction, "StaticSteps", FakeStaticSteps).start()
    mock.patch.object(machine, "find_machine", return_value=MACHINE).start()
