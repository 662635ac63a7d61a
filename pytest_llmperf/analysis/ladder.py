"""A ladder of optimisations, or of GPU counts: what each rung brings. Pure."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.records.result import Reference
from pytest_llmperf.settings.train_spec import TrainSpec, precision_fields
from pytest_llmperf.support.formats import GIB


@dataclass(frozen=True)
class Rung:
    """One row of a published table."""

    number: str
    """The table it is of."""
    spec: TrainSpec
    reference: Reference | None = None

    @property
    def published_rate(self) -> float | None:
        """Tokens/s per GPU; ``None`` where none was published."""
        return self.reference.tokens_per_second_per_gpu if self.reference else None

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the publication says so: a trial that shows the limit, and no step of the ladder."""
        return self.reference is not None and self.reference.tokens_per_second_per_gpu is None


@dataclass(frozen=True)
class Gain:
    """What a rung brings over the step before it, and over the first: ratios of rates; ``None``: one is not known."""

    over_previous: float | None
    over_first: float | None


def gains(rungs: Sequence[Rung], rates: Sequence[float | None]) -> list[Gain]:
    """The gain of each rung by its rate; a trial that ran out of memory is nothing to climb from."""
    found = []
    previous, first = None, rates[0] if rates else None
    for index, (rung, rate) in enumerate(zip(rungs, rates, strict=True)):
        found.append(Gain(_ratio(rate, previous) if index else None, _ratio(rate, first)))
        if not rung.ran_out_of_memory:
            previous = rate
    return found


def _ratio(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate and other else None


@dataclass(frozen=True)
class Width:
    """One training on so many GPUs, each with the same work, against one GPU."""

    gpus: int
    rate: float | None
    """Tokens/s per GPU; ``None`` where it is not known."""
    rate_of_one: float | None
    """The same on one GPU."""
    memory_bytes: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.rate is None else self.rate * self.gpus

    @property
    def speed_up(self) -> float | None:
        return None if self.efficiency is None else self.efficiency * self.gpus

    @property
    def efficiency(self) -> float | None:
        """Speed-up over the number of GPUs, a fraction; at a constant price of a GPU-hour the cost efficiency too."""
        return _ratio(self.rate, self.rate_of_one)


# Chapter 15 as data, as published: the rungs of tables 15.1 to 15.9, the widths of 15.10 to 15.12, for both models.

CHAPTER = "chapter 15, MareNostrum 5 (H100 64 GB)"
LAB = "lab 10, MareNostrum 5 (H100 64 GB)"
#: Steps of each published run.
STEPS = 450

#: What makes the published figures and ours differ besides the machine.
NOTES = (
    "published: steps x batch x length / train_runtime, the first step included; ours: the median steady step",
    "published fp32 may use TF32, which that container allows; ours is true fp32",
)

_SOURCES = {"chapter": CHAPTER, "lab": LAB}


def _rungs(model: str, *, widths: bool = False) -> tuple[Rung, ...]:
    """Those of ``chapter.csv``. The chapter's tables are Llama's; the slides of the lab publish OPT's first rung, its
    best one and 32 GPUs: the steps between are the chapter's, with batches of ours."""
    found = []
    for row in csv.DictReader(Path(__file__).with_name("chapter.csv").read_text(encoding="utf-8").splitlines()):
        if row["model"] != model or (row["table"] == "15.10") is not widths:
            continue
        own = precision_fields(row["precision"]) | {"gpus": int(row["gpus"]), "micro_batch_size": int(row["batch"])}
        spec = TrainSpec(model=model, attention=row["attention"], liger=bool(row["liger"]), **own)
        rate, gib = row["tokens_per_second_per_gpu"], row["peak_reserved_gib"]
        reference = Reference(
            source=_SOURCES.get(row["source"], ""),
            tokens_per_second_per_gpu=None if rate in ("", "out of memory") else json.loads(rate),
            peak_reserved_bytes=float(gib) * GIB if gib else None,
        )
        found.append(Rung(row["table"], spec, reference if rate else None))
    return tuple(found)


LLAMA, OPT = _rungs("llama-3.2-1b"), _rungs("opt-1.3b")
LADDERS = (LLAMA, OPT)
LLAMA_WIDTHS, OPT_WIDTHS = _rungs("llama-3.2-1b", widths=True), _rungs("opt-1.3b", widths=True)
#: GPUs of tables 15.10 to 15.12.
WIDTHS = tuple(rung.spec.gpus for rung in LLAMA_WIDTHS)
SCALINGS = (LLAMA_WIDTHS, OPT_WIDTHS)
