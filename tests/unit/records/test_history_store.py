"""The store of a history: several writers, other versions, and files that are no such store."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.run import history_store
from pytest_llmperf.run.history import History
from pytest_llmperf.run.history_store import APPLICATION_ID, SCHEMAS, HistoryError, HistoryStore
from tests.golden import Golden
from tests.history import nights, past_result


@pytest.fixture
def store(tmp_path: Path) -> HistoryStore:
    return HistoryStore(tmp_path / "history.sqlite")


def test_what_is_added_is_read_again(store: HistoryStore) -> None:
    added = nights(2, cases=3)
    store.append(added[:3])
    store.append(added[3:])
    found = store.read()
    assert [replace(one, run="") for one in found] == [replace(one, run="") for one in added]
    assert len({one.run for one in found[:3]}) == 1
    assert found[0].run != found[3].run


def test_a_store_that_nobody_has_made_is_empty(store: HistoryStore) -> None:
    assert store.read() == []
    assert not store.path.exists()


def test_a_store_that_its_first_run_is_about_to_fill_is_empty_and_closed(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.path.touch()
    opened, connect = list[sqlite3.Connection](), sqlite3.connect

    def kept(*args: Any, **words: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **words))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", kept)
    assert store.read() == []
    assert len(opened) == 2
    for database in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            database.execute("SELECT 1")


def test_several_runs_may_end_at_the_same_time(store: HistoryStore) -> None:
    begin = threading.Barrier(8)

    def end(number: int) -> None:
        begin.wait()
        store.append([past_result(number, case) for case in range(20)])

    runs = [threading.Thread(target=end, args=(number,)) for number in range(8)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    found = store.read()
    assert len(found) == 160
    assert len({one.run for one in found}) == 8


def test_a_run_is_added_whole_or_not_at_all(store: HistoryStore) -> None:
    store.append([past_result()])
    bad = replace(past_result(1), peak_reserved_bytes=object())  # type: ignore[arg-type]
    with pytest.raises(HistoryError):
        store.append([past_result(1, 1), bad])
    assert [one.began[:10] for one in store.read()] == ["2026-01-01"]


def older(path: Path) -> None:
    """A store as the first version made it, with a result."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript(SCHEMAS[0])
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute("PRAGMA user_version = 1")
        database.execute('INSERT INTO texts VALUES (1, \'{"torch": "2.9"}\')')
        database.execute("INSERT INTO runs VALUES (1, 'first', 'm', '', '')")
        launches = '[{"started_at": "2025-12-01T00:00:00Z", "step_seconds": 0.1, "places": []}]'
        values = (1, "old", "0" * 16, "t", "pass", 1024, 1, None, 1, launches)
        database.execute(f"INSERT INTO results VALUES ({', '.join('?' * len(values))})", values)
        database.commit()


def test_an_older_store_is_read_as_it_is(store: HistoryStore) -> None:
    older(store.path)
    before = store.path.read_bytes()
    (found,) = store.read()
    assert (found.id, found.versions, found.counts) == ("old", {"torch": "2.9"}, {})
    assert store.path.read_bytes() == before


def test_calibrations_are_kept_once_for_all_cases_of_a_run(store: HistoryStore) -> None:
    made = {"GPU-1": {"made_at": "2026-01-01T00:00:00Z", "seconds": {"copy": 0.5}, "versions": {}}}
    several = [replace(past_result(case=case), calibrations=made) for case in range(3)]
    store.append([*several, past_result(1)])
    assert [one.calibrations for one in store.read()] == [made, made, made, {}]
    with closing(sqlite3.connect(store.path)) as database:
        (count,) = database.execute("SELECT count(*) FROM texts WHERE text LIKE '%GPU-1%'").fetchone()
    assert count == 1


def test_an_older_store_is_brought_up_to_date_by_who_adds_to_it(store: HistoryStore) -> None:
    older(store.path)
    store.append([past_result()])
    assert [(one.id, dict(one.counts)) for one in store.read()] == [
        ("old", {}),
        ("llama-case0-gpus1", {"kernels_per_step": 260.0}),
    ]


def test_a_newer_store_is_left_alone_and_told(store: HistoryStore, golden: Golden) -> None:
    store.append([past_result()])
    with closing(sqlite3.connect(store.path)) as database:
        database.execute(f"PRAGMA user_version = {len(SCHEMAS) + 1}")
    before = store.path.read_bytes()
    for act in (store.read, lambda: store.append([past_result(1)])):
        with pytest.raises(HistoryError) as caught:
            act()
        golden(caught)
        assert len(str(caught.value).splitlines()) == 1
    assert store.path.read_bytes() == before


def test_a_store_that_another_program_holds_is_told(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr(history_store, "BUSY_SECONDS", 0.05)
    store.append([past_result()])
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(HistoryError) as raised:
            store.append([past_result(1)])
        golden(raised)
        with pytest.raises(HistoryError) as raised:
            store.read()
        golden(raised)
    assert len(store.read()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_store_that_may_not_be_written_is_told_and_can_be_read(store: HistoryStore, golden: Golden) -> None:
    store.append([past_result()])
    store.path.chmod(0o444)
    with pytest.raises(HistoryError) as raised:
        store.append([past_result(1)])
    golden(raised)
    assert len(store.read()) == 1


def test_a_store_on_a_disk_that_takes_nothing_is_told(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    store.append([past_result()])

    def read_only(path: Path, **options: object) -> sqlite3.Connection:
        return real(f"file:{path}?mode=ro", uri=True, isolation_level=None)

    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(HistoryError) as raised:
        store.append([past_result(1)])
    golden(raised)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_store_that_is_cut_is_told_and_not_made_worse(store: HistoryStore, share: float, golden: Golden) -> None:
    for night in range(30):
        store.append([past_result(night, case) for case in range(20)])
    whole = store.path.read_bytes()
    cut = whole[: int(len(whole) * share)]
    store.path.write_bytes(cut)
    for act in (store.read, lambda: store.append([past_result(99)])):
        with pytest.raises(HistoryError) as raised:
            act()
        golden(raised)
    assert store.path.read_bytes() == cut


def test_a_store_without_its_last_page_takes_nothing_more(store: HistoryStore, golden: Golden) -> None:
    for night in range(30):
        store.append([past_result(night, case) for case in range(20)])
    cut = store.path.read_bytes()[:-4096]
    store.path.write_bytes(cut)
    for act in (store.read, lambda: store.append([past_result(99)])):
        with pytest.raises(HistoryError) as raised:
            act()
        golden(raised)
    assert store.path.read_bytes() == cut


def test_a_file_that_is_no_database_is_told_and_left_alone(store: HistoryStore) -> None:
    store.path.write_text("notes of last week\n" * 100)
    with pytest.raises(HistoryError, match="no database"):
        store.append([past_result()])
    assert store.path.read_text() == "notes of last week\n" * 100


def test_a_database_of_something_else_is_left_alone(store: HistoryStore, golden: Golden) -> None:
    with closing(sqlite3.connect(store.path)) as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
    before = store.path.read_bytes()
    for act in (store.read, lambda: store.append([past_result()])):
        with pytest.raises(HistoryError) as raised:
            act()
        golden(raised)
    assert store.path.read_bytes() == before


_KILLED = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA cache_size = 1")  # so that it writes before it is done
database.execute("BEGIN IMMEDIATE")
database.execute("DELETE FROM results")
for number in range(5000):
    database.execute("INSERT INTO texts (text) VALUES (?)", (f"{number} " * 100,))
os._exit(9)
"""


@pytest.mark.processes
def test_what_a_run_that_was_killed_has_half_written_is_taken_back(store: HistoryStore) -> None:
    store.append([past_result(night) for night in range(50)])
    assert subprocess.run([sys.executable, "-c", _KILLED, str(store.path)], check=False).returncode == 9
    assert store.path.with_name("history.sqlite-journal").exists()
    assert len(store.read()) == 50
    store.append([past_result(99)])
    assert len(store.read()) == 51


def test_what_lies_in_two_places_counts_once(tmp_path: Path) -> None:
    for name in ("a.sqlite", "b.sqlite"):
        HistoryStore(tmp_path / name).append(nights(3))
    found = History.read([tmp_path])
    assert [one.began[:10] for one in found.results] == ["2026-01-01", "2026-01-02", "2026-01-03"]
    assert found.troubles == ()


def test_a_result_that_lost_its_launches_is_told(store: HistoryStore, golden: Golden) -> None:
    store.append(nights(1, cases=2))
    with closing(sqlite3.connect(store.path)) as database:
        database.execute("UPDATE results SET launches = '[]' WHERE rowid = 1")
        database.commit()
    found = History.read([store.path])
    assert found.results == ()
    (trouble,) = found.troubles
    golden(trouble)


@pytest.mark.parametrize("table", ["runs", "texts"])
def test_results_that_lost_what_belongs_to_them_are_not_an_empty_history(
    store: HistoryStore, table: str, golden: Golden
) -> None:
    store.append([past_result(), past_result(case=1)])
    with closing(sqlite3.connect(store.path, isolation_level=None)) as database:
        database.execute(f"DELETE FROM {table}")
    with pytest.raises(HistoryError) as raised:
        store.read()
    golden(raised)
