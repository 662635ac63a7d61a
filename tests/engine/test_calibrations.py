"""Which launches are asked for a calibration of their GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf.judge.beside_baseline import seen_notes
from pytest_llmperf.launch import local
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.request import LaunchRequest, write_request
from pytest_llmperf.records.calibration import OF_THE_RUN, UNKEPT, Calibration
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.ranks import Request
from pytest_llmperf.run.measured import calibrates
from tests.engine.conftest import EAGER, SPEC, Engine
from tests.fakes import FakeLauncher, launch_of
from tests.golden import Golden

GPUS = Machine(gpus=(Gpu(0, "GPU-a", "NVIDIA H200", 140 * 2**30),), cpu_name="Fake CPU", cores=8)


@pytest.fixture
def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LaunchRequest]:
    """Each launch's request, on one GPU."""
    found: list[LaunchRequest] = []

    class Listening(FakeLauncher):
        def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
            found.append(request)
            return super().launch(request, watch)

    monkeypatch.setattr(local, "LocalLauncher", Listening)
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "cache"))
    engine.on(GPUS)
    return found


def test_what_is_held_against_a_baseline_is_calibrated(
    engine: Engine, asked: list[LaunchRequest], tmp_path: Path
) -> None:
    engine.check(gpus=1)
    assert {request.calibrations for request in asked} == {tmp_path / "cache" / "calibrations"}
    write_request(asked[0])
    assert Request.read(asked[0].folder).calibrations == str(tmp_path / "cache" / "calibrations")


def test_what_is_not_is_not(engine: Engine, asked: list[LaunchRequest]) -> None:
    engine.check(gpus=0)
    engine.check(gpus=1, calibration=False)
    engine.run(gpus=1).measure(SPEC)
    engine.run(gpus=1).compare(SPEC, EAGER, {})
    assert len(asked) >= 5
    assert {request.calibrations for request in asked} == {None}
    write_request(asked[0])
    assert Request.read(asked[0].folder).calibrations == ""


def test_what_cannot_be_kept_is_said_once_a_run(
    engine: Engine, asked: list[LaunchRequest], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    class Unkept(FakeLauncher):
        def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
            folder = request.folder.parent / OF_THE_RUN
            folder.mkdir(parents=True, exist_ok=True)
            (folder / UNKEPT).write_text("/cache/calibrations: Read-only file system\n")
            asked.append(request)
            return super().launch(request, watch)

    monkeypatch.setattr(local, "LocalLauncher", Unkept)
    run = engine.run(gpus=1)
    run.check(SPEC)
    run.check(EAGER)
    assert len(asked) >= 2
    said = [line for line in engine.heard.said if "calibrations" in line]
    (line,) = said
    golden(line)


def test_a_run_that_calibrates_nothing_says_nothing(engine: Engine, asked: list[LaunchRequest]) -> None:
    run = engine.run(gpus=1)
    run.check(SPEC)
    assert asked
    assert [line for line in engine.heard.said if "calibrations" in line] == []


def calibrated(device: str, trouble: str) -> Launch:
    calibration = Calibration(made_at="2026-01-01T00:00:00Z", seconds={"copy": 1.0}, versions={}, trouble=trouble)
    record = launch_of(SPEC)
    return replace(record, ranks=(replace(record.ranks[0], device=device, calibration=calibration),))


def test_two_in_vain_on_one_gpu_are_the_last_there_and_others_go_on(engine: Engine) -> None:
    engine.on(GPUS)
    caller = engine.caller(gpus=1)

    def told(*launches: Launch) -> list[bool]:
        gpus = [Gpu(0, f"GPU-{name}", "NVIDIA H200", 2**37) for name in ("a1", "b2")]
        return [calibrates(caller, launches, [gpu]) for gpu in gpus]

    troubled = calibrated("NVIDIA H200 a1", "another process on the GPU")
    assert told(troubled) == [True, True]
    assert told(troubled, troubled) == [False, True]
    assert told(*[calibrated("NVIDIA H200 a1", "")] * 3) == [True, True]


def test_each_trouble_of_a_calibration_is_told_once() -> None:
    of_fp32, of_bf16 = (f"{name}_product was not steady: its halves are 0.9 % apart" for name in ("fp32", "bf16"))
    launches = [calibrated("NVIDIA H200 a1", trouble) for trouble in (of_fp32, f"{of_bf16}; {of_fp32}")]
    told = [line for line in seen_notes(launches, None) if "calibration" in line]
    assert [line.partition(": ")[2] for line in told] == [of_fp32, of_bf16]
