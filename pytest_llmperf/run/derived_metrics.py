"""What the launches of one spec mean beside their rate: the use of the chip, energy, waiting; what they should be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

from pytest_llmperf.analysis import formulas
from pytest_llmperf.analysis.expectation import Case, Error, Expectation, expected, filled, judged, standing
from pytest_llmperf.analysis.waits import communication_share, data_wait
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.launch.prediction import CountError, FlopCounts
from pytest_llmperf.records.launch import OLDER, Launch
from pytest_llmperf.records.metrics import METRICS, RATE, measured, pooled_tokens_per_second
from pytest_llmperf.records.result import Check
from pytest_llmperf.records.trace import Trace
from pytest_llmperf.settings.precision import bytes_each
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec


def _of_steps(spec: Spec, launches: tuple[Launch, ...]) -> Iterator[Check]:
    # Of all GPUs while they trained; nothing where no counter told it.
    watts = [launch.health.power_watts for launch in launches if launch.health.power_watts > 0]
    if watts and measured(launches)[RATE].name == RATE:
        yield METRICS["joules_per_token"].check(fmean(watts) / pooled_tokens_per_second(launches))
    if spec.passes_per_step > 1:
        yield METRICS["micro_batch_seconds"].check(METRICS["step_seconds"].read(launches) / spec.passes_per_step)
    # The rate without what only fills rows up, and how much of each row is text.
    if any(rank.real_tokens for launch in launches for rank in launch.ranks):
        share = fmean(launch.real_share for launch in launches)
        yield METRICS["real_tokens_per_second_per_gpu"].check(share * METRICS[RATE].read(launches))
        yield METRICS["real_token_share"].check(share)
    if waited := [each for launch in launches if (each := communication_share(launch)) is not None]:
        yield METRICS["communication_share"].check(median(waited))
    if exposed := [shown for launch in launches if (shown := launch.trace.exposed_share) is not None]:
        yield METRICS["exposed_communication_share"].check(median(exposed))
    for name, value in zip(("data_wait_seconds", "data_wait_share"), data_wait(launches) or (), strict=False):
        yield METRICS[name].check(value)


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


class ModelFlops:
    """Counted ahead of the launches: a count takes a core for some seconds, and none may be timed meanwhile."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], float | CountError] = {}
        self._asked: dict[tuple[str, int], int] = {}
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

    def figures(self, spec: Spec, launches: tuple[Launch, ...]) -> tuple[Check, ...]:
        """What the launches' rate means on their chip, where known; energy, a micro-batch's time, waiting."""
        gpu, found = launches[0].environment.gpu, [*_of_steps(spec, launches)]
        if isinstance(spec, TrainSpec):  # else of its arithmetic nothing is known
            found = [*_arithmetic(spec, launches, gpu, self), *_traffic(spec, launches, gpu), *found]
        return tuple(found)

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
        if (known := model.flops_per_token(length)) is not None:
            self._known[key] = known
            return
        self._counts = self._counts or FlopCounts()
        self._asked[key] = self._counts.ask(model, length)


def _key(spec: TrainSpec) -> tuple[str, int]:
    return spec.architecture.fingerprint, spec.sequence_length


# An expectation: of stored baselines of every kind of GPU as cases.

_RATES = ("matmul_flops", "copy_bytes_per_second")


@cache
def stored_cases(root: Path) -> list[Case]:
    """Those of GPUs under ``root``, as they were first; a step that is counted for one kind of GPU is that of all."""
    store = BaselineStore(root)
    baselines = [baseline for machine in store.machines() for baseline in store.baselines(machine)]
    steps = {one.digest: one.static.step for one in baselines if one.static}
    return [replace(one, static=steps.get(one.digest)) for one in map(_case, baselines) if one]


def _case(baseline: Baseline) -> Case | None:
    on_a_gpu = all(launch.seen.run.is_on_gpu for launch in baseline.launches)
    try:
        spec = TrainSpec.from_dict(baseline.spec)
    except (TypeError, ValueError):  # a script, or settings that are none of today's
        return None
    if not on_a_gpu or spec.digest != baseline.digest:
        return None
    seconds = math.exp(fmean(math.log(launch.median_step_seconds) for launch in baseline.launches))
    trace = baseline.trace.trace if baseline.trace else None
    rates = rates_of(baseline.launches)
    return Case(spec=spec, kind=baseline.machine, step_seconds=seconds, trace=trace, rates=rates)


def rates_of(launches: Iterable[Launch]) -> tuple[float, float] | None:
    """What their chips gave to products and copies that never change."""
    told = [launch.canary for launch in launches if all(launch.canary.get(name) for name in _RATES)]
    return (median(one[_RATES[0]] for one in told), median(one[_RATES[1]] for one in told)) if told else None


@cache
def _judged(root: Path) -> tuple[list[Case], list[Error]]:
    cases = filled(stored_cases(root))
    return cases, judged(cases)


def expectation(spec: TrainSpec, kind: str, root: Path, launches: Sequence[Launch] = ()) -> Expectation | None:
    """Of ``spec`` on ``kind``, by all others under ``root``; ``launches`` tell what a chip that nobody knew gives."""
    cases, errors = _judged(root)
    static = next((one.static for one in cases if one.digest == spec.digest), None)
    return expected(Case(spec=spec, kind=kind, static=static, rates=rates_of(launches)), cases, errors)


def newest_launch(spec: TrainSpec, kind: str, root: Path) -> Launch | None:
    """What is stored of it; a baseline keeps one trace beside its launches."""
    if (stored := BaselineStore(root).load(kind, spec)) is None:
        return None
    return replace(stored.newest[-1], trace=stored.trace.trace if stored.trace else Trace(none=OLDER))


def first_guess(spec: Spec, kind: str, root: Path, launches: Sequence[Launch]) -> tuple[str, ...]:
    """What stored cases, of other kinds of GPU too, say of the first figure of ``spec``; nothing is held by it."""
    found = expectation(spec, kind, root, launches) if isinstance(spec, TrainSpec) else None
    if found is None:
        return ()
    newest = next((launch for launch in reversed(launches) if launch.trace), launches[-1])
    return (f"{standing(found, newest)} (by {found.nearest.spec.id} on {found.nearest.kind}, and others)",)
