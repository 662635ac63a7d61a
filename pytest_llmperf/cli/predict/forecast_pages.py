"""``llmperf predict``: how fast more GPUs will train than were measured, how sure that is, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pytest_llmperf.cli.predict.forecast import Outlook
from pytest_llmperf.cli.screen import Screen, table
from pytest_llmperf.insight import scaling_model
from pytest_llmperf.report.exports import comma_separated, escaped, markdown
from pytest_llmperf.report.table import Column
from pytest_llmperf.support import formats

_BILLION = 1e9


def columns(found: Outlook) -> list[Column]:
    """A line for each number of GPUs."""
    rows = found.rows
    return [
        Column("GPUs", [f"{row.gpus}" for row in rows]),
        Column("nodes", [f"{row.nodes}" for row in rows]),
        Column("tokens/s/GPU", [formats.tokens_per_second(row.rate) for row in rows]),
        Column(
            f"{scaling_model.CONFIDENCE:.0%} from".replace("%", " %"), [formats.tokens_per_second(r.low) for r in rows]
        ),
        Column("to", [formats.tokens_per_second(row.high) for row in rows]),
        Column("efficiency", [formats.share(row.efficiency) for row in rows]),
        Column("tokens/s", [formats.tokens_per_second(row.rate * row.gpus) for row in rows]),
        Column("step", [_milliseconds(row.step_seconds) for row in rows]),
        Column("all-reduce", [_milliseconds(row.all_reduce_seconds) for row in rows]),
        Column("exposed", [_milliseconds(row.exposed_seconds) for row in rows]),
        Column("by", [row.algorithm if row.gpus > 1 else formats.ABSENT for row in rows], right=False),
        Column("measured", [formats.tokens_per_second(found.points.get(row.gpus)) for row in rows]),
        Column("error", [formats.percent(found.error(row)) for row in rows]),
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


# How a coefficient is shown: a factor, and its unit.
_UNITS: Mapping[str, tuple[float, str]] = {
    "compute_seconds": (1e3, " ms"),
    "overhead_share": (100, " %"),
    "exposed_share": (100, " %"),
    "intra_node_bandwidth": (1 / _BILLION, " GB/s"),
    "inter_node_bandwidth": (1 / _BILLION, " GB/s"),
    "latency_factor": (1, ""),
    "straggling_share": (100, " %"),
}


def coefficient_columns(found: Outlook) -> list[Column]:
    """What was fitted, how far it may lie, and whether the points told anything of it."""
    known, fit = asdict(found.fit.coefficients), found.fit

    def shown(name: str, factor: float = 1.0) -> str:
        scale, unit = _UNITS[name]
        return f"{known[name] * factor * scale:.3g}{unit}"

    return [
        Column("coefficient", [name.replace("_", " ").removesuffix(" seconds") for name in known], right=False),
        Column("value", [shown(name) for name in known]),
        Column("one sd from", [shown(name, math.exp(-fit.spread(name))) for name in known]),
        Column("to", [shown(name, math.exp(fit.spread(name))) for name in known]),
        Column("by", ["the points" if fit.learned(name) else "belief" for name in known], right=False),
    ]


def text_page(found: Outlook, screen: Screen) -> list[str]:
    """For a terminal."""
    return [
        found.subject,
        *table(columns(found), screen),
        "",
        *table(coefficient_columns(found), screen),
        "",
        *found.notes,
    ]


def markdown_page(found: Outlook) -> list[str]:
    """For a document."""
    notes = [f"- {escaped(line)}" for line in found.notes]
    tables = [*markdown(columns(found)), "", *markdown(coefficient_columns(found))]
    return [f"## {escaped(found.subject)}", "", *tables, "", *notes]


def csv_page(found: Outlook) -> list[str]:
    """For programs: a line for each number of GPUs."""
    return comma_separated(_records(found))


def document(found: Outlook) -> dict[str, Any]:
    """The same and the fit, as JSON can hold it."""
    fit = found.fit
    return {
        "schema": 1,
        "subject": found.subject,
        "confidence": scaling_model.CONFIDENCE,
        "workload": asdict(fit.workload),
        "fitted_to": {str(gpus): rate for gpus, rate in sorted(fit.points.items())},
        "point_noise": fit.point_noise,
        "coefficients": {
            name: {"value": value, "sd_of_log": fit.spread(name), "learned": fit.learned(name)}
            for name, value in asdict(fit.coefficients).items()
        },
        "notes": list(found.notes),
        "predictions": _records(found),
    }


def _records(found: Outlook) -> list[dict[str, Any]]:
    return [
        {
            "gpus": row.gpus,
            "nodes": row.nodes,
            "algorithm": row.algorithm if row.gpus > 1 else None,
            "tokens_per_second_per_gpu": row.rate,
            "low": row.low,
            "high": row.high,
            "scaling_efficiency": row.efficiency,
            "tokens_per_second": row.rate * row.gpus,
            "step_seconds": row.step_seconds,
            "all_reduce_seconds": row.all_reduce_seconds,
            "exposed_seconds": row.exposed_seconds,
            "measured": found.points.get(row.gpus),
            "error": found.error(row),
        }
        for row in found.rows
    ]
