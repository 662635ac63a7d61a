"""The engine alone: cases checked in this process, with the fake launcher and baselines in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.launch import local, machine, prediction
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run import runner
from pytest_llmperf.run.case import Caller, CaseTerms
from pytest_llmperf.run.cases import Cases
from pytest_llmperf.run.findings import Concluded, Findings
from pytest_llmperf.run.options import Settings
from pytest_llmperf.run.run import Run
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import MACHINE, FakeLauncher, FakeStaticSteps, write_fake

#: As the fixture ``train_spec`` makes it on the CPU.
SPEC = TrainSpec(model="llama-tiny", attention="sdpa", sequence_length=64, steps=20)
EAGER = replace(SPEC, attention="eager")


class Heard:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.counted: list[tuple[int, int]] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    @contextmanager
    def launch(self, _spec_id: str, number: int, launches: int) -> Iterator[Heard]:
        self.counted.append((number, launches))
        yield self

    def update(self, progress: Progress) -> None: ...

    def finished(self, launch: Launch) -> None: ...

    def clear(self) -> None: ...

    def ended_from_outside(self, _error: BaseException) -> str:
        return ""


class Engine:
    """One run after another on the same baselines."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._patch = path, monkeypatch
        self.heard, self.findings = Heard(), Findings()
        self.on(MACHINE)

    def on(self, found: Machine) -> None:
        """Runs are on this machine from now on."""
        self._patch.setattr(machine, "find_machine", lambda: found)

    def fake(self, **values: Any) -> None:
        """What launches yield from now on; ``tests.fakes`` says how."""
        write_fake(self.path, **values)

    def run(self, terms: CaseTerms | None = None, **settings: Any) -> Cases:
        """What a new run's one caller may ask for."""
        return Cases(self.caller(terms, **{"gpus": 0, **settings}))

    def static(self, **settings: Any) -> Cases:
        """The same of a run that launches nothing."""
        return Cases(self.caller(static=True, **settings))

    def caller(self, terms: CaseTerms | None = None, **settings: Any) -> Caller:
        """Of a new run."""
        self.findings = Findings()
        asked = Settings(**{"baselines": self.path / "baselines", **settings})
        return Caller(
            run=Run(asked, rootdir=self.path),
            terms=terms or CaseTerms(),
            findings=self.findings,
            observer=self.heard,
            nodeid="test_mine.py::test_it",
        )

    def check(self, spec: TrainSpec = SPEC, **settings: Any) -> Concluded:
        """``spec``, in a run of its own."""
        return self.run(**settings).check(spec)

    def record(self, *specs: TrainSpec, **values: Any) -> None:
        """Baselines of ``specs`` with these figures."""
        self.fake(**values)
        for spec in specs or (SPEC,):
            assert self.check(spec, update="all", reason="start").result.updated
        (self.path / "launches.txt").unlink()

    @property
    def launches(self) -> list[str]:
        """The ids of the specs that were launched."""
        path = self.path / "launches.txt"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def baselines(self) -> list[Path]:
        return sorted((self.path / "baselines").rglob("*.json"))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.chdir(tmp_path)  # where the fake launcher looks
    monkeypatch.setenv("LLMPERF_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(local, "LocalLauncher", FakeLauncher)
    monkeypatch.setattr(runner, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(prediction, "StaticSteps", FakeStaticSteps)
    return Engine(tmp_path, monkeypatch)
