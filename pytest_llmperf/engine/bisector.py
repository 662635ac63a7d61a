"""Bisector: one search, from its two ends to the first bad candidate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from pytest_llmperf.analysis.step_difference import step_difference
from pytest_llmperf.engine.beside_good import BesideGood
from pytest_llmperf.engine.bisection import Bisection, BisectionOrder, Change, Step
from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.judge.yardstick import Lineage, Look, Side, Yardstick, compared_ends, criteria, most_steps, side_of
from pytest_llmperf.launch.candidates import History, Span
from pytest_llmperf.records.candidate import Candidate
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.report.step_words import points_to
from pytest_llmperf.run.errors import CaseFailedError
from pytest_llmperf.settings.train_spec import TrainSpec

#: How often all of a bisection's decisions together may be wrong.
ALPHA = 0.05

# A change below so many standard deviations of a pair is often seen larger than it is, where it is seen at all.
_CLEAR = 2.0

Watch = Callable[[str], None]


class Bisector:
    """Of one case and one history."""

    def __init__(self, caller: Caller, spec: TrainSpec, order: BisectionOrder, history: History, watch: Watch) -> None:
        self._caller, self._spec, self._order, self._history, self._watch = caller, spec, order, history, watch
        self._policy = caller.policy(spec)
        self._steps: list[Step] = []

    def run(self, span: Span) -> Bisection:
        """Search between the ends of ``span`` until one is left, or none can tell more, or time is over.

        Raises:
            CaseFailedError: an end cannot be launched, or another process does the same.
        """
        context = self._caller.context
        context.until = time.monotonic() + self._order.seconds
        lineage = Lineage(span.candidates)
        # One is of the ends, and skipped ones may make the halves uneven by one.
        alpha = ALPHA / (most_steps(len(span.candidates)) + 2)
        found = Bisection(good=span.good, bad=lineage.bad, num_candidates=len(span.candidates), notes=span.notes)
        with BesideGood(self._caller, self._spec, self._history, span.good, self._watch) as beside:
            ended = ""
            try:
                yardstick = self._ends(beside, lineage.bad, alpha)
                found = replace(found, yardstick=yardstick)
                if yardstick is not None:
                    found = replace(found, notes=(*found.notes, *self._caution(yardstick)))
                    self._divided(beside, lineage, yardstick, alpha)
            except KeyboardInterrupt:
                ended = "interrupted"
            notes = (*found.notes, *beside.notes)
            found = replace(found, steps=tuple(self._steps), ended=ended or beside.ended, notes=notes)
            return self._concluded(found, lineage, beside, alpha)

    def _ends(self, beside: BesideGood, bad: Candidate, alpha: float) -> Yardstick | None:
        """In what they differ.

        Raises:
            CaseFailedError: one of them cannot be launched.
        """
        self._watch(f"the ends: {beside.good.shown} (good) and {bad.shown} (bad), in turns")
        yardstick: list[Yardstick | None] = [None]
        order = criteria(self._order.by, on_cpu=self._caller.context.on_cpu)

        def decide(pairs: tuple[tuple[Launch, Launch], ...]) -> Look:
            told = compared_ends(pairs, self._policy, order, alpha=alpha, budget=self._order.max_pairs)
            yardstick[0] = told.yardstick
            return Look(told.goes_on, "bad" if told.yardstick else None)

        step = beside.compared(bad, decide, is_end=True)
        self._steps.append(step)
        if step.side == "skipped":
            raise CaseFailedError(f"--bad {bad.shown}: {step.reason}")
        return yardstick[0]

    def _caution(self, yardstick: Yardstick) -> tuple[str, ...]:
        on_cpu = self._caller.context.on_cpu
        if yardstick.by != "speed":
            told = "step times are by a CPU's clock, which shows its other work too: they decided nothing here"
            return (told,) if on_cpu else ()
        found = []
        if on_cpu:
            found.append("a CPU's clock shows its other work too: see whether --by counts tells the ends apart")
        scatter = yardstick.error * math.sqrt(self._steps[0].pairs)
        if abs(yardstick.size) < _CLEAR * scatter:
            more = 4 * self._order.max_pairs
            why = "the ends are hardly further apart than one pair scatters, and chance may have enlarged that"
            found.append(f"{why}: its answer is worth little without --max-pairs {more}")
        return tuple(found)

    def _divided(self, beside: BesideGood, lineage: Lineage, yardstick: Yardstick, alpha: float) -> None:
        def decide(pairs: tuple[tuple[Launch, Launch], ...]) -> Look:
            return side_of(pairs, yardstick, self._policy, alpha=alpha, budget=self._order.max_pairs)

        while not beside.ended:
            candidate = lineage.following(self._sides)
            if candidate is None:
                return
            num = len(lineage.suspects(self._sides))
            self._watch(f"step {len(self._steps)}, about {most_steps(num)} left of {num} suspects: {candidate.told}")
            step = beside.compared(candidate, decide)
            self._steps.append(step)
            self._watch(
                f"{candidate.shown}: {step.side or 'not decided'}" + (f": {step.reason}" if step.reason else "")
            )

    @property
    def _sides(self) -> dict[str, Side]:
        return {step.candidate.name: step.side for step in self._steps if step.side is not None}

    def _concluded(self, found: Bisection, lineage: Lineage, beside: BesideGood, alpha: float) -> Bisection:
        if found.yardstick is None:
            return found
        # What is counted has no noise to be wrong by.
        decided = sum(step.side in ("good", "bad") for step in found.steps) if found.yardstick.by == "speed" else 0
        suspects = lineage.suspects(self._sides)
        found = replace(found, suspects=suspects, confidence=1 - min(1.0, alpha * decided))
        first_bad = found.first_bad
        if first_bad is None:
            return found
        name = lineage.before(first_bad, self._sides)
        last_good = next((one for one in lineage.candidates if one.name == name), found.good)
        now = beside.newest(first_bad.name)
        then = beside.newest(last_good.name) if name else beside.newest_good(first_bad.name)
        if now is None or then is None:
            return replace(found, last_good=last_good)
        words = points_to(step_difference(then.trace, now.trace)) if then.trace and now.trace else ""
        return replace(
            found,
            last_good=last_good,
            change=_between(self._step(name), self._step(first_bad.name)),
            exact=(*beside.exact_differences(then, now), *then.differences(now)),
            diagnosis=words,
        )

    def _step(self, name: str | None) -> Step | None:
        return next((step for step in self._steps if step.candidate.name == name), None)


def _between(good: Step | None, bad: Step | None) -> Change | None:
    """Of the second over the first, both of which were held against the same end; none is that end itself."""
    if bad is None or bad.change is None:
        return None
    if good is None or good.change is None:
        return bad.change
    log = bad.change.log - good.change.log
    wide = math.hypot(bad.change.log - bad.change.low, good.change.log - good.change.low)
    return Change(log, log - wide, log + wide)
