"""A run for other tools: a page of Markdown, samples for Prometheus, and a test's properties for JUnit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_llmperf.records.metrics import RATE, label
from pytest_llmperf.records.result import VERDICTS
from pytest_llmperf.report.results_json import ExportedCase, ExportedRun
from pytest_llmperf.report.summary_table import merged_reasons, no_gate_of_speed
from pytest_llmperf.report.text import UNICODE, Column, escaped, figure_columns, markdown, shorten_middle
from pytest_llmperf.support import formats

_LONGEST = 500
_MOST_TROUBLES, _MOST_SKIPPED = 20, 10


def markdown_page(run: ExportedRun) -> list[str]:
    """A heading, what fails the run and is no case's, the table, and what was skipped."""
    lines = [f"## llmperf: {run.headline}", ""]
    skipped = [f"skipped: {line}" for line in merged_reasons(run.skipped)]
    gate = no_gate_of_speed(case.result.figure(RATE) for case in run.cases)
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
            value = getattr(figure, name)
            if value is not None:
                yield f"{PREFIX}{metric}.{name}", repr(float(value))


_GAUGE = "llmperf_"
_NO_NAME = re.compile(r"[^a-zA-Z0-9_]+")
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
# From here on a float no longer holds every whole number.
_EXACT = 2**53

Labels = tuple[tuple[str, str], ...]


def _families(run: ExportedRun) -> dict[str, tuple[str, dict[Labels, float]]]:
    """Samples of all of ``run`` by name, each of which its labels tell from the others, and the name's help."""
    found: dict[str, tuple[str, dict[Labels, float]]] = {}
    for name, told, labels, value in (*_of_the_run(run), *_of_cases(run)):
        # What is empty is as good as absent there. What two hostile names share stays the first one's: a second sample
        # of the same labels is no valid text.
        own = tuple((key, text) for key, text in labels.items() if text)
        found.setdefault(_GAUGE + name, (told, {}))[1].setdefault(own, value)
    return found


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


def _of_cases(run: ExportedRun) -> Iterator[_Sample]:
    for case in run.cases:
        labels = {"case": case.name, "machine": case.machine, "verdict": case.verdict}
        yield "verdict", "1 for the verdict of a case, which its label has", labels, 1.0
    for case in run.cases:
        labels = {"case": case.name, "machine": case.machine}
        for metric, figure, value in case.trusted:
            name = _NO_NAME.sub("_", metric)
            told = f"{label(metric)} of the case, {figure.unit if figure.unit not in ('', '1') else 'a number'}"
            yield name, told, labels, float(value)
            if figure.baseline is not None:
                yield f"{name}_baseline", f"baseline of {_GAUGE}{name}", labels, float(figure.baseline)
            if figure.change is not None:
                yield f"{name}_change_ratio", f"{_GAUGE}{name} by its baseline, less 1", labels, float(figure.change)


def _sample(name: str, labels: Iterable[tuple[str, str]], value: str) -> str:
    """A line. No blank stands between labels: some who read it take the first blank for the name's end."""
    inside = ",".join(f'{label}="{text.translate(_ESCAPED)}"' for label, text in labels)
    return f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


def _exact(value: float) -> str:
    """``value`` with every digit that it has."""
    return str(int(value)) if value.is_integer() and abs(value) < _EXACT else repr(value)


def prometheus(run: ExportedRun) -> Iterator[str]:
    """Prometheus' text format, by lines; no sample has a time: node_exporter's textfile collector would refuse it."""
    for name, (told, samples) in _families(run).items():
        yield "# HELP {} {}".format(name, told.replace("\\", r"\\"))
        yield f"# TYPE {name} gauge"
        for labels, value in samples.items():
            yield _sample(name, labels, _exact(value))
