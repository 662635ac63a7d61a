"""ExportedRun: what other tools are told of ``--perf-json`` documents, each case once; what is no number is absent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from pytest_llmperf.records.result import FAILING, VERDICTS
from pytest_llmperf.records.results_document import EndedTest, Figure, Result, ResultsDocument
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import codec

_MOST_CHANGES = 3
_DIGEST_SHOWN = 8
_TESTS_FAILED = 1  # pytest's own exit code, of which the cases tell
_NUMBERS = ("value", "baseline", "limit", "change", "detectable", "times_slower")


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    slurm_nodes: str = ""


@dataclass(frozen=True, kw_only=True)
class _Record:
    """As much of a launch as every version has had."""

    started_at: str = ""
    wall_seconds: float = 0.0
    evidence: _Evidence = _Evidence()


@dataclass(frozen=True, kw_only=True)
class ExportedCase:
    """One case."""

    result: Result
    """Its texts are one line each, its figures finite."""
    name: str
    """Its id; with its digest where another case of the machine has the same id."""
    machine: str = ""
    """Machine kind; empty where the document does not say."""
    expected: str = ""
    """Why its test was expected to fail, and did; it fails nothing then, as pytest has it."""
    test_failed: str = ""
    """How its test failed by itself, whatever the verdict."""

    @classmethod
    def read(cls, result: Result, machine: str = "", tests: Mapping[str, EndedTest] | None = None) -> ExportedCase:
        """Read one of a document's results; ``tests``: how those that did not just pass ended (``tests_of``)."""
        test = (tests or {}).get(result.nodeid)
        return cls(
            result=_as_told(result),
            name=one_line(result.id) or "unnamed",
            machine=one_line(machine),
            expected=one_line(test.reason or "xfail") if test is not None and test.outcome == "xfailed" else "",
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
        """The same, or its test failed beside it."""
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
        more = f" and {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
        told = f"changed since the baseline: {', '.join(changed[:_MOST_CHANGES])}{more}" if changed else ""
        reason = "recorded" if self.result.updated else self.result.reason
        beside = "" if self.has_failing_verdict else self.test_failed
        expected = f"expected to fail: {self.expected}" if self.outcome.endswith(", expected") else ""
        # Where it ran and what was otherwise there, where it is no pass; the last word: what is too long is cut before.
        nodes = sorted({one_line(record.evidence.slurm_nodes) for record in self._records} - {""})
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
    def seconds(self) -> float:
        """The sum over all its launches."""
        return sum(record.wall_seconds for record in self._records)

    @property
    def launched_at(self) -> float | None:
        """When its last launch began, seconds since 1970."""
        return max(filter(None, (_time(record.started_at) for record in self._records)), default=None)


class FailedTest(NamedTuple):
    """A test that failed by itself, and of which no case says so."""

    nodeid: str
    outcome: str
    """``failed``, or ``error`` of a fixture."""
    how: str

    def __str__(self) -> str:
        return f"{self.nodeid}: {self.how.removeprefix('test ')}"


@dataclass(frozen=True, kw_only=True)
class ExportedRun:
    """The runs of one or several documents."""

    cases: tuple[ExportedCase, ...] = ()
    """The worst first."""
    troubles: tuple[str, ...] = ()
    """What fails the run and is no case's, a line each; tests that failed by themselves are among them."""
    failed: tuple[FailedTest, ...] = ()
    """Those tests."""
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
        found: dict[tuple[str, str, str], ExportedCase] = {}
        for document in documents:
            tests = tests_of(document)
            # Reversed: of those of one name the worst is written last, and of its equals the first.
            cases = [ExportedCase.read(result, document.kind, tests) for result in reversed(document.results)]
            for case in sorted(cases, key=_badness, reverse=True):
                found[case.machine, case.name, case.result.digest] = case
        ids = Counter((case.machine, case.name) for case in found.values())
        cases = [
            replace(case, name=f"{case.name} {case.result.digest[:_DIGEST_SHOWN]}")
            if ids[case.machine, case.name] > 1
            else case
            for case in found.values()
        ]
        skipped = {one_line(case.id): one_line(case.reason) for document in documents for case in document.skipped}
        times = [*(_time(document.ended_at) for document in documents), *(case.launched_at for case in cases)]
        return cls(
            cases=tuple(sorted(cases, key=_badness)),
            troubles=tuple(dict.fromkeys(line for document in documents for line in _troubles(document))),
            failed=tuple(dict.fromkeys(test for document in documents for test in _without_case(document))),
            skipped=tuple(skipped.items()),
            num_planned=sum(len(document.planned) for document in documents),
            unfinished=tuple(dict.fromkeys(one_line(each.kind) for each in documents if each.unfinished)),
            machines=tuple(dict.fromkeys(one_line(each.kind) for each in documents)),
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
    where = "" if test.phase == "call" else f" at {test.phase}"
    return one_line(f"test {test.outcome}{where}: {test.reason}").rstrip(": ")


def failed_tests(document: ResultsDocument, told: Container[str] = ()) -> Iterator[FailedTest]:
    """Each test that failed by itself: no verdict of its cases says so, nor do those that are ``told``."""
    tests = tests_of(document)
    cases = [(result.nodeid, ExportedCase.read(result, tests=tests)) for result in document.results]
    said = {nodeid for nodeid, case in cases if case.has_failing_verdict}
    for nodeid, test in tests.items():
        how = _how_it_failed(test)
        if how and nodeid not in told and nodeid not in said:
            yield FailedTest(one_line(nodeid), test.outcome, how)


def _without_case(document: ResultsDocument) -> Iterator[FailedTest]:
    return failed_tests(document, told={result.nodeid for result in document.results})


def _troubles(document: ResultsDocument) -> Iterator[str]:
    if document.unfinished:
        yield f"the run was ended before its end: {one_line(document.unfinished)}"
    for name, common in document.common.items():
        if common.verdict in FAILING:
            yield one_line(common.told or name)
    if document.unjudged:
        yield one_line(document.unjudged)
    yield from map(str, _without_case(document))
    yield from filter(None, map(one_line, document.troubles))
    code = document.exit_code
    if code not in (None, 0, _TESTS_FAILED) and not document.unfinished:
        yield f"pytest ended with exit code {code}"


def _as_told(result: Result) -> Result:
    figures = {}
    for metric, figure in result.metrics.items():
        numbers: dict[str, Any] = {name: _finite(getattr(figure, name)) for name in _NUMBERS}
        figures[one_line(metric)] = replace(figure, unit=one_line(figure.unit), **numbers)
    return replace(
        result,
        digest=one_line(result.digest),
        nodeid=one_line(result.nodeid),
        reason=one_line(result.reason),
        changed=tuple(map(one_line, result.changed)),
        differences=tuple(map(one_line, result.differences)),
        metrics=figures,
    )


def _finite(value: float | None) -> float | None:
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:
        return None


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
