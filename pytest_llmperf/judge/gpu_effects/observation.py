"""Observation: how long one thing took on one unit of hardware: a case's launch, or a part of a calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pytest_llmperf.judge.noise import log_of
from pytest_llmperf.records.calibration import ALL_REDUCE, BF16_PRODUCT, COPY
from pytest_llmperf.records.launch import Launch, host_of, site_of

#: What begins the name of a series that is a part of a calibration, and no case.
CALIBRATION = "calibration "
#: The same of one that waits for the memory alone.
CALIBRATION_COPY = CALIBRATION + COPY
#: It stays comparable where the driver changes, of which nobody knows by how much that moves it.
COPY_ERROR = 0.005


@dataclass(frozen=True)
class Unit:
    """What shares one effect: the very GPUs, on one UTC day."""

    hosts: tuple[str, ...]
    """Of each device."""
    devices: tuple[str, ...]
    day: str

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Each case asks for that of thousands.
        return hash((self.hosts, self.devices, self.day))


@dataclass(frozen=True)
class Observation:
    """One launch, or one part of a calibration."""

    series: str
    """The digest of its case; of a calibration what was done, and by which versions: others are not comparable."""
    unit: Unit
    log: float
    """Logarithm of its seconds."""
    error: float = 0.0
    """Standard error of that within the launch."""
    clock_mhz: float = 0.0
    """At which the chip ran; 0 where nobody told."""
    at: str = ""
    """UTC, ISO 8601: when the launch began, or the calibration was made."""

    @property
    def is_calibration(self) -> bool:
        return self.series.startswith(CALIBRATION)

    @property
    def tells_of_gpu(self) -> bool:
        """Whether it is work that feels what a GPU does to training: memory and fp32 feel a tenth of it."""
        return self.series.startswith(CALIBRATION + BF16_PRODUCT)

    @property
    def measurement(self) -> tuple[str, Unit, str]:
        """Which one it is: a baseline keeps rounded figures of what a run has seen whole."""
        return self.series, self.unit, self.at


def unit_of(launch: Launch) -> Unit:
    """Where and when ``launch`` ran."""
    places = sorted((site_of([rank.place]), host_of([rank.place])) for rank in launch.ranks)
    return Unit(tuple(host for _, host in places), tuple(device for device, _ in places), launch.started_at[:10])


def observation_of(launch: Launch) -> Observation:
    """What ``launch`` shows."""
    clock = launch.health.sm_clock_mhz
    return Observation(launch.digest, unit_of(launch), log_of(launch), launch.median_error, clock, launch.started_at)


def observations_of(launches: Sequence[Launch]) -> list[Observation]:
    """What ``launches`` show, and their calibrations, each once."""
    return [*map(observation_of, launches), *dict.fromkeys(calibrations_of(launches))]


def calibrations_of(launches: Iterable[Launch]) -> Iterator[Observation]:
    """What the calibrations of their GPUs show, once for each launch that tells of one."""
    for launch in launches:
        for rank in launch.ranks:
            calibration = rank.calibration
            if calibration is None or calibration.trouble:
                continue
            unit = Unit((host_of([rank.place]),), (site_of([rank.place]),), calibration.made_at[:10])
            # Those that work side by side share power and air.
            width = f" of {len(launch.ranks)}" if len(launch.ranks) > 1 else ""
            for name, seconds in calibration.seconds.items():
                if name != ALL_REDUCE:  # what several GPUs do together tells of none of them alone
                    clock = calibration.sm_clock_mhz if name == BF16_PRODUCT else 0.0
                    series = f"{CALIBRATION}{name}{width} by {calibration.maker_of(name)}"
                    error = COPY_ERROR if name == COPY else 0.0
                    yield Observation(series, unit, math.log(seconds), error, clock, calibration.made_at)
