"""Charts as Vega-Lite specifications, which are drawn before a page is written, so that it needs no script for them.

Colours are CSS variables of the page, so that one picture serves light, dark and paper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_llmperf.report.page.page_model import BarChart, Chart, IntervalChart, LineChart, StackChart
from pytest_llmperf.report.text import one_line, shorten_middle

# As wide as a phone shows without shrinking its text much; a desktop sets several beside one another.
_WIDTH = 440
_ROW = 40
# Above its bar stands what a row is, below it is the next row.
_ABOVE, _BELOW = -9, 7
_BAR = 11
_LABEL_CHARACTERS = 44
# Figures from here on are told by two digits and a letter.
_LARGE = 10_000
_THREE_DIGITS = ".3~s"

_ROLES = ("now", "baseline", "published", "ideal")
# Of many launches the lines behind are no more than a ground.
_LINES = {"baseline": "quiet"}
_DASHES = {"now": [], "baseline": [2, 3], "published": [6, 3], "ideal": [1, 4]}

_CONFIG: Mapping[str, Any] = {
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--quiet)",
        "titleColor": "var(--quiet)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "domain": False,
        "ticks": False,
        "gridColor": "var(--grid)",
        "labelPadding": 4,
        # Labels are wider in the reader's font than in the one they are laid out by.
        "titlePadding": 8,
    },
}

#: What a mark of a stack is drawn in, and a line's colour: names that the style sheet has.
PART_COLOURS = tuple(f"part{number}" for number in range(1, 12))

_Spec = dict[str, Any]


def legend(chart: Chart) -> list[tuple[str, str]]:
    """Colours, by the style sheet's names, and what they stand for."""
    match chart:
        case BarChart():
            bars = chart.bars
            told = {
                "now": ("this run", any(bar.value is not None and not bar.is_stored for bar in bars)),
                "stored": ("baseline, not run this time", any(bar.is_stored for bar in bars)),
                "baseline mark": ("baseline", any(bar.baseline is not None for bar in bars)),
                "published mark": ("published", any(bar.published is not None for bar in bars)),
            }
            return [(colour, name) for colour, (name, is_there) in told.items() if is_there]
        case LineChart():
            return list(dict.fromkeys((f"{line.role} line", line.name) for line in chart.lines))
        case StackChart():
            marks = zip(("baseline mark", "published mark", "now mark"), chart.marks, strict=False)
            return [*((colour, name) for name, colour in _part_colours(chart.parts).items()), *marks]
        case IntervalChart():
            return [("now", "change, nine times in ten within the line"), ("limit mark", "limit")]
    return []


def _part_colours(parts: Sequence[str]) -> dict[str, str]:
    return {name: PART_COLOURS[index % len(PART_COLOURS)] for index, name in enumerate(parts)}


def specification(chart: Chart) -> dict[str, Any]:
    """Of Vega-Lite. The picture says nothing by itself: what it shows is said beside it."""
    return _spec(chart) | {
        "width": _WIDTH,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 10, "top": 2, "bottom": 2},
        "background": None,
        "config": _CONFIG,
    }


# What only a script would need of them.
_NOISE = re.compile(
    r' (?:role|aria-roledescription|aria-label|aria-hidden|pointer-events|xmlns:xlink|version)="[^"]*"'
    r'|<path class="(?:back|fore)ground"[^>]*?/>| opacity="1"| stroke-width="1"'
)
_HIDDEN_LABEL = re.compile(r'<text [^>]*opacity="0"[^>]*>[^<]*</text>')
_FONT = ' font-family="system-ui, sans-serif"'


def slim(text: str) -> str:
    """SVG without what a page has no use for."""
    return _HIDDEN_LABEL.sub("", _NOISE.sub("", text)).replace(_FONT, "")


def _spec(chart: Chart) -> _Spec:
    makers: Mapping[type[Chart], Callable[[Any], _Spec]] = {
        BarChart: _bars,
        LineChart: _lines,
        StackChart: _stacks,
        IntervalChart: _intervals,
    }
    return makers[type(chart)](chart)


def _rows(layers: Sequence[_Spec], count: int) -> _Spec:
    return {"height": _ROW * count, "layer": list(layers)}


def _y() -> _Spec:
    return {"field": "row", "type": "ordinal", "axis": None, "scale": {"padding": 0}}


def _x(title: str, most: float = 0.0, **axis: Any) -> _Spec:
    """``most``: the largest figure there. Long ones would stand in each other. ``axis``: what else Vega has of it."""
    short = {"format": _THREE_DIGITS} if most >= _LARGE else {}
    return {"type": "quantitative", "axis": {"tickCount": 5, "title": title, **short, **axis}}


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[_Spec]:
    """Above each bar what it is, at the left, and its figure, at the right."""
    data = {"values": [{name: row[name] for name in ("row", "label", "told")} for row in rows]}
    text = {"type": "text", "baseline": "middle", "yOffset": _ABOVE, "fontSize": 13, "color": "var(--ink)"}
    return [
        {
            "data": data,
            "mark": {**text, "align": "left"},
            "encoding": {"y": _y(), "x": {"value": 0}, "text": {"field": "label", "type": "nominal"}},
        },
        {
            "data": data,
            "mark": {**text, "align": "right", "fontWeight": 600},
            "encoding": {"y": _y(), "x": {"value": "width"}, "text": {"field": "told", "type": "nominal"}},
        },
    ]


def _mark(rows: Sequence[Mapping[str, Any]], name: str, colour: str, x: _Spec) -> list[_Spec]:
    """A tick across the bar, where a row has such a figure."""
    values = [{"row": row["row"], "x": row[name]} for row in rows if row[name] is not None]
    if not values:
        return []
    mark = {
        "type": "tick",
        "color": f"var(--{colour})",
        "thickness": 3,
        "size": _BAR + 4,
        "yOffset": _BELOW,
        "opacity": 1,
    }
    return [{"data": {"values": values}, "mark": mark, "encoding": {"y": _y(), "x": {**x, "field": "x"}}}]


def _short(label: str) -> str:
    """An id's end tells it apart as often as its start; a control character would end the process that draws it."""
    return shorten_middle(one_line(label), _LABEL_CHARACTERS, "…")


def _bars(chart: BarChart) -> _Spec:
    rows = [
        {
            "row": index,
            "label": _short(bar.label),
            "told": one_line(bar.told),
            "value": bar.value,
            "baseline": None if bar.is_stored else bar.baseline,
            "published": bar.published,
            "colour": "var(--stored)" if bar.is_stored else "var(--now)",
        }
        for index, bar in enumerate(chart.bars)
    ]
    figures = (figure for bar in chart.bars for figure in (bar.value, bar.baseline, bar.published))
    x = _x(chart.axis, max((figure for figure in figures if figure is not None), default=0.0))
    bar_layer = {
        "data": {"values": [row for row in rows if row["value"] is not None]},
        "mark": {"type": "bar", "height": _BAR, "yOffset": _BELOW},
        "encoding": {
            "y": _y(),
            "x": {**x, "field": "value"},
            "color": {"field": "colour", "type": "nominal", "scale": None, "legend": None},
        },
    }
    marks = [*_mark(rows, "baseline", "baseline", x), *_mark(rows, "published", "published", x)]
    return _rows([bar_layer, *marks, *_labels(rows)], len(rows))


def _stacks(chart: StackChart) -> _Spec:
    colours = _part_colours(chart.parts)
    x = _x(chart.axis)
    rows = [
        {
            "row": index,
            "label": _short(stack.label),
            "told": one_line(stack.told),
            **dict.fromkeys(chart.marks),
            **dict(stack.marks),
        }
        for index, stack in enumerate(chart.stacks)
    ]
    values = []
    for index, stack in enumerate(chart.stacks):
        end = 0.0
        for name, size in stack.parts:
            values.append({"row": index, "start": end, "end": end + size, "colour": f"var(--{colours[name]})"})
            end += size
    layer = {
        "data": {"values": values},
        "mark": {"type": "bar", "height": _BAR, "yOffset": _BELOW},
        "encoding": {
            "y": _y(),
            "x": {**x, "field": "start"},
            "x2": {"field": "end"},
            "color": {"field": "colour", "type": "nominal", "scale": None, "legend": None},
        },
    }
    marks = [
        mark
        for name, colour in zip(chart.marks, ("baseline", "published", "now"), strict=False)
        for mark in _mark(rows, name, colour, x)
    ]
    return _rows([layer, *marks, *_labels(rows)], len(rows))


def _intervals(chart: IntervalChart) -> _Spec:
    rows = [
        {
            "row": index,
            "label": _short(one.label),
            "told": one_line(one.told),
            "change": one.change,
            "low": one.change if one.low is None else one.low,
            "high": one.change if one.high is None else one.high,
            "limit": one.limit,
            "colour": f"var(--{one.verdict})",
        }
        for index, one in enumerate(chart.intervals)
    ]
    # A change of nothing has no sign.
    signed = "datum.value == 0 ? '0 %' : format(datum.value * 100, '+~r') + ' %'"
    x = {**_x("change of tokens/s/GPU since the baseline", labelExpr=signed), "scale": {"zero": True}}
    colour = {"field": "colour", "type": "nominal", "scale": None, "legend": None}
    span = {
        "mark": {"type": "rule", "strokeWidth": 3, "yOffset": _BELOW, "opacity": 0.6},
        "encoding": {"y": _y(), "x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": colour},
    }
    point = {
        "mark": {"type": "point", "filled": True, "size": 70, "yOffset": _BELOW, "opacity": 1},
        "encoding": {"y": _y(), "x": {**x, "field": "change"}, "color": colour},
    }
    data = {"values": rows}
    layers = [{"data": data, **span}, {"data": data, **point}]
    # Of each row its own: one line through all of them would cross their names.
    zero = _mark([{**row, "zero": 0} for row in rows], "zero", "quiet", x)
    return _rows([*zero, *layers, *_mark(rows, "limit", "limit", x), *_labels(rows)], len(rows))


def _ticks(chart: LineChart, xs: Sequence[Any]) -> _Spec:
    if not chart.doubles:
        return {"tickCount": 6}
    return {"values": xs, **({"format": ".2~s"} if max(xs) >= _LARGE else {})}


def _lines(chart: LineChart) -> _Spec:
    values = [
        {"line": f"{index}", "role": line.role, "x": x, "y": y}
        for index, line in enumerate(chart.lines)
        for x, y in line.points
    ]
    xs = sorted({x for line in chart.lines for x, _ in line.points})
    logarithms = {"type": "log", "base": 2}
    x_axis: _Spec = {"title": chart.x_axis, "grid": False, "labelOverlap": True, **_ticks(chart, xs)}
    y_axis: _Spec = {"title": chart.y_axis, "tickCount": 5}
    y_scale: _Spec = {"zero": chart.from_zero}
    ys = sorted({y for line in chart.lines for _, y in line.points})
    if chart.doubles:
        y_scale = {**logarithms, "domain": [min(ys), max(ys)]}
        y_axis |= {"format": ".2~s"}
    elif max(ys, default=0.0) >= _LARGE:
        y_axis |= {"format": _THREE_DIGITS}
    roles = [role for role in _ROLES if any(line.role == role for line in chart.lines)]
    return {
        "height": 220,
        "data": {"values": values},
        "mark": {"type": "line", "point": {"size": 30} if chart.doubles else False, "strokeWidth": 2},
        "encoding": {
            "x": {
                "field": "x",
                "type": "quantitative",
                "axis": x_axis,
                "scale": {**logarithms, "domain": [xs[0], xs[-1]]}
                if chart.doubles and len(xs) > 1
                else {"zero": False},
            },
            "y": {"field": "y", "type": "quantitative", "axis": y_axis, "scale": y_scale},
            "detail": {"field": "line", "type": "nominal"},
            "color": {
                "field": "role",
                "type": "nominal",
                "scale": {"domain": roles, "range": [f"var(--{_LINES.get(role, role)})" for role in roles]},
                "legend": None,
            },
            "strokeDash": {
                "field": "role",
                "type": "nominal",
                "scale": {"domain": roles, "range": [_DASHES[role] or [1, 0] for role in roles]},
                "legend": None,
            },
        },
    }
