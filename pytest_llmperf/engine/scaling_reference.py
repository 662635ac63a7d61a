"""Scaling: a wide case held against the narrowest of its series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.engine.recorder import Recorder
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.scaling_efficiency import METRIC, Narrow, judge_efficiency
from pytest_llmperf.judge.verdict import Judgement, joined
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Check
from pytest_llmperf.run.context import Context
from pytest_llmperf.spec.equivalence import narrower
from pytest_llmperf.spec.train_spec import TrainSpec


def reference_width(
    context: Context, recorder: Recorder, wide: TrainSpec, scaled_from: TrainSpec | None
) -> Narrow | None:
    """The narrowest of the series of ``wide``, or ``scaled_from``: as this run measured it, else as it is stored.

    Under ``--perf-against`` no baseline is read.
    """
    narrow = context.result_cache.narrow(wide, scaled_from)
    if narrow is not None or context.settings.against:
        return narrow
    for spec in [scaled_from] if scaled_from else narrower(wide):
        baseline = recorder.find(spec)
        if baseline is not None:
            return Narrow(gpus=spec.gpus, launches=baseline.launches, baseline=baseline, in_this_run=False)
    return None


class Scaling:
    """How well one wide case scales."""

    def __init__(self, caller: Caller, spec: TrainSpec, narrow: Narrow | None) -> None:
        self._context, self._terms = caller.context, caller.terms.efficiency
        self._policy, self._narrow = caller.policy(spec), narrow

    def joined(self, judgement: Judgement, launches: Sequence[Launch], baseline: Baseline | None) -> Judgement:
        """``judgement`` against ``baseline`` with what more GPUs brought; of launches in trouble nothing."""
        if judgement.verdict == "invalid":
            return judgement
        batch = Check(metric="global_batch_tokens", value=float(launches[0].tokens_per_step), unit="tokens")
        if self._narrow is None:
            judgement = replace(judgement, checks=(*judgement.checks, batch))
            return self._without_reference(judgement) if self._terms.at_least is not None else judgement
        found = judge_efficiency(launches, baseline, self._narrow, self._policy, self._terms)
        widening = len(launches[0].ranks) / self._narrow.gpus
        speed_up = Check(
            metric="speed_up", value=found.check.value * widening, unit="1", detail=f"over {self._narrow.name}"
        )
        return joined(judgement, (found.check, speed_up, batch), undecided=found.undecided)

    @property
    def unheld(self) -> str:
        """Why its floor could not be held; empty where it could, or where there is none."""
        if self._narrow is not None or self._terms.at_least is None:
            return ""
        stored = ", and --perf-against reads no baseline" if self._context.settings.against else " or is stored"
        return f"{METRIC}: no narrower width was measured in this run{stored}, so its floor was not held"

    def _without_reference(self, judgement: Judgement) -> Judgement:
        if judgement.verdict not in ("pass", "improved", "changed"):
            return judgement
        return replace(judgement, verdict="inconclusive", reason=self.unheld)
