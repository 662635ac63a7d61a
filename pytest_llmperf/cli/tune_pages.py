"""What a search has found: a page for people, a document for programs, a test that holds it; and lines meanwhile."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_llmperf.cli.asked_run import Terminal
from pytest_llmperf.cli.baseline_folder import chosen_settings
from pytest_llmperf.judge.tuning import Trial
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.run.tuning.trials import Compared, Tuning
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support import codec, formats

# Of reasons; the document has all.
_MOST = 8


def page(tuning: Tuning) -> Iterator[str]:
    """The winner first, then what it rests on."""
    yield from _winner(tuning, tuning.winner) if tuning.winner is not None else ("no winner",)
    counts = (
        (tuning.too_large, "of those looked at do not fit"),
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


def _winner(tuning: Tuning, winner: Spec) -> Iterator[str]:
    trial, before = tuning.trial_of(winner), tuning.trial_of(tuning.begun_at)
    yield f"{winner.id}"
    if trial is not None:
        yield f"  {_figures(trial)}"
        yield from (f"  uncertain: {line}" for line in trial.disturbances[:1])
    if trial is not None and before is not None and winner != tuning.begun_at:
        now, then = tuning.objective.log_of(trial), tuning.objective.log_of(before)
        gain = f"{tuning.begun_at.id} did not train"
        if now is not None and then is not None:
            about = "" if trial.ranks and before.ranks else "about "
            gain = f"{about}{math.exp(then - now):.2f} times what {tuning.begun_at.id} gives"
        yield f"  {gain}, where the search began"
    for one in tuning.compared:
        turns = one.turns
        what = {"second": "is better", "first": "is worse", "tie": "is a tie"}.get(turns.verdict, "was not told apart")
        cost, low, high = (formats.percent(math.expm1(log)) for log in (turns.log, turns.low, turns.high))
        against = f"cost {cost} ({low} to {high}) of {one.first.id}, {formats.counted(turns.pairs, 'pair')}"
        yield f"  in turns: {one.second.id} {what}: {against}"
    yield from (f"  a tie with {tie.id}" for tie in tuning.ties)
    if not tuning.left:
        yield "  everything that fits was tried"
    like = "; its losses are like those of where the search began" if trial is not None and trial.losses else ""
    unshown = f"not claimed{like}" if winner.is_script else "not shown"
    for what, conclusion, none in (("parity", tuning.parity, unshown), ("as a case", tuning.case, "not launched")):
        result = conclusion.result if conclusion else None
        yield f"  {what}: {f'{result.verdict}: {result.reason}' if result else none}"
        yield from (f"    {line}" for line in ((result and result.updated) or "").splitlines())


def _figures(trial: Trial) -> str:
    joules, memory = trial.joules_per_token, formats.memory(trial.peak_reserved_bytes)
    energy = f", {joules * 1e3:.3g} mJ a token" if joules else ""
    rate = formats.tokens_per_second(trial.tokens_per_second_per_gpu)
    return f"{rate} tokens/s/GPU, {memory}{energy} (±{formats.share(2 * trial.step_error)})"


_TOLD = "ended refused too_large left unseen notes".split()


def document(tuning: Tuning, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Everything; bytes, seconds and tokens/s."""
    trials = [{**codec.plain(one.trial), "spec": one.spec.to_dict(), "kept": one.was_kept} for one in tuning.tried]
    return {
        "schema": 1,
        "machine": dict(machine),
        "objective": tuning.objective.name,
        "seconds": round(tuning.seconds, 3),
        "seconds_given": tuning.seconds_given,
        "begun_at": _spec(tuning.begun_at, tuning),
        "winner": None if tuning.winner is None else _spec(tuning.winner, tuning),
        "ties": [_spec(spec, tuning) for spec in tuning.ties],
        "compared": [_compared(one) for one in tuning.compared],
        "parity": _concluded(tuning.parity),
        "case": _concluded(tuning.case),
        "trials": trials,
        **{name: codec.plain(getattr(tuning, name)) for name in _TOLD},
        "least": None if tuning.least is None else {"id": tuning.least[0].id, "peak_bytes": tuning.least[1] or None},
    }


def _compared(one: Compared) -> dict[str, Any]:
    turns, sides = one.turns, {"first": one.first.id, "second": one.second.id}
    verdict = turns.verdict or "undecided"
    return {**sides, "cost_log": turns.log, "within": turns.wide, "pairs": turns.pairs, "verdict": verdict}


def _spec(spec: Spec, tuning: Tuning) -> dict[str, Any]:
    trial, names = tuning.trial_of(spec), ("tokens_per_second_per_gpu", "peak_reserved_bytes", "joules_per_token")
    measured = {name: getattr(trial, name) for name in names} if trial is not None and trial.is_measured else {}
    return {"id": spec.id, "digest": spec.digest, "spec": spec.to_dict(), **measured}


def _concluded(conclusion: Concluded | None) -> dict[str, Any] | None:
    if conclusion is None:
        return None
    about = {name: getattr(conclusion.result, name) for name in ("verdict", "reason", "updated")}
    return {**about, "launches": len(conclusion.result.launches)}


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
    words = ", ".join(f"{name}={_quoted(value)}" for name, value in chosen_settings(winner.to_dict()).items())
    kind = "ScriptSpec" if winner.is_script else "TrainSpec"
    yield from ("", "# test_tuned.py", f"from pytest_llmperf import {kind}", "", "")
    yield from ("def test_tuned(perf):", f"    perf.check({kind}({words}))", f"# pytest test_tuned.py --gpus {gpus}")


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
