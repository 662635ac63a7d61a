"""Vega-Lite's specifications as SVG, by the process that draws the page's charts too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llmperf.report.page import svgs


def drawn(specifications: Sequence[Mapping[str, Any]]) -> list[str]:
    """SVG of each."""
    pictures = svgs(specifications)
    if len(pictures) != len(specifications):
        raise ValueError("Vega-Lite could not draw them; vl_convert of the extra 'page' does")
    return pictures
