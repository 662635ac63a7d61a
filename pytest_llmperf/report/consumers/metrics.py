"""Families of samples, ``name{label="value"} number``, as Prometheus and all who read its format know them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pytest_llmperf.records.metrics import label
from pytest_llmperf.records.result import VERDICTS
from pytest_llmperf.report.consumers.exported_run import ExportedCase, ExportedRun

PREFIX = "llmperf_"
_NO_NAME = re.compile(r"[^a-zA-Z0-9_]+")
_ESCAPED = {"\\": r"\\", '"': r"\"", "\n": r"\n"}
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
    for name, told, labels, value in _samples(run, compared=compared):
        # What two hostile names share stays the first one's: a second sample of the same labels is no valid text.
        found.setdefault(name, Family(name, told)).samples.setdefault(_clean(labels), value)
    return list(found.values())


_Sample = tuple[str, str, Mapping[str, str], float]


def _samples(run: ExportedRun, *, compared: bool) -> Iterator[_Sample]:
    if compared:
        yield from _of_the_run(run)
    for case in run.cases:
        labels = {"case": case.name, "machine": case.machine, "verdict": case.verdict}
        yield f"{PREFIX}verdict", "1 for the verdict of a case, which its label has", labels, 1.0
    for case in run.cases:
        yield from _of_a_case(case, compared=compared)


def _of_the_run(run: ExportedRun) -> Iterator[_Sample]:
    # Without a machine: a run that never came to its hardware has none, and is what an alert is for.
    told = "1 where nobody has to look: no test, no case and nothing of the run itself failed"
    yield f"{PREFIX}run_green", told, {}, float(not run.is_red)
    if run.ended_at is not None:
        yield f"{PREFIX}run_timestamp_seconds", "when the run ended, seconds since 1970", {}, run.ended_at
    for machine in run.machines:
        is_whole = float(machine not in run.unfinished)
        yield f"{PREFIX}run_complete", "0 where the run was ended before its end", {"machine": machine}, is_whole
        cases = [case for case in run.cases if case.machine == machine]
        for verdict in VERDICTS:  # those of which there is none too: an alert must end
            number = float(sum(case.verdict == verdict for case in cases))
            yield f"{PREFIX}cases", "cases by verdict", {"machine": machine, "verdict": verdict}, number
        last = max((case.launched_at for case in cases if case.launched_at is not None), default=None)
        if last is not None:
            told = "when the last launch began, seconds since 1970"
            yield f"{PREFIX}last_launch_timestamp_seconds", told, {"machine": machine}, last


def _of_a_case(case: ExportedCase, *, compared: bool) -> Iterator[_Sample]:
    labels = {"case": case.name, "machine": case.machine}
    for figure, value in case.trusted:
        name = PREFIX + _NO_NAME.sub("_", figure.metric)
        told = f"{label(figure.metric)} of the case, {figure.unit if figure.unit not in ('', '1') else 'a number'}"
        yield name, told, labels, value
        if compared and figure.baseline is not None:
            yield f"{name}_baseline", f"baseline of {name}", labels, figure.baseline
        if compared and figure.change is not None:
            yield f"{name}_change_ratio", f"{name} by its baseline, less 1", labels, figure.change


def _clean(labels: Mapping[str, str]) -> Labels:
    """Without what is empty, which is as good as absent there."""
    return tuple((name, value) for name, value in labels.items() if value)


def escaped_help(text: str) -> str:
    """``text`` behind ``# HELP name``."""
    return text.replace("\\", r"\\").replace("\n", r"\n")


def sample(name: str, labels: Iterable[tuple[str, str]], value: str) -> str:
    """A line. No blank stands between labels: some who read it take the first blank for the name's end."""
    inside = ",".join(f'{label}="{_label(text)}"' for label, text in labels)
    return f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


def _label(text: str) -> str:
    return "".join(_ESCAPED.get(character, character) for character in text)


def exact(value: float) -> str:
    """``value`` with every digit that it has."""
    return str(int(value)) if value.is_integer() and abs(value) < _EXACT else repr(value)


# Prometheus' text format, for node_exporter's textfile collector or a push gateway.


def prometheus(run: ExportedRun) -> Iterator[str]:
    """The lines of a ``.prom`` file. No sample has a time: the textfile collector refuses a file that has one."""
    for family in families(run, compared=True):
        yield f"# HELP {family.name} {escaped_help(family.help)}"
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
            yield sample(family.name, told, _short(value))
    yield "# EOF"


def _short(value: float) -> str:
    """It is shown as it stands, and as changed where any digit is: whole numbers (bytes) are exact, others rounded."""
    return exact(value if value.is_integer() else float(f"{value:.{_DIGITS}g}"))
