"""GitLab's metrics report, which is OpenMetrics' text: a merge request shows what differs from the target branch."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmperf.report.consumers.exported_run import ExportedRun
from pytest_llmperf.report.consumers.metric_families import exact, families, sample

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
