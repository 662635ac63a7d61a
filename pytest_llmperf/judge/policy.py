"""Policy: what each kind of machine tolerates of each metric, and how its launches scatter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_llmperf.judge import stats
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.gpu_knowledge import Knowledge
from pytest_llmperf.judge.noise import Noise, Spread
from pytest_llmperf.judge.stats import Difference, Rule, least_tolerance
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS, measured, phases
from pytest_llmperf.support.user_input import hint, is_positive

_GPU_NOISE = Noise(host=Spread(0.008, 6), site=Spread(0.008, 10), session=Spread(0.004, 6), launch=Spread(0.004, 8))

# Of a quiet one: it matters only to who sets a tolerance of their own, and a busy one soon teaches more.
_CPU_NOISE = Noise(host=Spread(0.10, 8), site=Spread(0.10, 8), session=Spread(0.05, 8), launch=Spread(0.05, 8))


@dataclass(frozen=True)
class Policy:
    """By what a case is judged: tolerances, as fractions, by metric; one without is shown and gates nothing;
    ValueError: an unknown metric (with the nearest known one), or a tolerance that is not a positive fraction."""

    tolerances: Mapping[str, float]
    noise: Noise = _CPU_NOISE
    """The machine's, as its baselines show it; what is believed of it before they do."""
    elsewhere: Mapping[str, float] = field(default_factory=dict)
    """Tolerances in place of those above on hardware that a baseline has not seen; none where a user chose."""
    paired: Mapping[str, float] = field(default_factory=dict)
    """The same, where launches of both sides took turns on the same hardware."""
    rule: Rule = field(default_factory=Rule)
    on_known: Mapping[str, float] = field(default_factory=dict)
    """Those on hardware that is known, where ``tolerances`` are wider as long as the run does not know its own."""
    knowledge: Knowledge | None = None
    """Of the run's GPUs; ``None``: too little is stored, or it is a CPU's run, and each case stands for itself."""
    is_elsewhere: bool = False
    """Whether launches ran on hardware that their baseline does not know."""
    waits: bool = False
    """Whether a loss that may be its GPU's is decided at the run's end, by when other cases have told of that."""

    def __post_init__(self) -> None:
        for metric, tolerance in self.tolerances.items():
            known = (*measured(), *phases())
            if metric not in known:
                near = hint(metric, known) or f"; known: {', '.join(known)}"
                raise ValueError(f"tolerance for unknown metric {metric!r}{near}")
            if not is_positive(tolerance):
                raise ValueError(f"tolerance {metric}={tolerance!r} must be a positive fraction, e.g. 0.05 for 5 %")

    @classmethod
    def for_gpu(cls) -> Policy:
        return cls(_tolerances("gpu"), _GPU_NOISE, _tolerances("gpu_elsewhere"), _tolerances("gpu_paired"))

    @classmethod
    def for_cpu(cls) -> Policy:
        return cls(_tolerances("cpu"), _CPU_NOISE)

    def merged(self, tolerances: Mapping[str, float]) -> Policy:
        """This policy with these tolerances in place of its own."""
        elsewhere, paired = (
            {metric: value for metric, value in special.items() if metric not in tolerances}
            for special in (self.elsewhere, self.paired)
        )
        return replace(self, tolerances={**self.tolerances, **tolerances}, elsewhere=elsewhere, paired=paired)

    def difference(self, launches: Sequence[Launch], stored: Sequence[Launch]) -> Difference:
        """``launches`` of one case against those ``stored`` of it."""
        return stats.difference(launches, stored, self.knowledge or self.noise)

    def at(self, launches: Sequence[Launch], baseline: Baseline) -> Policy:
        """This policy where ``launches`` ran: on hardware that ``baseline`` knows, or elsewhere.

        Elsewhere a tolerance is no wider than it has to be for one unchanged launch to pass, as far as the run knows
        its GPU by then.
        """
        known = {launch.site for launch in baseline.launches}
        if all(launch.site in known for launch in launches):
            return self
        if not self.elsewhere:
            return replace(self, is_elsewhere=True)
        if self.knowledge is None:
            return replace(self, tolerances={**self.tolerances, **self.elsewhere}, is_elsewhere=True)
        least = least_tolerance(self.difference(launches, baseline.launches))
        elsewhere = {name: min(widest, max(self.tolerances[name], least)) for name, widest in self.elsewhere.items()}
        wider = {name: self.tolerances[name] for name, value in elsewhere.items() if value > self.tolerances[name]}
        return replace(self, tolerances={**self.tolerances, **elsewhere}, on_known=wider, is_elsewhere=True)

    def in_pairs(self) -> Policy:
        """This policy for launches that took turns."""
        return replace(self, tolerances={**self.tolerances, **self.paired})


def _tolerances(kind: str) -> dict[str, float]:
    return {name: value for name, row in METRICS.items() if (value := getattr(row, kind)) is not None}
