"""A run as a page of Markdown: what is wrong, then its cases in a table, the worst first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from xml.etree import ElementTree as ET

from pytest_llmperf.records.metrics import METRICS, RATE, cell, columns, formatted, label
from pytest_llmperf.report.consumers.exported_run import ExportedCase, ExportedFigure, ExportedRun, FailedTest
from pytest_llmperf.report.summary_table import merged_reasons, no_gate_of_speed
from pytest_llmperf.report.table import Column, escaped, markdown
from pytest_llmperf.report.text import UNICODE, one_line, shorten_list
from pytest_llmperf.support import formats

_LONGEST = 500
_MOST_TROUBLES, _MOST_SKIPPED = 20, 10
# For the line that says what was left out.
_NOTE_BYTES = 200
_PADDING = re.compile(r" {2,}")

_ALWAYS = ("case", "verdict")


def markdown_page(run: ExportedRun) -> list[str]:
    """A heading, what fails the run and is no case's, the table, and what was skipped."""
    lines = [f"## llmperf: {run.headline}", ""]
    troubles = _some(run.troubles, _MOST_TROUBLES)
    lines += [*troubles, ""] if troubles else []
    skipped = _some([f"skipped: {line}" for line in merged_reasons(run.skipped)], _MOST_SKIPPED)
    lines += [*skipped, ""] if skipped else []
    rates = [case.figure(RATE) for case in run.cases]
    gate = no_gate_of_speed(rate.times_slower for rate in rates)
    lines += [f"- {escaped(gate)}", ""] if gate else []
    return lines + case_table(run.cases)


def _some(lines: Sequence[str], most: int) -> list[str]:
    shown = [f"- {escaped(_cut(line))}" for line in lines[:most]]
    return shown + ([f"- … and {len(lines) - most} more"] if len(lines) > most else [])


def case_table(cases: Sequence[ExportedCase]) -> list[str]:
    """A row for each case; columns that have nothing to say are left out."""

    def words(of: Callable[[ExportedCase], str]) -> list[str]:
        return [_cut(of(case)) for case in cases]

    if not cases:
        return []
    machines = {case.machine for case in cases}
    figures = []
    for name, column in columns("markdown").items():
        told = [case.figure(name) for case in cases]
        figures.append(Column(column.heading, [cell(name, each.value, each.unit) for each in told]))
        if METRICS[name].of:
            figures.append(Column("change", [formats.percent(each.change) for each in told]))
    found = [
        Column("case", words(lambda case: case.name), right=False),
        *([Column("machine", words(lambda case: case.machine), right=False)] if len(machines) > 1 else []),
        Column("verdict", words(lambda case: case.outcome), right=False),
        *figures,
        Column("why", words(lambda case: case.explanation), right=False),
    ]
    kept = [
        column
        for column in found
        if column.heading in _ALWAYS or any(cell not in ("", formats.ABSENT) for cell in column.cells)
    ]
    return markdown(kept)


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
    yield f"{PREFIX}reason", case.reason
    for figure in case.figures:
        if figure.value is not None:
            yield f"{PREFIX}{figure.metric}", repr(figure.value)
        for name in _COMPARED:
            value = getattr(figure, name)
            if value is not None:
                yield f"{PREFIX}{figure.metric}.{name}", repr(value)


def junit(run: ExportedRun) -> Iterator[str]:
    """The lines of an XML document: a suite for each machine, and one for what fails the run and is no case's."""
    suites = [_suite(machine, [case for case in run.cases if case.machine == machine]) for machine in run.machines]
    suites += [_suite_of_tests(run.failed)] if run.failed else []
    suites += [_suite_of_others(run)] if len(run.troubles) > len(run.failed) or run.skipped else []
    root = ET.Element("testsuites", {"name": "llmperf", **_totals(suites)})
    root.extend(suites)
    ET.indent(root, " ")
    yield '<?xml version="1.0" encoding="utf-8"?>'
    yield from ET.tostring(root, encoding="unicode").split("\n")


def _suite(machine: str, cases: Sequence[ExportedCase]) -> ET.Element:
    tests = Counter(case.nodeid for case in cases)
    return _counted(f"llmperf {machine}".strip(), [_testcase(case, alone=tests[case.nodeid] == 1) for case in cases])


def _testcase(case: ExportedCase, *, alone: bool) -> ET.Element:
    classname, name = _names(case.nodeid)
    told = name if alone and name else f"{name} ({case.name})".strip()
    element = ET.Element("testcase", classname=classname or "llmperf", name=told, time=f"{case.seconds:.3f}")
    inside = ET.SubElement(element, "properties")
    for key, value in properties(case):
        ET.SubElement(inside, "property", name=one_line(key), value=one_line(value))
    if case.is_failing:
        told = f"{case.outcome}: {case.explanation}"
        failure = ET.SubElement(element, "failure", type=case.verdict, message=told)
        failure.text = "\n".join(_failure_text(case))
    return element


def _names(nodeid: str) -> tuple[str, str]:
    """A test's class and name as pytest has them there: ``perf_tests.test_ladder`` and ``test_rung[…]``."""
    path, _, name = nodeid.partition("::")
    head, bracket, parameters = name.partition("[")
    *classes, function = head.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *classes]), function + bracket + parameters


def _failure_text(case: ExportedCase) -> Iterator[str]:
    yield f"{case.name}: {case.outcome}: {case.reason}"
    if case.test_failed:
        yield case.test_failed
    for figure in case.figures:
        if figure.limit is not None or figure.change is not None:
            yield f"  {_sentence(figure)}"
    if case.changed:
        yield "changed since the baseline:"
        yield from (f"  {line}" for line in case.changed)
    if case.differences:
        yield "different from the baseline's environment:"
        yield from (f"  {line}" for line in case.differences)


def _sentence(figure: ExportedFigure) -> str:
    """``tokens/s/GPU 64,000, baseline 71,857 (-10.9 %), limit 70,420``."""
    told = [f"{label(figure.metric)} {formatted(figure.metric, figure.value, figure.unit)}"]
    if figure.baseline is not None:
        told.append(
            f"baseline {formatted(figure.metric, figure.baseline, figure.unit)} ({formats.percent(figure.change)})"
        )
    if figure.limit is not None:
        told.append(f"limit {formatted(figure.metric, figure.limit, figure.unit)}")
    return ", ".join(told)


def _suite_of_tests(failed: Sequence[FailedTest]) -> ET.Element:
    """Tests without a case, as pytest has them: what a fixture raised is an error."""
    elements = []
    for test in failed:
        classname, name = _names(test.nodeid)
        element = ET.Element("testcase", classname=classname or "llmperf", name=name, time="0.000")
        ET.SubElement(element, "error" if test.outcome == "error" else "failure", message=test.how).text = test.how
        elements.append(element)
    return _counted("llmperf, tests without a case", elements)


def _suite_of_others(run: ExportedRun) -> ET.Element:
    elements = []
    tests = set(map(str, run.failed))
    for number, line in enumerate((line for line in run.troubles if line not in tests), 1):
        element = ET.Element("testcase", classname="llmperf", name=f"the run: trouble {number}", time="0.000")
        ET.SubElement(element, "error", message=line).text = line
        elements.append(element)
    for name, reason in run.skipped:
        element = ET.Element("testcase", classname="llmperf", name=name, time="0.000")
        ET.SubElement(element, "skipped", message=reason)
        elements.append(element)
    return _counted("llmperf, the run", elements)


def _counted(name: str, testcases: Sequence[ET.Element]) -> ET.Element:
    def number(kind: str) -> str:
        return str(sum(testcase.find(kind) is not None for testcase in testcases))

    seconds = sum(float(testcase.get("time", "0")) for testcase in testcases)
    counts = {"failures": number("failure"), "errors": number("error"), "skipped": number("skipped")}
    suite = ET.Element("testsuite", {"name": name, "tests": str(len(testcases)), **counts, "time": f"{seconds:.3f}"})
    suite.extend(testcases)
    return suite


def _totals(suites: Iterable[ET.Element]) -> dict[str, str]:
    found = list(suites)
    counts = {
        name: str(sum(int(suite.get(name, "0")) for suite in found))
        for name in ("tests", "failures", "errors", "skipped")
    }
    return {**counts, "time": f"{sum(float(suite.get('time', '0')) for suite in found):.3f}"}
