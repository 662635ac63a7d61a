"""``llmperf tune``: the fastest configuration of a model, or of a training command, that fits, searched and shown."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.answer import Answer, CaseError, Screen, add_option, add_shared
from pytest_llmperf.cli.asked_run import Terminal, asked_run, searching, usage_errors
from pytest_llmperf.cli.asked_run import settings as named_settings
from pytest_llmperf.cli.baseline_folder import chosen_settings
from pytest_llmperf.judge.objective import OBJECTIVES, Trial
from pytest_llmperf.run.tuning.trials import Tuning
from pytest_llmperf.run.tuning.tuner import Tuner
from pytest_llmperf.settings.space import ScriptSpace, Space, default_axes, read_axes
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec, lacks_rows
from pytest_llmperf.support import codec, formats, user_input

# What a search begins with by default.
_MICRO_BATCH_SIZE, _CPU_LENGTH = 8, 64


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    whole = user_input.argument(user_input.count, "a whole number above 0")
    add("model", metavar="MODEL", nargs="?", default="")
    add("fixed", metavar="FIELD=VALUE", nargs="*")
    add_shared(parser, "tune")
    add_option(parser, "--json")
    add_option(parser, "--minutes", default=10.0)
    add("--sequence-length", type=whole, metavar="N")
    add("--global-batch", type=whole, metavar="N")
    add("--objective", choices=tuple(OBJECTIVES), default="throughput")
    add("--allow", action="append", default=[], metavar="WORD")
    add("--script", metavar="COMMAND")
    own = parser.add_mutually_exclusive_group()
    own.add_argument("--space", type=Path, metavar="FILE.toml")
    own.add_argument("--axes", dest="space", type=Path, metavar="FILE.toml")
    add("--record", action="store_true")
    parser.set_defaults(answer=_answer, usage=parser.error, later_words="fixed")


def _why_none(tuning: Tuning, run_bytes: int, *, on_cpu: bool) -> str:
    """``run_bytes``: what each rank may hold, where the search does not know."""
    objective, trained = tuning.objective, [one.trial for one in tuning.tried if one.trial.is_measured]
    if tuning.least is None:
        why = "the fastest are not sound, see the notes above" if trained else "see above what became of each"
        if trained and not any(objective.log_of(trial) is not None for trial in trained):
            why = f"of {len(trained)} that trained none told of its {objective.name}"
        return f"no configuration was found: {tuning.ended or why}"
    (spec, needed), limit = tuning.least, tuning.limit_bytes or run_bytes
    has = formats.memory(limit) if limit else "what this host has"
    if not needed:
        return f"nothing fits: {spec.id} asks for the least, and ran out of {has}"
    holder = "a rank on this host" if on_cpu else "a GPU"
    return f"nothing fits: the least is {spec.id} with {formats.memory(needed)} predicted, and {holder} may hold {has}"


def _unrecorded(tuning: Tuning) -> str:
    """Why the winner has no baseline. It may have one by a search that was ended: that is what holds it."""
    case = tuning.case
    if case is not None and (case.result.updated or case.result.verdict in {"pass", "inconclusive"}):
        return ""
    asked = case.refused or case.result.reason if case else "".join(tuning.notes[-1:])
    why = asked or tuning.ended or "it was not launched as a case"
    more = "; the same command with more --minutes goes on from what was tried"
    return f"the winner was not recorded: {why}" + (more if "time was left for" in why else "")


def _space(arguments: argparse.Namespace, rootdir: Path, gpus: int) -> Space:
    """What is searched; CaseError: what cannot be asked for; ValueError: a model, or a space."""
    if arguments.objective == "energy" and not gpus:
        raise CaseError("--objective energy: no counter tells what a CPU takes; expected a GPU, or another objective")
    space = _script_space(arguments, rootdir, gpus) if arguments.script else _model_space(arguments, gpus)
    for line in space.no_neighbours(space.base, at_all=True) if arguments.space else ():
        raise CaseError(f"{arguments.space}: {line}; correct it there, or leave it out")
    if not arguments.script and all(map(lacks_rows, nearest := [space.base, *space.neighbours(space.base)])):
        least = min(nearest, key=lambda one: one.sequences_per_step)
        raise CaseError(f"{least.id}: {lacks_rows(least)}")
    return space


def _model_space(arguments: argparse.Namespace, gpus: int) -> Space:
    pairs, length = named_settings(arguments.fixed), arguments.sequence_length
    if "model" in pairs:
        raise CaseError(f"model={pairs['model']} is given beside {arguments.model}, expected one model")
    for name, value in (("gpus", arguments.gpus), ("sequence_length", length)):
        if value is not None and name in pairs and pairs[name] != max(1, value):
            option = "--" + name.replace("_", "-")
            raise CaseError(f"{name}={pairs[name]} is given beside {option} {value}, expected one of them")
    given = {"gpus": max(1, gpus), **pairs, **({} if length is None else {"sequence_length": length})}
    # A CPU takes short sequences, as the suite's cases for it do.
    usual = {"micro_batch_size": _MICRO_BATCH_SIZE, **({} if gpus else {"sequence_length": _CPU_LENGTH})}
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
    axes = default_axes(base, on_cpu=not gpus, fixed=given, allowed=arguments.allow, global_batch=batch)
    if batch is not None:  # of the micro-batches that it can have the largest up to the usual one
        sized = [dict(choice.fields) for axis in axes for choice in axis.choices if "micro_batch_size" in axis.fields]
        fitting = [one for one in sized if one["micro_batch_size"] <= base.micro_batch_size] or sized[:1]
        base = replace(base, **max(fitting, key=lambda one: one["micro_batch_size"]))
    return Space(base, axes)


def _script_space(arguments: argparse.Namespace, rootdir: Path, gpus: int) -> Space:
    """Of a training command; ValueError: one that cannot be, or its axes."""
    usual = {"--sequence-length": arguments.sequence_length, "--global-batch": arguments.global_batch}
    for option, value in {**usual, "--allow": arguments.allow}.items():
        if value:
            raise CaseError(f"{option} is about a model, and a command has words of its own: leave it out")
    if arguments.space is None:
        raise CaseError("--script needs --axes FILE.toml, with the values of each word in braces: batch = [8, 16]")
    words = [f"command={arguments.script}", *filter(None, [arguments.model]), *arguments.fixed]
    return ScriptSpace.read(named_settings(words), arguments.space, rootdir, gpus)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    if bool(arguments.model) == bool(arguments.script) and "=" not in arguments.model:
        arguments.usage("expected a MODEL or --script COMMAND, one of them")
    run, troubles = asked_run(arguments, update="new" if arguments.record else None), list[str]()
    try:
        space = _space(arguments, run.rootdir, run.num_gpus)
        if arguments.record:
            run.store.check_writable(run.machine_kind, space.base)
        with usage_errors(arguments):
            run.begin([space.base])
    except ValueError as error:  # SpecError is one
        raise CaseError(str(error)) from error
    objective, seconds = OBJECTIVES[arguments.objective], 60 * arguments.minutes
    tuning = Tuning(space=space, objective=objective, seconds_given=seconds, begun_at=space.base)

    def lines() -> Iterator[str]:
        with searching(run, troubles) as findings:
            watcher = Watcher(tuning)
            if run.on_cpu and arguments.gpus is None:
                watcher.say("no GPU is seen here: the CPU trains, as with --gpus 0")
            found = Tuner(run.caller("llmperf tune", watcher, findings=findings), tuning, watcher.standing).run()
            if arguments.json:
                yield json.dumps(document(found, run.machine_document()), indent=1)
            else:
                yield from page(found, on_cpu=run.on_cpu)
            why_none = "" if found.winner else _why_none(found, run.memory_bytes, on_cpu=run.on_cpu)
            if why := why_none or (_unrecorded(found) if arguments.record else ""):
                troubles.append(why)
            elif not arguments.json:
                yield from winners_test(found.winner, run.num_gpus)
            if found.ended == "interrupted":
                troubles.append("interrupted; the same command goes on from what was kept")
                raise KeyboardInterrupt  # the exit code is that of a command that was

    return Answer(lines(), troubles, for_programs=arguments.json, acts=True)


# What a search has found: a page for people, a document for programs, a test that holds it; and lines meanwhile. The
# page has so many reasons, the document all.
_MOST, _AS_PLAIN = 8, "; what is compiled is predicted as plain"


def page(tuning: Tuning, *, on_cpu: bool = False) -> Iterator[str]:
    yield from _winner(tuning, tuning.winner) if tuning.winner is not None else ("no winner",)
    counts = (
        (tuning.too_large, f"of those looked at do not fit{_AS_PLAIN * bool(tuning.limit_bytes)}"),
        (tuning.left, "promised too little, or no time was left for them"),
        (tuning.unseen, "more were not looked at: the space is searched in a sample of it"),
    )
    untried = [f"{number:,} cannot be: {reason}" for reason, number in tuning.refused.most_common(_MOST)]
    if (more := len(tuning.refused) - _MOST) > 0:
        untried.append(f"and {more} more reasons (--json has them all)")
    untried += [f"{number:,} {words}" for number, words in counts if number]
    yield from ("", "not tried", *(f"  {line}" for line in untried)) if untried else ()
    yield from (f"note: {note}" for note in tuning.notes)
    kept = sum(one.was_kept for one in tuning.tried)
    made, earlier = len(tuning.tried) - kept, f", {kept} of earlier searches" if kept else ""
    end = f", {tuning.ended}" if tuning.ended else ""
    yield f"{formats.counted(made, 'trial')}{earlier} in {formats.elapsed(tuning.seconds)}{end}"
    if on_cpu and tuning.winner:
        yield "note: a CPU's times are noise, and what is close may be in another order tomorrow"


def _winner(tuning: Tuning, winner: Spec) -> Iterator[str]:
    trial, before, verdicts = tuning.trial_of(winner), tuning.trial_of(tuning.begun_at), _verdicts(tuning)
    sign, name = (-1, "tokens/s") if tuning.objective.name == "throughput" else (1, tuning.objective.name)
    yield f"{winner.id}"
    if trial is not None:
        yield f"  as a trial of {trial.steps} steps: {_figures(trial)}"
        yield from (f"  uncertain: {line}" for line in trial.disturbances[:1])
    if trial is not None and before is not None and winner != tuning.begun_at:
        now, then = tuning.objective.log_of(trial), tuning.objective.log_of(before)
        gain = f"{tuning.begun_at.id} did not train"
        if now is not None and then is not None:
            about = "" if trial.ranks and before.ranks else "about "
            gain = f"{about}{formats.percent(math.expm1(sign * (now - then)))} {name} against {tuning.begun_at.id}"
        yield f"  {gain}, where the search began"
    beside = {"second": "is better than", "first": "is worse than", "tie": "ties with", "": "is not yet told from"}
    for (first, second), turns in tuning.compared.items():
        more, *ends = (formats.percent(math.expm1(sign * log)) for log in (turns.log, turns.low, turns.high))
        figure = f"{more} {name} ({' to '.join(ends[::sign])}), {formats.counted(turns.pairs, 'pair')}"
        yield f"  in turns: {second.id} {beside[verdicts[first]]} {first.id}: {figure}"
    if tuning.rivals:
        ids = formats.first_n([one.id for one in tuning.rivals], _MOST)
        yield f"  not decided: turns have not told it yet from {ids}; give more --minutes"
    elif not (tuning.ended or tuning.unsound) and len(tuning.tried) > 1:
        yield f"  decided: {'by turns with all that' if tuning.compared else 'no other'} came as near as trials scatter"
    if not tuning.left:
        yield "  everything that fits was tried"
    like = "; its losses are in the band of the start's" if trial and trial.losses and winner != tuning.begun_at else ""
    unshown = f"not claimed{like}" if winner.is_script else "not shown"
    case = "as a case, as its test launches it", tuning.case, "not launched"
    for what, conclusion, none in (("parity", tuning.parity, unshown), case):
        result = conclusion and conclusion.result
        yield f"  {what}: {f'{result.verdict}: {result.reason}' if result else none}"
        yield from (f"    {line}" for line in ((result and result.updated) or "").splitlines())


def _verdicts(tuning: Tuning) -> Mapping[Spec, str]:
    """Of each that took turns with the winner; empty where they have not told it yet."""
    return {one: "" if one in tuning.rivals else turns.verdict for (one, _), turns in tuning.compared.items()}


def _figures(trial: Trial) -> str:
    joules, memory = trial.joules_per_token, formats.memory(trial.peak_reserved_bytes)
    energy = f", {joules * 1e3:.3g} mJ a token" if joules else ""
    rate = formats.tokens_per_second(trial.tokens_per_second_per_gpu)
    return f"{rate} tokens/s/GPU (±{formats.share(2 * trial.step_error)}), {memory}{energy}"


_TOLD, _TOLD_OF_A_CASE = "ended refused too_large left unseen notes".split(), "verdict reason updated".split()


def document(tuning: Tuning, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Everything; bytes, seconds and tokens/s."""
    verdicts = _verdicts(tuning)
    trials = [{**codec.plain(one.trial), "spec": one.spec.to_dict(), "kept": one.was_kept} for one in tuning.tried]
    told = {"parity": tuning.parity and tuning.parity.result, "case": tuning.case and tuning.case.result}
    concluded = {
        name: {**{each: getattr(one, each) for each in _TOLD_OF_A_CASE}, "launches": len(one.launches)} if one else None
        for name, one in told.items()
    }
    return {
        "schema": 1,
        "machine": dict(machine),
        "objective": tuning.objective.name,
        "seconds": round(tuning.seconds, 3),
        "seconds_given": tuning.seconds_given,
        "begun_at": _spec(tuning.begun_at, tuning),
        "winner": None if tuning.winner is None else _spec(tuning.winner, tuning),
        "ties": [_spec(one, tuning) for one, verdict in verdicts.items() if verdict == "tie"],
        "undecided": [_spec(spec, tuning) for spec in tuning.rivals],
        "compared": [
            {"first": first.id, "second": second.id, "cost_log": turns.log, "within": turns.wide}
            | {"pairs": turns.pairs, "verdict": verdicts[first] or "undecided"}
            for (first, second), turns in tuning.compared.items()
        ],
        **concluded,
        "trials": trials,
        **{name: codec.plain(getattr(tuning, name)) for name in _TOLD},
        "least": None if tuning.least is None else {"id": tuning.least[0].id, "peak_bytes": tuning.least[1] or None},
    }


def _spec(spec: Spec, tuning: Tuning) -> dict[str, Any]:
    trial, names = tuning.trial_of(spec), ("tokens_per_second_per_gpu", "peak_reserved_bytes", "joules_per_token")
    measured = {name: getattr(trial, name) for name in names} if trial is not None and trial.is_measured else {}
    return {"id": spec.id, "digest": spec.digest, "spec": spec.to_dict(), **measured}


class Watcher(Terminal):
    """What is seen of a search while it runs: a line for each trial, and none for a launch, on standard error."""

    shows_launches = False

    def __init__(self, tuning: Tuning) -> None:
        self._shown = 0
        size, minutes = formats.counted(tuning.space.size, "combination"), formats.elapsed(tuning.seconds_given)
        self.say(f"searching {size} for {tuning.objective.words}, {minutes} at most")

    def standing(self, tuning: Tuning, doing: str, seconds_left: float) -> None:
        time_left = f"{formats.elapsed(max(0.0, seconds_left))} left"
        for number, tried in enumerate(tuning.tried[self._shown :], self._shown + 1):
            trial = tried.trial
            outcome = _figures(trial) if trial.is_measured else f"failed ({trial.kind}: {trial.failure})"
            outcome += ", by an earlier search" if tried.was_kept else ""
            outcome += "".join(f", spoilt: {line}" for line in trial.disturbances[:1])
            self.say(f"{number}: {outcome}: {tried.spec.id}; {tuning.left:,} left, {time_left}")
        self._shown = len(tuning.tried)
        if doing:
            self.say(f"{doing}; {time_left}")


def winners_test(winner: Spec, gpus: int) -> Iterator[str]:
    """What holds it from tomorrow on, ready to paste."""
    values, kind = chosen_settings(winner.to_dict()).items(), type(winner).__name__
    pairs = [(name, json.dumps(one, ensure_ascii=False) if isinstance(one, str) else one) for name, one in values]
    words = ", ".join(f"{name}={text}" for name, text in pairs)
    yield from ("", "# test_tuned.py", f"from pytest_llmperf import {kind}", "", "")
    yield from ("def test_tuned(perf):", f"    perf.check({kind}({words}))", f"# pytest test_tuned.py --gpus {gpus}")
