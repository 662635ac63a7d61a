"""Hardware: where ranks run, how it fared meanwhile, and what it gives to work that is not under test."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pytest_llmperf.support.codec import Number, sparse

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    host: str
    device: str
    boot: str = ""


def host_of(places: Iterable[Place]) -> str:
    """The machines of a launch, which cool, feed and drive all its devices alike."""
    return " + ".join(sorted({f"{place.host} {place.boot}".strip() for place in places}))


def site_of(places: Iterable[Place]) -> str:
    # A GPU's UUID is its own everywhere; a CPU's name needs its host's.
    return " + ".join(sorted(p.device if _UUID.search(p.device) else f"{p.host} {p.device}" for p in places))


# Calibration: the canary of each launch takes a tenth of a second and finds a chip that is far too slow; this takes
# some seconds, once a day and GPU, and tells GPUs apart that differ by a per cent.

#: The work that is timed: products of matrices, a copy within the memory, and where there are peers an exchange.
BF16_PRODUCT, FP32_PRODUCT, COPY, ALL_REDUCE = "bf16_product", "fp32_product", "copy", "all_reduce"
#: In the folder of a run: the calibrations that could be kept nowhere else, and the file beside them that says why.
OF_THE_RUN, UNKEPT = "calibrations", "unkept.txt"
#: How every time of a record is written: UTC, ISO 8601.
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
#: Of how a GPU is calibrated, raised with each change of it: what another procedure measured is not comparable.
PROCEDURE = 1
_FIRST_PROCEDURE = 1

_SENSED = ("sm_clock_mhz", "power_watts", "temperature_celsius", "power_limit_watts")


@sparse("sm_clock_mhz", "power_watts", "temperature_celsius", "power_limit_watts", "trouble")
@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Of one GPU (or CPU) at one time."""

    made_at: str
    """UTC, ISO 8601."""
    seconds: Mapping[str, float]
    """Of one repetition of each work, a mean over its steady part."""
    versions: Mapping[str, str]
    """What may change the work itself: torch, its CUDA, cuBLAS, the driver, as far as they are known."""
    sm_clock_mhz: Number = 0.0
    """Mean while bf16 products ran; 0 where nobody told. So is every figure below."""
    power_watts: Number = 0.0
    """Mean while bf16 products ran."""
    temperature_celsius: Number = 0.0
    """Highest while bf16 products ran."""
    power_limit_watts: Number = 0.0
    trouble: str = ""
    """Why it cannot be used; empty where it can."""
    procedure: int = _FIRST_PROCEDURE
    """That it was made by; absent in files of the first."""

    def __post_init__(self) -> None:
        try:
            time.strptime(self.made_at, TIME_FORMAT)
        except ValueError:
            raise ValueError(f"a calibration was made at {self.made_at!r}, expected a time in UTC") from None
        if not self.seconds:
            raise ValueError("a calibration has no seconds of any work")
        for name, seconds in self.seconds.items():
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"a calibration has {name!r} at {seconds} s, expected more than none")
        for name in _SENSED:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a calibration has {name} {value}, expected 0 or more")

    @property
    def maker(self) -> str:
        """``cuda 13.0, driver 580.82.07, torch 2.13.0, procedure 1``: those of another one are not comparable."""
        versions = [f"{name} {version}" for name, version in sorted(self.versions.items())]
        return ", ".join([*versions, f"procedure {self.procedure}"])

    def maker_of(self, work: str) -> str:
        """By what the seconds of ``work`` were made; a copy calls no library and stays comparable where they change."""
        return f"procedure {self.procedure}" if work == COPY else self.maker


#: Why a GPU's clocks are lower than they could be, by NVML's bits; also by design: idle, its power limit.
_REASONS = (
    "idle, application clocks, power limit, hardware slowdown, sync boost, software thermal slowdown, "
    "hardware thermal slowdown, hardware power brake, display clocks"
)
CLOCK_REASONS = {1 << bit: reason for bit, reason in enumerate(_REASONS.split(", "))}

#: Clocks lowered for one of these reasons say something of the room or the board, nothing of the software. The power
#: limit is not among them: a chip that works at full speed lives there.
THROTTLES = frozenset(
    {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"}
)


@sparse("foreign_processes")
@dataclass(frozen=True, kw_only=True)
class Health:
    """What else happened on the hardware while the launch ran."""

    foreign_processes: tuple[str, ...] = ()
    """Other processes on this launch's GPUs, one line each."""
    clock_reasons: Mapping[str, float] = field(default_factory=dict)
    """Why clocks were lowered while it trained: share of the samples, by reason."""
    sm_clock_mhz: Number = 0.0
    """Median while it trained, of the slowest GPU; 0 where nobody told. So is every figure below."""
    temperature_celsius: Number = 0.0
    """Highest while it trained."""
    power_watts: Number = 0.0
    """Mean while it trained, of all its GPUs together, by their energy counters."""
    power_limit_watts: Number = 0.0
    """Of the GPU with the lowest."""
    memory_errors: int = 0
    """New uncorrected ECC errors and row remappings."""
