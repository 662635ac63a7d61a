"""The ladder of the committed baselines, as a Vega-Lite specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llmperf.analysis.ladder import Rung
from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.records.metrics import pooled_tokens_per_second
from pytest_llmperf.support.formats import GIB

_OURS, _PUBLISHED = "one H200, this project", "H100 64 GB, as published"
_COLOURS = {_OURS: "#2a78d6", _PUBLISHED: "#9aa3ad"}


def rows(rungs: Sequence[Rung], store: BaselineStore, machine: str) -> list[dict[str, Any]]:
    """Of each rung that ran, for each of the two its rate in tokens/s per GPU and its memory in GiB."""
    found = []
    for rung in rungs:
        baseline = store.load(machine, rung.spec)
        if baseline is None or rung.ran_out_of_memory:
            continue
        spec = rung.spec
        words = [spec.precision, spec.attention, "liger" if spec.liger else "", f"mbs {spec.micro_batch_size}"]
        name = f"{rung.number}  {' '.join(filter(None, words))}"
        rate = pooled_tokens_per_second(baseline.launches) / spec.gpus
        peak = max(launch.peak_reserved_bytes for launch in baseline.launches)
        found.append({"rung": name, "of": _OURS, "rate": rate, "memory": peak / GIB})
        reference = rung.reference
        if reference is not None and reference.tokens_per_second_per_gpu is not None:
            published = reference.peak_reserved_bytes
            memory = None if published is None else published / GIB
            found.append(
                {"rung": name, "of": _PUBLISHED, "rate": reference.tokens_per_second_per_gpu, "memory": memory}
            )
    return found


def ladder(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ladder as Vega-Lite: rates beside memory, ours beside what was published."""
    order = list(dict.fromkeys(row["rung"] for row in values))

    def bars(field: str, title: str, label: str, *, has_names: bool) -> dict[str, Any]:
        y: dict[str, Any] = {"field": "rung", "type": "nominal", "sort": order, "title": None}
        y["axis"] = {"labelLimit": 260, "domain": False, "ticks": False} if has_names else None
        encoding = {
            "y": y,
            "yOffset": {"field": "of", "sort": [_OURS, _PUBLISHED]},
            "x": {"field": field, "type": "quantitative", "axis": {"title": title, "format": "~s", "tickCount": 4}},
        }
        colour = {"field": "of", "scale": {"domain": list(_COLOURS), "range": list(_COLOURS.values())}, "title": None}
        bar = {
            "mark": {"type": "bar", "cornerRadiusEnd": 2},
            "encoding": {"color": {**colour, "legend": {"orient": "top", "columnPadding": 40, "labelFontSize": 12}}},
        }
        text = {
            "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 11, "color": "#444"},
            "encoding": {"text": {"field": field, "type": "quantitative", "format": label}},
        }
        return {"width": 300, "height": {"step": 15}, "encoding": encoding, "layer": [bar, text]}

    return {
        "data": {"values": list(values)},
        "hconcat": [
            bars("rate", "tokens/s per GPU", ",.0f", has_names=True),
            bars("memory", "peak memory, GiB", ".0f", has_names=False),
        ],
        "background": "white",
        "padding": {"left": 30, "right": 20, "top": 14, "bottom": 14},
        "config": {
            "font": "Helvetica, Arial, sans-serif",
            "view": {"stroke": None},
            "axis": {"labelFontSize": 12, "gridColor": "#eee"},
        },
    }
