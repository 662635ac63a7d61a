"""``llmperf tune``: the fastest configuration of a model, or of a training command, that fits, searched and shown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.answer import Answer, CaseError, Screen, add_option, add_shared
from pytest_llmperf.cli.asked_run import Terminal, asked_run, usage_errors
from pytest_llmperf.cli.asked_run import settings as named_settings
from pytest_llmperf.cli.tune_pages import Watcher, document, page, winners_test
from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.judge.tuning import OBJECTIVES
from pytest_llmperf.run.findings import CaseFailedError, Findings, RunEndedError, UsageError
from pytest_llmperf.run.options import TUNE
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.tuning.trials import Tuning
from pytest_llmperf.run.tuning.tuner import Tuner
from pytest_llmperf.settings.space import ScriptSpace, Space, default_axes, read_axes
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats, user_input

NODEID = "llmperf tune"

# What a search begins with by default.
_MICRO_BATCH_SIZE, _CPU_LENGTH = 8, 64


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    whole = user_input.argument(user_input.count, "a whole number above 0")
    add("model", metavar="MODEL", nargs="?", default="", help="a model's name or path, as a TrainSpec has it")
    what = "what else is fixed, as a TrainSpec has it, e.g. micro_batch_size=8 model_precision=fp32"
    add("fixed", metavar="FIELD=VALUE", nargs="*", help=what)
    add_shared(parser, TUNE)
    add_option(parser, "--json")
    add_option(parser, "--minutes", default=10.0)
    add("--sequence-length", type=whole, metavar="N", help="tokens of a sequence; default: 1024, on a CPU 64")
    add("--global-batch", type=whole, metavar="N", help="sequences of a step on all GPUs, reached by accumulation")
    add("--objective", choices=tuple(OBJECTIVES), default="throughput", help="default: %(default)s")
    what = "also what trains otherwise: fp8, a precision (bf16-pure) or an optimizer; may be given again"
    add("--allow", action="append", default=[], metavar="WORD", help=what)
    what = "in place of a model, a training command with words in braces: 'torchrun train.py --batch {batch}'"
    add("--script", metavar="COMMAND", help=what)
    what = "a space of one's own, in place of the usual one; of a command, each word with its values: batch = [8, 16]"
    add("--space", "--axes", type=Path, metavar="FILE.toml", help=what)
    add("--record", action="store_true", help="record the winner as a baseline, which its test holds")
    parser.set_defaults(answer=_answer, usage=parser.error, later_words="fixed")


@dataclass
class Tune:
    """One search."""

    arguments: argparse.Namespace
    run: Run
    tuning: Tuning
    troubles: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        try:
            watcher = Watcher(self.tuning)
            if self.run.on_cpu and self.arguments.gpus is None:
                watcher.say("no GPU is seen here: the CPU trains, as with --gpus 0")
            # What trials find is none of the run's: a search has no results to judge or to write.
            caller = self.run.caller(NODEID, watcher, findings=Findings())
            yield from self._report(Tuner(caller, self.tuning, watcher.standing).run())
        except (CaseFailedError, RunEndedError, UsageError) as error:
            self.troubles.append(str(error))
        finally:
            self.troubles += self.run.bad_ends
            self.run.finish(0, Terminal())

    def _report(self, tuning: Tuning) -> Iterator[str]:
        if self.arguments.json:
            yield json.dumps(document(tuning, self.run.machine_document()), indent=1)
        else:
            yield from page(tuning)
            if self.run.on_cpu and tuning.winner is not None:
                yield "note: a CPU's times are noise, and what is close may be in another order tomorrow"
        if tuning.winner is None:
            self.troubles.append(self._why_none(tuning))
        elif self.arguments.record and (why := self._unrecorded(tuning)):
            self.troubles.append(why)
        elif not self.arguments.json:
            yield from winners_test(tuning.winner, self.run.num_gpus)
        if tuning.ended == "interrupted":
            self.troubles.append("interrupted; the same command goes on from what was kept")
            raise KeyboardInterrupt  # the exit code is that of a command that was

    def _why_none(self, tuning: Tuning) -> str:
        objective, trained = tuning.objective, [one.trial for one in tuning.tried if one.trial.is_measured]
        if tuning.least is None:
            why = "the fastest are not sound, see the notes above" if trained else "see above what became of each"
            if trained and not any(objective.log_of(trial) is not None for trial in trained):
                why = f"of {len(trained)} that trained none told of its {objective.name}"
            return f"no configuration was found: {tuning.ended or why}"
        (spec, needed), limit = tuning.least, tuning.limit_bytes or self.run.memory_bytes
        has = formats.memory(limit) if limit else "what this host has"
        if not needed:
            return f"nothing fits: {spec.id} asks for the least, and ran out of {has}"
        holder = "a rank on this host" if self.run.on_cpu else "a GPU"
        return (
            f"nothing fits: the least is {spec.id} with {formats.memory(needed)} predicted, and {holder} may hold {has}"
        )

    def _unrecorded(self, tuning: Tuning) -> str:
        """Why the winner has no baseline. It may have one by a search that was ended: that is what holds it."""
        case = tuning.case
        if case is not None and (case.result.updated or case.result.verdict in {"pass", "inconclusive"}):
            return ""
        asked = case.refused or case.result.reason if case else "".join(tuning.notes[-1:])
        why = asked or tuning.ended or "it was not launched as a case"
        more = "; the same command with more --minutes goes on from what was tried"
        return f"the winner was not recorded: {why}" + (more if "time was left for" in why else "")


def _space(arguments: argparse.Namespace, run: Run) -> Space:
    """What is searched; CaseError: a setting that cannot be; ValueError: a model, or a space."""
    pairs, length = named_settings(arguments.fixed), arguments.sequence_length
    if "model" in pairs:
        raise CaseError(f"model={pairs['model']} is given beside {arguments.model}, expected one model")
    for name, value in (("gpus", arguments.gpus), ("sequence_length", length)):
        if value is not None and name in pairs and pairs[name] != max(1, value):
            option = "--" + name.replace("_", "-")
            raise CaseError(f"{name}={pairs[name]} is given beside {option} {value}, expected one of them")
    given: dict[str, Any] = {"gpus": max(1, run.num_gpus), **pairs}
    given |= {} if length is None else {"sequence_length": length}
    # A CPU takes short sequences, as the suite's cases for it do.
    usual = {"micro_batch_size": _MICRO_BATCH_SIZE, **({"sequence_length": _CPU_LENGTH} if run.on_cpu else {})}
    base, batch = TrainSpec(model=arguments.model, **{**usual, **given}), arguments.global_batch
    if arguments.space is not None:
        for option, value in (("--global-batch", batch), ("--allow", arguments.allow)):
            if value:
                raise CaseError(
                    f"{option} is about the usual space, and --space {arguments.space} names another: leave one of "
                    "them out, and name in the file what may change"
                )
        space = Space(base, read_axes(arguments.space))
        if twice := sorted({name for axis in space.axes for name in axis.fields} & set(pairs)):
            raise CaseError(f"{twice[0]} is fixed by {twice[0]}={pairs[twice[0]]}, and an axis of {arguments.space}")
        return space
    axes = default_axes(base, on_cpu=run.on_cpu, fixed=given, allowed=arguments.allow, global_batch=batch)
    if batch is not None:  # of the micro-batches that it can have the largest up to the usual one
        sized = [dict(choice.fields) for axis in axes for choice in axis.choices if "micro_batch_size" in axis.fields]
        fitting = [one for one in sized if one["micro_batch_size"] <= base.micro_batch_size] or sized[:1]
        base = replace(base, **max(fitting, key=lambda one: one["micro_batch_size"]))
    return Space(base, axes)


def _script_space(arguments: argparse.Namespace, run: Run) -> Space:
    """The same of a training command; ValueError: one that cannot be, or its axes."""
    usual = {"--sequence-length": arguments.sequence_length, "--global-batch": arguments.global_batch}
    for option, value in {**usual, "--allow": arguments.allow}.items():
        if value:
            raise CaseError(f"{option} is about a model, and a command has words of its own: leave it out")
    if arguments.space is None:
        raise CaseError("--script needs --axes FILE.toml, with the values of each word in braces: batch = [8, 16]")
    words = [f"command={arguments.script}", *filter(None, [arguments.model]), *arguments.fixed]
    return ScriptSpace.read(named_settings(words), arguments.space, run.rootdir, run.num_gpus)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    """What cannot be had is refused, mostly by a CaseError, before anything is launched."""
    if bool(arguments.model) == bool(arguments.script) and "=" not in arguments.model:
        arguments.usage("expected a MODEL, or --script COMMAND")
    run = asked_run(arguments, TUNE, update="new" if arguments.record else None)
    try:
        if arguments.objective == "energy" and run.on_cpu:
            raise CaseError(
                "--objective energy: no counter tells what a CPU takes; expected a GPU, or another objective"
            )
        space = _script_space(arguments, run) if arguments.script else _space(arguments, run)
        if arguments.record:
            BaselineStore(run.settings.baselines).check_writable(run.machine_kind, space.base)
        with usage_errors(arguments):
            run.begin([space.base])
    except ValueError as error:  # SpecError is one
        raise CaseError(str(error)) from error
    tuning = Tuning(
        space=space,
        objective=OBJECTIVES[arguments.objective],
        seconds_given=60 * arguments.minutes,
        begun_at=space.base,
    )
    tune = Tune(arguments, run, tuning)
    return Answer(tune.lines(), tune.troubles, for_programs=arguments.json, acts=True)
