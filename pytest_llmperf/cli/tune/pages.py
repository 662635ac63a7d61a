"""What a search has found, as a page for people and as a document for programs. Pure."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pytest_llmperf.cli.check.terminal import Terminal
from pytest_llmperf.cli.screen import Screen, table
from pytest_llmperf.engine.conclusion import Conclusion
from pytest_llmperf.engine.tuning.trials import NEEDED, Compared, Share, Tried, Tuning, TuningOrder
from pytest_llmperf.engine.tuning.tuner import Standing
from pytest_llmperf.records.trial import Trial
from pytest_llmperf.report.progress_line import LaunchLines, Numbered
from pytest_llmperf.report.table import Column
from pytest_llmperf.report.text import one_line
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec, formats

SCHEMA = 1

# Of reasons, and of what failed: who wants all of them asks for the document.
_MOST = 8


def page(order: TuningOrder, tuning: Tuning, screen: Screen) -> Iterator[str]:
    """The winner first, then what it rests on."""
    if tuning.winner is None:
        yield "no winner"
    else:
        yield from _winner(order, tuning, tuning.winner)
    yield from _section("what each choice brought", _shares(tuning.shares), screen)
    front = [one for one in tuning.tried if one.spec in tuning.front and one.trial.ranks]
    front.sort(key=lambda one: -one.trial.tokens_per_second_per_gpu)
    yield from _section("no other is both faster and smaller", _trials(front) if front else [], screen)
    yield from _failures(tuning)
    yield from _spoilt(tuning)
    untried = [*_untried(tuning)]
    if untried:
        yield from ("", "not tried", *(f"  {line}" for line in untried))
    for note in tuning.notes:
        yield f"note: {note}"
    if tuning.unkept:
        yield f"note: its trials are not kept, and the next search makes them anew ({tuning.unkept})"
    made = sum(not one.was_kept for one in tuning.tried)
    kept = len(tuning.tried) - made
    end = f", {tuning.ended}" if tuning.ended else ""
    earlier = f", {kept} of earlier searches" if kept else ""
    yield f"{formats.counted(made, 'trial')}{earlier} in {formats.elapsed(tuning.seconds)}{end}"


def _winner(order: TuningOrder, tuning: Tuning, winner: TrainSpec) -> Iterator[str]:
    trial, before = tuning.trial_of(winner), tuning.trial_of(tuning.begun_at)
    yield f"{winner.id}"
    if trial is not None:
        yield f"  {_figures(trial)}"
        yield from (f"  uncertain: {line}" for line in trial.disturbances[:1])
    if trial is not None and before is not None and winner != tuning.begun_at:
        gain, about = _ratio(order, trial, before), "" if trial.ranks and before.ranks else "about "
        told = (
            f"{about}{gain:.2f} times what {tuning.begun_at.id} gives"
            if gain
            else f"{tuning.begun_at.id} did not train"
        )
        yield f"  {told}, where the search began"
    for one in tuning.compared:
        yield f"  {_turns(one)}"
    for tie in tuning.ties:
        yield f"  a tie with {tie.id}"
    yield f"  {_sureness(tuning)}"
    yield from _concluded("parity", tuning.parity, "not shown")
    yield from _concluded("as a case", tuning.case, "not launched")


def _figures(trial: Trial) -> str:
    rate = f"{formats.tokens_per_second(trial.tokens_per_second_per_gpu)} tokens/s/GPU"
    parts = [
        f"{rate} (±{formats.share(2 * trial.step_error)} in its trial)",
        f"{formats.memory(trial.peak_reserved_bytes)} reserved",
    ]
    joules = trial.joules_per_token
    parts += [f"{joules * 1e3:.3g} mJ a token"] if joules else []
    return ", ".join(parts)


def _turns(one: Compared) -> str:
    cost = math.expm1(one.turns.log)
    low, high = (math.expm1(value) for value in (one.turns.low, one.turns.high))
    what = {"second": "is better", "first": "is worse", "tie": "is a tie"}.get(one.turns.verdict, "was not told apart")
    pairs = f"{one.turns.pairs} pair{'s' * (one.turns.pairs > 1)}"
    return (
        f"in turns: {one.second.id} {what}: cost {formats.percent(cost)} ({formats.percent(low)} to "
        f"{formats.percent(high)}) of {one.first.id}, {pairs}"
    )


def _sureness(tuning: Tuning) -> str:
    if not tuning.left:
        return "everything that fits was tried"
    chance = tuning.better_chance
    told = "below 1 %" if chance < 0.01 else f"{chance * 100:.0f} %"  # noqa: PLR2004
    return f"chance that one of the {tuning.left:,} untried is more than 1 % better: {told}"


def _concluded(what: str, conclusion: Conclusion | None, none: str) -> Iterator[str]:
    if conclusion is None:
        yield f"  {what}: {none}"
    else:
        result = conclusion.result
        yield f"  {what}: {result.verdict}: {result.reason}"
        yield from (f"    {line}" for line in (result.updated or "").splitlines())


def _section(title: str, columns: Sequence[Column], screen: Screen) -> Iterator[str]:
    if columns and columns[0].cells:
        yield from ("", title)
        yield from (f"  {line}" for line in table(columns, screen))


def _shares(shares: Sequence[Share]) -> list[Column]:
    """In falling order of what they brought."""
    ranked = sorted(shares, key=lambda one: one.log)
    return [
        Column("choice", [f"{one.axis}: {one.before} to {one.after}" for one in ranked], right=False),
        Column("cost", ["" if one.how == NEEDED else formats.percent(math.expm1(one.log)) for one in ranked]),
        Column("±", ["" if one.how == NEEDED else formats.share(one.wide) for one in ranked]),
        Column("by", [one.how for one in ranked], right=False),
    ]


def _trials(tried: Sequence[Tried]) -> list[Column]:
    return [
        Column("configuration", [one.spec.id for one in tried], right=False),
        Column("tokens/s/GPU", [formats.tokens_per_second(one.trial.tokens_per_second_per_gpu) for one in tried]),
        Column("memory", [formats.memory(one.trial.peak_reserved_bytes) for one in tried]),
    ]


def _failures(tuning: Tuning) -> Iterator[str]:
    failed = [one for one in tuning.tried if not one.trial.is_measured and not one.trial.is_too_large]
    if failed:
        yield from ("", "failed")
        for one in failed[:_MOST]:
            yield f"  {one.spec.id}: {one.trial.kind}: {one.trial.failure}"
        if len(failed) > _MOST:
            yield f"  and {len(failed) - _MOST} more (--json has them all)"


def _spoilt(tuning: Tuning) -> Iterator[str]:
    last = {one.spec: one.trial for one in tuning.tried}
    spoilt = [trial for trial in last.values() if trial.disturbances]
    if spoilt:
        yield from ("", "spoilt by what was around them, and ranked nowhere; the same command measures them anew")
        for trial in spoilt[:_MOST]:
            yield f"  {trial.id}: {trial.disturbances[0]}"
        if len(spoilt) > _MOST:
            yield f"  and {len(spoilt) - _MOST} more (--json has them all)"


def _untried(tuning: Tuning) -> Iterator[str]:
    for reason, number in Counter(dict(tuning.refused)).most_common(_MOST):
        yield f"{number:,} cannot be: {reason}"
    if len(tuning.refused) > _MOST:
        yield f"and {len(tuning.refused) - _MOST} more reasons (--json has them all)"
    if tuning.too_large:
        yield f"{tuning.too_large:,} of those looked at do not fit"
    if tuning.memory_errors is not None:
        low, high = tuning.memory_errors
        yield f"reserved memory was {formats.percent(low)} to {formats.percent(high)} of what was predicted for tensors"
    for reason, number in tuning.put_off.items():
        yield f"{number:,} {reason}; more --minutes give a trial more"
    rest = tuning.left - sum(tuning.put_off.values())
    if rest:
        yield f"{rest:,} promised too little, or no time was left for them"
    if tuning.unseen:
        yield f"{tuning.unseen:,} more were not looked at: the space is searched in a sample of it"


def _ratio(order: TuningOrder, now: Trial, before: Trial) -> float | None:
    logs = order.objective.log_of(now), order.objective.log_of(before)
    return None if logs[0] is None or logs[1] is None else math.exp(logs[1] - logs[0])


def document(order: TuningOrder, tuning: Tuning, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Everything; bytes, seconds and tokens/s."""
    return {
        "schema": SCHEMA,
        "machine": dict(machine),
        "objective": order.objective.name,
        "seconds": round(tuning.seconds, 3),
        "seconds_given": order.seconds,
        "ended": tuning.ended,
        "begun_at": _spec(tuning.begun_at, tuning),
        "winner": None if tuning.winner is None else _spec(tuning.winner, tuning),
        "ties": [_spec(spec, tuning) for spec in tuning.ties],
        "compared": [_compared(one) for one in tuning.compared],
        "parity": _document_of(tuning.parity),
        "case": _document_of(tuning.case),
        "choices": [
            {
                "axis": one.axis,
                "before": one.before,
                "after": one.after,
                "cost_log": one.log,
                "within": one.wide,
                "by": one.how,
            }
            for one in tuning.shares
        ],
        "front": [spec.id for spec in tuning.front],
        "trials": [
            {**codec.plain(one.trial), "spec": one.spec.to_dict(), "kept": one.was_kept} for one in tuning.tried
        ],
        "refused": dict(tuning.refused),
        "too_large": tuning.too_large,
        "left": tuning.left,
        "put_off": dict(tuning.put_off),
        "unseen": tuning.unseen,
        "better_chance": tuning.better_chance,
        "memory_errors": tuning.memory_errors,
        "least": None if tuning.least is None else {"id": tuning.least[0].id, "peak_bytes": tuning.least[1] or None},
        "unkept": tuning.unkept,
        "notes": list(tuning.notes),
    }


def _spec(spec: TrainSpec, tuning: Tuning) -> dict[str, Any]:
    trial = tuning.trial_of(spec)
    measured = (
        {}
        if trial is None or not trial.is_measured
        else {
            "tokens_per_second_per_gpu": trial.tokens_per_second_per_gpu,
            "peak_reserved_bytes": trial.peak_reserved_bytes,
            "joules_per_token": trial.joules_per_token,
        }
    )
    return {"id": spec.id, "digest": spec.digest, "spec": spec.to_dict(), **measured}


def _compared(one: Compared) -> dict[str, Any]:
    turns = one.turns
    return {
        "first": one.first.id,
        "second": one.second.id,
        "cost_log": turns.log,
        "within": turns.wide,
        "pairs": turns.pairs,
        "verdict": turns.verdict or "undecided",
    }


def _document_of(conclusion: Conclusion | None) -> dict[str, Any] | None:
    if conclusion is None:
        return None
    result = conclusion.result
    return {
        "verdict": result.verdict,
        "reason": result.reason,
        "updated": result.updated,
        "launches": len(result.launches),
    }


# Watcher: what is seen of a search while it runs: a line for each trial.


class Watcher(Terminal):
    """On standard error: what is printed as the answer stays by itself."""

    def __init__(self, order: TuningOrder) -> None:
        self._told = 0
        size, minutes = formats.counted(order.space.size, "combination"), formats.elapsed(order.seconds)
        self.say(f"searching {size} for {order.objective.words}, {minutes} at most")

    def standing(self, standing: Standing) -> None:
        """Where the search is now."""
        seconds_left = f"{formats.elapsed(max(0.0, standing.seconds_left))} left"
        new, self._told = standing.tried[self._told :], len(standing.tried)
        for number, tried in enumerate(new, self._told - len(new) + 1):
            self.say(f"{number}: {_outcome(tried)}: {tried.spec.id}; {standing.left:,} left, {seconds_left}")
        if standing.doing and not standing.doing.startswith("trial"):
            self.say(f"{standing.doing}; {seconds_left}")

    def say(self, line: str) -> None:
        """A line about what happens, or about why nothing seems to."""
        if sys.stderr is not None:
            print(one_line(f"llmperf: {line}"), file=sys.stderr, flush=True)

    @contextmanager
    def launch(self, spec_id: str, number: int, launches: int) -> Iterator[LaunchLines]:
        """Nothing is shown of one launch: several may run side by side, and each trial has its line."""
        yield LaunchLines(Numbered(spec_id, number, launches), say=lambda _line: None, write=None)


def _outcome(tried: Tried) -> str:
    trial = tried.trial
    kept = ", by an earlier search" if tried.was_kept else ""
    kept += "".join(f", spoilt: {line}" for line in trial.disturbances[:1])
    if not trial.is_measured:
        return f"failed ({trial.kind}: {trial.failure}){kept}"
    rate = formats.tokens_per_second(trial.tokens_per_second_per_gpu)
    return f"{rate} tokens/s/GPU, {formats.memory(trial.peak_reserved_bytes)}{kept}"
