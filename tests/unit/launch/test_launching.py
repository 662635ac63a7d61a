"""The launcher and its surroundings without torch: hardware, leases, outcomes, reaping."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pytest_llmperf import ScriptSpec, TrainSpec
from pytest_llmperf.judge.soak import SoakRule, judge_folder
from pytest_llmperf.judge.stats import Spread
from pytest_llmperf.launch import device, local, machine, outcome, process
from pytest_llmperf.launch.device import Gpu, select
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.machine import Machine, is_of_kind
from pytest_llmperf.launch.request import LaunchRequest, worker_environment
from pytest_llmperf.launch.watch import HealthWatch
from pytest_llmperf.observe import vital_signs as heartbeat
from pytest_llmperf.records.failure import SOAKED, Failure, Progress
from pytest_llmperf.records.launch import DIARY_FILE, SOAK_FILE, Launch
from pytest_llmperf.records.ranks import write_failure
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import boot_id
from tests.fakes import launch_of
from tests.golden import Golden
from tests.waiting import until

SPEC = TrainSpec(model="llama-tiny")
FOREIGN_PROCESSES = device.foreign_processes
GPUS = tuple(Gpu(index, f"GPU-{index}{'abcdef'[index]}", "NVIDIA H200", 150 * 10**9) for index in range(4))


def run(
    script: str, folder: Path, watch: Callable[[Progress], None] = lambda _: None, limit: float = 20.0, **asked: Any
) -> Any:
    """A launch whose torchrun is ``script``; it finds its folder in ``folder``."""
    request = LaunchRequest(spec=SPEC, folder=folder, gpus=(), timeout_seconds=limit, **asked)
    code = f"import json, os, pathlib, signal, subprocess, sys, time\nfolder = pathlib.Path({str(folder)!r})\n{script}"
    return LocalLauncher(lambda _: [sys.executable, "-c", code]).launch(request, watch)


class TestMachine:
    @pytest.mark.parametrize(
        ("visible", "indices"),
        [
            (None, [0, 1, 2, 3]),
            ("", []),
            ("-1", []),
            ("2,0", [2, 0]),
            ("1,9,2", [1]),
            ("1,1", [1]),
            ("GPU-2", [2]),
            ("GPU-", []),
            ("GPU-3d,0", [3, 0]),
            ("none", []),
        ],
    )
    def test_visible_devices_mean_what_cuda_means(self, visible: str | None, indices: list[int]) -> None:
        assert [gpu.index for gpu in select(GPUS, visible)] == indices

    def test_a_mig_slice_is_refused(self, golden: Golden) -> None:
        with pytest.raises(ValueError, match="MIG slices are") as raised:
            select(GPUS, "MIG-1234")
        golden(raised)

    def test_kinds_name_the_hardware_and_its_memory(self) -> None:
        assert Machine(gpus=GPUS, cpu_name="", cores=1).gpu_kind == "nvidia-h200-140gib"
        kind = Machine(gpus=(), cpu_name="Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", cores=8).cpu_kind
        assert kind == "cpu-intel-xeon-e5-2690-v4-8c"
        assert is_of_kind("Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", kind)
        assert is_of_kind("NVIDIA H200", "nvidia-h200-140gib-500w")
        assert not is_of_kind("NVIDIA H100", "nvidia-h100-nvl-94gib")

    @pytest.mark.parametrize(
        ("limit", "kind"),
        [(700_000, "nvidia-h200-140gib"), (699_990, "nvidia-h200-140gib"), (500_000, "nvidia-h200-140gib-500w")],
    )
    def test_a_lowered_power_limit_is_another_kind(
        self, monkeypatch: pytest.MonkeyPatch, limit: int, kind: str
    ) -> None:
        assert _gpu_kind_under(monkeypatch, lambda _: limit) == kind

    def test_a_driver_that_tells_no_limit_is_of_the_usual_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: int) -> int:
            raise FakeNvml.NVMLError("not supported")

        assert _gpu_kind_under(monkeypatch, refuse) == "nvidia-h200-140gib"

    def test_mixed_kinds_are_refused(self) -> None:
        mixed = (GPUS[0], Gpu(1, "GPU-x", "NVIDIA A100", 80 * 10**9))
        with pytest.raises(ValueError, match="different kinds"):
            _ = Machine(gpus=mixed, cpu_name="", cores=1).gpu_kind

    def test_no_nvml_library_means_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class NVMLError(Exception):
            pass

        def fail() -> None:
            raise NVMLError("library not found")

        monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, nvmlInit=fail))
        assert machine.find_machine().gpus == ()
        assert device.foreign_processes(GPUS) == ()

    def test_no_nvml_package_means_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert machine.find_machine().gpus == ()


def test_where_the_kernel_names_the_cpu_no_process_is_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if "model name" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("it does not name this one")
    monkeypatch.setattr("platform.processor", lambda: pytest.fail("uname is run"))
    assert machine.find_machine().cpu_name


def _gpu_kind_under(monkeypatch: pytest.MonkeyPatch, limit: Callable[[int], int]) -> str:
    """What a machine is called whose one H200 tells this power limit, in mW."""
    nvml = SimpleNamespace(
        NVMLError=FakeNvml.NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda _: "GPU-a",
        nvmlDeviceGetName=lambda _: "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=150_754_820_096),
        nvmlDeviceGetPowerManagementLimit=limit,
        nvmlDeviceGetPowerManagementDefaultLimit=lambda _: 700_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return machine.find_machine().gpu_kind


class FakeNvml:
    """Counters of memory errors, as NVML tells them: one reading after the other, the last one for the rest."""

    class NVMLError(Exception):
        pass

    def __init__(self, uncorrected: list[int | None], rows: list[tuple[int, int, int, int] | None]) -> None:
        self._readings: dict[str, list[Any]] = {
            "nvmlDeviceGetTotalEccErrors": uncorrected,
            "nvmlDeviceGetRemappedRows": rows,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        readings = self._readings.get(name)
        if readings is None:
            return lambda *_: [] if name.endswith("Processes") else 0

        def read(*_: Any) -> Any:
            value = readings.pop(0) if len(readings) > 1 else readings[0]
            if value is None:
                raise self.NVMLError(name)
            return value

        return read


class TestMemoryErrors:
    NONE, SOME = (9, 0, 0, 0), (9, 2, 1, 0)  # corrected ones are no trouble

    @pytest.mark.parametrize(
        ("uncorrected", "rows", "new"),
        [
            ([3, 3], [SOME, SOME], 0),
            ([3, 5], [NONE, SOME], 5),
            ([None, 7], [NONE, NONE], 0),
            ([7, None], [NONE, NONE], 0),
            ([7, 0], [NONE, NONE], 0),
            ([0, 0], [None, SOME], 0),
            ([0, 1], [SOME, None], 1),
        ],
    )
    def test_only_what_both_readings_tell_is_new(
        self, monkeypatch: pytest.MonkeyPatch, uncorrected: list[int | None], rows: list[Any], new: int
    ) -> None:
        nvml = FakeNvml(list(uncorrected), list(rows))
        monkeypatch.setattr(device, "session", lambda: nullcontext(nvml))
        monkeypatch.setattr(device, "foreign_processes", lambda *_: ())
        with HealthWatch(GPUS[:1], Path("nowhere")) as watch:
            assert watch.health().memory_errors == new


class TestWhatWasSeenOfTheChip:
    """By a fake chip that draws 600 W at work and 100 W at rest, looked at once a second."""

    TRAINING = Progress(phase="training", step=1)

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        clock = SimpleNamespace(now=1e9, joules=5e6, watts=600.0, mhz=1500)
        chip = SimpleNamespace(
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetTotalEnergyConsumption=lambda _: clock.joules * 1000,
            nvmlDeviceGetClockInfo=lambda *_: clock.mhz,
            nvmlDeviceGetTemperature=lambda *_: 60,
            nvmlDeviceGetCurrentClocksEventReasons=lambda _: 0x04 if clock.watts > 500 else 0x01,
        )
        monkeypatch.setattr(device, "session", lambda: nullcontext(chip))
        monkeypatch.setattr(device, "foreign_processes", lambda *_: ())
        monkeypatch.setattr(time, "time", lambda: clock.now)
        monkeypatch.setattr(time, "monotonic", lambda: clock.now)
        return clock

    @staticmethod
    def _spend(clock: SimpleNamespace, watch: HealthWatch, progress: Progress, seconds: int) -> None:
        for _ in range(seconds):
            watch.look(progress)
            clock.now, clock.joules = clock.now + 1, clock.joules + clock.watts

    def test_is_the_training_alone_though_its_end_is_told_late(self, clock: SimpleNamespace) -> None:
        with HealthWatch(GPUS[:1], Path("nowhere")) as watch:
            self._spend(clock, watch, Progress(phase="building"), 3)
            self._spend(clock, watch, self.TRAINING, 10)
            ended, clock.watts, clock.mhz = clock.now - 0.5, 100.0, 345
            self._spend(clock, watch, self.TRAINING, 15)
            watch.look(Progress(phase="finishing", step=9, reached={"finishing": ended}))
            seen = watch.health()
        assert (seen.power_watts, seen.sm_clock_mhz, seen.clock_reasons) == (600.0, 1500, {"power limit": 1.0})

    def test_is_all_of_it_where_nobody_tells_its_end(self, clock: SimpleNamespace) -> None:
        with HealthWatch(GPUS[:1], Path("nowhere")) as watch:
            self._spend(clock, watch, self.TRAINING, 4)
            assert watch.health().power_watts == 600.0

    def test_of_a_soak_each_look_is_written_down_and_can_be_judged(
        self, clock: SimpleNamespace, tmp_path: Path
    ) -> None:
        (tmp_path / SOAK_FILE).write_text("60", encoding="utf-8")
        steps = [[0.05, 0.0, 0.0]] * 20
        usual = {"allocated_bytes": 1, "host_bytes": 1, "open_files": 1, "threads": 1, "written_bytes": 1}
        lines = [{"time": clock.now + at, "steps": steps, **usual, "waited_seconds": 0.0} for at in range(60)]
        (tmp_path / DIARY_FILE.format(0, 1)).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        with HealthWatch(GPUS[:1], tmp_path) as watch:
            self._spend(clock, watch, self.TRAINING, 60)
        found = judge_folder(tmp_path, 60.0, SPEC, SoakRule(0.02, Spread(0.004, 8), on_cpu=False))
        assert found["verdict"] == "pass"
        assert {*found["soak"].series["clock_mhz"]} == {1500}
        assert found["soak"].series["watts"][2:] == pytest.approx([600.0] * 58, abs=0.01)

    def test_is_nothing_before_the_first_step(self, clock: SimpleNamespace) -> None:
        with HealthWatch(GPUS[:1], Path("nowhere")) as watch:
            self._spend(clock, watch, Progress(phase="training", step=0), 4)
            assert (watch.health().power_watts, watch.health().clock_reasons) == (0.0, {})

    def test_processes_of_a_script_are_its_own_before_they_are_ranks(
        self, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        running = {pid: f"GPU 0: pid {pid}" for pid in (11, 12, 13)}
        monkeypatch.setattr(device.Sensors, "processes", lambda _: running)
        (tmp_path / "rank-0.pid").write_text("11", encoding="ascii")
        (tmp_path / "seen-12").write_text("torch", encoding="ascii")
        with HealthWatch(GPUS[:1], tmp_path) as watch:
            self._spend(clock, watch, self.TRAINING, 2)
            assert watch.health().foreign_processes == ("GPU 0: pid 13",)

    @pytest.mark.parametrize(
        ("began", "foreign"), [(True, ("GPU 0: pid 13",)), (False, ("GPU 0: pid 11", "GPU 0: pid 13"))]
    )
    def test_a_rank_that_began_behind_the_end_of_another_is_its_own_from_the_start(
        self, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, began: bool, foreign: Any
    ) -> None:
        monkeypatch.setattr(device, "foreign_processes", FOREIGN_PROCESSES)
        monkeypatch.setattr(device.Sensors, "processes", lambda _: {pid: f"GPU 0: pid {pid}" for pid in (11, 13)})
        if began:
            (tmp_path / "rank-0.pid").write_text("11", encoding="ascii")
        with HealthWatch(GPUS[:1], tmp_path) as watch:
            assert watch.health().foreign_processes == foreign

    @pytest.mark.parametrize(("pids", "looks"), [({11}, 4), ({11, 14}, 4), ({12}, 1), (set(), 1)])
    def test_a_killed_rank_is_waited_for_until_it_has_left_its_gpu(
        self, monkeypatch: pytest.MonkeyPatch, pids: set[int], looks: int
    ) -> None:
        seen = [{11: "ours", 13: "another's"}] * 3 + [{13: "another's"}]
        left = iter(seen)
        monkeypatch.setattr(device, "session", lambda: nullcontext(SimpleNamespace(nvmlDeviceGetHandleByUUID=str)))
        monkeypatch.setattr(device.Sensors, "processes", lambda _: next(left))
        monkeypatch.setattr(time, "sleep", lambda _: None)
        device.wait_until_left(GPUS[:1], pids)
        assert len(seen) - len(list(left)) == looks


class TestLeases:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLMPERF_LEASE_DIR", str(tmp_path / "leases"))
        monkeypatch.setattr(machine, "_POLL_SECONDS", 0.02)

    def test_two_leases_share_no_gpu(self) -> None:
        with machine.lease_gpus(2, GPUS, print) as mine, machine.lease_gpus(2, GPUS, print) as theirs:
            assert not set(mine) & set(theirs)

    def test_a_busy_gpu_is_waited_for_with_a_message_and_freed_by_a_kill(self) -> None:
        holder = multiprocessing.get_context("fork").Process(target=_hold, args=(4,))
        said: list[str] = []
        holder.start()
        try:
            until((Path(os.environ["LLMPERF_LEASE_DIR"]) / "held").exists)

            def say(line: str) -> None:
                said.append(line)
                assert holder.pid is not None
                os.kill(holder.pid, signal.SIGKILL)

            with machine.lease_gpus(1, GPUS, say) as mine:
                assert len(mine) == 1
        finally:
            holder.kill()
            holder.join()
        assert "waiting for 1 GPU(s)" in said[0]

    def test_a_foreign_process_is_avoided_and_else_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def foreign(gpus: Any) -> tuple[str, ...]:
            return tuple("GPU 0: pid 7 (python)" for gpu in gpus if gpu.index == 0)

        monkeypatch.setattr(machine, "foreign_processes", foreign)
        said: list[str] = []
        with machine.lease_gpus(3, GPUS, said.append) as mine:
            assert [gpu.index for gpu in mine] == [1, 2, 3]
            assert said == []
            with machine.lease_gpus(1, GPUS, said.append):
                assert "pid 7" in said[0]

    def test_what_nobody_times_shares_and_what_is_timed_waits_for_the_last_of_them(self) -> None:
        class WaitedError(Exception):
            pass

        def say(line: str) -> None:
            raise WaitedError(line)

        one = GPUS[:1]
        with machine.lease_gpus(1, one, say, shared=True) as mine:
            with machine.lease_gpus(1, one, say, shared=True) as theirs:
                assert mine == theirs == one
            with pytest.raises(WaitedError, match=r"waiting for 1 GPU"), machine.lease_gpus(1, one, say):
                pass
        with (
            machine.lease_gpus(1, one, say),
            pytest.raises(WaitedError, match=r"waiting for 1 GPU"),
            machine.lease_gpus(1, one, say, shared=True),
        ):
            pass

    def test_who_shares_the_cpu_keeps_timed_runs_from_it(self) -> None:
        class WaitedError(Exception):
            pass

        def say(line: str) -> None:
            raise WaitedError(line)

        with (
            machine.lease_cpu(say, shared=True),
            machine.lease_cpu(say, shared=True),
            pytest.raises(WaitedError, match="waiting for the CPU"),
            machine.lease_cpu(say),
        ):
            pass

    @pytest.mark.parametrize(("pid", "first"), [(8, 0), (9, 1), (11, 3)])
    def test_those_who_share_begin_with_other_gpus(self, monkeypatch: pytest.MonkeyPatch, pid: int, first: int) -> None:
        monkeypatch.setattr(os, "getpid", lambda: pid)
        with machine.lease_gpus(2, GPUS, print, shared=True) as mine:
            assert {gpu.index for gpu in mine} == {first, (first + 1) % 4}

    def test_more_than_there_are_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="5 GPUs asked for, 4 visible"), machine.lease_gpus(5, GPUS, print):
            pass

    def test_cpu_runs_take_turns(self) -> None:
        said: list[str] = []

        class WaitedError(Exception):
            pass

        def say(line: str) -> None:
            raise WaitedError(line)

        with (
            machine.lease_cpu(said.append),
            pytest.raises(WaitedError, match="waiting for the CPU"),
            machine.lease_cpu(say),
        ):
            pass
        with machine.lease_cpu(said.append):
            assert said == []

    def test_a_folder_that_cannot_be_used_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("LLMPERF_LEASE_DIR", str(tmp_path / "file"))
        with pytest.raises(OSError, match="LLMPERF_LEASE_DIR"), machine.lease_cpu(print):
            pass

    @pytest.mark.parametrize("lease", [machine.lease_cpu, lambda say: machine.lease_gpus(1, GPUS, say)])
    def test_a_lock_that_cannot_be_opened_is_one_line_that_names_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: Callable[[Any], Any]
    ) -> None:
        def refuse(*_: Any) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(machine, "open_shared", refuse)
        with (
            pytest.raises(OSError, match=r"leases cannot be kept in .*\.lock .*Permission denied") as error,
            lease(print),
        ):
            pass
        assert "\n" not in str(error.value)

    def test_a_folder_that_the_user_made_keeps_its_mode(self, tmp_path: Path) -> None:
        folder = tmp_path / "leases"
        folder.mkdir(mode=0o750)
        folder.chmod(0o750)
        with machine.lease_cpu(print):
            pass
        assert folder.stat().st_mode & 0o777 == 0o750

    def test_a_folder_that_was_made_here_is_everyones(self, tmp_path: Path) -> None:
        with machine.lease_cpu(print):
            pass
        assert stat.S_IMODE((tmp_path / "leases").stat().st_mode) == 0o1777

    def test_the_default_folder_is_everyones_whoever_made_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("LLMPERF_LEASE_DIR")
        monkeypatch.setattr(machine, "_FOLDER", str(tmp_path / "default"))
        (tmp_path / "default").mkdir(mode=0o700)
        with machine.lease_cpu(print):
            pass
        assert stat.S_IMODE((tmp_path / "default").stat().st_mode) == 0o1777

    def test_a_file_system_that_locks_for_writers_alone_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.EBADF, "Bad file descriptor")

        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.raises(OSError, match="locks only what may be written, and this is another user's"):
            machine.lease_cpu(print).__enter__()


def _hold(num_gpus: int) -> None:
    with machine.lease_gpus(num_gpus, GPUS, print):
        (Path(os.environ["LLMPERF_LEASE_DIR"]) / "held").touch()
        time.sleep(60)


class TestOutcomes:
    def test_a_record_becomes_a_launch(self, tmp_path: Path) -> None:
        record = json.dumps(codec.plain(launch_of(SPEC)))
        launch = run(f"(folder / 'launch.json').write_text({record!r})", tmp_path / "run folder")
        assert isinstance(launch, Launch)
        assert 0 < launch.wall_seconds < 20
        request = json.loads((tmp_path / "run folder" / "request.json").read_text())
        assert TrainSpec.from_dict(request["spec"]) == SPEC

    @pytest.mark.parametrize("end", ["raise SystemExit(3)", ""])
    def test_what_was_measured_before_traced_steps_that_failed_is_a_launch(
        self, tmp_path: Path, end: str, golden: Golden
    ) -> None:
        record = json.dumps(codec.plain(launch_of(SPEC)))
        launch = run(f"(folder / 'measured.json').write_text({record!r}); {end}", tmp_path / "run")
        assert isinstance(launch, Launch)
        golden(launch.trace.none)

    @pytest.mark.parametrize("text", ["", "{", "[]", "\x00garbage", '{"ranks": []}'])
    def test_a_garbled_record_is_a_failure(self, tmp_path: Path, text: str) -> None:
        failure = run(f"(folder / 'launch.json').write_text({text!r})", tmp_path / "run")
        assert isinstance(failure, Failure)
        assert "no usable launch.json" in failure.message

    def test_a_record_of_another_spec_is_a_failure(self, tmp_path: Path) -> None:
        other = json.dumps(codec.plain(launch_of(TrainSpec(model="opt-tiny"))))
        failure = run(f"(folder / 'launch.json').write_text({other!r})", tmp_path / "run")
        assert isinstance(failure, Failure)
        assert SPEC.digest in failure.message

    @pytest.mark.parametrize(
        ("progress", "where"),
        [
            (Progress(phase="building"), "in phase building"),
            (Progress(phase="training", step=3, steps=8), "in phase training, step 3 of 8"),
        ],
    )
    def test_one_that_was_killed_says_how_far_it_was(
        self, tmp_path: Path, progress: Progress, where: str, golden: Golden
    ) -> None:
        (tmp_path / "rank-0.pid").write_text("1")
        failure = outcome.read(tmp_path, SPEC, process.Ended(1, timed_out=False, seconds=9.0), progress)
        assert isinstance(failure, Failure)
        golden(failure.message)

    def test_garbage_on_the_output_is_quoted_harmlessly(self, tmp_path: Path) -> None:
        began = "(folder / 'rank-0.pid').write_text(str(os.getpid()))"
        failure = run(f"{began}; os.write(1, b'\\xff\\x1b[31mred\\x00\\n' * 50); sys.exit(3)", tmp_path / "run")
        assert isinstance(failure, Failure)
        assert failure.kind == "killed"
        assert all(line.isprintable() for line in failure.tail)
        assert len(failure.tail) <= 12

    @pytest.mark.parametrize(
        ("reasons", "kind", "rank"),
        [([(0, "error", 2.0), (1, "error", 1.0)], "error", 1), ([(0, "error", 1.0), (1, "oom", 2.0)], "oom", 1)],
    )
    def test_the_first_reason_counts_and_out_of_memory_wins(
        self, tmp_path: Path, reasons: list[tuple[int, str, float]], kind: str, rank: int
    ) -> None:
        lines = "".join(
            f"(folder / 'failure-{r}.json').write_text(json.dumps("
            f"dict(kind={k!r}, message='rank {r}: it broke', tail=['x'], time={t})))\n"
            for r, k, t in reasons
        )
        failure = run(f"{lines}sys.exit(1)", tmp_path / "run")
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.rank) == (kind, rank)

    def test_one_that_failed_tells_who_else_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "foreign_processes", lambda *_: ("GPU 0: pid 7",))
        failure = run("sys.exit(1)", tmp_path / "run")
        assert isinstance(failure, Failure)
        assert failure.health.foreign_processes == ("GPU 0: pid 7",)

    def test_what_ends_before_a_rank_begins_never_started(self, tmp_path: Path, golden: Golden) -> None:
        failure = run("print('no module named torch'); sys.exit(1)", tmp_path / "run")
        assert isinstance(failure, Failure)
        assert failure.kind == "never-started"
        golden(failure.tail)

    def test_a_python_that_does_not_exist_never_started(self, tmp_path: Path) -> None:
        request = LaunchRequest(
            spec=SPEC, folder=tmp_path / "run", gpus=(), timeout_seconds=5, python=str(tmp_path / "python")
        )
        failure = LocalLauncher().launch(request, lambda _: None)
        assert isinstance(failure, Failure)
        assert failure.kind == "never-started"
        assert "python" in failure.message

    def test_a_killed_rank_of_several_nodes_is_told_with_its_node(self, tmp_path: Path, golden: Golden) -> None:
        report = "  host      : localhost\n  rank      : {} (local_rank: 0)\n  exitcode  : {} (pid: 7)\n"
        (tmp_path / "torchrun-n1.log").write_text(report.format(0, 1))
        (tmp_path / "torchrun-n-2.log").write_text(report.format(1, -9))
        failure = outcome.read(tmp_path, SPEC, process.Ended(1, timed_out=False, seconds=9.0), Progress(phase="a"))
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.rank) == ("killed", 1)
        golden(failure.message)

    @pytest.mark.parametrize(("first", "second", "kind"), [(-15, 1, "killed"), (1, -15, "error")])
    def test_sigterm_is_told_of_the_rank_that_torchrun_saw_go_first(
        self, tmp_path: Path, first: int, second: int, kind: str
    ) -> None:
        report = "  rank      : {} (local_rank: {})\n  exitcode  : {} (pid: 7)\n"
        parts = ["Failures:", report.format(0, 0, second), "Root Cause (first observed failure):"]
        (tmp_path / "torchrun.log").write_text("\n".join([*parts, report.format(1, 1, first)]))
        reason = {"kind": "error", "message": "rank 0: connection reset", "tail": [], "time": 1.0}
        (tmp_path / "failure-0.json").write_text(json.dumps(reason))
        failure = outcome.read(tmp_path, SPEC, process.Ended(1, timed_out=False, seconds=9.0), Progress(phase="a"))
        assert isinstance(failure, Failure)
        assert failure.kind == kind
        assert ("by SIGTERM" in failure.message) is (kind == "killed")

    def test_what_failed_is_metered_too(self, tmp_path: Path) -> None:
        request = LaunchRequest(spec=SPEC, folder=tmp_path / "run", gpus=(), timeout_seconds=20.0)
        code = "import time; time.sleep(0.3); raise SystemExit(1)"
        result = LocalLauncher(lambda _: [sys.executable, "-c", code]).launch(request, lambda _: None)
        assert isinstance(result, Failure)
        assert request.meter.seconds > 0.3

    def test_a_full_disk_never_started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "open", full)
        failure = run("", tmp_path / "run")
        assert isinstance(failure, Failure)
        assert "No space left" in failure.message


STEPS = """
begun = time.time() - BEGUN
for number in range(2000):
    beat = {"phase": "training", "step": min(number, MOST), "steps": 0, "time": time.time(), "compiles": False}
    beat |= {"tokens_per_step": 1, "reserved_bytes": 1, "reached": {"training": begun}}
    (folder / "beat").write_text(json.dumps(beat))
    (folder / "beat").rename(folder / "progress.json")
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("most", "begun", "kind", "words"),
    [
        (2000, 60, SOAKED, "are over"),
        (0, 60, "timeout", "no end after"),
        (20, 59, "timeout", "no step for 1 s"),
        (20, 5, "timeout", "no step for 1 s"),
    ],
    ids=["steps", "none", "hangs at its end", "hangs before"],
)
def test_a_soak_is_over_with_a_step_and_one_that_makes_none_is_asked_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, begun: int, kind: str, words: str
) -> None:
    monkeypatch.setattr(local, "_LEAST_SECONDS", 5.0)
    script = STEPS.replace("MOST", str(most)).replace("BEGUN", str(begun))
    found = run(script, tmp_path / "run", limit=65, soak_seconds=60)
    assert (found.kind, words in found.message) == (kind, True), found.message


class TestReaping:
    # A rank as torchrun leaves it behind: in a session of its own, deaf to SIGTERM.
    STUBBORN = """
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
rank = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
(folder / "rank-0.pid").write_text(str(rank.pid))
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
time.sleep(99)
"""

    @pytest.fixture(autouse=True)
    def _no_grace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "_GRACE_SECONDS", 2.0)

    def test_a_timeout_reaps_what_ignores_sigterm(self, tmp_path: Path) -> None:
        failure = run(self.STUBBORN, tmp_path / "run", limit=2.0)
        assert isinstance(failure, Failure)
        assert failure.kind == "timeout"
        assert not _alive(tmp_path / "run")

    def test_ctrl_c_reaps_what_ignores_sigterm(self, tmp_path: Path) -> None:
        def interrupt(_: Progress) -> None:
            if (tmp_path / "run" / "rank-0.pid").exists():
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(self.STUBBORN, tmp_path / "run", interrupt)
        assert not _alive(tmp_path / "run")

    def test_a_process_that_the_launch_did_not_start_is_left_alone(self, tmp_path: Path) -> None:
        bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(0.1)
        script = f"(folder / 'rank-0.pid').write_text('{bystander.pid}'); time.sleep(1); sys.exit(1)"
        try:
            assert isinstance(run(script, tmp_path / "run"), Failure)
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()


def _alive(folder: Path) -> bool:
    pid = int((folder / "rank-0.pid").read_text())
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def test_the_workers_environment_is_ours_where_it_matters(tmp_path: Path) -> None:
    request = LaunchRequest(spec=SPEC, folder=tmp_path, gpus=GPUS[1:3], timeout_seconds=1)
    inherited = {"RANK": "3", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "y", "PYTHONPATH": "/mine", "HOME": "/h"}
    environment = worker_environment(request, inherited)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1b,GPU-2c"
    assert environment["HOME"] == "/h"
    assert environment["PYTHONPATH"].split(os.pathsep)[1:] == ["/mine"]
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"} & environment.keys()
    assert worker_environment(request, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    "spec", [ScriptSpec(command="python train.py"), replace(SPEC, gpus=2, parallelism="zero2", model_precision="fp32")]
)
def test_who_reads_no_uuids_sees_its_gpus_by_numbers(spec: Spec, tmp_path: Path) -> None:
    request = LaunchRequest(spec=spec, folder=tmp_path, gpus=GPUS[1:3], timeout_seconds=1)
    environment = worker_environment(request, {"CUDA_VISIBLE_DEVICES": "3,1,2", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(str(gpu.index) for gpu in GPUS[1:3])
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_another_python_has_the_path_of_the_user_too_and_none_of_ours(tmp_path: Path) -> None:
    request = LaunchRequest(spec=SPEC, folder=tmp_path, gpus=(), timeout_seconds=1, python="/old/bin/python")
    environment = worker_environment(request, {"PYTHONPATH": f"/mine{os.pathsep}/faults"})
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "path"), "/mine", "/faults"]


class TestLifeline:
    """The lock by which a rank knows that its launcher is there."""

    @pytest.fixture
    def locked(self, tmp_path: Path) -> Path:
        (tmp_path / "launcher.lock").touch()
        return tmp_path

    @pytest.fixture(autouse=True)
    def _same_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLMPERF_LAUNCHER_BOOT", boot_id())

    def test_a_launch_holds_it_and_says_on_which_host(self, tmp_path: Path) -> None:
        tell = (
            "import pytest_llmperf.observe.vital_signs as h; print(h._is_free(h._launcher_lock(folder)), flush=True)\n"
        )
        name = "print(os.environ['LLMPERF_LAUNCHER_BOOT'], flush=True); sys.exit(1)"
        failure = run(tell + name, tmp_path / "run")
        assert isinstance(failure, Failure)
        assert failure.tail == ("False", boot_id())
        assert heartbeat._is_free(heartbeat._launcher_lock(tmp_path / "run")), "held after the launch"

    def test_a_launch_inside_a_launch_watches_its_own(self, tmp_path: Path) -> None:
        request = LaunchRequest(spec=SPEC, folder=tmp_path, gpus=(), timeout_seconds=1)
        assert "LLMPERF_LAUNCHER_BOOT" not in worker_environment(request, {"LLMPERF_LAUNCHER_BOOT": "outer"})

    def test_a_file_system_without_locks_still_launches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "flock", _no_locks)
        failure = run("print('LLMPERF_LAUNCHER_BOOT' in os.environ); sys.exit(1)", tmp_path / "run")
        assert isinstance(failure, Failure)
        assert failure.tail == ("False",)

    def test_one_that_is_held_is_a_launcher_that_lives(self, locked: Path) -> None:
        with (locked / "launcher.lock").open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert not heartbeat._is_free(heartbeat._launcher_lock(locked))

    def test_one_that_is_free_is_a_launcher_that_is_gone(self, locked: Path) -> None:
        assert heartbeat._is_free(heartbeat._launcher_lock(locked))
        assert heartbeat._is_free(heartbeat._launcher_lock(locked)), "one rank that looks must not hold up another"

    def test_what_cannot_be_told_ends_nothing(self, locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lock = heartbeat._launcher_lock(locked)
        monkeypatch.setattr(fcntl, "flock", _no_locks)
        assert not heartbeat._is_free(lock)
        assert not heartbeat._is_free(heartbeat._launcher_lock(locked / "no such folder"))

    @pytest.mark.parametrize("boot", ["another host", ""])
    def test_another_hosts_is_not_asked(self, locked: Path, monkeypatch: pytest.MonkeyPatch, boot: str) -> None:
        monkeypatch.setenv("LLMPERF_LAUNCHER_BOOT", boot)
        assert not heartbeat._is_free(heartbeat._launcher_lock(locked))


def _no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


class TestFailureFile:
    @staticmethod
    def message(folder: Path, text: str) -> str:
        write_failure(folder, 3, RuntimeError(text), "error")
        return str(json.loads((folder / "failure-3.json").read_text())["message"])

    def test_every_line_of_a_message_is_kept(self, tmp_path: Path, golden: Golden) -> None:
        said = self.message(tmp_path, "\nThe following went wrong:\n\n  no kernel for sm_90\n")
        golden(said)

    def test_a_long_one_is_cut(self, tmp_path: Path) -> None:
        said = self.message(tmp_path, "many words\n" * 1000)
        assert len(said) < 340
        assert said.endswith("...")

    def test_none_is_said_so(self, tmp_path: Path, golden: Golden) -> None:
        golden(self.message(tmp_path, " \n"))
