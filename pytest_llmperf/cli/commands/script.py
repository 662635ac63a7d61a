"""``llmperf script -- COMMAND``: what could be held of a user's own training, found out by two short launches of it."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.answer import Answer, CaseError, Screen, plain, table
from pytest_llmperf.cli.arguments import add_shared
from pytest_llmperf.cli.asked_run import Terminal, asked_run, usage_errors
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trace import COUNTED
from pytest_llmperf.report.table import Column
from pytest_llmperf.run.errors import CannotRunError, CaseFailedError, RunEndedError
from pytest_llmperf.run.options import SCRIPT
from pytest_llmperf.run.run import Run
from pytest_llmperf.settings.script_spec import ScriptSpec
from pytest_llmperf.support import formats

NODEID = "llmperf script"

# Fields of a ScriptSpec that have an option of their name.
_OPTIONS = {
    "steps": "optimizer steps of each launch, those of warm-up included",
    "tokens": "tokens of one step over all ranks, or sequences:64, where they are not found",
    "step": "the optimizer, by its class, whose calls end a step; a number: so many calls are one step",
    "cwd": "the folder in which the command runs (here)",
    "seed": "seed torch, random and numpy when they are imported",
    "end": "park: end it after the measured steps; script: let it go on to its own end",
    "workdir": "scratch: run in a folder that shows the files of this one; own: run in this one",
}
_NUMBERS = ("steps", "seed", "tokens", "step")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, SCRIPT)
    for name, what in _OPTIONS.items():
        parser.add_argument(f"--{name}", metavar=name.upper(), help=what)
    what = "the command as you run it, after --: -- torchrun --nproc-per-node 2 train.py"
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER, help=what)
    parser.set_defaults(answer=_answer, usage=parser.error)


def named_script(arguments: argparse.Namespace) -> ScriptSpec:
    """The spec that the command line names; CaseError: none, or one that cannot be."""
    words = arguments.command[arguments.command[:1] == ["--"] :]
    if not words:
        usual = "llmperf script -- torchrun --nproc-per-node 2 train.py"
        raise CaseError(f"no command is named; expected one after --, e.g. {usual}")
    said = {name: getattr(arguments, name) for name in _OPTIONS}
    given: dict[str, Any] = {
        name: int(text) if name in _NUMBERS and text.isdecimal() else text
        for name, text in said.items()
        if text is not None
    }
    if not Path(said["cwd"] or ".").is_dir():
        raise CaseError(f"--cwd {said['cwd']}: no such folder; expected the one in which the command is written to run")
    try:
        spec = ScriptSpec(command=words[0] if len(words) == 1 else shlex.join(words), **given)
        told = spec.gpus > 1 or not arguments.gpus or "{gpus}" not in spec.command
        return spec if told else ScriptSpec(command=spec.command, gpus=arguments.gpus, **given)
    except ValueError as error:
        raise CaseError(str(error)) from error


@dataclass
class Tried:
    """Two launches of one command, to know what of it is the same in both."""

    spec: ScriptSpec
    run: Run
    troubles: list[str] = field(default_factory=list)

    def lines(self, screen: Screen) -> Iterator[str]:
        """What was found, at its end."""
        terminal = Terminal()
        try:
            yield from page(self.spec, self.run.cases(NODEID, terminal).measure(self.spec), screen, self.run.num_gpus)
        except (CaseFailedError, CannotRunError, RunEndedError) as error:
            self.troubles += str(error).splitlines()
        finally:
            self.run.finish(0, terminal)


def page(spec: ScriptSpec, launches: Sequence[Launch], screen: Screen, gpus: int) -> Iterator[str]:
    """What a record would hold, what not, and the test that guards it."""
    first, last = launches[0], launches[-1]
    steps, ranks = len(first.step_seconds), len(first.ranks)
    yield f"{spec.command}: {len(launches)} launches of {steps} steps on {formats.counted(ranks, 'rank')}"
    rows = [*_work(spec, first), *_figures(launches)]
    columns = [
        Column("what", [name for name, _, _ in rows], right=False),
        Column("found", [plain(found) for _, found, _ in rows], right=False),
        Column("held", [plain(how) for _, _, how in rows], right=False),
    ]
    yield from ("", *table(columns, screen), "")
    for note in dict.fromkeys(note for launch in launches for note in launch.evidence.get("remarks", ())):
        yield f"note: {plain(note)}"
    if different := first.differences(last):
        yield f"different in the two launches: {'; '.join(map(plain, different))}"
    yield "exact: the same in both launches; what was not is held as a range"
    yield "not claimed: what the script learns, and that its update is right; this is no loop of this plugin"
    yield from ("", *_test(spec, gpus))


def _work(spec: ScriptSpec, launch: Launch) -> Iterator[tuple[str, str, str]]:
    setup = launch.evidence.get("setup", {})
    optimizers = ", ".join(name.rpartition(".")[2] for name in setup.get("optimizers", ())) or "unknown"
    yield "a step ends with", optimizers if spec.step == "auto" else str(spec.step), "timed as it is"
    seconds = formats.seconds(launch.median_step_seconds)
    if launch.evidence.get("tokens") == "unknown":
        rate = f"{1 / launch.median_step_seconds:.3g} steps/s"
        yield "speed", f"{rate} ({seconds} a step)", "as steps/s: tokens were not found (--tokens)"
    else:
        rate = f"{formats.tokens_per_second(launch.tokens_per_second)} {spec.rate_unit}/s"
        yield "speed", f"{rate} ({seconds} a step)", f"as {spec.rate_unit}/s"


def _figures(launches: Sequence[Launch]) -> Iterator[tuple[str, str, str]]:
    """What is the same in all launches is held exactly, the rest as a range."""
    first = launches[0]
    if first.evidence.get("tokens") != "unknown":
        tokens = [tuple(rank.step_tokens or rank.tokens_per_step for rank in each.ranks) for each in launches]
        varies = ", not all steps alike" if first.ranks[0].step_tokens else ""
        yield "tokens a step", f"{first.tokens_per_step:,}{varies}", _held(tokens)
    if first.losses:
        apart = max(abs(a - b) for a, b in zip(first.losses, launches[-1].losses, strict=False))
        how = "exact" if apart == 0 else f"band: up to {apart:.2g} apart"
        yield "losses", f"{first.losses[0]:.4f} to {first.losses[-1]:.4f}", how
    else:
        yield "losses", formats.ABSENT, "not: backward does not begin with one number"
    for name in COUNTED if first.trace else ():
        if not name.startswith("kernels" if first.trace.is_on_host else "operators"):
            counts = [each.trace.count(name) for each in launches]
            yield name.removesuffix("_per_step") + " a step", f"{counts[0]:,.6g}", _held(counts)
    if not first.trace:
        yield "a traced step", formats.ABSENT, f"not: {first.trace.none}"
    peaks = [each.peak_reserved_bytes for each in launches]
    yield "peak memory", formats.memory(peaks[0]), _held(peaks)
    held = [tuple(rank.allocated_bytes for rank in each.ranks) for each in launches]
    if first.allocated_growth is not None:
        yield "memory kept a step", formats.memory(first.allocated_growth), f"{_held(held)}; a slope is a leak"


def _held(values: Sequence[Any]) -> str:
    if all(value == values[0] for value in values):
        return "exact"
    if all(isinstance(value, (int, float)) for value in values) and min(values) > 0:
        return f"range: {formats.percent(max(values) / min(values) - 1)} apart"
    return "range: not the same"


def _test(spec: ScriptSpec, gpus: int) -> Iterator[str]:
    """Ready to paste, for a project whose tests are started at the top of its git work tree."""
    here = Path(spec.cwd).resolve()
    top = next((each for each in (here, *here.parents) if (each / ".git").exists()), here)
    values = {**vars(spec), "cwd": here.relative_to(top).as_posix()}
    usual = {each.name: each.default for each in fields(ScriptSpec)}
    words = [f"{name}={_quoted(values[name])}" for name in _OPTIONS if values[name] != usual[name]]
    name = "test_" + re.sub(r"\W", "_", spec.slug)
    yield f"# {name}.py"
    yield f"def {name}(perf):"
    yield f"    perf.script({', '.join([_quoted(spec.command), *words])})"
    yield f"# pytest {name}.py --gpus {gpus} --update-baselines=new"


def _quoted(value: object) -> str:
    """As a formatter has it."""
    return f'"{value}"' if isinstance(value, str) and not set(value) & {'"', "\\"} else repr(value)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    """What cannot be had is refused before anything is launched."""
    spec = named_script(arguments)
    run = asked_run(arguments, SCRIPT, launches=2, calibration=False)
    with usage_errors(arguments):
        run.begin([spec])
    tried = Tried(spec, run)
    return Answer(tried.lines(screen), tried.troubles, acts=True)
