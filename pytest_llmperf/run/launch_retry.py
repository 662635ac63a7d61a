"""The retry of a launch that the circumstances spoilt: it is set aside and tried once more, later; once a case.

``runs_out`` is for a case that is declared to run out of memory: one launch decides whether it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.validity import Circumstances
from pytest_llmperf.records.failure import Failure, LaunchFailed
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run.case import Caller, Case
from pytest_llmperf.run.runner import Runner
from pytest_llmperf.settings.spec import Spec

# What spoilt a launch (heat, somebody else's job) is seldom gone at once.
_PAUSE_SECONDS = 20.0


class LaunchRetry:
    """The launches of one case, and what is wrong with those that count."""

    def __init__(self, runner: Runner, say: Callable[[str], None]) -> None:
        self._runner, self._say = runner, say
        self.set_aside: tuple[str, ...] = ()
        """Why a launch was set aside."""
        self.spoilt: tuple[str, ...] = ()
        """Why launches are no good that count all the same, because the retry was spoilt too."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Tell a reader of the verdict of the one that was set aside."""
        return (f"one launch was set aside: {self.set_aside[0]}",) if self.set_aside else ()

    def launch(self, spec: Spec, number: int, circumstances: Callable[[Launch], Circumstances], **how: Any) -> Launch:
        """One launch of ``spec``, made as a runner does it, which ``circumstances`` may have spoilt.

        Raises:
            LaunchFailed: it yielded no record.
        """
        outcome = self._runner.launch(spec, number, **how)
        around = _around(outcome, circumstances)
        if around.lines and not self.set_aside:
            self.set_aside = around.lines
            self._say(f"{spec.id}: {around.lines[0]}; set aside, launched once more in {_PAUSE_SECONDS:.0f} s")
            time.sleep(_PAUSE_SECONDS)
            if around.drifts and not spec.is_script:  # nobody knows whether a script makes more steps
                # It is given more of them, and what passes with its own says nothing of these.
                least = min(spec.min_steps, spec.steps)
                spec, how = spec.changed(steps=2 * spec.steps, min_steps=2 * least), how | {"passing": None}
            outcome = self._runner.launch(spec, number, **how)
            around = _around(outcome, circumstances)
        self.spoilt = (*self.spoilt, *around.lines)
        if isinstance(outcome, Failure):
            raise LaunchFailed(spec.id, outcome)
        return outcome


def _around(outcome: Launch | Failure, circumstances: Callable[[Launch], Circumstances]) -> Circumstances:
    if isinstance(outcome, Launch):
        return circumstances(outcome)
    # Of what makes a launch fail, memory alone is what a neighbour takes.
    return Circumstances(validity.neighbours(outcome.health) if outcome.kind == "oom" else ())


def should_run_out(caller: Caller) -> bool:
    """Whether the GPUs here have less memory than the case was declared to need."""
    below = caller.terms.oom_below_gib
    return below is not None and not caller.run.on_cpu and caller.run.memory_bytes < below * 2**30


def runs_out(caller: Caller, runner: Runner, spec: Spec) -> CaseResult:
    """``pass`` where a launch of ``spec`` runs out of memory that nobody else holds; ``invalid`` where it trains."""
    case, retry = Case.of(spec), LaunchRetry(runner, caller.observer.say)
    try:
        launch = retry.launch(spec, 1, lambda _: Circumstances())
    except LaunchFailed as error:
        if error.failure.kind != "oom" or retry.spoilt:
            raise
        return caller.result(case, "pass", "ran out of memory, as declared")
    reason = f"was declared to run out of memory below {caller.terms.oom_below_gib:g} GiB, and trained"
    return replace(caller.result(case, "invalid", reason), launches=(launch,))
