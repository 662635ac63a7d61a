"""Configurations of a space launched once each, to be searched from that by ``tools.tuning_replay``.

``python -m tools.tuning_grid MODEL SPACE.toml OUT.jsonl [--gpus N] [--seconds S] [--most N] [--backwards]`` goes on
where it was ended. The space's own beginning comes first, the others in one random order, whatever is measured of them:
each fifth is one that spares memory for time. What does not fit by predicted memory is written down without a launch.
A second GPU measures the same order from its end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_llmperf.cli.asked_run import Terminal
from pytest_llmperf.judge.objective import Trial
from pytest_llmperf.records.result import Spent
from pytest_llmperf.run.case import Caller, CaseTerms
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.options import Settings
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.tuning.trials import Trials
from pytest_llmperf.run.tuning.tuner import MemoryForecast, field_of
from pytest_llmperf.settings.space import Space, read_axes
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec, formats

_SEED, _PLAIN, _LONGEST = 15, 4, 120.0
# What says nothing of a configuration, and is made again by the next call.
_OF_THE_HOST = frozenset({"killed", "never-started", "unwritable", "rendezvous", "node-failure"})


@dataclass(frozen=True)
class Measured:
    """A configuration and its only trial."""

    spec: TrainSpec
    trial: Trial
    phases: Mapping[str, float] = field(default_factory=dict)
    """What its seconds went to."""


def read(path: Path) -> list[Measured]:
    """A measured grid."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Measured(TrainSpec.from_dict(row["spec"]), codec.read(Trial, row["trial"], newer=True), row.get("phases", {}))
        for row in rows
    ]


def line(row: Measured) -> str:
    """What of it is not at its default: a line of a grid is read by people too."""
    spec, trial = row.spec.to_dict(), codec.plain(row.trial)
    usual, none = TrainSpec(model=row.spec.model).to_dict(), codec.plain(Trial(digest="", id="", wall_seconds=-1.0))
    said = {name: value for name, value in spec.items() if name == "model" or value != usual[name]}
    told = {"spec": said, "trial": {name: one for name, one in trial.items() if one != none[name]}}
    return json.dumps(told | {"phases": dict(row.phases)}) + "\n"


def in_order(specs: Sequence[TrainSpec], wastes: Sequence[float]) -> Iterator[TrainSpec]:
    """The first of all, and the others at random: of those that cost more to spare memory one after four others."""
    order = list(zip(specs, wastes, strict=True))
    rest = order[1:]
    random.Random(_SEED).shuffle(rest)  # noqa: S311 - the same space is measured in the same order
    plain, sparing = ([spec for spec, waste in rest if bool(waste) == spares] for spares in (False, True))
    yield order[0][0]
    while plain or sparing:
        yield from plain[:_PLAIN]
        yield from sparing[:1]
        del plain[:_PLAIN], sparing[:1]


def measure(asked: argparse.Namespace) -> Iterator[str]:
    """Launch those that its file does not have yet; a line each."""
    out: Path = asked.out
    known = {one.spec for one in read(out)} if out.exists() else set[TrainSpec]()
    context = Run(
        Settings(gpus=asked.gpus, baselines=Path("baselines").absolute(), timeout_seconds=_LONGEST, calibration=False),
        rootdir=Path.cwd(),
    )
    length = 64 if context.on_cpu else 1024
    found = Space(TrainSpec(model=asked.model, sequence_length=length, micro_batch_size=8), read_axes(asked.space))
    candidates = found.candidates()
    order = [*in_order(candidates.specs, field_of(found, candidates.specs).wastes)][: asked.most]
    if asked.backwards:
        order.reverse()
    order = [spec for spec in order if spec not in known]
    yield f"{len(candidates.specs)} configurations, {sum(candidates.refused.values())} cannot be, {len(order)} to do"
    if not order:
        return
    context.begin(order[:1])
    context.until = until = time.monotonic() + asked.seconds
    forecast = MemoryForecast(0 if context.on_cpu else context.memory_bytes)
    caller = Caller(
        run=context, terms=CaseTerms(), findings=Findings(), observer=Terminal(), nodeid="tools.tuning_grid"
    )
    trials = Trials(caller)
    try:
        large = [spec for spec in order if spec.micro_batch_size > candidates.specs[0].micro_batch_size]
        forecast.ask(large)  # beside the launches
        for spec in order:
            if time.monotonic() > until:
                break
            caller.findings.spent = Spent()
            if spec not in large or forecast.fits(spec):
                trial = trials.make(spec)
            else:
                why = f"{formats.memory(forecast.peaks[spec])} are predicted"
                trial = Trial(digest=spec.digest, id=spec.id, wall_seconds=0.0, failure=why, kind="oom")
            is_ended = time.monotonic() > until and not trial.is_measured
            if not is_ended and trial.kind not in _OF_THE_HOST:
                with out.open("a", encoding="utf-8") as file:
                    # A trial's seconds are without the wait for imports.
                    phases = {name: took for name, took in caller.findings.spent.phases.items() if name != "start"}
                    file.write(line(Measured(spec, trial, phases)))
            rate = f"{trial.tokens_per_second_per_gpu:,.0f} tokens/s/GPU" if trial.is_measured else trial.failure
            yield f"{trial.wall_seconds:6.1f} s  {spec.id}  {rate}"
    finally:
        forecast.process.close()
        context.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("space", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--most", type=int, help="so many of them; default: all")
    parser.add_argument("--backwards", action="store_true", help="from the order's end")
    for line in measure(parser.parse_args(argv)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
