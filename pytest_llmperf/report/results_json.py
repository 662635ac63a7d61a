"""``--perf-json``: results as they are written, as they are read again, whoever wrote them, and for other tools."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import FAILING, VERDICTS, CaseResult, Check, Spent
from pytest_llmperf.records.results_document import (
    SCHEMA,
    TEST,
    EndedTest,
    Figure,
    ResultsDocument,
    SpentTime,
    document_of,
    launch_of,
)
from pytest_llmperf.records.results_document import Result as StoredResult
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.formats import first_n
from pytest_llmperf.support.redaction import redacted, without_secrets


def document(machine: Mapping[str, Any], results: Sequence[CaseResult], spent: Spent | None = None) -> dict[str, Any]:
    """Results as ``--perf-json`` has them: plain data that strict JSON can hold; NaN and infinities are null."""
    values = {"schema": SCHEMA, "machine": machine, "results": [codec.plain(result_of(result)) for result in results]}
    if spent is not None and spent.launches:
        phases = {name: round(seconds, 3) for name, seconds in spent.phases.items()}
        values["spent"] = codec.plain(
            SpentTime(launches=spent.launches, seconds=round(spent.seconds, 3), phases=phases)
        )
    plain: dict[str, Any] = _mapped(values, _for_json)
    return plain


def result_of(result: CaseResult) -> StoredResult:
    metrics = {}
    for check in result.checks:
        metrics[check.metric] = Figure(
            **_shared(Figure, check),
            interval=None if check.low is None or check.high is None else (check.low, check.high),
            verdict=check.verdict if check.verdict and check.verdict != result.verdict else "",
            times_slower=check.times_slower,
        )
    return StoredResult(**_shared(StoredResult, result), verdict=result.verdict, metrics=metrics)


def _shared(kind: type[Figure | StoredResult], record: Check | CaseResult) -> dict[str, Any]:
    """The fields of ``record`` that a ``kind`` has too; a figure's verdict is another."""
    own = vars(record)
    return {name: own[name] for name in (each.name for each in fields(kind)) if name in own and name != "verdict"}


def _mapped(value: Any, leaf: Callable[[Any], Any], raw: Container[str] = (), name: str = "") -> Any:
    """``value`` with its keys and all that is no list and no object as ``leaf`` makes it; what is ``raw`` stays."""
    if isinstance(value, Mapping):
        return {str(leaf(key)): _mapped(item, leaf, raw, key) for key, item in value.items()}
    if name in raw:
        return value
    return [_mapped(item, leaf, raw) for item in value] if isinstance(value, (list, tuple)) else leaf(value)


def _for_json(value: Any) -> Any:
    """What JSON can hold: evidence is whatever a worker found, and a reader must not trip over NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def _leaving(value: Any, name: str = "") -> Any:
    """``value`` as it may leave; JSON itself escapes what a terminal would obey."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return (
            redacted(value)
            if name == "variables"
            else {_leaving(key): _leaving(item, key) for key, item in value.items()}
        )
    return [_leaving(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document``, without secrets, so that ``path`` always holds a whole one, or an OSError and the old one."""
    write_text(path, json.dumps(_leaving(document), indent=1, allow_nan=False) + "\n")


# Read leniently: what is absent, of the wrong kind or no number is left out, and texts are one line each.

# No figure of ours is near it, and products and ratios of such are numbers.
_MOST = 2.0**63

_Stored = TypeVar("_Stored", StoredResult, ResultsDocument)
_RAW = ("launches", "launches_before")


def _for_a_page(value: Any) -> Any:
    """Texts of one line, and numbers that can be computed with: next to nothing is nothing."""
    if isinstance(value, str):
        return " ".join(one_line(value).split())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    number = value if -_MOST < value < _MOST else None
    return number if number is None or abs(number) > 1 / _MOST else 0


def _for_tools(value: Any) -> Any:
    """Texts of one line, and numbers that are some."""
    if isinstance(value, str):
        return one_line(value)
    try:
        return value if not isinstance(value, (int, float)) or math.isfinite(value) else None
    except OverflowError:
        return None


def shown(record: _Stored) -> _Stored:
    """``record`` as other tools get it."""
    return codec.read_lenient(type(record), _mapped(codec.plain(record), _for_tools, _RAW)) or record


@dataclass(frozen=True)
class Result:
    """A case."""

    record: StoredResult
    machine: str

    @property
    def id(self) -> str:
        return self.record.id or self.record.nodeid or "a case without a name"

    @property
    def verdict(self) -> str:
        return self.record.verdict or "unknown"

    def figure(self, metric: str) -> Figure:
        return self.record.figure(metric)

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Those of its records that this version can read."""
        return _launches(self.record.launches)

    @cached_property
    def launches_before(self) -> tuple[Launch, ...]:
        """Those of the other side, where two took turns."""
        return _launches(self.record.launches_before)

    @property
    def num_unread(self) -> int:
        """How many of its launches no longer are, or not yet, what this version reads."""
        return len(self.record.launches) - len(self.launches)


def _launches(records: Sequence[Any]) -> tuple[Launch, ...]:
    found = []
    for record in records:
        try:
            launch = launch_of(record)
            _ = launch.median_step_seconds
            if not all(map(math.isfinite, (*launch.step_seconds, *launch.phases.values()))):
                raise ValueError("a time that is none")
        except (ArithmeticError, ValueError):
            continue
        found.append(launch)
    return tuple(found)


class RunDocument:
    """One run."""

    def __init__(self, values: Mapping[str, Any], source: str = "") -> None:
        """``source``: its file's name, where several are told of."""
        self.source = source
        self.record = document_of(_mapped(values, _for_a_page, (*_RAW, "updated")))  # which has several lines
        self.schema = values.get("schema")

    @property
    def machine(self) -> str:
        """Its kind; of a night of several files that of all of them, where they have one."""
        return self.record.machine.kind or self.record.kind or "unknown machine"

    @property
    def name(self) -> str:
        return self.source or self.machine

    @property
    def gpus(self) -> tuple[str, ...]:
        found = max((machine.gpus for machine in (self.record.machine, *self.record.machines.values())), key=len)
        return tuple(gpu.name or "GPU" for gpu in found)

    @cached_property
    def results(self) -> tuple[Result, ...]:
        return tuple(Result(each, self.machine) for each in self.record.results)

    def rerun(self, nodeid: str) -> list[str]:
        """The words that run a test again; none where it does not say."""
        words = self.record.rerun
        return [word.replace(TEST, nodeid) for word in words] if any(TEST in word for word in words) else []

    @property
    def spent(self) -> Mapping[str, float]:
        """Seconds by phase."""
        phases = self.record.spent.phases if self.record.spent else {}
        return {name: seconds for name, seconds in phases.items() if seconds}

    @property
    def num_launches(self) -> int:
        return (
            self.record.spent.launches if self.record.spent else sum(len(one.record.launches) for one in self.results)
        )


# Told to other tools: each case once, with how its test ended.

_MOST_CHANGES, _DIGEST_SHOWN = 3, 8
_NO_TESTS: Mapping[str, EndedTest] = {}
_TESTS_FAILED = 1  # pytest's own exit code, of which the cases tell


@dataclass(frozen=True, kw_only=True)
class _Record:
    """As much of a launch as every version has had."""

    started_at: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExportedCase:
    """One case."""

    result: StoredResult
    name: str
    """Its id; with its digest where another case of the machine has the same id."""
    machine: str = ""
    """Machine kind; empty where the document does not say."""
    expected: str = ""
    """Why its test was expected to fail, and did; it fails nothing then, as pytest has it."""
    test_failed: str = ""
    """How its test failed by itself, whatever the verdict."""

    @classmethod
    def of(cls, result: StoredResult, machine: str = "", tests: Mapping[str, EndedTest] = _NO_TESTS) -> ExportedCase:
        """One of a document's results; ``tests``: how those that did not just pass ended (``tests_of``)."""
        test = tests.get(result.nodeid)
        return cls(
            result=result,
            name=result.id or "unnamed",
            machine=machine,
            expected=(test.reason or "xfail") if test is not None and test.outcome == "xfailed" else "",
            test_failed=_how_it_failed(test),
        )

    @property
    def verdict(self) -> str:
        return self.result.verdict

    @property
    def has_failing_verdict(self) -> bool:
        """Whether its verdict fails a run that is not strict; what was recorded, or expected to fail, does not."""
        return self.verdict in FAILING and not self.result.updated and not self.expected

    @property
    def is_failing(self) -> bool:
        return self.has_failing_verdict or bool(self.test_failed)

    @property
    def outcome(self) -> str:
        """Its verdict, and what is otherwise with its test."""
        if self.test_failed and not self.has_failing_verdict:
            return f"{self.verdict}, test failed"
        return f"{self.verdict}, expected" if self.expected and self.verdict in FAILING else self.verdict

    @property
    def explanation(self) -> str:
        """The reason, and what is exact and not as in the baseline: that is told of a ``pass`` too."""
        changed = self.result.changed
        told = f"changed since the baseline: {first_n(changed, _MOST_CHANGES)}" if changed else ""
        reason = "recorded" if self.result.updated else self.result.reason
        beside = "" if self.has_failing_verdict else self.test_failed
        expected = f"expected to fail: {self.expected}" if self.outcome.endswith(", expected") else ""
        # Where it ran and what was otherwise there, where it is no pass; the last word: what is too long is cut before.
        nodes = sorted({one_line(str(each.evidence.get("slurm_nodes") or "")) for each in self._records} - {""})
        circumstances = [*self.result.differences[:_MOST_CHANGES], *([f"on {', '.join(nodes)}"] if nodes else [])]
        shown = circumstances if self.verdict != "pass" else []
        return "; ".join(filter(None, [beside, expected, reason, told, *shown]))

    @property
    def trusted(self) -> list[tuple[str, Figure, float]]:
        """Metrics, figures and values, for who keeps a history: those of an ``invalid`` case are worth nothing."""
        figures = self.result.metrics.items() if self.verdict != "invalid" else ()
        return [(metric, figure, figure.value) for metric, figure in figures if figure.value is not None]

    @cached_property
    def _records(self) -> Sequence[_Record]:
        found = (codec.read_lenient(_Record, each) for each in self.result.launches)
        return [record for record in found if record is not None]

    @property
    def launched_at(self) -> float | None:
        """When its last launch began, seconds since 1970."""
        return max(filter(None, (_time(record.started_at) for record in self._records)), default=None)


@dataclass(frozen=True, kw_only=True)
class ExportedRun:
    """The runs of one or several documents."""

    cases: tuple[ExportedCase, ...] = ()
    troubles: tuple[str, ...] = ()
    """What fails the run and is no case's, a line each; tests that failed by themselves are among them."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Cases that could not run, and why."""
    num_planned: int = 0
    unfinished: tuple[str, ...] = ()
    """Machine kinds of the documents whose run was ended before its end."""
    machines: tuple[str, ...] = ()
    """Machine kinds of all documents, in their order."""
    ended_at: float | None = None
    """When the last of them ended, seconds since 1970; of older documents when their last launch began."""
    has_failed: bool = False
    """Whether pytest said so, of a strict run perhaps for less than its verdicts tell."""

    @property
    def headline(self) -> str:
        """One line: how it went."""
        others = [f"{len(self.skipped)} skipped"] if self.skipped else []
        others += [f"{self.num_planned} planned"] if self.num_planned else []
        return f"{'red' if self.is_red else 'green'}: {', '.join([counted(self.cases), *others])}"

    @property
    def is_red(self) -> bool:
        """Whether somebody has to look; pytest's own exit code counts too."""
        return self.has_failed or bool(self.troubles) or any(case.is_failing for case in self.cases)

    @classmethod
    def read(cls, documents: Sequence[ResultsDocument]) -> ExportedRun:
        """Each case of each machine once: as the last of ``documents`` has it, and there by its worst verdict."""
        documents = list(map(shown, documents))
        found: dict[tuple[str, str, str], ExportedCase] = {}
        for document in documents:
            tests = tests_of(document)
            # Reversed: of those of one name the worst is written last, and of its equals the first.
            cases = [ExportedCase.of(result, document.kind, tests) for result in reversed(document.results)]
            for case in sorted(cases, key=_badness, reverse=True):
                found[case.machine, case.name, case.result.digest] = case
        ids = Counter((case.machine, case.name) for case in found.values())
        cases = [
            replace(case, name=f"{case.name} {case.result.digest[:_DIGEST_SHOWN]}")
            if ids[case.machine, case.name] > 1
            else case
            for case in found.values()
        ]
        skipped = {case.id: case.reason for document in documents for case in document.skipped}
        times = [*(_time(document.ended_at) for document in documents), *(case.launched_at for case in cases)]
        return cls(
            cases=tuple(sorted(cases, key=_badness)),
            troubles=tuple(dict.fromkeys(line for document in documents for line in _troubles(document))),
            skipped=tuple(skipped.items()),
            num_planned=sum(len(document.planned) for document in documents),
            unfinished=tuple(dict.fromkeys(each.kind for each in documents if each.unfinished)),
            machines=tuple(dict.fromkeys(each.kind for each in documents)),
            ended_at=max(filter(None, times), default=None),
            has_failed=any(document.exit_code for document in documents),
        )


def _badness(case: ExportedCase) -> tuple[int, bool, str, str, str]:
    return VERDICTS.index(case.verdict), not case.is_failing, case.machine, case.name, case.result.digest


def counted(cases: Iterable[ExportedCase]) -> str:
    """``1 regressed (1 expected), 3 pass (1 test failed)``, the worst first."""
    found = list(cases)
    told = []
    for verdict in VERDICTS:
        own = [case for case in found if case.verdict == verdict]
        beside = Counter(case.outcome.partition(", ")[2] for case in own)
        more = ", ".join(f"{number} {word}" for word, number in beside.items() if word)
        told += [f"{len(own)} {verdict}" + (f" ({more})" if more else "")] if own else []
    return ", ".join(told) or "no case"


def tests_of(document: ResultsDocument) -> dict[str, EndedTest]:
    """By node id the tests that did not just pass, each by what is worst of its phases; of older documents none."""
    found: dict[str, EndedTest] = {}
    for test in document.tests:
        if test.outcome != "passed" and (test.nodeid not in found or test.has_failed):
            found[test.nodeid] = test
    return found


def _how_it_failed(test: EndedTest | None) -> str:
    if test is None or not test.has_failed:
        return ""
    where = "" if test.phase in ("", "call") else f" at {test.phase}"
    return one_line(f"test {test.outcome}{where}: {test.reason}").rstrip(": ")


def failed_tests(document: ResultsDocument, told: Container[str] = ()) -> Iterator[str]:
    """A line for each test that failed by itself: no verdict of its cases says so, nor do those that are ``told``."""
    tests = tests_of(document)
    cases = [(result.nodeid, ExportedCase.of(result, tests=tests)) for result in document.results]
    said = {nodeid for nodeid, case in cases if case.has_failing_verdict}
    for nodeid, test in tests.items():
        how = _how_it_failed(test)
        if how and nodeid not in told and nodeid not in said:
            yield one_line(f"{nodeid}: {how.removeprefix('test ')}")


def _troubles(document: ResultsDocument) -> Iterator[str]:
    if document.unfinished:
        yield f"the run was ended before its end: {document.unfinished}"
    for name, common in document.common.items():
        if common.verdict in FAILING:
            yield common.told or name
    yield from filter(
        None,
        [
            document.unjudged,
            *failed_tests(document, {result.nodeid for result in document.results}),
            *document.troubles,
        ],
    )
    code = document.exit_code
    if code not in (None, 0, _TESTS_FAILED) and not document.unfinished:
        yield f"pytest ended with exit code {code}"


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
