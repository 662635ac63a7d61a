"""Paths that another user of the host may prepare: leases, caches, scratch and locks, as two users."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_llmperf.judge import store as store_module
from pytest_llmperf.judge.store import BaselineError
from pytest_llmperf.launch import histories, machine
from pytest_llmperf.launch.histories import NotMadeError
from pytest_llmperf.launch.scratch import remove_of_job, scratch
from pytest_llmperf.launch.script import ScriptLaunch
from pytest_llmperf.run.findings import CaseFailedError
from pytest_llmperf.run.hardware import new_run_folder
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.support.files import private_folder, refused_at, write_text

# Nobody's on any system.
ALICE, MALLORY = 54321, 54322

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture
def ground() -> Iterator[Path]:
    """A folder like ``/tmp``, which every user reaches; pytest's own is closed to others."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "tmp").mkdir()
        (top / "tmp").chmod(0o1777)
        yield top / "tmp"


def as_user(uid: int, do: Callable[[], object]) -> None:
    """Have ``uid`` do it in a process of its own; what it raises is an error here."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0o077)
            do()
            code = 0
        except BaseException:  # noqa: BLE001 - pytest's own must not go on in here
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def refused(error: type[Exception], do: Callable[[], object], *words: str) -> None:
    with pytest.raises(error) as caught:
        do()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def lease() -> None:
    with machine.lease_cpu(print):
        pass


def open_folder(path: Path, made: int) -> None:
    path.mkdir()
    path.chmod(made)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def victim_of(ground: Path) -> Path:
    """A file that only its owner may touch."""
    victim = ground.parent / "authorized_keys"
    victim.write_text("key")
    victim.chmod(0o600)
    os.chown(victim, ALICE, ALICE)
    return victim


@needs_root
class TestLeasesOfTwoUsers:
    @pytest.fixture(autouse=True)
    def folder(self, ground: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.delenv("LLMPERF_LEASE_DIR", raising=False)
        monkeypatch.setattr(machine, "_FOLDER", str(ground / "leases"))
        monkeypatch.setattr(machine, "_POLL_SECONDS", 0.02)
        return ground / "leases"

    def test_they_meet_in_a_sticky_folder_and_leave_nothing(self, folder: Path) -> None:
        as_user(MALLORY, lease)
        as_user(ALICE, lease)
        assert (mode(folder), [*folder.iterdir()]) == (0o1777, [])

    @pytest.mark.parametrize("shared", [False, True])
    def test_who_waits_is_told_for_whom(self, folder: Path, shared: bool) -> None:
        class WaitedError(Exception):
            pass

        def say(line: str) -> None:
            raise WaitedError(line)

        def wait() -> None:
            with pytest.raises(WaitedError, match=rf"the CPU: in use by pid {holder} of root "), machine.lease_cpu(say):
                pass

        holder = os.getpid()
        with machine.lease_cpu(print, shared=shared):
            assert mode(folder / "cpu.lock") == 0o644
            as_user(ALICE, wait)
            if shared:
                as_user(ALICE, lambda: machine.lease_cpu(say, shared=True).__enter__())
        as_user(ALICE, lease)

    def test_a_lock_that_its_owner_left_serves_others(self, folder: Path) -> None:
        def leave() -> None:
            with machine.lease_cpu(print, shared=True):
                pass

        as_user(MALLORY, leave)
        assert (folder / "cpu.lock").stat().st_uid == MALLORY
        as_user(ALICE, lease)

    @pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "fifo", "folder"])
    @pytest.mark.parametrize("shared", [False, True])
    def test_what_another_user_put_in_a_locks_place_is_refused_and_untouched(
        self, folder: Path, ground: Path, kind: str, shared: bool
    ) -> None:
        victim, lock = victim_of(ground), folder / "cpu.lock"
        open_folder(folder, 0o1777)
        puts: dict[str, Callable[[], object]] = {
            "link": lambda: lock.symlink_to(victim),
            "dangling link": lambda: lock.symlink_to(ground.parent / "new"),
            "hard link": lambda: lock.hardlink_to(victim),  # as root, whom fs.protected_hardlinks does not stop
            "fifo": lambda: os.mkfifo(lock, 0o666),
            "folder": lock.mkdir,
        }
        puts[kind]()

        def take() -> None:
            with machine.lease_cpu(print, shared=shared):
                pass

        as_user(ALICE, lambda: refused(OSError, take, "cpu.lock", "plain file", "LLMPERF_LEASE_DIR"))
        assert (mode(victim), victim.read_text()) == (0o600, "key")
        assert not (ground.parent / "new").exists()

    def test_a_link_in_the_folders_place_is_refused_and_its_end_untouched(self, folder: Path, ground: Path) -> None:
        home = ground.parent / "alice"
        home.mkdir(mode=0o700)
        os.chown(home, ALICE, ALICE)
        as_user(MALLORY, lambda: folder.symlink_to(home))
        as_user(ALICE, lambda: refused(OSError, lease, "it is a link"))
        assert (mode(home), [*home.iterdir()]) == (0o700, [])

    @pytest.mark.parametrize(
        ("made", "words"), [(0o777, "without the sticky bit"), (0o700, "Permission denied"), (0o755, "Permission")]
    )
    def test_another_users_folder_serves_only_where_it_is_sticky(self, folder: Path, made: int, words: str) -> None:
        as_user(MALLORY, lambda: open_folder(folder, made))
        as_user(ALICE, lambda: refused(OSError, lease, words, "LLMPERF_LEASE_DIR"))
        as_user(MALLORY, lambda: folder.chmod(0o1777))
        as_user(ALICE, lease)

    def test_a_named_folder_of_ours_that_everybody_may_write_becomes_sticky(
        self, ground: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        named = ground / "named"
        monkeypatch.setenv("LLMPERF_LEASE_DIR", str(named))
        as_user(ALICE, lambda: open_folder(named, 0o777))
        as_user(ALICE, lease)
        assert mode(named) == 0o1777

    def test_a_lock_that_its_holder_removes_meanwhile_is_taken_anew(self, folder: Path) -> None:
        with machine.lease_cpu(print):
            waiting = os.open(folder / "cpu.lock", os.O_RDONLY)
        fcntl.flock(waiting, fcntl.LOCK_EX)  # of a file that is no more
        lease()
        os.close(waiting)


def prepared(path: Path, kind: str, ground: Path) -> None:
    """What MALLORY can put there; a link leads to what the victim has."""
    home = ground.parent / "alice"
    home.mkdir(mode=0o755)
    os.chown(home, ALICE, ALICE)

    def put() -> None:
        if kind == "link":
            path.symlink_to(home)
        else:
            open_folder(path, 0o777)

    as_user(MALLORY, put)


@needs_root
@pytest.mark.parametrize("kind", ["link", "folder"])
class TestWhatOthersPrepared:
    @pytest.mark.parametrize("of_job", [False, True])
    def test_caches_are_the_launchs_own(
        self, ground: Path, monkeypatch: pytest.MonkeyPatch, kind: str, of_job: bool
    ) -> None:
        monkeypatch.setenv("LLMPERF_SCRATCH", str(ground))
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "one")
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
        trap = ground / (f"llmperf-{ALICE}-one-7" if of_job else f"llmperf-{ALICE}")
        prepared(trap, kind, ground)

        def use() -> None:
            tempfile.tempdir = str(ground)
            with scratch(of_job=of_job) as own:
                assert {"TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} == {*own.variables}
                folder = Path(own.variables["TMPDIR"])
                assert folder.parent == ground
                assert (mode(folder), folder.stat().st_uid) == (0o700, ALICE)
                assert all(Path(path).is_relative_to(folder) for path in own.variables.values())
            assert not folder.exists()
            remove_of_job()

        as_user(ALICE, use)
        assert trap.exists()
        assert [*trap.iterdir()] == []
        assert mode(ground.parent / "alice") == 0o755

    def test_the_lock_folder_is_refused_in_one_line(
        self, ground: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        monkeypatch.setattr(store_module, "_LOCKS", str(ground / "locks"))
        prepared(ground / "locks", kind, ground)

        def record() -> None:
            with store_module._locked(ground / "b.json"):
                pass

        as_user(ALICE, lambda: refused(BaselineError, record, "lock folder", str(ground / "locks")))

    def test_a_run_without_a_checkout_of_its_own_has_a_folder_of_its_own(self, ground: Path, kind: str) -> None:
        prepared(ground / f"pytest-llmperf-runs-{ALICE}", kind, ground)

        def begin() -> None:
            tempfile.tempdir = str(ground)
            folder = new_run_folder(Path("/proc/nothing"), None)
            assert (folder.parent, mode(folder), folder.stat().st_uid) == (ground, 0o700, ALICE)

        as_user(ALICE, begin)


@needs_root
def test_an_interpreter_that_others_made_is_not_run(ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(ground))
    prepared(ground / "candidates", "folder", ground)
    make = lambda: histories.made("venv", ["torch"], lambda _folder: None)  # noqa: E731
    as_user(ALICE, lambda: refused(NotMadeError, make, f"belongs to user {MALLORY}"))


@pytest.mark.parametrize("between", ["", "a", "a/b"])
def test_a_private_folder_below_one_that_everybody_may_rearrange_is_refused(ground: Path, between: str) -> None:
    ground.chmod(0o777)
    refused(PermissionError, lambda: private_folder(ground / between / "mine"), "sticky")


@needs_root
@pytest.mark.parametrize("is_link", [False, True])
def test_a_private_folder_below_one_that_another_user_made_in_an_open_one_is_refused(
    ground: Path, is_link: bool
) -> None:
    as_user(MALLORY, lambda: open_folder(ground / "theirs", 0o1777))
    if is_link:
        as_user(MALLORY, lambda: (ground / "link").symlink_to(ground / "theirs"))
    named = ground / ("link" if is_link else "theirs") / "a" / "mine"
    as_user(ALICE, lambda: refused(PermissionError, lambda: private_folder(named), f"user {MALLORY} may replace"))


def test_a_private_folder_that_others_could_write_is_refused_and_one_they_could_read_is_closed(ground: Path) -> None:
    for found in (0o777, 0o755):
        (ground / f"{found:o}").mkdir()
        (ground / f"{found:o}").chmod(found)
    refused(PermissionError, lambda: private_folder(ground / "777"), "others may write")
    assert mode(private_folder(ground / "755")) == 0o700


def test_a_jobs_run_needs_a_folder_that_its_nodes_see(ground: Path) -> None:
    refused(CaseFailedError, lambda: new_run_folder(Path("/proc/nothing"), "7"), "all nodes")


@needs_root
def test_a_file_that_is_written_does_not_follow_a_link_that_another_user_planted(ground: Path) -> None:
    precious, link, own = ground.parent / "precious", ground / "results.json", ground / "own.json"
    precious.write_text("x", encoding="ascii")
    as_user(MALLORY, lambda: link.symlink_to(precious))
    own.symlink_to(precious)
    with pytest.raises(PermissionError, match=f"link of user {MALLORY}"):
        write_text(link, "{}")
    assert precious.read_text(encoding="ascii") == "x"
    assert "link of user" in refused_at(link)
    write_text(own, "{}")
    assert precious.read_text(encoding="ascii") == "{}"


@needs_root
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_what_another_user_put_in_a_files_place_is_refused_before_anything_runs(ground: Path, kind: str) -> None:
    path = ground / "results.json"
    as_user(MALLORY, lambda: os.mkfifo(path) if kind == "pipe" else path.touch())
    path.chmod(0o666)

    def write() -> None:
        assert kind in refused_at(path)
        refused(PermissionError, lambda: write_text(path, "{}"), f"user {MALLORY}")

    as_user(ALICE, write)


@needs_root
def test_a_folder_of_path_that_another_user_closed_hides_no_message(ground: Path) -> None:
    (ground / "closed" / "bin").mkdir(parents=True)
    (ground / "closed").chmod(0o700)
    spec = ScriptSpec(command="nosuchprogram", steps=6, warmup_steps=2)
    script = ScriptLaunch(spec, ground, ground, spec.argv, {}, "")
    path = str(ground / "closed" / "bin")
    as_user(ALICE, lambda: refused(FileNotFoundError, lambda: script.check(path), "is not found on PATH;"))
