"""Pictures of charts, drawn by a process of its own; a chart without one is told by its table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_llmperf.report.page import vega_drawing
from pytest_llmperf.report.page.charts import slim, specification
from pytest_llmperf.report.page.page_model import Chart, Page

# Three seconds for eighty charts on two cores.
_SECONDS = 120.0


def charts_of(page: Page) -> list[Chart]:
    """All that are on it, each once."""
    found = [chart for section in page.sections for chart in section.charts]
    found += [chart for case in page.cases for chart in case.details.charts]
    return list(dict.fromkeys(found))


def drawn(charts: Sequence[Chart]) -> Mapping[Chart, str]:
    """SVG of each chart; those that could not be drawn are not among them, and no trouble is raised."""
    pictures = _drawn([specification(chart) for chart in charts])
    if len(pictures) != len(charts):
        # One of them has ended the process: by itself each of the others has its picture all the same.
        pictures = [next(iter(_drawn([specification(chart)])), "") for chart in charts[:_MOST_SINGLY]]
    return {chart: slim(picture) for chart, picture in zip(charts, pictures, strict=False) if picture}


# A process each, of half a second.
_MOST_SINGLY = 40


def _drawn(specifications: Iterable[object]) -> list[str]:
    told = json.dumps(list(specifications))
    if told == "[]":
        return []
    # By its path: where this package is imported from is not always where a fresh interpreter looks.
    command = [sys.executable, str(Path(vega_drawing.__file__))]
    try:
        done = subprocess.run(command, input=told, capture_output=True, encoding="utf-8", timeout=_SECONDS, check=True)
        return [str(picture) for picture in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
