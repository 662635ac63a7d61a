"""Agreement: whether the parts of a baseline's file, which somebody may have edited, still belong together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean, median
from typing import Any

from pytest_llmperf.judge.baseline_file import Accepted
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec

# A file keeps six digits, of both sides.
_ROUNDED = 2e-5

# Steady states are looked for at so many places at most, as ``steady_state.py`` does.
_MOST_CUTS = 50


def same_settings(values: Mapping[str, Any], digest: str) -> None:
    """That the spec of these ``values`` is the one that the ``digest`` is of, else ValueError; a user's own file may be
    gone, or other by now."""
    try:
        spec = TrainSpec.from_dict(values)
    except SpecError:
        return
    is_ours = "/" not in spec.model and spec.text is None and spec.tokenizer is None
    if is_ours and spec.digest != digest:
        raise ValueError(f"its spec ({spec.id}) is of other settings than its digest")


def same_anchor(anchor: Accepted, history: Sequence[Accepted]) -> None:
    """That the anchor is the first acceptance, else ValueError."""
    first = history[0]
    apart = sorted(
        name
        for name in {*anchor.metrics, *first.metrics}
        if not _is_near(anchor.metrics.get(name, math.nan), first.metrics.get(name, math.nan))
    )
    apart += [name for name in ("recorded_at", "launches") if getattr(anchor, name) != getattr(first, name)]
    if apart:
        raise ValueError(f"its anchor is not the first of its history: {apart[0]} differs")


def same_figures(launches: Sequence[Launch], history: Sequence[Accepted]) -> None:
    """That what was accepted is what its launches hold, and that figures that follow from one another do; else
    ValueError.

    What only a version's own statistic gives (how a steady state is found) is held against what any could have given.
    """
    tokens, ranks = launches[0].tokens_per_step, len(launches[0].ranks)
    for entry in history:
        for line in _apart(entry.metrics, tokens, ranks):
            raise ValueError(f"{line} of {_day(entry)} do not belong together")
    rest = list(launches)
    for entry in reversed(history):
        if not 0 < entry.launches <= len(rest):
            return  # of older ones, some or all are gone
        rest, own = rest[: -entry.launches], rest[-entry.launches :]
        low, high = _step_seconds(own)
        missing = [] if low <= entry.metrics.get("step_seconds", low) <= high else ["step_seconds"]
        for name, row in METRICS.items():
            if row.is_raw and name in entry.metrics and not _is_near(entry.metrics[name], row.read(own)):
                missing.append(name)
        if missing:
            raise ValueError(f"its launches do not hold the {missing[0]} that was accepted on {_day(entry)}")


def _apart(metrics: Mapping[str, float], tokens: int, ranks: int) -> Iterator[str]:
    """Rates and times, of which each follows from the others."""
    whole, each, step = (
        metrics.get(name) for name in ("tokens_per_second", "tokens_per_second_per_gpu", "step_seconds")
    )
    if whole is not None and step is not None and not _is_near(whole * step, float(tokens)):
        yield f"tokens_per_second {whole:g} and step_seconds {step:g}"
    if whole is not None and each is not None and not _is_near(each * ranks, whole):
        yield f"tokens_per_second_per_gpu {each:g} and tokens_per_second {whole:g}"


def _step_seconds(launches: Sequence[Launch]) -> tuple[float, float]:
    """The least and the most that the pooled step time of ``launches`` can be, wherever steady states are seen."""
    spans = []
    for launch in launches:
        # Of every part that may be the steady one: at most half of the steps come before it.
        steps, first = launch.step_seconds, launch.warmup_steps
        last = max(first, len(steps) // 2)
        stride = 1 + (last - first) // _MOST_CUTS
        spans.append([median(steps[start:]) for start in range(first, last + 1, stride)])
    low, high = ([choose(span) for span in spans] for choose in (min, max))
    # Pooled by a mean of logarithms, a median of them, and once by a plain mean: none leaves these.
    ways = (fmean, median, geometric_mean)
    return min(way(low) for way in ways) * (1 - _ROUNDED), max(way(high) for way in ways) * (1 + _ROUNDED)


def _is_near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_ROUNDED)


def _day(entry: Accepted) -> str:
    return entry.recorded_at[:10]
