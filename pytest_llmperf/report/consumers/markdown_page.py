"""A run as a page of Markdown: what is wrong, then its cases in a table, the worst first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pytest_llmperf.report.consumers.exported_run import ExportedCase, ExportedRun
from pytest_llmperf.report.exports import escaped, markdown
from pytest_llmperf.report.merged_notes import merged_reasons
from pytest_llmperf.report.speed_gate import no_gate_of_speed
from pytest_llmperf.report.table import Column
from pytest_llmperf.report.text import UNICODE, shorten_list
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
    rates = [case.figure("tokens_per_second_per_gpu") for case in run.cases]
    gate = no_gate_of_speed(rate.times_slower for rate in rates)
    lines += [f"- {escaped(gate)}", ""] if gate else []
    return lines + case_table(run.cases)


def _some(lines: Sequence[str], most: int) -> list[str]:
    shown = [f"- {escaped(_cut(line))}" for line in lines[:most]]
    return shown + ([f"- … and {len(lines) - most} more"] if len(lines) > most else [])


def case_table(cases: Sequence[ExportedCase]) -> list[str]:
    """A row for each case; columns that have nothing to say are left out."""

    def values(metric: str) -> list[str]:
        return [_value(case, metric) for case in cases]

    def changes(metric: str) -> list[str]:
        return [formats.percent(case.figure(metric).change) for case in cases]

    def words(of: Callable[[ExportedCase], str]) -> list[str]:
        return [_cut(of(case)) for case in cases]

    if not cases:
        return []
    machines = {case.machine for case in cases}
    columns = [
        Column("case", words(lambda case: case.name), right=False),
        *([Column("machine", words(lambda case: case.machine), right=False)] if len(machines) > 1 else []),
        Column("verdict", words(lambda case: case.outcome), right=False),
        Column("tokens/s/GPU", values("tokens_per_second_per_gpu")),
        Column("change", changes("tokens_per_second_per_gpu")),
        Column("memory", values("peak_reserved_bytes")),
        Column("change", changes("peak_reserved_bytes")),
        Column("MFU", values("mfu")),
        Column("arithmetic", values("flops_per_step")),
        Column("predicted", values("predicted_peak_bytes")),
        Column("why", words(lambda case: case.explanation), right=False),
    ]
    kept = [
        column
        for column in columns
        if column.heading in _ALWAYS or any(cell not in ("", formats.ABSENT) for cell in column.cells)
    ]
    return markdown(kept)


def _value(case: ExportedCase, metric: str) -> str:
    figure = case.figure(metric)
    if figure.unit == "bytes":
        return formats.memory(figure.value)
    return formats.figure(metric, figure.value, figure.unit)


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
