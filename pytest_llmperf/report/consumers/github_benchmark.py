"""What github-action-benchmark charts: its tools ``customBiggerIsBetter`` and ``customSmallerIsBetter``."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pytest_llmperf.report.consumers.bencher import case_name
from pytest_llmperf.report.consumers.direction import DIRECTIONS, Better
from pytest_llmperf.report.consumers.exported_run import ExportedCase, ExportedRun
from pytest_llmperf.support import formats

# Its comments put names into code inside of a table's row, where neither can be escaped.
_NO_CELL = str.maketrans({"|": "\N{BROKEN BAR}", "`": "'"})


def github_benchmark(run: ExportedRun, better: Better) -> Iterator[str]:
    """One JSON array, in ASCII, of the metrics that get better this way; the other way is another file."""
    entries = [
        {
            "name": f"{case_name(case, run)}: {figure.metric}".translate(_NO_CELL),
            # Its comments show `0` 1 for a count of none: a unit of one is no word there.
            "unit": "" if figure.unit == "1" else figure.unit.translate(_NO_CELL),
            "value": value,
            "extra": _extra(case, formats.percent(figure.change)),
        }
        for case in run.cases
        for figure, value in case.trusted
        if figure.metric in DIRECTIONS[better]
    ]
    yield from json.dumps(entries, indent=1, allow_nan=False).splitlines()


def _extra(case: ExportedCase, change: str) -> str:
    """What the chart shows beside a point."""
    against = "no baseline" if change == formats.ABSENT else f"{change} against the baseline"
    return "\n".join(filter(None, [f"{case.verdict}: {case.reason}", against, case.machine]))
