"""A run for others: each case once, with how its test ended; as a page of Markdown, and as properties in JUnit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.records.metrics import RATE
from pytest_llmperf.records.result import FAILING, VERDICTS
from pytest_llmperf.records.results_document import EndedTest, Result, ResultsDocument
from pytest_llmperf.report.results_json import shown
from pytest_llmperf.report.summary_table import merged_reasons, no_gate_of_speed
from pytest_llmperf.report.text import UNICODE, Column, escaped, figure_columns, markdown, one_line, shorten_middle
from pytest_llmperf.support import formats

_MOST_CHANGES, _DIGEST_SHOWN = 3, 8
_NO_TESTS: Mapping[str, EndedTest] = {}
_TESTS_FAILED = 1  # pytest's own exit code, of which the cases tell


@dataclass(frozen=True, kw_only=True)
class ExportedCase:
    result: Result
    name: str
    """Its id; with its digest where another case of the machine has the same id."""
    machine: str = ""
    """Machine kind; empty where the document does not say."""
    expected: str = ""
    """Why its test was expected to fail, and did; it fails nothing then, as pytest has it."""
    test_failed: str = ""
    """How its test failed by itself, whatever the verdict."""
    of_runs: str = ""
    """Which of several runs it is of."""

    @classmethod
    def of(cls, result: Result, machine: str = "", tests: Mapping[str, EndedTest] = _NO_TESTS) -> ExportedCase:
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
        told = f"changed since the baseline: {formats.first_n(changed, _MOST_CHANGES)}" if changed else ""
        reason = "recorded" if self.result.updated else self.result.reason
        beside = "" if self.has_failing_verdict else self.test_failed
        expected = f"expected to fail: {self.expected}" if self.outcome.endswith(", expected") else ""
        # Where it ran and what was otherwise there, where it is no pass; the last word: what is too long is cut before.
        seen = [each["evidence"] for each in self.result.launches if isinstance(each.get("evidence"), Mapping)]
        nodes = sorted({one_line(str(each.get("slurm_nodes") or "")) for each in seen} - {""})
        circumstances = [*self.result.differences[:_MOST_CHANGES], *([f"on {', '.join(nodes)}"] if nodes else [])]
        shown = circumstances if self.verdict != "pass" else []
        return "; ".join(filter(None, [beside, expected, reason, told, *shown, self.of_runs]))


@dataclass(frozen=True, kw_only=True)
class ExportedRun:
    cases: tuple[ExportedCase, ...] = ()
    troubles: tuple[str, ...] = ()
    """What fails the run and is no case's, a line each; tests that failed by themselves are among them."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Cases that could not run, and why."""
    num_planned: int = 0
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
    def of(cls, document: ResultsDocument) -> ExportedRun:
        """Each case of ``document`` once: by its worst verdict, and of those that are alike the first."""
        document = shown(document)
        tests, found = tests_of(document), dict[tuple[str, str], ExportedCase]()
        for case in sorted((ExportedCase.of(each, document.kind, tests) for each in document.results), key=_badness):
            found.setdefault((case.name, case.result.digest), case)
        ids = Counter(name for name, _ in found)
        cases = (
            replace(case, name=f"{name} {digest[:_DIGEST_SHOWN]}") if ids[name] > 1 else case
            for (name, digest), case in found.items()
        )
        return cls(
            cases=tuple(cases),
            troubles=tuple(dict.fromkeys(_troubles(document))),
            skipped=tuple({case.id: case.reason for case in document.skipped}.items()),
            num_planned=len(document.planned),
            has_failed=bool(document.exit_code),
        )


def _badness(case: ExportedCase) -> tuple[int, bool, str, str, str]:
    return VERDICTS.index(case.verdict), not case.is_failing, case.machine, case.name, case.result.digest


def counted(cases: Sequence[ExportedCase]) -> str:
    """``1 regressed (1 expected), 3 pass (1 test failed)``, the worst first."""
    told = []
    for verdict in VERDICTS:
        own = [case for case in cases if case.verdict == verdict]
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
    failed = failed_tests(document, {result.nodeid for result in document.results})
    yield from filter(None, [document.unjudged, *failed, *document.troubles])
    code = document.exit_code
    if code not in (None, 0, _TESTS_FAILED) and not document.unfinished:
        yield f"pytest ended with exit code {code}"


# As Markdown.

_LONGEST = 500
_MOST_TROUBLES, _MOST_SKIPPED = 20, 10


def markdown_page(run: ExportedRun) -> list[str]:
    """A heading, what fails the run and is no case's, the table, and what was skipped."""
    lines = [f"## llmperf: {run.headline}", ""]
    skipped = [f"skipped: {line}" for line in merged_reasons(run.skipped)]
    gate = no_gate_of_speed(case.result.figure(RATE) for case in run.cases)
    for those, most in ((run.troubles, _MOST_TROUBLES), (skipped, _MOST_SKIPPED)):
        more = [f"- … and {len(those) - most} more"] * (len(those) > most)
        lines += [*(f"- {escaped(_cut(line))}" for line in those[:most]), *more, *[""] * bool(those)]
    return [*lines, *([f"- {escaped(gate)}", ""] if gate else []), *case_table(run.cases)]


def case_table(cases: Sequence[ExportedCase]) -> list[str]:
    """A row for each case; columns that have nothing to say are left out."""
    if not cases:
        return []
    machines = [_cut(case.machine) for case in cases]
    found = [
        Column("case", [_cut(case.name) for case in cases], right=False),
        *([Column("machine", machines, right=False)] if len({*machines}) > 1 else []),
        Column("verdict", [_cut(case.outcome) for case in cases], right=False),
        *figure_columns("markdown", [case.result.figure for case in cases]),
        Column("why", [_cut(case.explanation) for case in cases], right=False),
    ]
    always, nothing = ("case", "verdict"), {"", formats.ABSENT}
    return markdown([column for column in found if column.heading in always or {*column.cells} - nothing])


def _cut(text: str) -> str:
    return shorten_middle(text, _LONGEST, UNICODE.ellipsis)


# What pytest writes into JUnit's XML of a case.

PREFIX = "llmperf."

_COMPARED = ("baseline", "limit", "change", "detectable")


def properties(case: ExportedCase) -> Iterator[tuple[str, str]]:
    """Names and values of a testcase's properties; those of a test's next case begin with ``llmperf.case`` again."""
    yield f"{PREFIX}case", case.name
    yield f"{PREFIX}machine", case.machine or "unknown"
    yield f"{PREFIX}verdict", case.verdict
    yield f"{PREFIX}reason", case.result.reason
    for metric, figure in case.result.metrics.items():
        if figure.value is not None:
            yield f"{PREFIX}{metric}", repr(float(figure.value))
        for name in _COMPARED:
            if (value := getattr(figure, name)) is not None:
                yield f"{PREFIX}{metric}.{name}", repr(float(value))
