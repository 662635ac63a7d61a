"""What the launches of one spec mean beside their rate: the chip's use, energy, waiting; and what to note of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median

from pytest_llmperf.analysis import cost, formulas
from pytest_llmperf.analysis.waits import communication_share, data_wait
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.gain import METRIC, Narrow, judge_efficiency
from pytest_llmperf.judge.verdict import Judgement, joined
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, RATE, pooled_tokens_per_second
from pytest_llmperf.records.result import Check
from pytest_llmperf.run.caller import Caller
from pytest_llmperf.run.conclusion import Recorder
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.model_flops import ModelFlops
from pytest_llmperf.settings.parallelism import narrower
from pytest_llmperf.settings.precision import bytes_each
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.formats import memory

_MOST_STALLED = 0.01


def figures(spec: TrainSpec, launches: tuple[Launch, ...], model_flops: ModelFlops) -> tuple[Check, ...]:
    """What the launches' rate means on their chip, as far as that is known; energy, a micro-batch's time, waiting."""
    gpu = launches[0].environment.gpu
    return (
        *_arithmetic(spec, launches, gpu, model_flops),
        *_traffic(spec, launches, gpu),
        *_energy(launches),
        *_accumulated(spec, launches),
        *_unpadded(launches),
        *_waited(launches),
        *_waited_for_data(launches),
        *_saved(launches),
    )


def _saved(launches: tuple[Launch, ...]) -> Iterator[Check]:
    sizes = [size for launch in launches if (size := launch.seen.weights.checkpoint_bytes)]
    if sizes:
        yield METRICS["checkpoint_bytes"].check(float(max(sizes)))


def _unpadded(launches: tuple[Launch, ...]) -> Iterator[Check]:
    """The rate without what only fills rows up, and how much of each row is text."""
    if any(rank.real_tokens for launch in launches for rank in launch.ranks):
        share = fmean(launch.real_share for launch in launches)
        rate = METRICS[RATE].read(launches)
        yield METRICS["real_tokens_per_second_per_gpu"].check(share * rate)
        yield METRICS["real_token_share"].check(share)


def _waited(launches: tuple[Launch, ...]) -> Iterator[Check]:
    shares = [share for launch in launches if (share := communication_share(launch)) is not None]
    if shares:
        yield METRICS["communication_share"].check(median(shares))


def _waited_for_data(launches: tuple[Launch, ...]) -> Iterator[Check]:
    wait = data_wait(launches)
    if wait:
        yield METRICS["data_wait_seconds"].check(wait.seconds)
        yield METRICS["data_wait_share"].check(wait.share)


def _accumulated(spec: TrainSpec, launches: tuple[Launch, ...]) -> Iterator[Check]:
    """Where an optimizer step has several micro-batches, the seconds of one beside the step's own."""
    if spec.gradient_accumulation_steps > 1:
        seconds = METRICS["step_seconds"].read(launches) / spec.gradient_accumulation_steps
        yield METRICS["micro_batch_seconds"].check(seconds)


def _energy(launches: tuple[Launch, ...]) -> Iterator[Check]:
    """Of all GPUs while they trained; nothing where no counter told it, as ``llmperf report --purpose`` has it."""
    watts = [launch.health.power_watts for launch in launches if launch.health.power_watts > 0]
    if watts:
        joules = cost.joules_per_token(fmean(watts), pooled_tokens_per_second(launches))
        yield METRICS["joules_per_token"].check(joules)


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
    """Of the chip's memory, where every weight takes part in every step: not all of a mixture's experts may."""
    bandwidth = formulas.peak_bandwidth(gpu)
    is_known = formulas.peak_flops(gpu, spec.compute_precision) is not None
    if spec.architecture.geometry is None or bandwidth is None or not is_known:
        return
    moved = formulas.least_traffic(launches[0].parameters, bytes_each(spec))
    fastest = min(launch.median_step_seconds for launch in launches)
    yield METRICS["least_memory_traffic"].check(moved / fastest / bandwidth)


def stalled(launches: Sequence[Launch]) -> list[str]:
    """What steps lost that were slow by themselves, a line."""
    stalls = max((launch.steady.stalls for launch in launches), default=0.0)
    if stalls <= _MOST_STALLED:
        return []
    return [f"slow steps lost {stalls * 100:.1f} % of a launch; the median leaves them out"]


def waits_for_data(launches: Sequence[Launch]) -> list[str]:
    """For how long a step waits for its data, a line where that is much of it."""
    wait = data_wait(launches)
    if wait is None or not wait.is_notable:
        return []
    return [f"waits for data: {wait.seconds * 1000:.3g} ms a step ({wait.share * 100:.0f} % of it)"]


def uneven_memory(launches: Sequence[Launch], tolerance: float) -> list[str]:
    """Where peaks differ by more than is tolerated, a line."""
    least, most = (choose(launch.peak_reserved_bytes for launch in launches) for choose in (min, max))
    if most <= least * (1 + tolerance):
        return []
    return [f"peak memory of its launches: {memory(least, 2)} to {memory(most, 2)}; the leanest counts"]


def compiler(launches: Sequence[Launch]) -> list[str]:
    """What torch.compile had to do and should not, a line each."""
    noted = {row.note: row.evidence for row in METRICS.values() if row.note}
    found = {did: max(launch.evidence.get(name, 0) for launch in launches) for did, name in noted.items()}
    return [f"torch_compile {did} {count} time(s)" for did, count in found.items() if count]


# Scaling: a wide case held against the narrowest of its series.


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
        batch = METRICS["global_batch_tokens"].check(float(launches[0].tokens_per_step))
        if self._narrow is None:
            judgement = replace(judgement, checks=(*judgement.checks, batch))
            return self._without_reference(judgement) if self._terms.at_least is not None else judgement
        found = judge_efficiency(launches, baseline, self._narrow, self._policy, self._terms)
        widening = len(launches[0].ranks) / self._narrow.gpus
        speed_up = METRICS["speed_up"].check(found.check.value * widening, detail=f"over {self._narrow.name}")
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
