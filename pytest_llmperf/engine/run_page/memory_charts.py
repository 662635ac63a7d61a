"""Memory by part: predicted from fake tensors, as stored, beside what launches took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_llmperf.engine.run_page.run_document import Result
from pytest_llmperf.engine.run_page.stored_figures import MEMORY, StoredFigures
from pytest_llmperf.insight.memory_formulas import PARTS
from pytest_llmperf.report.page.page_model import Section, Stack, StackChart, Table
from pytest_llmperf.support import formats
from pytest_llmperf.support.units import GIB

_ALLOCATED = "peak_allocated_bytes"
_PREDICTED = "predicted_peak_bytes"
_MEASURED, _RESERVED = "measured: allocated", "measured: reserved"
# More are no picture.
_MOST_CASES = 12
_NEGLIGIBLE = 0.001


def memory_parts(result: Result, stored: StoredFigures) -> Mapping[str, int]:
    """Bytes at the predicted peak, by part; nothing where none are stored of this case."""
    baseline = stored.of(result.machine, result.text("digest"))
    if baseline is None or baseline.static is None:
        return {}
    parts = baseline.static.step.memory
    return {name: parts[name] for name in (*PARTS, *sorted({*parts} - {*PARTS})) if parts.get(name)}


def memory_table(result: Result, parts: Mapping[str, int]) -> Table | None:
    """Of one case; ``None`` where it has no figure of memory."""
    allocated, reserved = result.figure(_ALLOCATED).value, result.figure(MEMORY).value
    rows = [
        (f"{name}: {PARTS[name]}" if name in PARTS else name, formats.memory(size, 2)) for name, size in parts.items()
    ]
    total = result.figure(_PREDICTED).value or (float(sum(parts.values())) or None)
    told = (("predicted peak", total), ("measured peak, allocated", allocated), ("measured peak, reserved", reserved))
    rows += [(name, formats.memory(size, 2)) for name, size in told if size is not None]
    if total and allocated and result.values.get("launches"):
        rows.append(("prediction off by", formats.percent(total / allocated - 1)))
    return Table(headings=("part", "size"), rows=tuple(rows)) if rows else None


def memory_section(results: Sequence[Result], stored: StoredFigures) -> Section | None:
    """Of every case of which parts are stored; ``None`` where there is none."""
    told = [(result, parts) for result in results if (parts := memory_parts(result, stored))]
    if not told:
        return None
    shown = told[:_MOST_CASES]
    left = f"{len(told) - len(shown)} more: each case below opens to its own." if len(told) > len(shown) else ""
    names = [name for name in PARTS if any(parts.get(name) for _, parts in shown)]
    chart = StackChart(
        title="Predicted by part, and measured",
        says=f"Memory of {len(shown)} cases at the predicted peak, by part, beside what launches took.",
        axis="GiB",
        note=left,
        stacks=tuple(_stack(result, parts) for result, parts in shown),
        table=Table(
            headings=("case", *names, "predicted", "allocated", "reserved"),
            rows=tuple(
                (
                    result.id,
                    *(formats.memory(parts.get(name)) for name in names),
                    formats.memory(sum(parts.values())),
                    formats.memory(result.figure(_ALLOCATED).value),
                    formats.memory(result.figure(MEMORY).value),
                )
                for result, parts in shown
            ),
        ),
    )
    return Section(anchor="memory", title="Memory", charts=(chart,))


def _stack(result: Result, parts: Mapping[str, int]) -> Stack:
    total = sum(parts.values())
    marks = ((_MEASURED, result.figure(_ALLOCATED).value), (_RESERVED, result.figure(MEMORY).value))
    return Stack(
        label=result.id,
        told=formats.memory(total),
        parts=tuple((name, size / GIB) for name, size in parts.items() if size > _NEGLIGIBLE * total),
        marks=tuple((name, size / GIB) for name, size in marks if size is not None),
    )
