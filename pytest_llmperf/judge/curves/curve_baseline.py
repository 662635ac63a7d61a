"""CurveBaseline: the losses of several seeds of one spec, and who accepted them when. Its JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_llmperf.judge.baseline_file import SCHEMA, BaselineError, dump, parse, refusing
from pytest_llmperf.judge.curves.curve_verdict import FEWEST_SEEDS
from pytest_llmperf.judge.curves.loss_parts import FEWEST_STEPS
from pytest_llmperf.judge.integrity import same_settings
from pytest_llmperf.support.json_fields import fields_of

#: In place of a machine kind: losses are none of a machine's, to within rounding.
LOSS_CURVES = "loss-curves"


@dataclass(frozen=True, kw_only=True)
class SeedCurve:
    """One training."""

    seed: int
    losses: tuple[float, ...]
    """Of each step, in nats a token, as rank 0 printed it."""


@dataclass(frozen=True, kw_only=True)
class CurveBaseline:
    """What the loss curve of a spec is held against."""

    id: str
    digest: str
    spec: Mapping[str, Any]
    recorded_by: str
    recorded_at: str
    """UTC, ISO 8601."""
    curves: tuple[SeedCurve, ...]
    """The spec's own seed first."""
    reason: str = ""
    revision: str = ""
    """Commit of the tree that trained; empty where there is none."""
    device: str = ""
    """What they were trained on."""
    versions: Mapping[str, str] = field(default_factory=dict)
    on_cpu: bool = False
    """Whether a run of the cases for the CPU recorded them: one of those for GPUs asks for others."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(curve.seed for curve in self.curves)

    @property
    def steps(self) -> int:
        return len(self.curves[0].losses)

    @property
    def losses(self) -> dict[int, tuple[float, ...]]:
        """By seed, in their order."""
        return {curve.seed: curve.losses for curve in self.curves}

    def to_json(self) -> str:
        """As other baselines are written."""
        values = {**asdict(self), "schema": SCHEMA, "machine": LOSS_CURVES}
        return dump({name: value for name, value in values.items() if value not in ("", False)})

    @classmethod
    def from_json(cls, text: str, source: str) -> CurveBaseline:
        """The curves in ``text``; ``source`` names it in errors.

        Raises:
            BaselineError: empty, truncated, of a newer schema, or of something else.
        """
        document = parse(text, source)
        with refusing(source, "loss curves"):
            if document["machine"] != LOSS_CURVES:
                raise BaselineError(f"{source}: it is of machine {document['machine']}, expected {LOSS_CURVES}")
            same_settings(document)
            own = {name: value for name, value in document.items() if name not in ("schema", "machine")}
            values = fields_of(cls, own, "it")
            curves = tuple(_curve(curve) for curve in values["curves"])
            _check(curves)
            return cls(**{**values, "spec": dict(values["spec"]), "curves": curves})


def _curve(values: object) -> SeedCurve:
    curve = SeedCurve(**fields_of(SeedCurve, values, "a curve"))
    return SeedCurve(seed=curve.seed, losses=tuple(map(float, curve.losses)))


def _check(curves: Sequence[SeedCurve]) -> None:
    """That they can be computed with.

    Raises:
        ValueError: they cannot.
    """
    seeds = [curve.seed for curve in curves]
    if len(set(seeds)) < max(len(seeds), FEWEST_SEEDS):
        raise ValueError(f"its seeds are {', '.join(map(str, seeds)) or 'none'}, expected {FEWEST_SEEDS} or more")
    lengths = sorted({len(curve.losses) for curve in curves})
    if len(lengths) > 1 or lengths[0] < FEWEST_STEPS:
        raise ValueError(
            f"its curves are of {', '.join(map(str, lengths))} steps, expected the same {FEWEST_STEPS} or more"
        )
    if not all(math.isfinite(loss) for curve in curves for loss in curve.losses):
        raise ValueError("a loss is no number")
