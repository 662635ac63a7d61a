"""Pictures of charts: Vega-Lite specifications, drawn before a page is written, so that it needs no script for them.

``template/charts.json`` has them, but for a chart's own figures. Colours are CSS variables of the page, so that one
picture serves light, dark and paper.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pytest_llmperf.report.page import vega_drawing
from pytest_llmperf.report.page.page_model import Chart, IntervalChart, LineChart, RowChart
from pytest_llmperf.report.text import one_line, shorten_middle

# As wide as a phone shows without shrinking its text much; a desktop sets several beside one another.
_WIDTH = 440
_ROW = 40
_LABEL_CHARACTERS = 44
# Figures from here on are told by two digits and a letter.
_LARGE = 10_000
_THREE_DIGITS = ".3~s"

#: Colours of parts, and of marks, in their order: names that the style sheet has.
PART_COLOURS = tuple(f"part{number}" for number in range(1, 12))
_MARKS = ("baseline", "published")
#: The part that is the whole bar, by whose figure it is.
NOW, STORED = "this run", "baseline, not run this time"
_WHOLE = {NOW: "now", STORED: "stored"}

# Three seconds for eighty charts on two cores.
_SECONDS = 120.0
# A process each, of half a second.
_MOST_SINGLY = 40


def legend(chart: Chart) -> list[tuple[str, str]]:
    """Colours, by the style sheet's names, and what they stand for."""
    match chart:
        case RowChart():
            found = {name for row in chart.rows for name, _ in row.marks}
            marks = [
                (f"{colour} mark", name) for colour, name in zip(_MARKS, chart.marks, strict=False) if name in found
            ]
            return [*((colour, name) for name, colour in _colours(chart).items()), *marks]
        case LineChart():
            return list(dict.fromkeys((f"{line.role} line", line.name) for line in chart.lines))
    return [("now", "change, nine times in ten within the line"), ("limit mark", "limit")]


def _colours(chart: RowChart) -> dict[str, str]:
    if {*chart.parts} <= {*_WHOLE}:
        return {name: colour for name, colour in _WHOLE.items() if name in chart.parts}
    return {name: PART_COLOURS[index % len(PART_COLOURS)] for index, name in enumerate(chart.parts)}


def specification(chart: Chart) -> dict[str, Any]:
    """The chart for Vega-Lite. The picture says nothing by itself: what it shows is said beside it."""
    known = json.loads((files(__package__) / "template" / "charts.json").read_text(encoding="utf-8"))
    match chart:
        case RowChart():
            spec, values = known["rows"], _rows(chart)
            sizes = [size for row in chart.rows for _, size in (*row.parts, *row.marks)]
            is_large = max(sizes, default=0.0) >= _LARGE
            spec["encoding"]["x"]["axis"] |= {"title": chart.axis, **({"format": _THREE_DIGITS} if is_large else {})}
        case IntervalChart():
            spec, values = known["intervals"], _intervals(chart)
        case LineChart():
            spec, values = known["lines"], _points(chart)
            spec["mark"] |= {"point": {"size": 30}} if chart.doubles else {}
            _set_axes(spec["encoding"], chart)
        case _:
            raise TypeError(f"{type(chart).__name__} has no picture")
    return {
        "height": _ROW * len(values),
        **spec,
        "data": {"values": values},
        "width": _WIDTH,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 10, "top": 2, "bottom": 2},
        "background": None,
        "config": known["config"],
    }


def _short(label: str) -> str:
    """An id's end tells it apart as often as its start; a control character would end the process that draws it."""
    return shorten_middle(one_line(label), _LABEL_CHARACTERS, "…")


def _rows(chart: RowChart) -> list[dict[str, Any]]:
    colours, found = _colours(chart), []
    for index, row in enumerate(chart.rows):
        ends = [0.0]
        for _, size in row.parts:
            ends.append(ends[-1] + size)
        marks = dict(row.marks)
        told = {"row": index, "label": _short(row.label), "told": one_line(row.words)}
        told |= {"start": ends[:-1], "end": ends[1:], "colour": [f"var(--{colours[name]})" for name, _ in row.parts]}
        found.append({**told, **{key: marks.get(name) for key, name in zip(_MARKS, chart.marks, strict=False)}})
    return found


def _intervals(chart: IntervalChart) -> list[dict[str, Any]]:
    return [
        {
            "row": index,
            "label": _short(one.label),
            "told": one_line(one.words),
            "zero": 0,
            "change": one.change,
            "low": one.change if one.low is None else one.low,
            "high": one.change if one.high is None else one.high,
            "limit": one.limit,
            "colour": f"var(--{one.verdict})",
        }
        for index, one in enumerate(chart.intervals)
    ]


def _points(chart: LineChart) -> list[dict[str, Any]]:
    return [
        {"line": f"{index}", "role": line.role, "x": x, "y": y}
        for index, line in enumerate(chart.lines)
        for x, y in line.points
    ]


def _set_axes(encoding: dict[str, Any], chart: LineChart) -> None:
    xs, ys = (sorted({point[axis] for line in chart.lines for point in line.points}) for axis in (0, 1))
    x, y = encoding["x"], encoding["y"]
    x["axis"] |= {"title": chart.x_axis}
    y["axis"] |= {"title": chart.y_axis}
    if not chart.doubles:
        x["axis"] |= {"tickCount": 6}
        y["axis"] |= {"format": _THREE_DIGITS} if max(ys, default=0.0) >= _LARGE else {}
        return
    logarithms = {"type": "log", "base": 2}
    x["axis"] |= {"values": xs, **({"format": ".2~s"} if max(xs) >= _LARGE else {})}
    if len(xs) > 1:
        x["scale"] = {**logarithms, "domain": [xs[0], xs[-1]]}
    y["axis"] |= {"format": ".2~s"}
    y["scale"] = {**logarithms, "domain": [min(ys), max(ys)]}


# What only a script would need of them.
_NOISE = re.compile(
    r' (?:role|aria-roledescription|aria-label|aria-hidden|pointer-events|xmlns:xlink|version)="[^"]*"'
    r'|<path class="(?:back|fore)ground"[^>]*?/>| opacity="1"| stroke-width="1"'
)
_HIDDEN_LABEL = re.compile(r'<text [^>]*opacity="0"[^>]*>[^<]*</text>')
_FONT = ' font-family="system-ui, sans-serif"'


def drawn(charts: Sequence[Chart]) -> Mapping[Chart, str]:
    """SVG of each chart; those that could not be drawn are not among them, and no trouble is raised."""
    pictures = _drawn([specification(chart) for chart in charts])
    if len(pictures) != len(charts):
        # One of them has ended the process: by itself each of the others has its picture all the same.
        pictures = [next(iter(_drawn([specification(chart)])), "") for chart in charts[:_MOST_SINGLY]]
    slim = (_HIDDEN_LABEL.sub("", _NOISE.sub("", picture)).replace(_FONT, "") for picture in pictures)
    return {chart: picture for chart, picture in zip(charts, slim, strict=False) if picture}


def _drawn(specifications: Sequence[object]) -> list[str]:
    if not specifications:
        return []
    # By its path: where this package is imported from is not always where a fresh interpreter looks.
    command, told = [sys.executable, str(Path(vega_drawing.__file__))], json.dumps(specifications)
    try:
        done = subprocess.run(command, input=told, capture_output=True, encoding="utf-8", timeout=_SECONDS, check=True)
        return [str(picture) for picture in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
