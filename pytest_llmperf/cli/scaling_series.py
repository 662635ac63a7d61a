"""Series: one training at several numbers of GPUs, as it is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from pytest_llmperf.cli.baseline_figures import RATE, figure
from pytest_llmperf.cli.baseline_folder import Shelf, Stored
from pytest_llmperf.cli.command_error import CaseError
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.spec.train_spec import TrainSpec


@dataclass(frozen=True)
class Series:
    """Baselines of one machine kind that differ in nothing but their GPUs."""

    spec: TrainSpec
    """Of the narrowest."""
    baselines: Mapping[int, Baseline]

    @property
    def name(self) -> str:
        """The id that they share."""
        return self.spec.id.removesuffix(f"-gpus{self.spec.gpus}")

    @property
    def machine(self) -> str:
        return next(iter(self.baselines.values())).machine

    @property
    def rates(self) -> dict[int, float]:
        """Tokens/s per GPU by number of GPUs."""
        return {gpus: figure(one, RATE) for gpus, one in self.baselines.items()}

    @property
    def parameters(self) -> int:
        """As the newest launch counted them."""
        return max(self._launches, key=lambda launch: launch.started_at).parameters

    @property
    def gpus_per_node(self) -> int | None:
        """As launches over several hosts show it; ``None`` where all ran on one."""
        hosts = [Counter((rank.host, rank.boot) for rank in launch.ranks) for launch in self._launches]
        return max((max(ranks.values()) for ranks in hosts if len(ranks) > 1), default=None)

    @property
    def _launches(self) -> list[Launch]:
        return [launch for one in self.baselines.values() for launch in one.launches]


def power_watts(baseline: Baseline) -> float | None:
    """Mean power of all its GPUs; ``None`` where no launch knows it."""
    watts = [launch.health.power_watts for launch in baseline.launches if launch.health.power_watts > 0]
    return fmean(watts) if watts else None


def all_series(shelf: Shelf) -> list[Series]:
    """Everything stored, sorted by id, but what is no training or has settings that are none of today's."""
    found: dict[tuple[Any, ...], dict[TrainSpec, Baseline]] = {}
    for stored in shelf.stored:
        spec = _trained(stored)
        if spec is not None:
            found.setdefault((stored.baseline.machine, *_work(spec)), {})[spec] = stored.baseline
    series = []
    for group in found.values():
        ordered = sorted(group, key=lambda spec: spec.gpus)
        series.append(Series(ordered[0], {spec.gpus: group[spec] for spec in ordered}))
    return sorted(series, key=lambda one: one.name)


def series_of(spec: TrainSpec, shelf: Shelf) -> Series:
    """The one with this work.

    Raises:
        CaseError: nothing is stored of it, or on several machine kinds.
    """
    same = [one for one in all_series(shelf) if _work(one.spec) == _work(spec)]
    if not same:
        raise CaseError(
            f"{spec.id}: no baseline of this training in {shelf.root}, whatever its GPUs; "
            "record some with --update-baselines=new, or give --points GPUS:TOKENS_PER_SECOND_PER_GPU,…"
        )
    if len(same) > 1:
        raise CaseError(f"{spec.id}: stored of {len(same)} machine kinds, expected one; choose with --machine")
    return same[0]


def _trained(stored: Stored) -> TrainSpec | None:
    try:
        spec = TrainSpec.from_dict(stored.baseline.spec)
    except (TypeError, ValueError):
        return None
    # A baseline of capacity has the digest of a search.
    return spec if spec.digest == stored.baseline.digest else None


def _work(spec: TrainSpec) -> tuple[Any, ...]:
    """All that decides the work of one GPU."""
    return tuple(
        getattr(spec, one.name) for one in fields(spec) if one.metadata.get("work", True) and one.name != "gpus"
    )
