"""A comparison with a baseline: launches of one spec until they decide, against its baseline or for the first time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median

from pytest_llmperf.engine.launch_retry import LaunchRetry
from pytest_llmperf.engine.scaling_reference import Scaling
from pytest_llmperf.insight import chip_utilisation, cost
from pytest_llmperf.insight.stragglers import communication_share, held_up
from pytest_llmperf.judge import stats, validity
from pytest_llmperf.judge.baseline import Baseline, creep
from pytest_llmperf.judge.exact_changes import changes, lost_attention_kernel
from pytest_llmperf.judge.noise import disagreement
from pytest_llmperf.judge.policy import METRICS, Policy
from pytest_llmperf.judge.verdict import Judgement, judge
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Check
from pytest_llmperf.run.context import Context
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support.formats import memory

RATE = "tokens_per_second_per_gpu"
_MOST_STALLED = 0.01


class BaselineComparison:
    """Of one spec."""

    def __init__(  # noqa: PLR0913 - what it needs, named
        self,
        context: Context,
        spec: TrainSpec,
        *,
        policy: Policy,
        inactive: frozenset[str],
        launch: Callable[[TrainSpec, int], Launch],
        say: Callable[[str], None],
        launches: tuple[Launch, ...] = (),
        keep: Callable[[tuple[Launch, ...]], None] = lambda _: None,
        begun: tuple[Launch, ...] = (),
    ) -> None:
        """``launches`` are those that another test of this run has made of the same spec, ``begun`` an earlier start's.

        ``keep`` is told of launches that count and do not decide yet.
        """
        self._context, self._spec, self._policy = context, spec, policy
        self._inactive, self._launch = inactive, launch
        self._baseline: Baseline | None = None
        self._scaling: Scaling | None = None
        self._sound = LaunchRetry(self._circumstances, say)
        self._keep, self._num_begun = keep, 0 if launches else len(begun)
        self.launches = launches or begun

    def run(self, baseline: Baseline | None, scaling: Scaling | None = None) -> Judgement:
        """Launch until there is a verdict; every launch but one that was set aside counts, also an earlier run's.

        Raises:
            LaunchFailed: a launch yielded no record.
        """
        settings = self._context.settings
        self._baseline, self._scaling = baseline, scaling
        is_begun = bool(self._num_begun) and len(self.launches) < settings.launches and not self._sound.spoilt
        if self.launches and not is_begun:
            judgement = self._judge()
            if not judgement.undecided or len(self.launches) >= settings.max_launches:
                return judgement
        while True:
            number = len(self.launches) + 1
            launch = self._sound.launch(self._spec, lambda spec: self._launch(spec, number))  # noqa: B023 - called now
            self.launches = (*self.launches, launch)
            if number >= settings.launches or self._sound.spoilt:
                judgement = self._judge()
                if not judgement.undecided or number >= settings.max_launches:
                    return judgement
            if not self._sound.spoilt:
                self._keep(self.launches)

    def _circumstances(self, launch: Launch) -> tuple[str, ...]:
        policy = self._policy.at([launch], self._baseline) if self._baseline else self._policy
        # Where throughput gates nothing, its drift spoils nothing.
        return validity.circumstances(launch, policy.tolerances.get(RATE, math.inf), self._context.experience)

    def _judge(self) -> Judgement:
        held = self._baseline.explained if self._baseline else ()
        wrong = (*contradictions(self._spec, self.launches, self._inactive), *self._lost(held))
        judgement = judge(
            self.launches,
            self._baseline,
            self._policy,
            (*wrong, *dict.fromkeys(self._sound.spoilt)),
            () if wrong else figures(self._spec, self.launches),  # what is no figure cannot be computed with
            rule=self._context.rule,
            experience=self._context.experience,
        )
        return self._scaling.joined(judgement, self.launches) if self._scaling else judgement

    def _lost(self, held: Sequence[Launch]) -> tuple[str, ...]:
        inactive = "attention" in self._inactive or self._spec.sdpa_backend != "auto"  # asked for, and looked at there
        return () if inactive else tuple(lost_attention_kernel(self.launches, held))

    def told(self, result: CaseResult, judgement: Judgement) -> CaseResult:
        """``result`` with what the latest run gave."""
        stored = self._baseline
        return replace(
            result,
            verdict=judgement.verdict,
            reason=judgement.reason,
            checks=judgement.checks,
            launches=self.launches,
            changed=changes(self.launches, stored.explained) if stored else (),
            differences=stored.launches[-1].differences(self.launches[-1]) if stored else (),
            notes=(*self._notes(), *(creep(stored, judgement.checks) if stored else ())),
        )

    def _notes(self) -> tuple[str, ...]:
        """What the verdict does not say of these launches."""
        notes = [*self._sound.notes]
        if self._num_begun:
            notes.append(f"{self._num_begun} of its launches ran before the job was requeued")
        if any(launch.steady.bimodal for launch in self.launches):
            was = self._baseline and any(launch.steady.bimodal for launch in self._baseline.launches)
            notes += [] if was else ["the steps have two speeds"]
        stalls = max((launch.steady.stalls for launch in self.launches), default=0.0)
        if stalls > _MOST_STALLED:
            notes.append(f"slow steps lost {stalls * 100:.1f} % of a launch; the median leaves them out")
        notes += _uneven_memory(self.launches, self._policy.tolerances.get("peak_reserved_bytes", math.inf))
        if self._spec.torch_compile and self._baseline is None:  # else a change is told as such
            notes += _compiler(self.launches)
        # A CPU's ranks share its cores, and take them from one another.
        invalid = any(True for launch in self.launches for _ in validity.unusable(launch))
        notes += () if self._context.on_cpu or invalid else held_up(self.launches)
        if self._scaling and self._baseline is None:  # else its verdict says so
            notes += filter(None, [self._scaling.unheld])
        notes += [f"measured under {fault}" for fault in validity.injected(self.launches)]
        stored = self._disagreement(self._baseline.launches) if self._baseline else ""
        notes += filter(None, [self.disagreement, stored and f"of the baseline's, {stored}: record it anew"])
        return tuple(notes)

    @property
    def disagreement(self) -> str:
        """A line where its launches are too far apart for one of them to be right; such ones are not recorded."""
        return self._disagreement(self.launches)

    def _disagreement(self, launches: Sequence[Launch]) -> str:
        tolerance = self._policy.tolerances.get(RATE)
        return "" if tolerance is None else disagreement(launches, self._context.experience.noise, tolerance)


def _uneven_memory(launches: Sequence[Launch], tolerance: float) -> list[str]:
    least, most = (choose(launch.peak_reserved_bytes for launch in launches) for choose in (min, max))
    if most <= least * (1 + tolerance):
        return []
    return [f"peak memory of its launches: {memory(least, 2)} to {memory(most, 2)}; the leanest counts"]


# What the compiler should not have to do, by its name in the evidence.
_COMPILER = {"graph_breaks": "broke the graph", "recompilations": "compiled anew"}


def _compiler(launches: Sequence[Launch]) -> list[str]:
    """What it had to do, a line each."""
    counts = {did: max(launch.evidence.get(name, 0) for launch in launches) for name, did in _COMPILER.items()}
    return [f"torch_compile {did} {count} time(s)" for did, count in counts.items() if count]


def contradictions(spec: TrainSpec, launches: tuple[Launch, ...], inactive: frozenset[str]) -> tuple[str, ...]:
    """What in ``launches`` contradicts ``spec``, each line once."""
    lines = (line for launch in launches for line in validity.troubles(spec, launch, inactive=inactive))
    return tuple(dict.fromkeys(lines))


def figures(spec: TrainSpec, launches: tuple[Launch, ...]) -> tuple[Check, ...]:
    """What the launches' rate means on their chip, as far as that is known; energy, a micro-batch's time, waiting."""
    return *_use_of_the_chip(spec, launches), *_energy(launches), *_accumulated(spec, launches), *_waited(launches)


def _waited(launches: tuple[Launch, ...]) -> Iterator[Check]:
    shares = [share for launch in launches if (share := communication_share(launch)) is not None]
    if shares:
        yield Check(metric="communication_share", value=median(shares), unit="1")


def _accumulated(spec: TrainSpec, launches: tuple[Launch, ...]) -> Iterator[Check]:
    """Where an optimizer step has several micro-batches, the seconds of one beside the step's own."""
    if spec.gradient_accumulation_steps > 1:
        seconds = METRICS["step_seconds"].of(launches) / spec.gradient_accumulation_steps
        yield Check(metric="micro_batch_seconds", value=seconds, unit="s")


def _energy(launches: tuple[Launch, ...]) -> Iterator[Check]:
    """Of all GPUs while they trained; nothing where no counter told it, as ``llmperf report --purpose`` has it."""
    watts = [launch.health.power_watts for launch in launches if launch.health.power_watts > 0]
    if watts:
        joules = cost.joules_per_token(fmean(watts), stats.pooled_tokens_per_second(launches))
        yield Check(metric="joules_per_token", value=joules, unit="J/token")


def _use_of_the_chip(spec: TrainSpec, launches: tuple[Launch, ...]) -> tuple[Check, ...]:
    geometry, gpu = spec.architecture.geometry, launches[0].environment.gpu
    peak, bandwidth = chip_utilisation.peak_flops(gpu, spec.compute_precision), chip_utilisation.peak_bandwidth(gpu)
    if geometry is None or peak is None or bandwidth is None:
        return ()
    rate = math.exp(sum(math.log(launch.tokens_per_second_per_gpu) for launch in launches) / len(launches))
    value = chip_utilisation.mfu(rate, geometry.flops_per_token(spec.sequence_length), peak)
    moved = chip_utilisation.least_traffic(launches[0].parameters, 4 if spec.model_precision == "fp32" else 2)
    fastest = min(launch.median_step_seconds for launch in launches)
    share = moved / fastest / bandwidth
    return Check(metric="mfu", value=value, unit="1"), Check(metric="least_memory_traffic", value=share, unit="1")
