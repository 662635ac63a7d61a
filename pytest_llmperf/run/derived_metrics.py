"""What the launches of one spec mean beside their rate: the chip's use, energy, waiting, what more GPUs brought."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from pytest_llmperf.analysis import cost, formulas
from pytest_llmperf.analysis.waits import communication_share, data_wait
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.gain import METRIC, Narrow, judge_efficiency
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.verdict import Judgement, joined
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, RATE, measured, pooled_tokens_per_second
from pytest_llmperf.records.result import Check
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.conclusion import Recorder
from pytest_llmperf.run.model_flops import ModelFlops
from pytest_llmperf.settings.precision import bytes_each
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec


def figures(spec: Spec, launches: tuple[Launch, ...], model_flops: ModelFlops) -> tuple[Check, ...]:
    """Return what the launches' rate means on their chip, where known; energy, a micro-batch's time, waiting."""
    gpu = launches[0].environment.gpu
    of_steps = _of_steps(spec, launches)
    if not isinstance(spec, TrainSpec):  # of its arithmetic nothing is known
        return tuple(of_steps)
    return (*_arithmetic(spec, launches, gpu, model_flops), *_traffic(spec, launches, gpu), *of_steps)


def _of_steps(spec: Spec, launches: tuple[Launch, ...]) -> Iterator[Check]:
    # Of all GPUs while they trained; nothing where no counter told it, as ``llmperf report --purpose`` has it.
    watts = [launch.health.power_watts for launch in launches if launch.health.power_watts > 0]
    if watts and measured(launches)[RATE].name == RATE:
        joules = cost.joules_per_token(fmean(watts), pooled_tokens_per_second(launches))
        yield METRICS["joules_per_token"].check(joules)
    if spec.passes_per_step > 1:
        seconds = METRICS["step_seconds"].read(launches) / spec.passes_per_step
        yield METRICS["micro_batch_seconds"].check(seconds)
    # The rate without what only fills rows up, and how much of each row is text.
    if any(rank.real_tokens for launch in launches for rank in launch.ranks):
        share = fmean(launch.real_share for launch in launches)
        yield METRICS["real_tokens_per_second_per_gpu"].check(share * METRICS[RATE].read(launches))
        yield METRICS["real_token_share"].check(share)
    waited = [each for launch in launches if (each := communication_share(launch)) is not None]
    if waited:
        yield METRICS["communication_share"].check(median(waited))
    if data := data_wait(launches):
        yield METRICS["data_wait_seconds"].check(data.seconds)
        yield METRICS["data_wait_share"].check(data.share)
    saved = [size for launch in launches if (size := launch.seen.weights.checkpoint_bytes)]
    if saved:
        yield METRICS["checkpoint_bytes"].check(float(max(saved)))


def _arithmetic(spec: TrainSpec, launches: tuple[Launch, ...], gpu: str, model_flops: ModelFlops) -> Iterator[Check]:
    """The chip's use. Of a chip whose peak is not known nothing can be told, and nothing is counted for it."""
    peak = formulas.peak_flops(gpu, spec.compute_precision)
    flops_per_token = model_flops.per_token(spec) if peak is not None else None
    if peak is None or flops_per_token is None:
        return
    rate = math.exp(sum(math.log(launch.tokens_per_second_per_gpu) for launch in launches) / len(launches))
    value = formulas.mfu(rate, flops_per_token, peak)
    # A window's masked scores are counted and need not be computed: beyond the peak such a figure says nothing.
    if value <= 1 or not spec.architecture.has_window(spec.sequence_length):
        yield METRICS["mfu"].check(value)


def _traffic(spec: TrainSpec, launches: tuple[Launch, ...], gpu: str) -> Iterator[Check]:
    """The chip's memory: only where every weight takes part in every step: not all of a mixture's experts may."""
    bandwidth = formulas.peak_bandwidth(gpu)
    is_known = formulas.peak_flops(gpu, spec.compute_precision) is not None
    if spec.architecture.geometry is None or bandwidth is None or not is_known:
        return
    moved = formulas.least_traffic(launches[0].parameters, bytes_each(spec))
    fastest = min(launch.median_step_seconds for launch in launches)
    yield METRICS["least_memory_traffic"].check(moved / fastest / bandwidth)


@dataclass(frozen=True)
class Scaling:
    """How well one wide case scales, held against the narrowest of its series."""

    caller: Caller
    policy: Policy
    narrow: Narrow | None

    @classmethod
    def of(cls, caller: Caller, recorder: Recorder, wide: Spec, scaled_from: Spec | None) -> Scaling | None:
        """Beside the narrowest of the series of ``wide``, or ``scaled_from``: as this run measured it, else as stored.

        Under ``--perf-against`` no baseline is read. ``None``: one GPU scales nothing.
        """
        if wide.gpus == 1:
            return None
        narrow = caller.run.result_cache.narrow(wide, scaled_from)
        candidates = [scaled_from] if scaled_from else wide.narrower()
        for spec in [] if narrow is not None or caller.run.settings.against else candidates:
            baseline = recorder.find(spec)
            if baseline is not None:
                narrow = Narrow(gpus=spec.gpus, launches=baseline.launches, baseline=baseline, in_this_run=False)
                break
        return cls(caller, caller.policy(wide), narrow)

    def joined(self, judgement: Judgement, launches: Sequence[Launch], baseline: Baseline | None) -> Judgement:
        """``judgement`` against ``baseline`` with what more GPUs brought; of launches in trouble nothing."""
        if judgement.verdict == "invalid":
            return judgement
        batch = METRICS["global_batch_tokens"].check(float(launches[0].tokens_per_step))
        if self.narrow is None:
            judgement = replace(judgement, checks=(*judgement.checks, batch))
            is_unheld = bool(self.unheld) and judgement.verdict in ("pass", "improved", "changed")
            return replace(judgement, verdict="inconclusive", reason=self.unheld) if is_unheld else judgement
        found = judge_efficiency(launches, baseline, self.narrow, self.policy, self.caller.terms.efficiency)
        widening = len(launches[0].ranks) / self.narrow.gpus
        speed_up = METRICS["speed_up"].check(found.check.value * widening, detail=f"over {self.narrow.name}")
        return joined(judgement, (found.check, speed_up, batch), undecided=found.undecided)

    @property
    def unheld(self) -> str:
        """Why its floor could not be held; empty where it could, or where there is none."""
        if self.narrow is not None or self.caller.terms.efficiency.at_least is None:
            return ""
        stored = ", and --perf-against reads no baseline" if self.caller.run.settings.against else " or is stored"
        return f"{METRIC}: no narrower width was measured in this run{stored}, so its floor was not held"
