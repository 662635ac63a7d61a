"""Policy: the metrics, in which direction each gets worse, and what each kind of machine tolerates.

What a tolerance means, and in which direction a metric gets worse, is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.gpu_effects.knowledge import Knowledge
from pytest_llmperf.judge.noise import Noise, Spread
from pytest_llmperf.judge.stats import Difference, Rule, least_tolerance
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.phases import CHECKPOINT, IMPORTS, MODEL, START
from pytest_llmperf.support.quantities import is_positive
from pytest_llmperf.support.suggestions import hint


@dataclass(frozen=True)
class Metric:
    """How a metric is read off launches, which way is worse, and by which rule it is decided."""

    unit: str
    of: Callable[[Sequence[Launch]], float]
    higher_is_better: bool = False
    rule: str = "exact"
    """``speed``: by statistics (``sequential_test.py``). ``confirmed``: the best of the launches, and never one alone.
    ``exact``: a loss where all launches show it, two where they repeat themselves and else as many as may be. Both are
    held against the middle one of the baseline's launches, of those accepted last where it is exact, and of
    those accepted with a reason and since where a loss was: an odd one that was stored must not move the limit.
    ``phase``: as ``confirmed``, and only against launches that are like it (``phase_checks.py``)."""
    slack: float = 0.0
    """In the metric's own unit: a smaller change is no change, whatever fraction it is."""
    whole: bool = False
    """Whether only launches that took all their steps pass: what comes late or seldom may be in the others' rest."""


#: The rule of those that not every launch has.
PHASE = "phase"

#: In the order in which they are shown; the names are the design's.
METRICS: Mapping[str, Metric] = {
    "tokens_per_second_per_gpu": Metric(
        "tokens/s",
        lambda runs: stats.pooled_tokens_per_second(runs) / len(runs[0].ranks),
        higher_is_better=True,
        rule="speed",
    ),
    "tokens_per_second": Metric("tokens/s", stats.pooled_tokens_per_second, higher_is_better=True, rule="speed"),
    "step_seconds": Metric("s", stats.pooled_step_seconds, rule="speed"),
    # Kernels compile, caches fill, autotuners try: the best launch says what the code takes.
    "first_step_seconds": Metric(
        "s", lambda runs: min(launch.first_step_seconds for launch in runs), rule="confirmed", slack=3.0
    ),
    # A median hides what only some steps lose. A hiccup in one launch is nobody's fault; one in every launch is. The
    # steadiest H200 launch lost nothing, the least steady of 231 six tenths of this.
    "stall_share": Metric(
        "1", lambda runs: min(launch.steady.stalls for launch in runs), rule="confirmed", slack=0.01, whole=True
    ),
    # The leanest launch says what the code takes: one in three kept 1.3 % more after its compiler had tried kernels,
    # one in two 3.7 %, where a rank still held the buckets of DDP's first step.
    "peak_reserved_bytes": Metric("bytes", lambda runs: float(min(launch.peak_reserved_bytes for launch in runs))),
    "peak_allocated_bytes": Metric("bytes", lambda runs: float(min(launch.peak_allocated_bytes for launch in runs))),
    "final_loss": Metric("1", lambda runs: runs[-1].losses[-1]),
}


def _seconds_in(phase: str, slack: float) -> Metric:
    return Metric("s", lambda runs: min(launch.phases[phase] for launch in runs), rule=PHASE, slack=slack)


#: Of a launch that told how long it was in each of its phases; ``phase_checks.py`` says which are alike. The best
#: launch says what the code takes: file systems are cold, hosts busy, and a second launch finds files where the first
#: had to fetch them. What is less than the slack is the machine's (docs/explanation/noise.md).
PHASES: Mapping[str, Metric] = {
    "start_seconds": _seconds_in(START, slack=10.0),
    "imports_seconds": _seconds_in(IMPORTS, slack=15.0),
    "model_seconds": _seconds_in(MODEL, slack=5.0),
    "checkpoint_seconds": _seconds_in(CHECKPOINT, slack=5.0),
}

# 2 % on hardware that the baseline knows. Eight GPUs of one host differ by 0.6 % (sd), hosts by 2 %.
_GPU_TOLERANCES = {
    "tokens_per_second_per_gpu": 0.02,
    "first_step_seconds": 1.0,
    "stall_share": 0.02,
    "peak_reserved_bytes": 0.01,
    **dict.fromkeys(PHASES, 1.0),
}
_GPU_ELSEWHERE = 0.05
_GPU_PAIRED = 0.01
_GPU_NOISE = Noise(host=Spread(0.008, 6), site=Spread(0.008, 10), session=Spread(0.004, 6), launch=Spread(0.004, 8))

# Identical runs on a CPU spread 20 % and more, twice that beside a busy neighbour, and the resident memory of a small
# process is mostly libraries and allocator: a tight gate would cry wolf every day.
_CPU_TOLERANCES = {
    "tokens_per_second_per_gpu": 3.0,
    "first_step_seconds": 9.0,
    "peak_reserved_bytes": 0.5,
    **dict.fromkeys(PHASES, 3.0),
}
# Of a quiet one: it matters only to who sets a tolerance of their own, and a busy one soon teaches more.
_CPU_NOISE = Noise(host=Spread(0.10, 8), site=Spread(0.10, 8), session=Spread(0.05, 8), launch=Spread(0.05, 8))


@dataclass(frozen=True)
class Policy:
    """By what a case is judged: tolerances, as fractions, by metric; one without is shown and gates nothing.

    Raises:
        ValueError: an unknown metric (with the nearest known one), or a tolerance that is not a positive fraction.
    """

    tolerances: Mapping[str, float]
    noise: Noise = _CPU_NOISE
    """The machine's, as its baselines show it; what is believed of it before they do."""
    elsewhere: Mapping[str, float] = field(default_factory=dict)
    """Tolerances in place of those above on hardware that a baseline has not seen; none where a user chose."""
    paired: Mapping[str, float] = field(default_factory=dict)
    """The same, where launches of both sides took turns on the same hardware."""
    rule: Rule = field(default_factory=Rule)
    """How strict the verdicts are."""
    on_known: Mapping[str, float] = field(default_factory=dict)
    """Those on hardware that is known, where ``tolerances`` are wider as long as the run does not know its own."""
    knowledge: Knowledge | None = None
    """Of the run's GPUs; ``None``: too little is stored, or it is a CPU's run, and each case stands for itself."""
    waits: bool = False
    """Whether a loss that may be its GPU's is decided at the run's end, by when other cases have told of that."""

    def __post_init__(self) -> None:
        for metric, tolerance in self.tolerances.items():
            if metric not in {**METRICS, **PHASES}:
                known = (*METRICS, *PHASES)
                near = hint(metric, known) or f"; known: {', '.join(known)}"
                raise ValueError(f"tolerance for unknown metric {metric!r}{near}")
            if not is_positive(tolerance):
                raise ValueError(f"tolerance {metric}={tolerance!r} must be a positive fraction, e.g. 0.05 for 5 %")

    @classmethod
    def for_gpu(cls) -> Policy:
        rate = "tokens_per_second_per_gpu"
        return cls(_GPU_TOLERANCES, _GPU_NOISE, {rate: _GPU_ELSEWHERE}, {rate: _GPU_PAIRED})

    @classmethod
    def for_cpu(cls) -> Policy:
        return cls(_CPU_TOLERANCES, _CPU_NOISE)

    def merged(self, tolerances: Mapping[str, float]) -> Policy:
        """This policy with these tolerances in place of its own."""
        elsewhere, paired = (
            {metric: value for metric, value in special.items() if metric not in tolerances}
            for special in (self.elsewhere, self.paired)
        )
        return replace(self, tolerances={**self.tolerances, **tolerances}, elsewhere=elsewhere, paired=paired)

    def difference(self, launches: Sequence[Launch], stored: Sequence[Launch]) -> Difference:
        """``launches`` of one case against those ``stored`` of it."""
        if self.knowledge is None:
            return stats.difference(launches, stored, self.noise)
        return self.knowledge.difference(launches, stored)

    def at(self, launches: Sequence[Launch], baseline: Baseline) -> Policy:
        """This policy where ``launches`` ran: on hardware that ``baseline`` knows, or elsewhere.

        Elsewhere a tolerance is no wider than it has to be for one unchanged launch to pass, as far as the run knows
        its GPU by then.
        """
        known = {launch.site for launch in baseline.launches}
        if not self.elsewhere or all(launch.site in known for launch in launches):
            return self
        if self.knowledge is None:
            return replace(self, tolerances={**self.tolerances, **self.elsewhere})
        least = least_tolerance(self.difference(launches, baseline.launches))
        elsewhere = {name: min(widest, max(self.tolerances[name], least)) for name, widest in self.elsewhere.items()}
        wider = {name: self.tolerances[name] for name, value in elsewhere.items() if value > self.tolerances[name]}
        return replace(self, tolerances={**self.tolerances, **elsewhere}, on_known=wider)

    def in_pairs(self) -> Policy:
        """This policy for launches that took turns."""
        return replace(self, tolerances={**self.tolerances, **self.paired})
