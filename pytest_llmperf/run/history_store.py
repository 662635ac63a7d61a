"""HistoryStore: rows of runs in one SQLite file, which several may write at the same time, and where rows come from.

A run is one transaction of some milliseconds, and SQLite's rollback journal keeps the file whole, whoever dies
meanwhile. Write-ahead logging would gain nothing at one write a run, is files beside the file, and does not work
where hosts share a file system; nor do all of these have locks that SQLite can rely on (docs/how-to/history.md). A
Python may have no SQLite: whoever opens a store asks for it."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pytest_llmperf.judge.exact import choices
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine, is_of_kind
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY
from pytest_llmperf.records.result import OBSERVED, STAND_INS, PastLaunch, PastResult
from pytest_llmperf.records.trace import COUNTED
from pytest_llmperf.report.results_json import Result, RunDocument
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import codec

if TYPE_CHECKING:
    import sqlite3

#: In the file's header, so that no other database is taken for one: ``lprf``.
APPLICATION_ID = 0x6C707266

#: How long one waits for the others: each of them writes some milliseconds.
BUSY_SECONDS = 15.0

#: What makes of each schema the next one; a new file goes through all of them.
SCHEMAS = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8").split("\n\n")

# Columns of a result that have its fields' names.
_SAME = ("digest", "nodeid", "verdict", "tokens_per_step", "ranks", "peak_reserved_bytes")

_READ = f"""
    SELECT runs.name, runs.machine, runs.revision, runs.unfinished, runs.project, case_id, {", ".join(_SAME)},
           launches, counts, texts.text, made.text
    FROM results JOIN runs ON runs.id = results.run JOIN texts ON texts.id = results.versions
    LEFT JOIN texts AS made ON made.id = results.calibrations
    ORDER BY results.rowid
"""  # noqa: S608 - names of ours


class HistoryError(Exception):
    """A source of history that cannot serve: one line with the file, what is wrong and what to do."""


class HistoryStore:
    """The store in one file, which the first run makes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, results: Sequence[PastResult]) -> None:
        """Add the results of one run, all or none: with a ``HistoryError`` what was there is still there."""
        import sqlite3

        with self._refusing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)) as database:
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
        """Return what it holds, in the order in which it was added; nothing of no file. The file stays as it is."""
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

    @contextmanager
    def _opened_for_reading(self) -> Iterator[sqlite3.Connection]:
        import sqlite3

        # Writable where it can be: what a run that was killed has left half written is taken back by the next who asks.
        address = f"file:{quote(str(self.path.absolute()))}?mode=rw"
        with closing(sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)) as database:
            database.execute("BEGIN")
            version = self._version(database)
            if version == len(SCHEMAS):
                yield database
                return
            # An older one is brought up to date in memory: whoever reads may not be allowed to write.
            with closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
                if version:  # else the very first run is about to fill it
                    database.execute("COMMIT")  # a backup is a transaction of its own
                    database.backup(copy)
                self._bring_up_to_date(copy)
                yield copy

    def _version(self, database: sqlite3.Connection) -> int:
        """0: it is empty."""
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
        import sqlite3

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
        values = {name: getattr(result, name) for name in _SAME} | {
            "run": runs[result.run],
            "case_id": result.id,
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
    *plain, launches, counts, versions, made = row
    values = dict(zip(("run", "machine", "revision", "unfinished", "project", "id", *_SAME), plain, strict=True))
    measured = tuple(
        PastLaunch(**{**launch, "places": tuple(Place(*place) for place in launch["places"])})
        for launch in json.loads(launches)
    )
    if not measured:
        raise ValueError(f"a result of {values['id']} without a launch")
    for text in filter(None, (versions, made)):
        if text not in known:
            known[text] = json.loads(text)
    return PastResult(
        **values,
        launches=measured,
        versions=known[versions],
        counts=json.loads(counts),
        calibrations=known[made] if made else {},
    )


# The cases of a ``--perf-json`` document as a history keeps them, and the row that a real run leaves.

# A launch that misbehaved on purpose is no history.
_FAULT = "LLMPERF_INJECT"

# What of an environment may move a figure, in the order in which it is told.
_VERSIONS = ("torch", "cuda", "driver", "transformers", "accelerate", "liger-kernel", "triton", "python")
_OTHERS = ("cudnn", "nccl", "flash-attn", "torchao", "bitsandbytes", "nvidia-cudnn-cu13")


def past_results(document: RunDocument, run: str) -> list[PastResult]:
    """Those of ``document`` that have a time: of a dry run, or of fake tensors alone, none has."""
    return [found for result in document.results if (found := _past(result, document, run)) is not None]


def _past(result: Result, document: RunDocument, run: str) -> PastResult | None:
    told = result.record
    if told.shares or told.launches_before:  # another test's launches, or cut to pairs with another environment
        return None
    records = result.launches
    if result.num_unread:  # of another version, or damaged: as far as they go
        records = tuple(filter(None, (codec.read_lenient(Launch, each) for each in told.launches)))
    launches = sorted(_measured(records), key=lambda launch: launch.started_at)
    if not launches or not told.digest or any(record.environment.variables.get(_FAULT) for record in records):
        return None
    commit = document.record.revision  # ``0123456789ab+`` where files differed from it; empty where nobody told
    revision = commit.commit + "+" * (commit.changed > 0) if commit and commit.commit else ""
    where = records[0].environment
    environment = {**where.versions, "driver": where.driver}
    # Of a night of unlike machines only its launches tell which they were on: by the kind that their other runs have.
    kinds = {one.kind for one in document.record.machines.values() if is_of_kind(where.gpu, one.kind)}
    unnamed = kinds.pop() if len(kinds) == 1 else ("" if where.driver else "cpu-") + where.gpu
    versions = {name: one_line(environment[name]) for name in (*_VERSIONS, *_OTHERS) if environment.get(name)}
    counted = {name: result.figure(name).value for name in COUNTED}
    has_tokens = told.metrics.keys().isdisjoint(STAND_INS)
    return PastResult(
        run=run,
        machine=document.record.machine.kind or document.record.kind or unnamed,
        id=result.id,
        digest=told.digest,
        nodeid=told.nodeid,
        verdict=result.verdict,
        launches=tuple(launches),
        tokens_per_step=sum(rank.tokens_per_step for rank in records[0].ranks) if has_tokens else 0,
        ranks=max(1, len(records[0].ranks)),
        peak_reserved_bytes=result.figure(MEMORY).value,
        versions=versions | choices(records[0]),
        revision=revision,
        project=document.record.project,
        counts={name: count for name, count in counted.items() if count is not None},
        unfinished=document.record.unfinished,
        calibrations={
            one_line(rank.device): codec.plain(rank.calibration)
            for record in records
            for rank in record.ranks
            if rank.calibration and not rank.calibration.trouble
        },
    )


def _measured(launches: Sequence[Launch]) -> Iterator[PastLaunch]:
    for launch in launches:
        with suppress(ArithmeticError, ValueError):  # a time that is none
            seconds, error = launch.median_step_seconds, launch.median_error
            if launch.started_at and 0 < seconds < math.inf:
                places = tuple(Place(one_line(one.host), one_line(one.device), one.boot) for one in launch.ranks)
                error = error if math.isfinite(error) else 0.0
                yield PastLaunch(one_line(launch.started_at), seconds, error, launch.health.sm_clock_mhz, places)


def observed_result(text: str, source: str) -> PastResult:
    """The row of a real run that was watched; where it ran is named as runs name the kind of their machine."""
    try:
        values = json.loads(text)
        result = codec.read(PastResult, values[OBSERVED], newer=True)
        name, num_bytes, cores = (values["device"][each] for each in ("name", "memory_bytes", "cores"))
        gpus = (Gpu(index=0, uuid="", name=name, memory_bytes=num_bytes),) if num_bytes else ()
        machine = Machine(gpus=gpus, cpu_name=name, cores=cores)
        return replace(result, machine=machine.gpu_kind if gpus else machine.cpu_kind)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise HistoryError(f"{source}: no row of a run that was watched ({error}); delete it") from error
