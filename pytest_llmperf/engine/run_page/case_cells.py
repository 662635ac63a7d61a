"""Cells: the columns of the table of cases, of which those are shown that any case has a figure for. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pytest_llmperf.engine.run_page.change_charts import detectable_words
from pytest_llmperf.engine.run_page.run_document import Result, RunDocument
from pytest_llmperf.engine.run_page.stored_figures import MEMORY, RATE
from pytest_llmperf.report.page.page_model import Cell
from pytest_llmperf.support import formats

#: The heading of the column that is there where several runs are.
RUN = "run"

_PREDICTED = "predicted_peak_bytes"


def headings(documents: Sequence[RunDocument]) -> tuple[str, ...]:
    """After case and verdict."""
    results = [result for document in documents for result in document.results]
    told = [
        name for name, cell in _CELLS.items() if any(cell(one).text not in (formats.ABSENT, "0") for one in results)
    ]
    return (*((RUN,) if len(documents) > 1 else ()), *told)


def cells(document: RunDocument, result: Result, names: Sequence[str]) -> tuple[Cell, ...]:
    """Of one case, in the columns of these ``names``."""
    return tuple(
        Cell(text=document.source or document.machine) if name == RUN else _CELLS[name](result) for name in names
    )


def _value(metric: str) -> Callable[[Result], Cell]:
    def cell(result: Result) -> Cell:
        figure = result.figure(metric)
        is_size = figure.unit == "bytes"
        text = formats.memory(figure.value) if is_size else formats.figure(metric, figure.value, figure.unit)
        return _cell(text, figure.value)

    return cell


def _change(metric: str) -> Callable[[Result], Cell]:
    def cell(result: Result) -> Cell:
        change = result.figure(metric).change
        return _cell(formats.percent(change), change)

    return cell


def _detectable(result: Result) -> Cell:
    figure = result.figure(RATE)
    return _cell(detectable_words(figure), None if figure.times_slower else figure.detectable)


def _operators(result: Result) -> Cell:
    """Of a step that was told without a launch; of one that was traced its row opens to what moved."""
    is_static = result.figure(_PREDICTED).value is not None
    return _value("operators_per_step")(result) if is_static else _cell(formats.ABSENT, None)


def _launches(result: Result) -> Cell:
    return _cell(str(result.num_launches), float(result.num_launches))


def _cell(text: str, order: float | None) -> Cell:
    """What is absent comes first upwards and last downwards, apart from all figures."""
    return Cell(text=text, order=-math.inf if order is None else order)


_CELLS: Mapping[str, Callable[[Result], Cell]] = {
    "tokens/s/GPU": _value(RATE),
    "change": _change(RATE),
    "detectable": _detectable,
    "peak memory": _value(MEMORY),
    "memory change": _change(MEMORY),
    "MFU": _value("mfu"),
    "efficiency": _value("scaling_efficiency"),
    "operators": _operators,
    "arithmetic": _value("flops_per_step"),
    "predicted memory": _value(_PREDICTED),
    "launches": _launches,
}
