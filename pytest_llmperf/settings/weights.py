"""Weights: what a training begins from, and whether it saves what it came to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.settings.setting import Evidence, Setting, TrainSpec, equal

# numpy, which the Trainer seeds too, takes no larger one.
_SEEDS = 2**32

# Of a small spec the next ones are taken too.
_LAST_SMALL_SEED = _SEEDS - 64


def _problems(spec: TrainSpec) -> Iterator[str]:
    try:
        is_folder = spec.weights is None or bool(spec.weights and Path(spec.weights).is_dir())
    except OSError:  # too long a name, or a parent that may not be read
        is_folder = False
    if not is_folder:
        yield f"TrainSpec: weights={spec.weights!r} names no folder, expected one as save_pretrained writes it"


def _clash(spec: TrainSpec) -> str | None:
    return None if 0 <= spec.seed < _SEEDS else f"seed={spec.seed} must be at least 0 and below 2**32"


@dataclass(frozen=True)
class WeightsEvidence:
    """What was saved."""

    checkpoint_bytes: int | None = None
    """Of the checkpoint that the Trainer wrote; records of launches that wrote none do not tell."""


def _saved(spec: TrainSpec, evidence: Evidence) -> str | None:
    return equal("save_checkpoint", spec.save_checkpoint, bool(evidence.weights.checkpoint_bytes))


SETTING = Setting(
    name="weights",
    fields=("weights", "seed", "save_checkpoint"),
    in_id={"weights": "pretrained", "seed": "seed{}", "save_checkpoint": "saves"},
    problems=_problems,
    clash=_clash,
    small=lambda spec: {"weights": None, "save_checkpoint": False, "seed": min(spec.seed, _LAST_SMALL_SEED)},
    evidence=WeightsEvidence,
    checks={"save_checkpoint": _saved},
)
