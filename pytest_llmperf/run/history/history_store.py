"""HistoryStore: results of runs in one SQLite file, which several runs may write at the same time.

A run is one transaction of some milliseconds, and SQLite's rollback journal keeps the file whole, whoever dies
meanwhile. Write-ahead logging would gain nothing at one write a run, is files beside the file, and does not work where
hosts share a file system; nor do all of these have locks that SQLite can rely on (docs/how-to/history.md).
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pytest_llmperf.records.launch import Place
from pytest_llmperf.records.past_result import PastLaunch, PastResult
from pytest_llmperf.run.history.past_results import HistoryError

#: In the file's header, so that no other database is taken for one: ``lprf``.
APPLICATION_ID = 0x6C707266

#: How long one waits for the others: each of them writes some milliseconds.
BUSY_SECONDS = 15.0

#: What makes of each schema the next one; a new file goes through all of them.
SCHEMAS = (
    """
    CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, machine TEXT NOT NULL, revision TEXT NOT NULL,
        unfinished TEXT NOT NULL
    );
    CREATE TABLE results (
        run INTEGER NOT NULL REFERENCES runs, case_id TEXT NOT NULL, digest TEXT NOT NULL, nodeid TEXT NOT NULL,
        verdict TEXT NOT NULL, tokens_per_step INTEGER NOT NULL, ranks INTEGER NOT NULL, peak_reserved_bytes REAL,
        versions INTEGER NOT NULL REFERENCES texts, launches TEXT NOT NULL
    );
    CREATE INDEX results_of_a_case ON results (case_id);
    """,
    """
    ALTER TABLE results ADD COLUMN counts TEXT NOT NULL DEFAULT '{}';
    """,
    """
    ALTER TABLE runs ADD COLUMN project TEXT NOT NULL DEFAULT '';
    """,
    """
    ALTER TABLE results ADD COLUMN calibrations INTEGER REFERENCES texts;
    """,
)

_READ = """
    SELECT runs.name, runs.machine, case_id, digest, nodeid, verdict, launches, tokens_per_step, ranks,
           peak_reserved_bytes, texts.text, runs.revision, counts, runs.unfinished, runs.project, made.text
    FROM results JOIN runs ON runs.id = results.run JOIN texts ON texts.id = results.versions
    LEFT JOIN texts AS made ON made.id = results.calibrations
    ORDER BY results.rowid
"""


class HistoryStore:
    """The store in one file, which the first run makes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, results: Sequence[PastResult]) -> None:
        """Add the results of one run, all or none.

        Raises:
            HistoryError: they cannot be; what was there is still there.
        """
        with self._refusing(), closing(self._opened_for_writing()) as database:
            database.execute("BEGIN IMMEDIATE")  # one writer at a time from here on
            try:
                self._bring_up_to_date(database)
                _insert(database, results)
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise

    def read(self) -> list[PastResult]:
        """Return what it holds, in the order in which it was added; nothing of no file. The file stays as it is.

        Raises:
            HistoryError: it cannot serve.
        """
        if not self.path.exists():
            return []
        with self._refusing(), self._opened_for_reading() as database:
            versions: dict[str, Any] = {}
            found = [_result(row, versions) for row in database.execute(_READ)]
            # What has lost its run or its versions is joined with nothing, and SQLite says nothing of it.
            (held,) = database.execute("SELECT count(*) FROM results").fetchone()
            if held != len(found):
                raise ValueError(f"{held - len(found)} of its {held} results lost their run or their versions")
            return found

    def _opened_for_writing(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)

    @contextmanager
    def _opened_for_reading(self) -> Iterator[sqlite3.Connection]:
        # Writable where it can be: what a run that was killed has left half written is taken back by the next who asks.
        address = f"file:{quote(str(self.path.absolute()))}?mode=rw"
        with closing(sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)) as database:
            database.execute("BEGIN")
            version = self._version(database)
            if version in (0, len(SCHEMAS)):
                if version:
                    yield database
                else:  # the very first run is about to fill it
                    with closing(sqlite3.connect(":memory:", isolation_level=None)) as empty:
                        self._bring_up_to_date(empty)
                        yield empty
                return
            # An older one is brought up to date in memory: whoever reads may not be allowed to write.
            with closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
                database.execute("COMMIT")  # a backup is a transaction of its own
                database.backup(copy)
                self._bring_up_to_date(copy)
                yield copy

    def _version(self, database: sqlite3.Connection) -> int:
        """Return its schema's; 0: it is empty."""
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != APPLICATION_ID and tables:
            raise HistoryError(f"{self.path}: a database of something else; expected one that --perf-history made")
        if version > len(SCHEMAS):
            raise HistoryError(
                f"{self.path}: schema {version} is newer than this version understands ({len(SCHEMAS)}); "
                "upgrade pytest-llmperf, or name another file with --perf-history"
            )
        return int(version) if tables else 0

    def _bring_up_to_date(self, database: sqlite3.Connection) -> None:
        version = self._version(database)
        for statements in SCHEMAS[version:]:
            for statement in filter(None, map(str.strip, statements.split(";"))):
                database.execute(statement)  # executescript would end the transaction
        if version < len(SCHEMAS):
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {len(SCHEMAS)}")

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Whatever SQLite finds, as a line."""
        try:
            yield
        except sqlite3.OperationalError as error:
            told = {
                "database is locked": f"locked by another program for over {BUSY_SECONDS:g} s; end that one",
                "attempt to write a readonly database": "it may not be written; name another file with --perf-history",
                "unable to open database file": "it or its folder cannot be opened; name another with --perf-history",
            }
            raise HistoryError(f"{self.path}: {told.get(str(error), str(error))}") from error
        except (sqlite3.Error, ValueError, LookupError, TypeError) as error:
            raise HistoryError(
                f"{self.path}: cut, damaged or no database ({error}); move it away and the next run begins a new one "
                f"(sqlite3 {self.path.name} .recover may save what is in it)"
            ) from error
        except OSError as error:
            raise HistoryError(f"{self.path}: {error.strerror or error}; name another with --perf-history") from error


def _insert(database: sqlite3.Connection, results: Sequence[PastResult]) -> None:
    texts: dict[str, int] = {}

    def shared(value: object) -> int:
        """Versions and places are the same in hundreds of rows."""
        text = json.dumps(value, sort_keys=True)
        if text not in texts:
            database.execute("INSERT OR IGNORE INTO texts (text) VALUES (?)", (text,))
            (texts[text],) = database.execute("SELECT id FROM texts WHERE text = ?", (text,)).fetchone()
        return texts[text]

    runs: dict[str, int] = {}
    for result in results:
        if result.run not in runs:
            # Two runs may begin in the same second.
            name = f"{result.began} {secrets.token_hex(4)}"
            added = database.execute(
                "INSERT INTO runs (name, machine, revision, unfinished, project) VALUES (?, ?, ?, ?, ?)",
                (name, result.machine, result.revision, result.unfinished, result.project),
            )
            runs[result.run] = added.lastrowid or 0
        launches = [
            {**asdict(launch), "places": [[place.host, place.device, place.boot] for place in launch.places]}
            for launch in result.launches
        ]
        values = {
            "run": runs[result.run],
            "case_id": result.id,
            "digest": result.digest,
            "nodeid": result.nodeid,
            "verdict": result.verdict,
            "tokens_per_step": result.tokens_per_step,
            "ranks": result.ranks,
            "peak_reserved_bytes": result.peak_reserved_bytes,
            "versions": shared(dict(result.versions)),
            "launches": json.dumps(launches),
            "counts": json.dumps(dict(result.counts)),
            "calibrations": shared(dict(result.calibrations)) if result.calibrations else None,
        }
        names = ", ".join(values)
        places = ", ".join(f":{name}" for name in values)
        database.execute(f"INSERT INTO results ({names}) VALUES ({places})", values)  # noqa: S608 - names of ours


def _result(row: Sequence[Any], known: dict[str, Any]) -> PastResult:
    """``known``: versions that were read before; thousands of results share them."""
    run, machine, case_id, digest, nodeid, verdict, launches, *rest = row
    tokens, ranks, memory, versions, revision, counts, unfinished, project, made = rest
    measured = tuple(
        PastLaunch(**{**values, "places": tuple(Place(*place) for place in values["places"])})
        for values in json.loads(launches)
    )
    if not measured:
        raise ValueError(f"a result of {case_id} without a launch")
    for text in filter(None, (versions, made)):
        if text not in known:
            known[text] = json.loads(text)
    return PastResult(
        run=run,
        machine=machine,
        id=case_id,
        digest=digest,
        nodeid=nodeid,
        verdict=verdict,
        launches=measured,
        tokens_per_step=tokens,
        ranks=ranks,
        peak_reserved_bytes=memory,
        versions=known[versions],
        revision=revision,
        counts=json.loads(counts),
        unfinished=unfinished,
        project=project,
        calibrations=known[made] if made else {},
    )
