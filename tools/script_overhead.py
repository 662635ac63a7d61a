"""What the hook of a watched script costs, and how right its clock is: launches with it and without it, in turns.

    python -m tools.script_overhead --turns 3 -- python train.py
    python -m tools.script_overhead --size 700m --seconds 470   # all of tools/scripts that fit the GPUs here

A script prints ``llmperf-own SECONDS`` for each of its steps, from the first one on, by its own clock, and goes on for
three steps more than ``--steps``: these are traced. Without a command each of tools/scripts is run at ``--size``, as
long as there are ``--seconds`` left. Turns go with, without, without, with. A launch takes 15 to 30 s of a GPU at 700m,
so that all five take 8 minutes by two turns; what two launches with the hook share to the last digit is said, too.

To record the same scripts as cases, by two launches each, in 5 minutes more:

    LLMPERF_SCRIPTS_SIZE=700m pytest tools/scripts/recorded.py --perf-launches 2 --update-baselines \\
        --perf-baselines /tmp/baselines
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.machine import find_machine
from pytest_llmperf.launch.request import LaunchRequest, worker_environment, write_request
from pytest_llmperf.launch.script import ScriptLaunch
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.spec import ScriptSpec

_OWN = re.compile(r"^llmperf-own (\S+)$", re.MULTILINE)
_TURNS = (True, False, False, True)
_SHORTEST = 60.0


@dataclass
class Turns:
    """The launches of one command."""

    own: dict[bool, list[Sequence[float]]] = field(default_factory=lambda: {True: [], False: []})
    """By the script's own clock: its timed steps, of each launch with the hook, and of each without."""
    hooked: list[Launch] = field(default_factory=list)

    def logs(self, *, hook: bool) -> list[float]:
        """One number of each launch: of its mean step."""
        return [math.log(fmean(seconds)) for seconds in self.own[hook]]

    @property
    def overhead(self) -> float:
        return fmean(self.logs(hook=True)) - fmean(self.logs(hook=False))

    def squares(self) -> tuple[float, int]:
        """What launches of one kind scatter, as a sum of squares and its degrees of freedom."""
        kinds = [self.logs(hook=True), self.logs(hook=False)]
        return sum(stdev(each) ** 2 * (len(each) - 1) for each in kinds if len(each) > 1), sum(map(len, kinds)) - 2

    @property
    def weight(self) -> float:
        """By how much less the overhead scatters than the squares of two launches do."""
        return sum(1 / len(each) for each in self.own.values())


def measured(spec: ScriptSpec, turns: int, timeout: float) -> Turns:
    """Launch it so often with the hook and so often without.

    Raises:
        RuntimeError: a launch failed, or the script told nothing by its own clock.
    """
    found = Turns()
    for number in range(2 * turns):
        hook = _TURNS[number % 4]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            gpus = find_machine().gpus[: spec.gpus]
            request = LaunchRequest(
                spec=spec, folder=Path(place) / "launch", gpus=gpus, root=Path.cwd(), timeout_seconds=timeout
            )
            launch, log = _with_hook(request) if hook else (None, _without(request))
        own = [float(each) for each in _OWN.findall(log)]
        if len(own) < spec.steps:
            last = "\n".join(log.splitlines()[-12:])
            raise RuntimeError(f"the script told of {len(own)} steps, expected {spec.steps}:\n{last}")
        # The last timed interval holds the start of the tracer.
        found.own[hook].append(own[spec.warmup_steps : spec.steps - 1])
        found.hooked += [launch] if launch else []
        kind, seconds = "with" if hook else "without", time.monotonic() - began
        print(f"  {kind:7} {1000 * fmean(found.own[hook][-1]):9.3f} ms a step, {seconds:.0f} s in all", flush=True)
    return found


def _with_hook(request: LaunchRequest) -> tuple[Launch, str]:
    result = LocalLauncher().launch(request, lambda _: None)
    log = (request.folder / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    if not isinstance(result, Launch):
        raise RuntimeError(f"{result.message}\n{log[-2000:]}")
    return result, log


def _without(request: LaunchRequest) -> str:
    """The same command in the same environment, but for the way in; it goes to its own end."""
    write_request(request)
    script = ScriptLaunch.of(request)
    assert script is not None  # noqa: S101 - its spec is one
    environment = worker_environment(request, os.environ)
    environment |= script.environment(environment)
    del environment["LLMPERF_SCRIPT"]
    _, *rest = environment["PYTHONPATH"].split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(rest)
    ended = subprocess.run(
        script.command,
        env=environment,
        cwd=script.work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=request.timeout_seconds,
        check=False,
    )
    log = ended.stdout.decode(errors="replace")
    if ended.returncode:
        raise RuntimeError(f"without the hook it ended with exit code {ended.returncode}:\n{log[-2000:]}")
    return log


def lines(turns: Turns, spec: ScriptSpec) -> Iterator[str]:
    """What the launches of one command show."""
    apart, worst = [], 0.0
    for launch, own in zip(turns.hooked, turns.own[True], strict=True):
        hook = launch.ranks[0].step_seconds[spec.warmup_steps : spec.steps - 1]
        apart.append(math.log(fmean(hook) / fmean(own)))
        worst = max(worst, *(abs(ours / theirs - 1) for ours, theirs in zip(hook, own, strict=True)))
    told = ", ".join(f"{100 * each:+.3f} %" for each in apart)
    yield f"the hook's clock beside the script's own: mean step {told}; the worst step {100 * worst:.2f} %"
    squares, freedom = turns.squares()
    medians = [median(map(median, turns.own[hook])) for hook in (True, False)]
    yield (
        f"with the hook the mean step {_change(turns.overhead, squares, freedom, turns.weight)}; the median step "
        f"{1000 * medians[0]:.3f} in place of {1000 * medians[1]:.3f} ms ({_percent(*medians)})"
    )
    first, *others = turns.hooked
    for other in others:
        equal = [
            f"{name} {'equal' if same else 'DIFFER'}"
            for name, same in {
                "counts": bool(first.trace) and first.trace.counts == other.trace.counts,
                "allocated": [r.allocated_bytes for r in first.ranks] == [r.allocated_bytes for r in other.ranks],
                "peaks": [r.peak_allocated_bytes for r in first.ranks] == [r.peak_allocated_bytes for r in other.ranks],
            }.items()
        ]
        losses = [abs(a - b) for a, b in zip(first.losses, other.losses, strict=False)]
        yield f"two launches: {', '.join(equal)}; losses apart by up to {max(losses, default=math.nan):.2g}"
    counts = {kind: first.trace.count(kind) for kind in ("kernels_per_step", "operators_per_step", "copies_per_step")}
    yield f"tokens {first.evidence.get('tokens')}; {first.trace.none or counts}"


def _change(log: float, squares: float, freedom: int, weight: float) -> str:
    if freedom < 1:
        return f"{100 * math.expm1(log):+.2f} % (one launch each: no interval)"
    half = quantile(0.975, freedom) * math.sqrt(squares / freedom * weight)
    low, high = (100 * math.expm1(log + sign * half) for sign in (-1, 1))
    return f"{100 * math.expm1(log):+.2f} % (95 %: {low:+.2f} to {high:+.2f})"


def _percent(after: float, before: float) -> str:
    return f"{100 * (after / before - 1):+.2f} %"


def all_of(results: Mapping[str, Turns]) -> str:
    """One overhead of all commands, whose launches are taken to scatter alike."""
    squares, freedom = (sum(each) for each in zip(*(turns.squares() for turns in results.values()), strict=True))
    weight = fmean(turns.weight for turns in results.values()) / len(results)
    mean = fmean(turns.overhead for turns in results.values())
    return f"all of {len(results)}: with the hook {_change(mean, squares, int(freedom), weight)}"


def commands(size: str, report: int = 0) -> dict[str, str]:
    """Of each of tools/scripts; its own clock is printed after the step ``report``."""
    words = f"--size {size}" + (f" --steps {report + 10} --report {report}" if report else "")
    names = ("hf_trainer", "compiled_loop", "fp16_scaler", "optimizer_in_backward")
    return {
        "fsdp2": f"torchrun --nproc-per-node 2 tools/scripts/fsdp2.py {words}",
        **{name: f"python tools/scripts/{name}.py {words}" for name in names},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=2, help="launches of each kind")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--size", default="tiny", help="of tools/scripts: tiny, 700m, 1b")
    parser.add_argument("--only", nargs="*", default=[], help="of tools/scripts: these names")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no command when they are nearly over")
    parser.add_argument("--timeout", type=float, default=300.0, help="of one launch")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    given, gpus = shlex.join(options.command), len(find_machine().gpus)
    asked = {given: given} if given else commands(options.size, options.steps)
    results, end, failed = {}, time.monotonic() + options.seconds, False
    for name, command in asked.items():
        spec = ScriptSpec(command=command, steps=options.steps)
        is_wanted = not options.only or name in options.only or bool(given)
        if not is_wanted or (gpus and spec.gpus > gpus) or end - time.monotonic() < _SHORTEST:
            print(f"== {name}: left out", flush=True)
            continue
        print(f"== {name}: {command}", flush=True)
        try:
            results[name] = measured(spec, options.turns, options.timeout)
        except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:
            failed = True
            print(f"  failed: {error}", flush=True)
            continue
        for line in lines(results[name], spec):
            print(f"  {line}", flush=True)
    if len(results) > 1:
        print(all_of(results))
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
