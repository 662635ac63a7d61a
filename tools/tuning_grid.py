"""Every configuration of a space launched once, and searches of it replayed from that, in many random orders.

``python -m tools.tuning_grid measure MODEL SPACE.toml OUT.jsonl [--gpus N] [--seconds S]`` launches, and goes on where
it was ended; ``count SPACE.toml OUT.jsonl GPU`` adds to each what can be counted of it on that GPU. What they leave is
searched by ``tools.tuning_replay``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.asked_run import Terminal
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.run.case import Caller, CaseTerms
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.search_store import TrialStore
from pytest_llmperf.run.settings import Settings
from pytest_llmperf.run.tuning.forecast import StepPredictions, counted_prior
from pytest_llmperf.run.tuning.trials import Trials
from pytest_llmperf.settings.space import Space, read_axes
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text


@dataclass(frozen=True)
class Measured:
    """A configuration and its only trial."""

    spec: TrainSpec
    trial: Trial
    counted: float | None = None
    """Logarithm of its seconds for a token as far as these can be counted, up to a constant of the grid."""


def read(path: Path) -> list[Measured]:
    """A measured grid."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Measured(TrainSpec.from_dict(row["spec"]), codec.read(Trial, row["trial"]), row.get("counted")) for row in rows
    ]


def _usual(spec: TrainSpec) -> Mapping[str, Any]:
    """What of it is not at its default: a line of a grid is read by people too."""
    usual = TrainSpec(model=spec.model).to_dict()
    return {name: value for name, value in spec.to_dict().items() if name == "model" or value != usual[name]}


def _line(row: Measured) -> str:
    counted = {} if row.counted is None else {"counted": round(row.counted, 6)}
    return json.dumps({"spec": _usual(row.spec), "trial": codec.plain(row.trial), **counted}) + "\n"


def count(space: Path, out: Path, gpu: str) -> Iterator[str]:
    """Add to each row of ``out`` what can be counted of it."""
    rows, predictions = read(out), StepPredictions()
    try:
        specs = [row.spec for row in rows]
        counted = counted_prior(Space(specs[0], read_axes(space)), specs, predictions, gpu)
    finally:
        predictions.close()
    if counted is None:
        yield "nothing can be counted here"
        return
    lines = (_line(replace(row, counted=log)) for row, log in zip(rows, counted, strict=True))
    write_text(out, "".join(lines))
    yield f"{len(rows)} counted"


def measure(model: str, space: Path, out: Path, gpus: int | None, seconds: float) -> Iterator[str]:
    """Launch what ``out`` does not have yet; a line each."""
    known = {one.spec for one in read(out)} if out.exists() else set[TrainSpec]()
    context = Run(
        Settings(gpus=gpus, baselines=Path("baselines").absolute(), timeout_seconds=120.0, calibration=False),
        rootdir=Path.cwd(),
    )
    length = 64 if context.on_cpu else 1024
    candidates = Space(TrainSpec(model=model, sequence_length=length), read_axes(space)).candidates()
    yield f"{len(candidates.specs)} configurations, {sum(candidates.refused.values())} cannot be"
    caller = Caller(
        run=context, terms=CaseTerms(), findings=Findings(), observer=Terminal(), nodeid="tools.tuning_grid"
    )
    context.begin(candidates.specs[:1])
    context.until = until = time.monotonic() + seconds
    trials = Trials(caller, TrialStore(f"grid-{context.machine_kind}"))
    try:
        for spec in candidates.specs:
            if spec in known or time.monotonic() > until:
                continue
            trial = trials.make(spec)
            if time.monotonic() > until and not trial.is_measured:
                continue
            with out.open("a", encoding="utf-8") as file:
                file.write(_line(Measured(spec, trial)))
            rate = f"{trial.tokens_per_second_per_gpu:,.0f} tokens/s/GPU" if trial.is_measured else trial.failure
            yield f"{trial.wall_seconds:6.1f} s  {spec.id}  {rate}"
    finally:
        context.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rooms = parser.add_subparsers(required=True, dest="what")
    one = rooms.add_parser("measure")
    one.add_argument("model")
    one.add_argument("space", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--gpus", type=int)
    one.add_argument("--seconds", type=float, default=3600.0)
    two = rooms.add_parser("count")
    two.add_argument("space", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("gpu")
    arguments = parser.parse_args(argv)
    if arguments.what == "count":
        lines = count(arguments.space, arguments.out, arguments.gpu)
    else:
        lines = measure(arguments.model, arguments.space, arguments.out, arguments.gpus, arguments.seconds)
    for line in lines:
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
