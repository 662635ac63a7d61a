"""Baselines as files: found, locked, replaced as a whole, never overwritten unread."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.judge import store as store_module
from pytest_llmperf.judge.baseline import Baseline, BaselineStore, CapacityBaseline
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.store import Accepted, BaselineError, text_of
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tests.shelf import accept

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4)
OTHER = replace(SPEC, attention="eager")
LOCKS = store_module._LOCKS


@pytest.fixture(autouse=True)
def _locks_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LOCKS", str(tmp_path_factory.mktemp("locks") / "here"))


@pytest.fixture
def store(tmp_path: Path) -> BaselineStore:
    return BaselineStore(tmp_path / "baselines")


def adding(step_seconds: float = 0.1, spec: TrainSpec = SPEC, by: str = "t.py::t") -> Callable[..., Baseline]:
    """A change that accepts one more launch."""

    def change(old: Baseline | None) -> Baseline:
        launches = [launch_of(spec, Fake(step_seconds=step_seconds))]
        judgement = judge(launches, old, Policy.for_gpu())
        return accept(
            old,
            judged=old,
            spec=spec,
            machine="m",
            launches=launches,
            verdict=judgement.verdict,
            checks=judgement.checks,
            reason="",
            recorded_at="2026-01-01T00:00:00Z",
            recorded_by=by,
        )

    return change


def refuse(_old: Baseline | None) -> Baseline:
    raise AssertionError("the file was not even to be offered for change")


def files(store: BaselineStore) -> list[str]:
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file())


def test_the_path_is_machine_model_spec(store: BaselineStore) -> None:
    assert store.path("m", SPEC) == store.root / "m/llama-tiny/llama-tiny-bf16-sdpa-seq64-mbs1-gpus1.json"


def test_no_file_is_no_baseline(store: BaselineStore) -> None:
    assert store.load("m", SPEC) is None
    assert not store.root.exists()


def test_what_was_recorded_is_loaded_and_nothing_else_is_left(store: BaselineStore) -> None:
    assert store.update("m", SPEC, adding())[0] is None
    old, new = store.update("m", SPEC, adding(0.101))
    loaded = store.load("m", SPEC)
    assert old is not None
    assert loaded is not None
    assert [len(old.launches), len(new.launches)] == [1, 2]
    assert text_of(loaded) == text_of(new)
    assert files(store) == ["m/llama-tiny/llama-tiny-bf16-sdpa-seq64-mbs1-gpus1.json"]


def test_the_file_has_the_mode_any_new_file_has(store: BaselineStore) -> None:
    mask = os.umask(0o027)
    try:
        store.update("m", SPEC, adding())
    finally:
        os.umask(mask)
    assert stat.S_IMODE(store.path("m", SPEC).stat().st_mode) == 0o640


def test_a_very_long_id_is_cut_and_stays_apart_from_its_neighbour(
    store: BaselineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainSpec, "id", property(lambda spec: "x" * 300 + spec.attention))
    paths = [store.path("m", spec) for spec in (SPEC, OTHER)]
    assert len({path.name for path in paths}) == 2
    assert all(len(path.name) <= 205 for path in paths)
    store.update("m", SPEC, adding())
    assert store.load("m", SPEC) is not None


class TestFilesThatCannotServe:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "empty"),
            (b'{"schema": 1, "id"', "truncated"),
            (b'{"schema": 2}', "schema 2 is newer than this version understands (1); upgrade pytest-llmperf"),
            (b"\xff\xfe", "cannot be read (it is not text in UTF-8); restore it"),
        ],
    )
    def test_they_are_named_and_never_overwritten(self, store: BaselineStore, content: bytes, said: str) -> None:
        path = store.path("m", SPEC)
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        for attempt in (lambda: store.load("m", SPEC), lambda: store.update("m", SPEC, refuse)):
            assert said in one_line(attempt, path)
        assert said in one_line(lambda: store.entries("m"), path)
        assert path.read_bytes() == content

    def test_another_spec(self, store: BaselineStore) -> None:
        store.update("m", SPEC, adding())
        path = store.path("m", OTHER)
        store.path("m", SPEC).rename(path)
        text = path.read_text()
        for attempt in (lambda: store.load("m", OTHER), lambda: store.update("m", OTHER, refuse)):
            message = one_line(attempt, path)
            assert f"digest {SPEC.digest}, expected {OTHER.digest}" in message
            assert "move it" in message
            assert "delete it" in message
        assert path.read_text() == text

    def test_another_machine(self, store: BaselineStore, golden: Golden) -> None:
        store.update("m", SPEC, adding())
        path = store.path("n", SPEC)
        path.parent.mkdir(parents=True)
        store.path("m", SPEC).rename(path)
        golden(one_line(lambda: store.load("n", SPEC), path))

    def test_a_folder_in_its_place(self, store: BaselineStore, golden: Golden) -> None:
        path = store.path("m", SPEC)
        path.mkdir(parents=True)
        golden(one_line(lambda: store.load("m", SPEC), path))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads anything")
    def test_a_file_that_may_not_be_read(self, store: BaselineStore) -> None:
        store.update("m", SPEC, adding())
        store.path("m", SPEC).chmod(0)
        assert "cannot be read" in one_line(lambda: store.load("m", SPEC), store.path("m", SPEC))


def one_line(attempt: Callable[[], Any], path: Path) -> str:
    """What the refusal says: one line that begins with the file."""
    with pytest.raises(BaselineError) as caught:
        attempt()
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


class TestFailedWrites:
    @pytest.mark.parametrize("broken", ["fsync", "replace"])
    def test_a_full_disk_changes_nothing(
        self, store: BaselineStore, monkeypatch: pytest.MonkeyPatch, broken: str
    ) -> None:
        store.update("m", SPEC, adding())
        path = store.path("m", SPEC)
        text, before = path.read_text(), files(store)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        owner: object = os if broken == "fsync" else Path
        monkeypatch.setattr(owner, broken, full)
        message = one_line(lambda: store.update("m", SPEC, adding(0.101)), path)
        assert "nothing was changed" in message
        assert "No space left" in message
        assert (path.read_text(), files(store)) == (text, before)

    def test_an_interrupt_leaves_no_temporary_file(self, store: BaselineStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(_descriptor: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.update("m", SPEC, adding())
        assert files(store) == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
    def test_a_read_only_folder(self, store: BaselineStore, golden: Golden) -> None:
        store.update("m", SPEC, adding())
        path = store.path("m", SPEC)
        path.parent.chmod(0o500)
        try:
            assert "nothing was changed" in one_line(lambda: store.update("m", SPEC, adding(0.101)), path)
            golden(one_line(lambda: store.check_writable("m", SPEC), path.parent))
        finally:
            path.parent.chmod(0o700)

    def test_a_read_only_file_system(self, store: BaselineStore, monkeypatch: pytest.MonkeyPatch) -> None:
        # As root sees it too, whom no mode stops.
        def read_only(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        opened = Path.open

        def none_new(path: Path, mode: str = "r", **others: Any) -> Any:
            return read_only() if mode == "xb" else opened(path, mode, **others)

        monkeypatch.setattr(Path, "open", none_new)
        monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
        path = store.path("m", SPEC)
        assert "nothing was changed" in one_line(lambda: store.update("m", SPEC, adding()), path)
        assert "Read-only file system" in one_line(lambda: store.check_writable("m", SPEC), path.parent)

    def test_a_file_where_the_folder_would_be(self, store: BaselineStore) -> None:
        store.root.write_text("a file")
        deeper = BaselineStore(store.root / "deep")
        assert "Not a directory" in one_line(lambda: deeper.update("m", SPEC, refuse), deeper.path("m", SPEC))

    @pytest.mark.parametrize("place", ["a file", "under a file"])
    def test_a_lock_folder_that_cannot_be_used(
        self, store: BaselineStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, golden: Golden
    ) -> None:
        blocked = tmp_path / "blocked"
        blocked.write_text("")
        monkeypatch.setattr(store_module, "_LOCKS", str(blocked if place == "a file" else blocked / "locks"))
        path = store.path("m", SPEC)
        for attempt in (lambda: store.update("m", SPEC, refuse), lambda: store.check_writable("m", SPEC)):
            message = one_line(attempt, path)
            golden(message)

    def test_a_refused_change_keeps_the_file(self, store: BaselineStore) -> None:
        store.update("m", SPEC, adding())
        text = store.path("m", SPEC).read_text()
        with pytest.raises(BaselineError, match="worse beyond tolerance"):
            store.update("m", SPEC, adding(9.0))
        assert store.path("m", SPEC).read_text() == text


@pytest.mark.processes
class TestLocking:
    def test_two_processes_lose_no_launch(self, store: BaselineStore) -> None:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=_add_five, args=(store.root, store_module._LOCKS)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0]
        baseline = store.load("m", SPEC)
        assert baseline is not None
        assert (len(baseline.launches), len(baseline.history)) == (10, 10)

    def test_a_lock_that_is_never_released_ends_in_one_line(
        self, store: BaselineStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store_module, "_LOCK_SECONDS", 0.05)
        path = store.path("m", SPEC)
        with store_module._locked(path):
            assert "nothing was changed" in one_line(lambda: store.update("m", SPEC, refuse), path)

    def test_locks_are_for_one_user(self, store: BaselineStore) -> None:
        assert LOCKS.endswith(f"-{os.getuid()}")
        store.update("m", SPEC, adding())
        assert stat.S_IMODE(Path(store_module._LOCKS).stat().st_mode) == 0o700

    def test_two_names_of_one_folder_share_a_lock(self, store: BaselineStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_module, "_LOCK_SECONDS", 0.05)
        store.root.mkdir()
        link = store.root.with_name("link")
        link.symlink_to(store.root)
        with store_module._locked(store.path("m", SPEC)), pytest.raises(BaselineError):
            BaselineStore(link).update("m", SPEC, refuse)


def _add_five(root: Path, locks: str) -> None:
    store_module._LOCKS = locks
    for _ in range(5):
        change = adding()

        def slowly(old: Baseline | None, change: Callable[..., Baseline] = change) -> Baseline:
            time.sleep(0.02)  # without the lock the other one reads the same file meanwhile
            return change(old)

        BaselineStore(root).update("m", SPEC, slowly)


class TestListing:
    def test_entries_of_a_machine(self, store: BaselineStore) -> None:
        store.update("m", SPEC, adding(by="a.py::a"))
        store.update("m", OTHER, adding(spec=OTHER, by="b.py::b"))
        assert {path: (one.id, one.digest, one.recorded_by) for path, one in store.entries("m").items()} == {
            store.path("m", spec): (spec.id, spec.digest, by) for spec, by in ((OTHER, "b.py::b"), (SPEC, "a.py::a"))
        }
        assert store.entries("n") == {}

    def test_machines(self, store: BaselineStore) -> None:
        assert store.machines() == []
        store.update("m", SPEC, adding())
        (store.root / "references").mkdir()
        (store.root / "references" / "published.json").write_text("{}")
        assert store.machines() == ["m"]


@pytest.mark.parametrize("name", ["x copy.json", "a.json"])
def test_a_copy_that_somebody_left_counts_for_nothing(store: BaselineStore, name: str) -> None:
    store.update("m", SPEC, adding(0.1))
    path = store.path("m", SPEC)
    path.with_name(name).write_bytes(path.read_bytes())
    store.update("m", SPEC, adding(0.1001))
    assert [*store.entries("m")] == [path]
    assert [len(one.launches) for one in store.baselines("m")] == [2]


def test_a_largest_micro_batch_stands_beside_its_launches(store: BaselineStore) -> None:
    store.update("m", SPEC, adding())
    path = store.capacities.path("m", SPEC)
    path.parent.mkdir()
    entry = Accepted(recorded_at="2026-01-01", reason="", launches=1, metrics={"max_micro_batch_size": 8})
    names = {"id": SPEC.capacity_id, "digest": SPEC.capacity_digest, "machine": "m", "recorded_by": "t.py::t"}
    text = text_of(CapacityBaseline(**names, spec=SPEC.to_dict(), anchor=entry, history=(entry,)))
    for name in (path.name, "a copy.json"):
        path.with_name(name).write_text(text)
    assert [*store.entries("m")] == [path, store.path("m", SPEC)]


def test_finding_out_whether_it_can_be_written_leaves_nothing(store: BaselineStore) -> None:
    store.check_writable("m", SPEC)
    assert files(store) == []
