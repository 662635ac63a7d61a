"""Every configuration of a space launched once, to be searched from that by ``tools.tuning_replay``.

``python -m tools.tuning_grid MODEL SPACE.toml OUT.jsonl [--gpus N] [--seconds S]`` goes on where it was ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.asked_run import Terminal
from pytest_llmperf.judge.tuning import Trial
from pytest_llmperf.run.case import Caller, CaseTerms
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.options import Settings
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.tuning.trials import Trials
from pytest_llmperf.settings.space import Space, read_axes
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec


@dataclass(frozen=True)
class Measured:
    """A configuration and its only trial."""

    spec: TrainSpec
    trial: Trial


def read(path: Path) -> list[Measured]:
    """A measured grid."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Measured(TrainSpec.from_dict(row["spec"]), codec.read(Trial, row["trial"], newer=True)) for row in rows]


def _usual(spec: TrainSpec) -> Mapping[str, Any]:
    """What of it is not at its default: a line of a grid is read by people too."""
    usual = TrainSpec(model=spec.model).to_dict()
    return {name: value for name, value in spec.to_dict().items() if name == "model" or value != usual[name]}


def _line(row: Measured) -> str:
    return json.dumps({"spec": _usual(row.spec), "trial": codec.plain(row.trial)}) + "\n"


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
    trials = Trials(caller)
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
    parser.add_argument("model")
    parser.add_argument("space", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--seconds", type=float, default=3600.0)
    one = parser.parse_args(argv)
    lines = measure(one.model, one.space, one.out, one.gpus, one.seconds)
    for line in lines:
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
