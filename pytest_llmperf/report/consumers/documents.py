"""A run as a page of Markdown: what is wrong, then its cases in a table, the worst first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree as ET

from pytest_llmperf.records.metrics import RATE, formatted, label
from pytest_llmperf.records.results_document import Figure
from pytest_llmperf.report.consumers.exported_run import ExportedCase, ExportedRun
from pytest_llmperf.report.summary_table import merged_reasons, no_gate_of_speed
from pytest_llmperf.report.table import Column, escaped, figure_columns, markdown
from pytest_llmperf.report.text import UNICODE, one_line, shorten_list
from pytest_llmperf.support import formats

_LONGEST = 500
_MOST_TROUBLES, _MOST_SKIPPED = 20, 10
# For the line that says what was left out.
_NOTE_BYTES = 200
_PADDING = re.compile(r" {2,}")


def markdown_page(run: ExportedRun) -> list[str]:
    """A heading, what fails the run and is no case's, the table, and what was skipped."""
    lines = [f"## llmperf: {run.headline}", ""]
    troubles = _first_n(run.troubles, _MOST_TROUBLES)
    lines += [*troubles, ""] if troubles else []
    skipped = _first_n([f"skipped: {line}" for line in merged_reasons(run.skipped)], _MOST_SKIPPED)
    lines += [*skipped, ""] if skipped else []
    gate = no_gate_of_speed(case.result.figure(RATE).times_slower for case in run.cases)
    lines += [f"- {escaped(gate)}", ""] if gate else []
    return lines + case_table(run.cases)


def _first_n(lines: Sequence[str], most: int) -> list[str]:
    shown = [f"- {escaped(_cut(line))}" for line in lines[:most]]
    return shown + ([f"- … and {len(lines) - most} more"] if len(lines) > most else [])


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
    return shorten_list(text, _LONGEST, UNICODE.ellipsis)


def within(page: Sequence[str], num_bytes: int) -> str:
    """``page`` in so many bytes at most: without padding, cut at a whole line, and with one that says so.

    Empty where there is no room for even that.
    """
    lines = [_PADDING.sub(" ", line) for line in page]
    sizes = [len(line.encode()) + 1 for line in lines]
    if sum(sizes) <= num_bytes:
        return "\n".join([*lines, ""])
    room, kept = num_bytes - _NOTE_BYTES, 0
    while kept < len(sizes) and room >= sizes[kept]:
        room -= sizes[kept]
        kept += 1
    if not kept:
        return ""
    left = len(lines) - kept
    note = f"{left} more lines had no room here, the worst come first: --perf-markdown and --perf-json have all."
    return "\n".join([*lines[:kept], "", note, ""])


# JUnit's XML of a run that is over, as pytest writes it while one lasts; and the properties of a case in both.


#: Before the name of each property of ours.
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
            value = getattr(figure, name)
            if value is not None:
                yield f"{PREFIX}{metric}.{name}", repr(float(value))


# What an element of a testcase is counted as.
_ENDS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def junit(run: ExportedRun) -> Iterator[str]:
    """The lines of an XML document: a suite for each machine, and one for what fails the run and is no case's."""
    suites = []
    for machine in run.machines:
        cases = [case for case in run.cases if case.machine == machine]
        tests = Counter(case.result.nodeid for case in cases)
        elements = [_case(case, alone=tests[case.result.nodeid] == 1) for case in cases]
        suites.append(_suite(f"llmperf {machine}".strip(), elements))
    if run.failed:  # as pytest has them: what a fixture raised is an error
        elements = []
        for test in run.failed:
            elements.append(_testcase(*_names(test.nodeid)))
            kind = "error" if test.outcome == "error" else "failure"
            ET.SubElement(elements[-1], kind, message=test.how).text = test.how
        suites.append(_suite("llmperf, tests without a case", elements))
    tests_told = set(map(str, run.failed))
    others = [line for line in run.troubles if line not in tests_told]
    if others or run.skipped:
        elements = []
        for number, line in enumerate(others, 1):
            elements.append(_testcase("", f"the run: trouble {number}"))
            ET.SubElement(elements[-1], "error", message=line).text = line
        for name, reason in run.skipped:
            elements.append(_testcase("", name))
            ET.SubElement(elements[-1], "skipped", message=reason)
        suites.append(_suite("llmperf, the run", elements))
    counts = {key: sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", *_ENDS)}
    root = _counted("testsuites", "llmperf", counts, suites)
    ET.indent(root, " ")
    yield '<?xml version="1.0" encoding="utf-8"?>'
    yield from ET.tostring(root, encoding="unicode").split("\n")


def _suite(name: str, testcases: Sequence[ET.Element]) -> ET.Element:
    ends = {key: sum(testcase.find(kind) is not None for testcase in testcases) for key, kind in _ENDS.items()}
    return _counted("testsuite", name, {"tests": len(testcases), **ends}, testcases)


def _counted(tag: str, name: str, counts: Mapping[str, int], inside: Sequence[ET.Element]) -> ET.Element:
    seconds = sum(float(each.get("time", "0")) for each in inside)
    numbers = {key: str(number) for key, number in counts.items()}
    element = ET.Element(tag, {"name": name, **numbers, "time": f"{seconds:.3f}"})
    element.extend(inside)
    return element


def _testcase(classname: str, name: str, seconds: float = 0.0) -> ET.Element:
    return ET.Element("testcase", classname=classname or "llmperf", name=name, time=f"{seconds:.3f}")


def _case(case: ExportedCase, *, alone: bool) -> ET.Element:
    classname, name = _names(case.result.nodeid)
    element = _testcase(classname, name if alone and name else f"{name} ({case.name})".strip(), case.seconds)
    inside = ET.SubElement(element, "properties")
    for key, value in properties(case):
        ET.SubElement(inside, "property", name=one_line(key), value=one_line(value))
    if case.is_failing:
        message = f"{case.outcome}: {case.explanation}"
        failure = ET.SubElement(element, "failure", type=case.verdict, message=message)
        failure.text = "\n".join(_failure_text(case))
    return element


def _names(nodeid: str) -> tuple[str, str]:
    """A test's class and name as pytest has them there: ``perf_tests.test_ladder`` and ``test_rung[…]``."""
    path, _, name = nodeid.partition("::")
    head, bracket, parameters = name.partition("[")
    *classes, function = head.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *classes]), function + bracket + parameters


def _failure_text(case: ExportedCase) -> Iterator[str]:
    yield f"{case.name}: {case.outcome}: {case.result.reason}"
    if case.test_failed:
        yield case.test_failed
    for metric, figure in case.result.metrics.items():
        if figure.limit is not None or figure.change is not None:
            yield f"  {_sentence(metric, figure)}"
    for title, lines in (
        ("changed since the baseline", case.result.changed),
        ("different from the baseline's environment", case.result.differences),
    ):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)


def _sentence(metric: str, figure: Figure) -> str:
    """``tokens/s/GPU 64,000, baseline 71,857 (-10.9 %), limit 70,420``."""
    values = (figure.value, figure.baseline, figure.limit)
    value, baseline, limit = (formatted(metric, each, figure.unit) for each in values)
    told = [f"{label(metric)} {value}"]
    told += [f"baseline {baseline} ({formats.percent(figure.change)})"] if figure.baseline is not None else []
    told += [f"limit {limit}"] if figure.limit is not None else []
    return ", ".join(told)
