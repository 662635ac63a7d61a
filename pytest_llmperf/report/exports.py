"""A run for other tools: a page of Markdown, JUnit's XML, and samples for Prometheus and GitLab."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from pytest_llmperf.records.metrics import RATE, formatted, label
from pytest_llmperf.records.result import VERDICTS
from pytest_llmperf.records.results_document import Figure
from pytest_llmperf.report.results_json import ExportedCase, ExportedRun
from pytest_llmperf.report.summary_table import merged_reasons, no_gate_of_speed
from pytest_llmperf.report.text import UNICODE, Column, escaped, figure_columns, markdown, shorten_list
from pytest_llmperf.support import formats

_LONGEST = 500
_MOST_TROUBLES, _MOST_SKIPPED = 20, 10
# For the line that says what was left out.
_NOTE_BYTES = 200
_PADDING = re.compile(r" {2,}")


def markdown_page(run: ExportedRun) -> list[str]:
    """A heading, what fails the run and is no case's, the table, and what was skipped."""
    lines = [f"## llmperf: {run.headline}", ""]
    skipped = [f"skipped: {line}" for line in merged_reasons(run.skipped)]
    gate = no_gate_of_speed(case.result.figure(RATE).times_slower for case in run.cases)
    told = [f"- {escaped(gate)}"] if gate else []
    for block in (_first_n(run.troubles, _MOST_TROUBLES), _first_n(skipped, _MOST_SKIPPED), told):
        lines += [*block, ""] if block else []
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
        ET.SubElement(inside, "property", name=key, value=value)
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


_GAUGE = "llmperf_"
_NO_NAME = re.compile(r"[^a-zA-Z0-9_]+")
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
# From here on a float no longer holds every whole number.
_EXACT = 2**53

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Family:
    """Samples of one name, each of which its labels tell from the others; all are gauges."""

    name: str
    help: str
    samples: dict[Labels, float] = field(default_factory=dict)


def families(run: ExportedRun, *, compared: bool) -> list[Family]:
    """All of ``run``; with baselines, changes and the run's own figures where they are ``compared`` nowhere else."""
    found: dict[str, Family] = {}
    for name, told, labels, value in (*(_of_the_run(run) if compared else ()), *_of_cases(run, compared=compared)):
        # What is empty is as good as absent there. What two hostile names share stays the first one's: a second sample
        # of the same labels is no valid text.
        own = tuple((key, text) for key, text in labels.items() if text)
        found.setdefault(_GAUGE + name, Family(_GAUGE + name, told)).samples.setdefault(own, value)
    return list(found.values())


_Sample = tuple[str, str, Mapping[str, str], float]


def _of_the_run(run: ExportedRun) -> Iterator[_Sample]:
    # Without a machine: a run that never came to its hardware has none, and is what an alert is for.
    told = "1 where nobody has to look: no test, no case and nothing of the run itself failed"
    yield "run_green", told, {}, float(not run.is_red)
    if run.ended_at is not None:
        yield "run_timestamp_seconds", "when the run ended, seconds since 1970", {}, run.ended_at
    for machine in run.machines:
        is_whole = float(machine not in run.unfinished)
        yield "run_complete", "0 where the run was ended before its end", {"machine": machine}, is_whole
        cases = [case for case in run.cases if case.machine == machine]
        for verdict in VERDICTS:  # those of which there is none too: an alert must end
            number = float(sum(case.verdict == verdict for case in cases))
            yield "cases", "cases by verdict", {"machine": machine, "verdict": verdict}, number
        last = max((case.launched_at for case in cases if case.launched_at is not None), default=None)
        if last is not None:
            told = "when the last launch began, seconds since 1970"
            yield "last_launch_timestamp_seconds", told, {"machine": machine}, last


def _of_cases(run: ExportedRun, *, compared: bool) -> Iterator[_Sample]:
    for case in run.cases:
        labels = {"case": case.name, "machine": case.machine, "verdict": case.verdict}
        yield "verdict", "1 for the verdict of a case, which its label has", labels, 1.0
    for case in run.cases:
        labels = {"case": case.name, "machine": case.machine}
        for metric, figure, value in case.trusted:
            name = _NO_NAME.sub("_", metric)
            told = f"{label(metric)} of the case, {figure.unit if figure.unit not in ('', '1') else 'a number'}"
            yield name, told, labels, float(value)
            if compared and figure.baseline is not None:
                yield f"{name}_baseline", f"baseline of {_GAUGE}{name}", labels, float(figure.baseline)
            if compared and figure.change is not None:
                yield f"{name}_change_ratio", f"{_GAUGE}{name} by its baseline, less 1", labels, float(figure.change)


def sample(name: str, labels: Iterable[tuple[str, str]], value: str) -> str:
    """A line. No blank stands between labels: some who read it take the first blank for the name's end."""
    inside = ",".join(f'{label}="{text.translate(_ESCAPED)}"' for label, text in labels)
    return f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


def exact(value: float) -> str:
    """``value`` with every digit that it has."""
    return str(int(value)) if value.is_integer() and abs(value) < _EXACT else repr(value)


def prometheus(run: ExportedRun) -> Iterator[str]:
    """Prometheus' text format, for node_exporter's textfile collector or a push gateway, by lines.

    No sample has a time: the textfile collector refuses a file that has one.
    """
    for family in families(run, compared=True):
        told = family.help.replace("\\", r"\\")
        yield f"# HELP {family.name} {told}"
        yield f"# TYPE {family.name} gauge"
        for labels, value in family.samples.items():
            yield sample(family.name, labels, exact(value))


# GitLab's metrics report, which is OpenMetrics' text: a merge request shows what differs from the target branch.
_DIGITS = 6


def gitlab_metrics(run: ExportedRun) -> Iterator[str]:
    """The lines of ``metrics.txt``, without baselines: GitLab compares with the target branch by itself.

    It takes all behind a ``#`` for a comment, also inside a label, whose quotation mark would then be missing.
    """
    for family in families(run, compared=False):
        yield f"# TYPE {family.name} gauge"
        for labels, value in family.samples.items():
            told = [(name, text.replace("#", "%23")) for name, text in labels]
            # Shown as it stands, and as changed where any digit is: whole numbers (bytes) are exact, others rounded.
            short = value if value.is_integer() else float(f"{value:.{_DIGITS}g}")
            yield sample(family.name, told, exact(short))
    yield "# EOF"
