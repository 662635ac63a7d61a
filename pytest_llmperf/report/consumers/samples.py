"""Families of samples, ``name{label="value"} number``, as Prometheus and all who read its format know them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pytest_llmperf.records.metrics import label
from pytest_llmperf.records.result import VERDICTS
from pytest_llmperf.report.consumers.exported_run import ExportedRun

PREFIX = "llmperf_"
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
        found.setdefault(PREFIX + name, Family(PREFIX + name, told)).samples.setdefault(own, value)
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
                yield f"{name}_baseline", f"baseline of {PREFIX}{name}", labels, float(figure.baseline)
            if compared and figure.change is not None:
                yield f"{name}_change_ratio", f"{PREFIX}{name} by its baseline, less 1", labels, float(figure.change)


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
