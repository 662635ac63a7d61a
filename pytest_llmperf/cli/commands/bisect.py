"""``llmperf bisect``: the revision, or the version, that made a training slower, larger or another."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.answer import Answer, CaseError, Screen, add_option, add_shared, facts, plain, table
from pytest_llmperf.cli.asked_run import Terminal, asked_run, named, searching, usage_errors
from pytest_llmperf.judge.pairs import CRITERIA, Change, Yardstick
from pytest_llmperf.launch.histories import CommandHistory, GitHistory, History, HistoryError
from pytest_llmperf.records.result import Spent
from pytest_llmperf.report.text import Column
from pytest_llmperf.run.bisection import Bisection, BisectionOrder, Bisector
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support import codec, formats, user_input
from pytest_llmperf.support.user_input import argument

# Exact changes that a page shows; the document has all.
_MOST_EXACT = 8


def page(spec: Spec, found: Bisection, spent: Spent, further: str, screen: Screen) -> Iterator[str]:
    num, steps = found.num_candidates, found.steps
    yield f"{spec.id}: {num} candidate{'s' * (num != 1)} after {found.good.told}"
    if steps:
        columns = [
            Column("candidate", [plain(step.candidate.shown) for step in steps], right=False),
            Column("side", [step.side or "not decided" for step in steps], right=False),
            Column("pairs", [f"{step.pairs}{' (kept)' if step.kept else ''}" for step in steps]),
            Column("step time", [_shown(step.change) for step in steps]),
            Column("exact", [plain("; ".join(step.exact[:1])) or formats.ABSENT for step in steps], right=False),
        ]
        yield from ("", *table(columns, screen), "")
    yield from (plain(f"{step.candidate.shown}: {step.reason}") for step in steps if step.reason)
    if found.yardstick is not None:
        yield from _conclusion(found, _words(found.yardstick), further)
    yield from (f"note: {plain(note)}" for note in found.notes)
    launches = f"{spent.launches} launch{'es' * (spent.launches != 1)}"
    gpus = f"; {spent.gpu_seconds / 60:.1f} GPU-minutes" if spent.gpu_seconds else ""
    yield f"cost: {launches}, {formats.elapsed(sum(spent.phases.values()))}{gpus}"


def _conclusion(found: Bisection, by: str, further: str) -> Iterator[str]:
    if found.first_bad is None:
        yield f"the first bad one is one of these {len(found.suspects)}, told apart by {by}:"
        yield from (f"  {plain(one.told)}" for one in found.suspects)
        return
    yield f"first bad: {plain(found.first_bad.told)}"
    confidence = f"at least {100 * found.confidence:.0f} % that the change is there, if it is one change"
    if found.confidence == 1:
        confidence = "no noise is in what was compared; of several changes, one that crosses the middle"
    last = found.last_good or found.good
    about = {"last good": last.told, "told apart by": by, "step time": _shown(found.change), "confidence": confidence}
    yield from facts(about)
    if found.diagnosis:
        yield plain(f"points to: {found.diagnosis}")
    if found.exact:
        yield "different:"
        yield from (f"  {plain(line)}" for line in found.exact[:_MOST_EXACT])
        if len(found.exact) > _MOST_EXACT:
            yield f"  and {len(found.exact) - _MOST_EXACT} more, which --json has"
    yield f"look further: {further}"


def _words(yardstick: Yardstick) -> str:
    if yardstick.by == "counts":
        good, bad = yardstick.ends
        return f"{yardstick.metric.removesuffix('_per_step')} of a step, {good:g} and {bad:g}"
    if yardstick.by == "evidence":
        return f"what is exact: {'; '.join(sorted(yardstick.lines)[:2])}"
    name = "step time" if yardstick.by == "speed" else "peak memory"
    return f"{name}, {_percent(yardstick.size)} from end to end"


def _shown(change: Change | None) -> str:
    if change is None:
        return formats.ABSENT
    return f"{_percent(change.log)} ({_percent(change.low)} to {_percent(change.high)})"


def _percent(log: float) -> str:
    return formats.percent(math.expm1(log))


def document(spec: Spec, found: Bisection, spent: Spent, further: str, machine: Mapping[str, Any]) -> dict[str, Any]:
    names = "good bad steps suspects first_bad last_good change confidence exact diagnosis ended notes"
    return {
        "case": spec.id,
        "spec": spec.to_dict(),
        "machine": dict(machine),
        "candidates": found.num_candidates,
        "by": found.yardstick.by if found.yardstick else None,
        **{name: codec.plain(getattr(found, name)) for name in names.split()},
        "further": further,
        "launches": spent.launches,
        "gpu_seconds": spent.gpu_seconds,
    }


NODEID = "llmperf bisect"

_OF_GIT = ("path", "build", "first_parent", "project")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("specs", metavar="CASE", nargs="*")
    add("--script", metavar="COMMAND")
    add("--good", required=True, metavar="REV")
    add("--bad", required=True, metavar="REV")
    add("--project", type=Path, metavar="DIR")
    add("--path", action="append", default=[], metavar="DIR")
    add("--build", default="", metavar="COMMAND")
    add("--first-parent", action="store_true")
    add("--versions", type=_versions, default=[], metavar="LIST")
    add("--python", metavar="COMMAND")
    add("--by", choices=CRITERIA)
    add("--max-pairs", type=argument(user_input.count, "a number of pairs, 1 or more"), default=8, metavar="N")
    add_shared(parser, "bisect")
    add_option(parser, "--json")
    add_option(parser, "--minutes", default=60.0)
    parser.set_defaults(answer=_answer)


def _troubles(found: Bisection, *, on_cpu: bool) -> list[str]:
    ends = f"{found.good.shown} and {found.bad.shown}"
    if found.ended:
        why = "interrupted" if found.ended == "interrupted" else "its --minutes are over"
        return [f"{why}; the same command goes on where it was"]
    if found.yardstick is None:
        change = found.steps[0].change if found.steps else None
        # That may leave out 0 and be nothing all the same: what else ran there slowed one of them.
        why = ", by a CPU's clock, which shows its other work too" if on_cpu else ""
        wide = f" (step time between {_percent(change.low)} and {_percent(change.high)}{why})" if change else ""
        return [f"{ends} do not differ in what can be shown here{wide}: nothing to bisect"]
    if found.first_bad is None:
        return [f"the first bad one is among {len(found.suspects)}, of which no more can be told: see why above"]
    return []


def _versions(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if len(set(found)) < len(found) or not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected versions, each once, e.g. 4.55.0,4.56.0")
    return found


def _history(arguments: argparse.Namespace) -> History:
    """What the candidates are; CaseError: options of two kinds; HistoryError: no such history."""
    git = [f"--{name.replace('_', '-')}" for name in _OF_GIT if getattr(arguments, name)]
    if arguments.python is not None:
        if git:
            raise CaseError(f"--python and {' and '.join(git)} are of different histories, expected one of them")
        return CommandHistory(arguments.python, arguments.versions)
    if arguments.versions:
        raise CaseError(f"--versions {shlex.quote(','.join(arguments.versions))} needs --python COMMAND")
    project = (arguments.project or Path()).absolute()
    if not project.is_dir():
        raise CaseError(f"--project {project}: no such folder")
    return GitHistory(project, arguments.path, arguments.build, arguments.first_parent)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    found = named(arguments.specs, arguments.perf_baselines, arguments.machine, arguments.script)
    specs = [one.spec for one in found]
    if len(specs) != 1:
        raise CaseError(f"{len(specs)} cases are named, expected one: {', '.join(spec.id for spec in specs)}")
    try:
        history = _history(arguments)
        span = history.span(arguments.good, arguments.bad)
    except HistoryError as error:
        raise CaseError(str(error)) from error
    run, troubles = asked_run(arguments, calibration=False, max_launches=arguments.max_pairs), list[str]()
    with usage_errors(arguments):
        if not run.site.is_here:
            raise CaseError("in a SLURM job with srun, other interpreters cannot be launched; leave it out")
        if why := run.caller(NODEID, Terminal()).why_not(specs[0]):
            raise CaseError(why)

    def lines() -> Iterator[str]:
        terminal, seconds = Terminal(), 60 * arguments.minutes
        order = BisectionOrder(by=arguments.by, seconds=seconds, max_pairs=arguments.max_pairs)
        for note in span.notes:
            terminal.say(note)
        with searching(run, troubles) as findings:
            caller = run.caller(NODEID, terminal, findings=findings)
            found = Bisector(caller, specs[0], order, history, terminal.say).run(span)
            told = specs[0], found, findings.spent, history.further(found.first_bad) if found.first_bad else ""
            if arguments.json:
                yield json.dumps(document(*told, run.machine_document()), indent=1)
            else:
                yield from page(*told, screen)
            troubles.extend(_troubles(found, on_cpu=run.on_cpu))
            if found.ended == "interrupted":
                raise KeyboardInterrupt  # the exit code is that of a command that was

    return Answer(lines(), troubles, for_programs=arguments.json, acts=True)
