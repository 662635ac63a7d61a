"""Simulated nights on GPUs that differ: cases, GPUs and days with known effects, as launches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.store import Accepted
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.records.calibration import Calibration, Health
from pytest_llmperf.records.launch import Launch, RankRecord
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import launch_of

#: The launches of each case.
Cases = Sequence[Sequence[Launch]]

#: After the stored nights, which are of January.
TONIGHT = "2026-02-01"

VERSIONS = {"cuda": "13.0", "driver": "580", "torch": "2.13"}

_SPEC = TrainSpec(model="llama-tiny", attention="sdpa", sequence_length=64, steps=10)
_LIMITED_MHZ, _HIGHEST_MHZ = 1700.0, 1980.0
_PER_HOST = 8
_FACTORS = {"general": 1.0, "at_power_limit": 0.6}


def spec_of(case: int, gpus: int = 1) -> TrainSpec:
    """Of the case with this number."""
    return replace(_SPEC, sequence_length=64 * (case + 1), gpus=gpus)


def is_limited(case: int) -> bool:
    """Whether it runs at the power limit."""
    return case % 2 == 0


def case_log(case: int) -> float:
    """Logarithm of its seconds on a GPU without effects."""
    return math.log(0.1) + 0.3 * case


def device_of(gpu: int) -> str:
    return f"NVIDIA H200 GPU-{gpu:08x}-0000-0000-0000-000000000000"


@dataclass
class World:
    """Effects are logarithms, the same in every world of this ``seed``; a GPU is a number, eight of them are a host."""

    seed: int
    launches: int = 0  # another number, other launches on the same GPUs
    host_sd: float = 0.006
    device_sd: float = 0.006
    day_sd: float = 0.002
    own_sd: float = 0.002
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed} {self.launches}")

    def _effect(self, sd: float, *name: object) -> float:
        return random.Random(f"{self.seed} {name}").gauss(0.0, sd)

    def effect(self, gpu: int, day: str, *, limited: bool) -> float:
        """By how much slower what runs at the power limit, or does not, is there on that day."""
        found = []
        for factor, share in _FACTORS.items():
            host = self._effect(share * self.host_sd, factor, "host", gpu // _PER_HOST)
            device = self._effect(share * self.device_sd, factor, "device", gpu)
            found.append(host + device + self._effect(share * self.day_sd, factor, "day", gpu, day))
        return found[0] + (0.5 if limited else -0.5) * found[1]

    def launch(
        self, case: int, gpus: int | Sequence[int], day: str = TONIGHT, slower: float = 0.0, *, calibrated: bool = False
    ) -> Launch:
        """One of ``case`` that is ``slower`` by this logarithm."""
        several = (gpus,) if isinstance(gpus, int) else tuple(gpus)
        limited = is_limited(case)
        moved = sum(self.effect(gpu, day, limited=limited) for gpu in several) / len(several)
        log = case_log(case) + moved + slower + self.random.gauss(0.0, self.own_sd)
        calibrations = [self.calibration(gpu, day) if calibrated else None for gpu in several]
        clock = _LIMITED_MHZ if limited else _HIGHEST_MHZ
        spec, started_at = spec_of(case, len(several)), self.time(day)
        return launch_at(spec, several, started_at, log, clock_mhz=clock, calibrations=calibrations)

    def time(self, day: str) -> str:
        """One that no other launch has."""
        return f"{day}T{self.random.randrange(24):02d}:{self.random.randrange(60):02d}:{self.random.randrange(60):02d}Z"

    def calibration(self, gpu: int, day: str) -> Calibration:
        """Of that day, the same for all who ask."""
        own = {name: self._effect(0.0005, "calibration", name, gpu, day) for name in ("bf16_product", "copy")}
        product = math.exp(-6.5 + self.effect(gpu, day, limited=True) + own["bf16_product"])
        copy = math.exp(-7.5 + self.effect(gpu, day, limited=False) + own["copy"])
        return Calibration(
            made_at=f"{day}T00:00:00Z",
            seconds={"bf16_product": product, "copy": copy},
            versions=VERSIONS,
            sm_clock_mhz=_LIMITED_MHZ,
        )

    def history(
        self, cases: int = 10, launches: int = 10, gpus: int = 32, *, calibrated: bool = False
    ) -> list[list[Launch]]:
        """The stored launches of each case, on GPUs and days as they came."""

        def one(case: int) -> Launch:
            day = f"2026-01-{self.random.randrange(1, 29):02d}"
            return self.launch(case, self.random.randrange(gpus), day, calibrated=calibrated)

        return [[one(case) for _ in range(launches)] for case in range(cases)]


def launch_at(
    spec: TrainSpec,
    gpus: Sequence[int],
    started_at: str,
    log: float,
    *,
    clock_mhz: float = 0.0,
    calibrations: Sequence[Calibration | None] = (),
) -> Launch:
    """A launch of ``spec`` whose median step takes ``exp(log)`` seconds, on these GPUs."""
    plain = launch_of(spec)
    seconds = math.exp(log)
    steps = (5 * seconds, *(seconds,) * (spec.steps - 1))
    ranks = tuple(
        _rank_on(rank, gpu, steps, calibration)
        for rank, gpu, calibration in zip(plain.ranks, gpus, calibrations or [None] * len(gpus), strict=True)
    )
    return replace(plain, started_at=started_at, ranks=ranks, health=Health(sm_clock_mhz=clock_mhz))


def _rank_on(rank: RankRecord, gpu: int, steps: tuple[float, ...], calibration: Calibration | None) -> RankRecord:
    host = f"host-{gpu // _PER_HOST}"
    return replace(rank, host=host, device=device_of(gpu), step_seconds=steps, calibration=calibration)


def flat(cases: Cases) -> list[Launch]:
    return [launch for launches in cases for launch in launches]


def waiting_for_hosts(cases: Cases, sd: float) -> Cases:
    """The same where the first case waits for its host, which is another one for each GPU and day."""

    def moved(one: Launch) -> Launch:
        (rank,) = one.ranks
        factor = math.exp(random.Random(f"{rank.device} {one.started_at[:10]}").gauss(0.0, sd))
        return replace(one, ranks=(replace(rank, step_seconds=tuple(factor * each for each in rank.step_seconds)),))

    return [list(map(moved, cases[0])), *cases[1:]]


def baseline_of(launches: Sequence[Launch], case: int = 0, machine: str = "h200") -> Baseline:
    entry = Accepted(recorded_at="2026-01-31T00:00:00Z", reason="", launches=len(launches), metrics={})
    spec = spec_of(case)
    return Baseline(
        id=spec.id,
        digest=spec.digest,
        machine=machine,
        spec=spec.to_dict(),
        recorded_by="t.py::t",
        launches=tuple(launches),
        anchor=entry,
        history=(entry,),
    )


def result_of(
    launches: Sequence[Launch], stored: Sequence[Launch], policy: Policy, machine: str = "h200"
) -> CaseResult:
    """As the run has it once ``launches`` are judged."""
    judgement = judge(launches, baseline_of(stored), policy)
    return CaseResult(
        id=launches[0].spec_id,
        digest=launches[0].digest,
        nodeid=f"t.py::{launches[0].spec_id}",
        machine=machine,
        verdict=judgement.verdict,
        reason=judgement.reason,
        checks=judgement.checks,
        launches=tuple(launches),
    )
