"""ExportedRun: what other tools are told of ``--perf-json`` documents, each case once; what is no number is absent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from pytest_llmperf.records.result import FAILING, VERDICTS, CaseResult, Check
from pytest_llmperf.records.results_document import EndedTest, Figure, Result, ResultsDocument
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import codec

_MOST_CHANGES = 3
_DIGEST_SHOWN = 8
_TESTS_FAILED = 1  # pytest's own exit code, of which the cases tell


@dataclass(frozen=True, kw_only=True)
class ExportedFigure:
    """One metric of one case, in the unit of the document (bytes, seconds)."""

    metric: str
    value: float | None
    unit: str = ""
    baseline: float | None = None
    limit: float | None = None
    change: float | None = None
    """A fraction of the baseline."""
    detectable: float | None = None
    times_slower: float | None = None
    """That still passes, where it is a multiple."""


@dataclass(frozen=True, kw_only=True)
class ExportedCase:
    """One case; its texts are one line each."""

    name: str
    """Its id; with its digest where another case of the machine has the same id."""
    digest: str = ""
    machine: str = ""
    """Machine kind; empty where the document does not say."""
    nodeid: str = ""
    verdict: str
    reason: str = ""
    figures: tuple[ExportedFigure, ...] = ()
    changed: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    circumstances: tuple[str, ...] = ()
    """Where it ran and what was otherwise there, where it is no ``pass``."""
    is_recorded: bool = False
    seconds: float = 0.0
    """Of all its launches."""
    launched_at: float | None = None
    """Of its last launch, seconds since 1970."""
    expected: str = ""
    """Why its test was expected to fail, and did; it fails nothing then, as pytest has it."""
    test_failed: str = ""
    """How its test failed by itself, whatever the verdict."""

    @property
    def has_failing_verdict(self) -> bool:
        """Whether its verdict fails a run that is not strict; what was recorded, or expected to fail, does not."""
        return self.verdict in FAILING and not self.is_recorded and not self.expected

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
        more = f" and {len(self.changed) - _MOST_CHANGES} more" if len(self.changed) > _MOST_CHANGES else ""
        told = f"changed since the baseline: {', '.join(self.changed[:_MOST_CHANGES])}{more}" if self.changed else ""
        reason = "recorded" if self.is_recorded else self.reason
        beside = "" if self.has_failing_verdict else self.test_failed
        expected = f"expected to fail: {self.expected}" if self.outcome.endswith(", expected") else ""
        return "; ".join(filter(None, [beside, expected, reason, told, *self.circumstances]))

    @property
    def trusted(self) -> list[tuple[ExportedFigure, float]]:
        """Figures and their values, for who keeps a history: those of an ``invalid`` case are worth nothing."""
        if self.verdict == "invalid":
            return []
        return [(figure, figure.value) for figure in self.figures if figure.value is not None]

    def figure(self, metric: str) -> ExportedFigure:
        """That of this metric; without a value where the case has none."""
        absent = ExportedFigure(metric=metric, value=None)
        return next((figure for figure in self.figures if figure.metric == metric), absent)

    @classmethod
    def read(cls, result: Result, machine: str = "", tests: Mapping[str, EndedTest] | None = None) -> ExportedCase:
        """Of one of a document's results; ``tests``: how those that did not just pass ended (``tests_of``)."""
        test = (tests or {}).get(result.nodeid)
        records = [record for record in (codec.read_lenient(_Record, each) for each in result.launches) if record]
        return cls(
            name=one_line(result.id) or "unnamed",
            digest=one_line(result.digest),
            machine=one_line(machine),
            nodeid=one_line(result.nodeid),
            verdict=result.verdict,
            reason=one_line(result.reason),
            figures=tuple(_figure(name, figure) for name, figure in result.metrics.items()),
            changed=tuple(map(one_line, result.changed)),
            differences=tuple(map(one_line, result.differences)),
            circumstances=tuple(_circumstances(result, records)),
            is_recorded=bool(result.updated),
            seconds=sum(record.wall_seconds for record in records),
            launched_at=max(filter(None, (_time(record.started_at) for record in records)), default=None),
            expected=one_line(test.reason or "xfail") if test is not None and test.outcome == "xfailed" else "",
            test_failed=_how_it_failed(test),
        )

    @classmethod
    def of(cls, result: CaseResult) -> ExportedCase:
        """Of a result that is in no document yet."""
        return cls(
            name=one_line(result.id) or "unnamed",
            digest=result.digest,
            machine=one_line(result.machine),
            nodeid=one_line(result.nodeid),
            verdict=result.verdict,
            reason=one_line(result.reason),
            figures=tuple(_figure(check.metric, check) for check in result.checks),
            changed=tuple(map(one_line, result.changed)),
            differences=tuple(map(one_line, result.differences)),
            is_recorded=bool(result.updated),
        )


@dataclass(frozen=True, kw_only=True)
class ExportedRun:
    """Of one or several documents."""

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
        told = counted(self.cases)
        others = [
            f"{number} {word}" for number, word in ((len(self.skipped), "skipped"), (self.num_planned, "planned"))
        ]
        more = [other for other in others if not other.startswith("0 ")]
        return f"{'red' if self.is_red else 'green'}: {', '.join([told, *more])}"

    @property
    def is_red(self) -> bool:
        """Whether somebody has to look; pytest's own exit code counts too."""
        return self.has_failed or bool(self.troubles) or any(case.is_failing for case in self.cases)

    @classmethod
    def read(cls, documents: Sequence[ResultsDocument]) -> ExportedRun:
        """Each case of each machine once: as the last of ``documents`` has it, and there by its worst verdict."""
        found: dict[tuple[str, str, str], ExportedCase] = {}
        for document in documents:
            for case in _unique(document):
                found[case.machine, case.name, case.digest] = case
        ids = Counter((case.machine, case.name) for case in found.values())
        cases = [
            replace(case, name=f"{case.name} {case.digest[:_DIGEST_SHOWN]}")
            if ids[case.machine, case.name] > 1
            else case
            for case in found.values()
        ]
        skipped = {one_line(case.id): one_line(case.reason) for document in documents for case in document.skipped}
        return cls(
            cases=tuple(sorted(cases, key=_badness)),
            troubles=tuple(dict.fromkeys(line for document in documents for line in _troubles(document))),
            failed=tuple(dict.fromkeys(test for document in documents for test in _without_case(document))),
            skipped=tuple(skipped.items()),
            num_planned=sum(len(document.planned) for document in documents),
            unfinished=tuple(dict.fromkeys(one_line(each.kind) for each in documents if each.unfinished)),
            machines=tuple(dict.fromkeys(one_line(each.kind) for each in documents)),
            ended_at=max(
                filter(None, [*(_time(each.ended_at) for each in documents), *(case.launched_at for case in cases)]),
                default=None,
            ),
            has_failed=any(document.exit_code for document in documents),
        )


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


def _unique(document: ResultsDocument) -> Iterable[ExportedCase]:
    tests = tests_of(document)
    unique: dict[tuple[str, str], ExportedCase] = {}
    for case in sorted((ExportedCase.read(result, document.kind, tests) for result in document.results), key=_badness):
        unique.setdefault((case.name, case.digest), case)
    return unique.values()


def _badness(case: ExportedCase) -> tuple[int, bool, str, str, str]:
    return VERDICTS.index(case.verdict), not case.is_failing, case.machine, case.name, case.digest


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


class FailedTest(NamedTuple):
    """A test that failed by itself, and of which no case says so."""

    nodeid: str
    outcome: str
    """``failed``, or ``error`` of a fixture."""
    how: str

    def __str__(self) -> str:
        return f"{self.nodeid}: {self.how.removeprefix('test ')}"


def failed_tests(document: ResultsDocument, told: Container[str] = ()) -> Iterator[FailedTest]:
    """Each test that failed by itself: no verdict of its cases says so, nor do those that are ``told``."""
    tests = tests_of(document)
    cases = (ExportedCase.read(result, tests=tests) for result in document.results)
    said = {case.nodeid for case in cases if case.has_failing_verdict}
    for nodeid, test in tests.items():
        how = _how_it_failed(test)
        if how and nodeid not in told and one_line(nodeid) not in said:
            yield FailedTest(one_line(nodeid), test.outcome, how)


def _without_case(document: ResultsDocument) -> Iterator[FailedTest]:
    return failed_tests(document, told={result.nodeid for result in document.results})


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    slurm_nodes: str = ""


@dataclass(frozen=True, kw_only=True)
class _Record:
    """As much of a launch as every version has had."""

    started_at: str = ""
    wall_seconds: float = 0.0
    evidence: _Evidence = _Evidence()


def _circumstances(result: Result, records: Sequence[_Record]) -> Iterator[str]:
    if result.verdict == "pass":
        return
    yield from map(one_line, result.differences[:_MOST_CHANGES])
    nodes = {one_line(record.evidence.slurm_nodes) for record in records} - {""}
    if nodes:  # the last word: what is too long is cut in its middle
        yield f"on {', '.join(sorted(nodes))}"


def _figure(metric: str, figure: Figure | Check) -> ExportedFigure:
    return ExportedFigure(
        metric=one_line(metric),
        unit=one_line(figure.unit),
        value=_finite(figure.value),
        baseline=_finite(figure.baseline),
        limit=_finite(figure.limit),
        change=_finite(figure.change),
        detectable=_finite(figure.detectable),
        times_slower=_finite(figure.times_slower),
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
