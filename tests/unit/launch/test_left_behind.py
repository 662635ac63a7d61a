"""What killed processes leave: the next one removes it, and nothing that somebody still writes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pytest_llmperf.launch.scratch import drop_unfinished, remove_of_job, scratch
from pytest_llmperf.run.hardware import _RUN_NAME, new_run_folder
from pytest_llmperf.support.files import mark, write_text

_DAYS = 3 * 24 * 3600.0

_KILLED = """
import os, sys, pathlib
from pytest_llmperf.support.files import replacing
with replacing(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def gone() -> int:
    """A pid of nobody."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def aged(path: Path, seconds: float = _DAYS) -> Path:
    os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)
    return path


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "a.json")], check=False)
    assert (done.returncode, len([*tmp_path.iterdir()])) == (-9, 1)
    write_text(tmp_path / "b.json", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]


def test_what_may_still_be_written_stays(tmp_path: Path, gone: int) -> None:
    elsewhere = f".llmperf-deadbeef-{gone}-0123abcd.part"
    names = {f".llmperf-{mark()}-0123abcd.part", elsewhere, f".llmperf-{gone}-0123abcd.part", "mine.part"}
    for name in names:
        (tmp_path / name).touch()
    write_text(tmp_path / "b.json", "")
    assert {path.name for path in tmp_path.iterdir()} == names | {"b.json"}
    for name in names:
        aged(tmp_path / name)
    write_text(tmp_path / "b.json", "")
    assert {path.name for path in tmp_path.iterdir()} == {f".llmperf-{mark()}-0123abcd.part", "mine.part", "b.json"}


def test_runs_of_a_checkout_that_cannot_be_written_are_kept_as_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = new_run_folder(Path("/proc/nothing"), None)
    home = first.parent
    first.rmdir()
    for number in range(15):
        run = home / f"20250101-{number:06}-{gone}"
        run.mkdir()
        aged(run)
    new_run_folder(Path("/proc/nothing"), None)
    assert ([*tmp_path.iterdir()], len([*home.iterdir()])) == ([home], 10)


def test_runs_of_one_process_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_764_000_000.5)
    folders = {new_run_folder(tmp_path / ".llmperf", job) for job in (None, None, None, "7", "7")}
    assert {folder.parent for folder in folders} == {tmp_path / ".llmperf"}
    assert len(folders) == 5
    assert all(_RUN_NAME.fullmatch(folder.name) for folder in folders)


class TestScratch:
    @pytest.fixture(autouse=True)
    def base(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("LLMPERF_SCRATCH", str(tmp_path))
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "one/../two")
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        return tmp_path

    @pytest.mark.parametrize("is_whole", [False, True])
    def test_a_launch_leaves_what_it_compiled_only_where_it_ended_well(self, base: Path, is_whole: bool) -> None:
        with scratch() as place:
            step, cache = Path(place.variables["TMPDIR"]), Path(place.variables["TORCHINDUCTOR_CACHE_DIR"])
            (step / "torchelastic_x").mkdir()
            (cache / "ab").mkdir(parents=True)
            for name in ("kernel.so", "header.h.gch", "code.py"):
                (cache / "ab" / name).write_text("some")
            place.is_whole = is_whole
        assert not step.exists()
        kept = {"code.py", *({"kernel.so", "header.h.gch"} if is_whole else ())}
        assert {path.name for path in (cache / "ab").iterdir()} == kept

    @pytest.mark.parametrize("is_whole", [False, True])
    def test_nobody_waits_for_a_builder_of_extensions_that_was_ended(
        self, base: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
    ) -> None:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(base / "extensions"))
        built = base / "extensions" / "py311_cpu" / "shm_comm"
        with scratch() as place:
            built.mkdir(parents=True)
            for name in ("lock", "shm_comm.so"):
                (built / name).touch()
            place.is_whole = is_whole
        assert {path.name for path in built.iterdir()} == {"shm_comm.so", *({"lock"} if is_whole else ())}

    def test_a_lock_that_another_host_may_hold_stays(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(base), fstype="nfs4")]
        monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(base / "extensions"))
        (base / "extensions").mkdir()
        with scratch():
            (base / "extensions" / "lock").touch()
        assert (base / "extensions" / "lock").exists()

    def test_a_killed_launcher_is_cleaned_up_after(self, base: Path, gone: int) -> None:
        home = base / f"llmperf-{os.getuid()}"
        (home / "inductor").mkdir(parents=True)
        home.chmod(0o700)
        old, new = home / "inductor" / "old.gch", home / "inductor" / "new.gch"
        for path in (old, new):
            path.write_text("a header")
        aged(old)
        space = mark().split("-")[0]
        left, other = (home / f"step-{space}-{pid}-{time.time() - 60:.0f}-x" for pid in (gone, os.getpid()))
        left.mkdir()
        other.mkdir()
        with scratch() as place:
            place.is_whole = True
        assert (left.exists(), other.exists(), old.exists(), new.exists()) == (False, True, True, False)

    def test_a_jobs_folder_names_its_cluster_and_goes_with_it(self, base: Path) -> None:
        with scratch(of_job=True) as place:
            home = Path(place.variables["TRITON_CACHE_DIR"]).parent
            assert home == base / f"llmperf-{os.getuid()}-one_.._two-7"
        assert home.exists()
        remove_of_job()
        assert not home.exists()

    def test_a_job_that_removed_nothing_is_forgotten_after_days(self, base: Path) -> None:
        names = [f"llmperf-{os.getuid()}-one-{number}" for number in (1, 2, 3)]
        for name in names[:2]:
            (base / name).mkdir()
        mine = base / "mine"
        mine.mkdir()
        (base / names[2]).symlink_to(mine)
        aged(base / names[0])
        aged(base / names[2])
        with scratch():
            pass
        assert [(base / name).exists() for name in names] == [False, True, True]
        assert mine.exists()


class TestCompiledFiles:
    def test_what_somebody_writes_stays(self, tmp_path: Path) -> None:
        with (tmp_path / "kernel.so").open("wb"):
            drop_unfinished(tmp_path, 0.0)
            assert (tmp_path / "kernel.so").exists()
        drop_unfinished(tmp_path, 0.0)
        assert not (tmp_path / "kernel.so").exists()

    def test_no_cache_is_none_to_clean(self, tmp_path: Path) -> None:
        drop_unfinished(tmp_path / "nothing", 0.0)

    def test_what_another_launch_removes_meanwhile_is_no_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "half.o").write_bytes(b"")
        monkeypatch.setattr(os, "walk", lambda _: [(str(tmp_path), [], ["gone.o", "half.o"])])
        drop_unfinished(tmp_path, time.time() - 60)
        assert list(tmp_path.iterdir()) == []
