"""Prometheus' text format, for node_exporter's textfile collector or a push gateway."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmperf.report.consumers.exported_run import ExportedRun
from pytest_llmperf.report.consumers.metric_families import escaped_help, exact, families, sample


def prometheus(run: ExportedRun) -> Iterator[str]:
    """The lines of a ``.prom`` file. No sample has a time: the textfile collector refuses a file that has one."""
    for family in families(run, compared=True):
        yield f"# HELP {family.name} {escaped_help(family.help)}"
        yield f"# TYPE {family.name} gauge"
        for labels, value in family.samples.items():
            yield sample(family.name, labels, exact(value))
