"""Both ladders of the committed baselines as one Vega-Lite specification: the chapter's, and fine-tuning's of eight
billion weights. Narrow and without axes, since a phone shows it at two thirds of its size: each bar has its figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perf_tests.fine_tuning import FINE_TUNING, FineTuning
from pytest_llmperf import TrainSpec
from pytest_llmperf.analysis.ladder import LADDERS, Rung
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.judge.gpu_knowledge import Knowledge
from pytest_llmperf.records.metrics import pooled_tokens_per_second
from pytest_llmperf.support.formats import GIB
from tools import fine_tuning

H200, H100 = "nvidia-h200-140gib", "nvidia-h100-80gb-hbm3-80gib"
_OURS, _PUBLISHED = "this project", "as published (H100 64 GB)"
#: As they are drawn, and what a reader with a dark page sees in their place.
_BLUE, _GREY, _TEXT, _QUIET, _WHITE = "#2a78d6", "#9aa3ad", "#1f2328", "#59636e", "#ffffff"
DARK = {_BLUE: "#3f8cf0", _GREY: "#6e7781", _TEXT: "#f0f6fc", _QUIET: "#b1bac4", _WHITE: "#0d1117"}
_NAMES, _BARS, _STEP, _FONT = 214, 150, 19, 16
_FONTS = "Helvetica, Arial, sans-serif"

Row = Mapping[str, Any]


def _row(name: str, of: str, rate: float, peak_bytes: float | None, times: float = 1.0) -> Row:
    within = f" ±{(times - 1) * 100:.1f} %" if times > 1.0 else ""
    memory = "" if peak_bytes is None else f", {peak_bytes / GIB:.0f} GiB"
    figures = f"{rate:,.0f}{within}{memory}"
    return {"name": name, "of": of, "rate": rate, "low": rate / times, "high": rate * times, "figures": figures}


def _ours(name: str, rate: float, stored: Baseline, knowledge: Knowledge) -> Row:
    peak = max(launch.peak_reserved_bytes for launch in stored.newest)
    return _row(name, _OURS, rate, peak, fine_tuning.times(stored.launches, knowledge))


def known(store: BaselineStore, machine: str) -> Knowledge:
    """How launches on it scatter. ValueError: too few are stored to say."""
    if found := Knowledge.of([each.launches for each in store.baselines(machine)]):
        return found
    raise ValueError(f"{machine}: too little is stored for an interval")


def chapter(rungs: Sequence[Rung], store: BaselineStore, machine: str) -> Iterable[Row]:
    """Of each rung that ran, what is stored and what was published."""
    knowledge = known(store, machine)
    for rung in rungs:
        spec, reference = rung.spec, rung.reference
        if (stored := store.load(machine, spec)) is None or rung.ran_out_of_memory:
            continue
        words = [spec.precision, spec.attention, "liger" if spec.liger else "", f"x {spec.micro_batch_size}"]
        name = f"{rung.number}  {' '.join(filter(None, words))}"
        yield _ours(name, pooled_tokens_per_second(stored.launches) / spec.gpus, stored, knowledge)
        if reference is not None and reference.tokens_per_second_per_gpu is not None:
            yield _row(name, _PUBLISHED, reference.tokens_per_second_per_gpu, reference.peak_reserved_bytes)


def tuned(cases: Sequence[FineTuning], store: BaselineStore, machine: str) -> Iterable[Row]:
    """Of each case that is stored."""
    knowledge = known(store, machine)
    for spec in (case.spec for case in cases):
        if stored := store.load(machine, spec):
            yield _ours(_trained(spec), fine_tuning.rate(spec, stored.launches), stored, knowledge)


def _trained(spec: TrainSpec) -> str:
    what = "full" if not spec.lora else "LoRA in 4 bits" if spec.lora_base == "nf4" else "LoRA"
    kept = "" if spec.gradient_checkpointing else ", all kept"
    return f"{what}{kept}, {spec.micro_batch_size} x {spec.sequence_length:,}"


def rows(store: BaselineStore) -> tuple[list[Row], list[Row]]:
    """Of the chapter's ladder, and of fine-tuning's."""
    large = [case for case in FINE_TUNING if case.spec.model == "llama-3.1-8b" and case.spec.gpus == 1]
    tuned_cases = sorted(large, key=lambda case: case.spec.sequence_length)
    return [*chapter(LADDERS[0], store, H200)], [*tuned(tuned_cases, store, H100)]


def both(store: BaselineStore) -> dict[str, Any]:
    """One below the other."""
    what = "tokens/s of one GPU with its 95 % interval, peak memory"
    titles = (
        ("Llama 3.2 1B: chapter 15 on one H200", [what, "x: sequences of 1,024 tokens a step"]),
        ("Llama 3.1 8B: fine-tuning on one H100", [what, "layers' activations are made again, or all are kept"]),
    )
    panels = [_panel(found, *title) for found, title in zip(rows(store), titles, strict=True)]
    return {
        "vconcat": panels,
        "spacing": 26,
        "resolve": {"legend": {"color": "independent"}, "scale": dict.fromkeys(("x", "y", "color"), "independent")},
        "background": _WHITE,
        "padding": {"left": 12, "right": 30, "top": 12, "bottom": 12},
        "config": {"font": _FONTS, "view": {"stroke": None}, "axis": {"labelColor": _TEXT, "labelFontSize": _FONT}},
    }


def _panel(rows: Sequence[Row], title: str, below: Sequence[str]) -> dict[str, Any]:
    drawn = [one for one in (_OURS, _PUBLISHED) if any(row["of"] == one for row in rows)]
    axis = {"domain": False, "ticks": False, "labelLimit": _NAMES, "minExtent": _NAMES, "maxExtent": _NAMES}
    most = max(row["high"] for row in rows)
    legend = {"orient": "top", "labelFontSize": _FONT, "labelColor": _TEXT, "labelLimit": 0, "columnPadding": 24}
    encoding: dict[str, Any] = {
        "y": {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": axis},
        "x": {"field": "rate", "type": "quantitative", "scale": {"domain": [0, most]}, "axis": None},
    }
    if len(drawn) > 1:
        encoding["yOffset"] = {"field": "of", "sort": drawn}
    colour = {"field": "of", "title": None, "scale": {"domain": drawn, "range": [_BLUE, _GREY][: len(drawn)]}}
    bar = {
        "mark": {"type": "bar", "cornerRadiusEnd": 2},
        "encoding": {"color": {**colour, "legend": legend if len(drawn) > 1 else None}},
    }
    within = {
        "transform": [{"filter": "datum.low < datum.rate"}],
        "mark": {"type": "rule", "strokeWidth": 2, "color": _TEXT},
        "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
    }
    text = {
        "mark": {"type": "text", "align": "left", "dx": 6, "fontSize": _FONT, "color": _QUIET},
        "encoding": {"text": {"field": "figures"}, "x": {"field": "high", "type": "quantitative"}},
    }
    heading = {"text": title, "fontSize": 18, "color": _TEXT, "anchor": "start", "frame": "bounds", "offset": 8}
    return {
        "data": {"values": list(rows)},
        "title": {**heading, "subtitle": below, "subtitleFontSize": _FONT, "subtitleColor": _QUIET},
        "width": _BARS,
        "height": {"step": _STEP if len(drawn) > 1 else _STEP + 8},
        "encoding": encoding,
        "layer": [bar, within, text],
    }


def with_dark(picture: str) -> str:
    """``picture`` whose colours change with the page's: of an image only its own style can know."""
    rules = "".join(
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}' for light, dark in DARK.items()
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    return re.sub(r"(<svg\b[^>]*>)", rf"\1{style}", picture, count=1)
