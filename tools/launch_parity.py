"""Whether one kind of launch measures what another does: both in turns on all GPUs of the run, spec by spec.

    python -m tools.launch_parity --by start --pairs 8 --gpus 1 SPEC... [--json FILE] [--seconds 500]

By start: warm over cold. By trace: with traced steps after the timed ones, over without. By overlap: begun behind the
end of another, over not; then a turn launches all specs in a row, each time another one first, which follows none and
is left out. By way: the same training as a script (``tools/bare_trainer.py``), over as the plugin's own recipe. No pair
begins that could end later than after so many seconds, and each is in FILE as soon as it is over, also where a launch
fails: then its spec is left, and said. SPEC is an id of a stored case, or
``key=value`` pairs joined by commas. For each it tells the ratio of rates with its 95 % interval, the spread of each
kind's launches, whether reserved bytes, the first loss and the evidence were the same in all launches, how far later
losses are apart, and the seconds that are not training.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from pytest_llmperf.cli.asked_run import Terminal, named
from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.case import Caller, CaseTerms
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.options import Settings
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.runner import Runner, Turn
from pytest_llmperf.settings.spec import ScriptSpec, Spec
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text

BARE_TRAINER = Path(__file__).with_name("bare_trainer.py")

# Of each kind its name and the settings that make it; the first over the second.
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "start": {"warm": {"start": "warm"}, "cold": {"start": "cold"}},
    "trace": {"traced": {"trace": True}, "untraced": {"trace": False}},
    "overlap": {"overlapped": {"overlap": True}, "apart": {"overlap": False}},
    "way": {"script": {}, "recipe": {}},
}


def runner(setting: dict[str, Any], arguments: argparse.Namespace) -> tuple[Run, Runner]:
    """One that launches so, and no other way."""
    settings = Settings(
        gpus=arguments.gpus, baselines=arguments.baselines, timeout_seconds=arguments.timeout, **setting
    )
    context = Run(settings, rootdir=Path.cwd())
    caller = Caller(
        run=context, terms=CaseTerms(), findings=Findings(), observer=Terminal(), nodeid="tools/launch_parity.py"
    )
    return context, Runner(caller)


def as_script(spec: Spec, words: str) -> Spec:
    """The script that trains what these words name."""
    ranks = max(spec.gpus, 1)
    command = f"torchrun --nproc-per-node {ranks} {BARE_TRAINER} {' '.join(words.split(','))}"
    return ScriptSpec(command=command, steps=min(spec.steps, 30), warmup_steps=spec.warmup_steps)


def in_turns(
    specs: Sequence[Spec], scripts: Mapping[str, Spec], runners: dict[str, Runner], pairs: int, until: float
) -> Iterator[tuple[Spec, dict[str, Launch]]]:
    """Pairs, each of its spec; every second time the other kind begins. None ends after ``until``, as far as can be
    foreseen."""
    longest = 0.0
    for number in range(1, pairs + 1):
        begun = time.monotonic()
        if begun + longest > until:
            return
        first = number % len(specs)
        row = [*specs[first:], *specs[:first]]
        made: list[dict[str, Launch]] = [{} for _ in row]
        for kind in runners if number % 2 else reversed(runners):
            for spec, pair in zip(row, made, strict=True):
                wanted = scripts[spec.id] if kind == "script" else spec
                outcome = runners[kind].launch(wanted, number, Turn(sides=2, side=kind))
                if isinstance(outcome, Failure):
                    sys.stdout.write(f"{spec.id} {kind}: {outcome.reason}\n" + "\n".join(outcome.tail) + "\n")
                    return
                pair[kind] = outcome
        yield from [*zip(row, made, strict=True)][len(row) > 1 :]
        longest = max(longest, time.monotonic() - begun)


def compared(spec: Spec, pairs: Sequence[dict[str, Launch]]) -> dict[str, Any]:
    """What the pairs say."""
    one, other = next(tuple(kinds) for kinds in KINDS.values() if kinds.keys() == pairs[0].keys())
    logs = [math.log(pair[other].median_step_seconds / pair[one].median_step_seconds) for pair in pairs]
    middle, error = fmean(logs), (stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf)
    wide = quantile(0.975, len(logs) - 1) * error if len(logs) > 1 else math.inf
    launches = {kind: [pair[kind] for pair in pairs] for kind in (one, other)}
    everything = [launch for side in launches.values() for launch in side]
    steps = min(len(launch.losses) for launch in everything)
    return {
        "spec": spec.id,
        "pairs": len(pairs),
        "ratio": math.exp(middle),
        "interval": [math.exp(middle - wide), math.exp(middle + wide)],
        "spread": {kind: _spread(side) for kind, side in launches.items()},
        "reserved_bytes": sorted({launch.peak_reserved_bytes for launch in everything}),
        "allocated_bytes": sorted({launch.peak_allocated_bytes for launch in everything}),
        "counts_are_the_same": len({_counts(launch) for launch in everything if launch.trace}) <= 1,
        "first_loss_is_the_same": len({launch.losses[0] for launch in everything}) == 1,
        "losses_apart": {
            f"{one} and {other}": _apart(launches[one], launches[other], steps),
            f"{other} and {other}": _apart(launches[other], launches[other], steps),
        },
        "evidence_is_the_same": len({_evidence(launch) for launch in everything}) == 1,
        "not_training_seconds": {
            kind: median(launch.wall_seconds - launch.train_seconds for launch in side)
            for kind, side in launches.items()
        },
        "first_step_seconds": {
            kind: median(launch.first_step_seconds for launch in side) for kind, side in launches.items()
        },
    }


def _spread(launches: Sequence[Launch]) -> float:
    return stdev([math.log(launch.median_step_seconds) for launch in launches]) if len(launches) > 1 else math.nan


def _apart(some: Sequence[Launch], others: Sequence[Launch], steps: int) -> float:
    """The largest difference of a loss at any step, over all pairs of two launches."""
    pairs = [(a, b) for a in some for b in others if a is not b]
    return max((abs(a.losses[at] - b.losses[at]) for a, b in pairs for at in range(steps)), default=0.0)


def _counts(launch: Launch) -> tuple[tuple[str, str, float], ...]:
    """Of a step, but for what the allocator asks of the driver, which comes and goes."""
    return tuple((row.kind, row.name, row.count) for row in launch.trace.rows if row.kind != "allocation")


def _evidence(launch: Launch) -> str:
    kept = {name: value for name, value in launch.evidence.items() if name != "start"}
    return json.dumps(kept, sort_keys=True, default=str)


def main(words: Sequence[str]) -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument("--by", choices=[*KINDS], default="start")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--baselines", type=Path, default=Path("baselines"))
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_args(words)
    made = {kind: runner(setting, arguments) for kind, setting in KINDS[arguments.by].items()}
    until = time.monotonic() + arguments.seconds
    found: dict[str, dict[str, Any]] = {}
    records: list[dict[str, Any]] = []
    try:
        asked = {
            one.spec.id: (one.spec, word)
            for word in arguments.specs
            for one in named(word.split(","), arguments.baselines, None)
        }
        specs = [spec for spec, _ in asked.values()]
        scripts = {name: as_script(spec, word) for name, (spec, word) in asked.items() if arguments.by == "way"}
        runners = {kind: each for kind, (_, each) in made.items()}
        pairs: dict[str, list[dict[str, Launch]]] = {spec.id: [] for spec in specs}
        for row in [specs] if arguments.by == "overlap" else [[spec] for spec in specs]:
            for spec, pair in in_turns(row, scripts, runners, arguments.pairs, until):
                pairs[spec.id].append(pair)
                found[spec.id] = compared(spec, pairs[spec.id])
                records.append({kind: codec.plain(launch) for kind, launch in pair.items()})
                if arguments.json:
                    text = json.dumps({"compared": [*found.values()], "launches": records})
                    write_text(arguments.json, text, lasts=True)
            for spec in row:
                sys.stdout.write(json.dumps(found.get(spec.id, f"{spec.id}: no time was left"), indent=1) + "\n")
            sys.stdout.flush()
    finally:
        for context, _ in made.values():
            context.close()


if __name__ == "__main__":
    main(sys.argv[1:])
