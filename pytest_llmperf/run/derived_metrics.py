"""What the launches of one spec mean beside their rate: the chip's use, energy, waiting; and a token's FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import fmean, median

from pytest_llmperf.analysis import formulas
from pytest_llmperf.analysis.waits import communication_share, data_wait
from pytest_llmperf.launch.prediction import CountError, FlopCounts
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, RATE, measured, pooled_tokens_per_second
from pytest_llmperf.records.result import Check
from pytest_llmperf.run.expectations import first_guess as first_guess  # noqa: PLC0414 - it is one of these too
from pytest_llmperf.settings.precision import bytes_each
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec


def figures(spec: Spec, launches: tuple[Launch, ...], model_flops: ModelFlops) -> tuple[Check, ...]:
    """What the launches' rate means on their chip, where known; energy, a micro-batch's time, waiting."""
    gpu, found = launches[0].environment.gpu, [*_of_steps(spec, launches)]
    if isinstance(spec, TrainSpec):  # else of its arithmetic nothing is known
        found = [*_arithmetic(spec, launches, gpu, model_flops), *_traffic(spec, launches, gpu), *found]
    return tuple(found)


def _of_steps(spec: Spec, launches: tuple[Launch, ...]) -> Iterator[Check]:
    # Of all GPUs while they trained; nothing where no counter told it, as ``llmperf report --purpose`` has it.
    watts = [launch.health.power_watts for launch in launches if launch.health.power_watts > 0]
    if watts and measured(launches)[RATE].name == RATE:
        yield METRICS["joules_per_token"].check(fmean(watts) / pooled_tokens_per_second(launches))
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
    exposed = [shown for launch in launches if (shown := launch.trace.exposed_share) is not None]
    if exposed:
        yield METRICS["exposed_communication_share"].check(median(exposed))
    if data := data_wait(launches):
        yield METRICS["data_wait_seconds"].check(data[0])
        yield METRICS["data_wait_share"].check(data[1])
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
    """The chip's memory: only where each step changes every weight: not all of a mixture's experts may take part."""
    bandwidth = formulas.peak_bandwidth(gpu)
    is_known = formulas.peak_flops(gpu, spec.compute_precision) is not None
    if spec.architecture.geometry is None or bandwidth is None or not is_known or spec.unmade_flops_per_token != 0:
        return
    moved = formulas.least_traffic(launches[0].parameters, bytes_each(spec))
    fastest = min(launch.median_step_seconds for launch in launches)
    yield METRICS["least_memory_traffic"].check(moved / fastest / bandwidth)


_Key = tuple[str, int]
"""A model's fingerprint and a length of sequences."""


class ModelFlops:
    """Counted ahead of the launches: a count takes a core for some seconds, and none may be timed meanwhile."""

    def __init__(self) -> None:
        self._known: dict[_Key, float | CountError] = {}
        self._asked: dict[_Key, int] = {}
        self._counts: FlopCounts | None = None

    def prepare(self, specs: Iterable[Spec], gpu: str) -> None:
        """Let be counted, beside this process, what ``specs`` cost, where their use of the chip ``gpu`` can be told."""
        for spec in specs:
            if isinstance(spec, TrainSpec) and formulas.peak_flops(gpu, spec.compute_precision) is not None:
                self._ask(spec)

    def settle(self) -> None:
        """Wait for what is being counted, and end what counts."""
        counts = self._counts
        for key, number in self._asked.items():
            assert counts is not None  # noqa: S101 - who is asked is there
            try:
                self._known[key] = counts.answer(number)
            except CountError as error:
                self._known[key] = error
        self.close()

    def per_token(self, spec: TrainSpec) -> float | None:
        """Training FLOPs for one token of a full sequence of ``spec``; ``None``: not known, and ``note`` says why."""
        self._ask(spec)
        if _key(spec) not in self._known:
            self.settle()
        known, unmade = self._known[_key(spec)], spec.unmade_flops_per_token
        return None if isinstance(known, CountError) or unmade is None else known - unmade

    def notes(self, *specs: Spec) -> Iterator[str]:
        """A line for each whose FLOPs were asked for in vain."""
        for spec in specs:
            known = self._known.get(_key(spec)) if isinstance(spec, TrainSpec) else None
            if isinstance(known, CountError):
                yield f"MFU is not told: the FLOPs of {spec.slug} cannot be counted: {known}"

    def close(self) -> None:
        if self._counts is not None:
            self._counts.close()
        self._counts, self._asked = None, {}

    def _ask(self, spec: TrainSpec) -> None:
        model, length, key = spec.architecture, spec.sequence_length, _key(spec)
        if key in self._known or key in self._asked:
            return
        known = model.flops_per_token(length)
        if known is not None:
            self._known[key] = known
            return
        self._counts = self._counts or FlopCounts()
        self._asked[key] = self._counts.ask(model, length)


def _key(spec: TrainSpec) -> _Key:
    return spec.architecture.fingerprint, spec.sequence_length
