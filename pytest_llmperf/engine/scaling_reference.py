"""Scaling: a wide case held against the narrowest of its series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_llmperf.engine.recorder import Recorder
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.scaling_efficiency import METRIC, Narrow, Terms, judge_efficiency
from pytest_llmperf.judge.verdict import Judgement, joined
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Check
from pytest_llmperf.run.context import Context
from pytest_llmperf.spec.equivalence import narrower
from pytest_llmperf.spec.train_spec import TrainSpec


def stored_narrow(recorder: Recorder, wide: TrainSpec, scaled_from: TrainSpec | None) -> Narrow | None:
    """The narrowest of the series of ``wide``, or ``scaled_from``, as its baseline has it."""
    for spec in [scaled_from] if scaled_from else narrower(wide):
        baseline = recorder.find(spec)
        if baseline is not None:
            return Narrow(gpus=spec.gpus, launches=baseline.launches, baseline=baseline, in_this_run=False)
    return None


class Scaling:
    """How well one wide case scales."""

    def __init__(
        self,
        context: Context,
        *,
        baseline: Baseline | None,
        policy: Policy,
        narrow: Narrow | None,
        terms: Terms,
    ) -> None:
        self._context, self._baseline, self._policy = context, baseline, policy
        self._narrow, self._terms = narrow, terms

    def joined(self, judgement: Judgement, launches: Sequence[Launch]) -> Judgement:
        """``judgement`` with what more GPUs brought; of launches in trouble nothing is computed."""
        if judgement.verdict == "invalid":
            return judgement
        batch = Check(metric="global_batch_tokens", value=float(launches[0].tokens_per_step), unit="tokens")
        if self._narrow is None:
            judgement = replace(judgement, checks=(*judgement.checks, batch))
            return self._without_reference(judgement) if self._terms.at_least is not None else judgement
        context = self._context
        found = judge_efficiency(
            launches,
            self._baseline,
            self._narrow,
            self._policy,
            self._terms,
            context.rule,
            context.experience.noise,
        )
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
        if judgement.verdict not in ("pass", "improved"):
            return judgement
        return replace(judgement, verdict="inconclusive", reason=self.unheld)
