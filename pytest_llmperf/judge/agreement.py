"""Agreement: whether the parts of a baseline's file, which somebody may have edited, still belong together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llmperf.judge.document import Accepted
from pytest_llmperf.measurement import Launch
from pytest_llmperf.spec import SpecError, TrainSpec

# A file keeps six digits, of both sides.
_ROUNDED = 2e-5


def same_settings(document: Mapping[str, Any]) -> None:
    """That the spec in a file is the one that its digest is of; a model's own file may be gone, or another by now.

    Raises:
        ValueError: it is not.
    """
    try:
        spec = TrainSpec.from_dict(document["spec"])
    except SpecError:
        return
    if "/" not in spec.model and spec.digest != document["digest"]:
        raise ValueError(f"its spec ({spec.id}) is of other settings than its digest")


def same_figures(launches: Sequence[Launch], history: Sequence[Accepted]) -> None:
    """That what was accepted lies among what its launches hold: raw values may have been edited since.

    Raises:
        ValueError: it does not.
    """
    rest = list(launches)
    for entry in reversed(history):
        if not 0 < entry.launches <= len(rest):
            return  # of older ones, some or all are gone
        rest, own = rest[: -entry.launches], rest[-entry.launches :]
        raw: dict[str, Sequence[float]] = {
            "step_seconds": [step for launch in own for step in launch.step_seconds[launch.warmup_steps :]],
            "peak_reserved_bytes": [launch.peak_reserved_bytes for launch in own],
        }
        for name, values in raw.items():
            accepted = entry.metrics.get(name, values[0])
            if not min(values) * (1 - _ROUNDED) <= accepted <= max(values) * (1 + _ROUNDED):
                raise ValueError(f"its launches do not hold the {name} that was accepted on {entry.recorded_at[:10]}")
