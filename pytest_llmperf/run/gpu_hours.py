"""What a run costs: the GPU-hours of its launches, and each case's tokens in money. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pytest_llmperf.analysis.cost import Price, price_per_million, tokens_per_price
from pytest_llmperf.records.metrics import METRICS, RATE
from pytest_llmperf.records.result import CaseResult, Check
from pytest_llmperf.records.results_document import Planned

_HOUR = 3600


def priced(results: Sequence[CaseResult], price: Price | None) -> list[CaseResult]:
    """``results`` of GPUs with what their tokens cost; not when they are judged, since no baseline knows a price."""
    if price is None:
        return list(results)
    return [replace(result, checks=(*result.checks, *_costs(result, price))) for result in results]


def _costs(result: CaseResult, price: Price) -> tuple[Check, ...]:
    rate = result.check(RATE)
    if rate is None or rate.value <= 0:
        return ()
    per_million, tokens = price_per_million(rate.value, price.gpu_hour), tokens_per_price(rate.value, price.gpu_hour)
    return (
        replace(METRICS["price_per_million_tokens"].check(per_million), unit=price.currency),
        Check(metric="tokens_per_price", value=tokens, unit=f"tokens/{price.currency}"),
    )


def cost_lines(gpu_seconds: float, price: Price | None) -> list[str]:
    """``0.42 GPU-hours in launches, 0.88 EUR at 2.10 EUR a GPU-hour``; nothing where no GPU was used."""
    if gpu_seconds <= 0:
        return []
    hours = gpu_seconds / _HOUR
    line = f"{hours:.3g} GPU-hours in launches"
    if price is not None:
        each = f"{price.gpu_hour:.2f} {price.currency} a GPU-hour"
        line += f", {hours * price.gpu_hour:.2f} {price.currency} at {each}"
    return [line]


def cost_document(gpu_seconds: float, price: Price | None) -> dict[str, Any]:
    """The same for ``--perf-json``: its key ``cost``, or nothing."""
    if gpu_seconds <= 0:
        return {}
    hours = gpu_seconds / _HOUR
    cost: dict[str, Any] = {"gpu_hours": hours}
    if price is not None:
        cost |= {"gpu_hour": price.gpu_hour, "currency": price.currency, "total": hours * price.gpu_hour}
    return {"cost": cost}


def planned_gpu_seconds(planned: Sequence[Planned]) -> float:
    """Of what would run, as far as baselines know how long it takes."""
    return sum((case.seconds or 0.0) * case.gpus for case in planned if not case.skipped)
