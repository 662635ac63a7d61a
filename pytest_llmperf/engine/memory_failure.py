"""A case that is declared to run out of memory: one launch decides whether it does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.engine.case import Case
from pytest_llmperf.engine.launch_retry import LaunchRetry
from pytest_llmperf.engine.runner import Runner
from pytest_llmperf.judge.validity import Circumstances
from pytest_llmperf.records.failure import LaunchFailed
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.spec.train_spec import TrainSpec


def should_run_out(caller: Caller) -> bool:
    """Whether the GPUs here have less memory than the case was declared to need."""
    below = caller.terms.oom_below_gib
    if below is None or caller.context.on_cpu:
        return False
    return caller.context.memory_bytes < below * 2**30


def runs_out(caller: Caller, runner: Runner, spec: TrainSpec) -> CaseResult:
    """``pass`` where a launch of ``spec`` runs out of memory, and nobody else holds any; ``invalid`` where it trains.

    Raises:
        LaunchFailed: it ended for another reason.
    """
    case, retry = Case.of(spec), LaunchRetry(caller.observer.say)
    try:
        launch = retry.launch(spec, partial(runner.launch, number=1), lambda _: Circumstances())
    except LaunchFailed as error:
        if error.failure.kind != "oom" or retry.spoilt:
            raise
        return caller.result(case, "pass", "ran out of memory, as declared")
    reason = f"was declared to run out of memory below {caller.terms.oom_below_gib:g} GiB, and trained"
    return replace(caller.result(case, "invalid", reason), launches=(launch,))
