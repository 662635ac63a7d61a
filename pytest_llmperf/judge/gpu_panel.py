"""Panel: observations by series and unit, as arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

from pytest_llmperf.judge.noise import log_of
from pytest_llmperf.records.calibration import ALL_REDUCE, BF16_PRODUCT, COPY
from pytest_llmperf.records.launch import Launch, host_of, site_of

# Observation: how long one thing took on one unit of hardware: a case's launch, or a part of a calibration.


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


#: One of NumPy, which counts as Any.
Array: TypeAlias = Any


#: What an effect is made of.
COMPONENTS = ("host", "device", "day")


@dataclass(frozen=True)
class Panel:
    """Cells: of each series on each of its units the mean of its observations, stored ones apart from a run's own."""

    stored: Sequence[Observation]
    seen: Sequence[Observation] = ()
    """By the run itself."""

    @cached_property
    def units(self) -> list[Unit]:
        return list(dict.fromkeys(each.unit for each in (*self.stored, *self.seen)))

    @cached_property
    def unit_index(self) -> dict[Unit, int]:
        return {unit: number for number, unit in enumerate(self.units)}

    @cached_property
    def series(self) -> list[str]:
        return list(dict.fromkeys(each.series for each in (*self.stored, *self.seen)))

    @cached_property
    def cells(self) -> list[list[Observation]]:
        groups: dict[tuple[bool, str, Unit], list[Observation]] = {}
        for is_seen, observations in ((False, self.stored), (True, self.seen)):
            for each in observations:
                groups.setdefault((is_seen, each.series, each.unit), []).append(each)
        return list(groups.values())

    @cached_property
    def may_have_changed(self) -> Array:
        """Of each cell whether it is of a case that the run itself has launched."""
        import numpy as np  # noqa: PLC0415 - only a judged case pays for it

        own = {id(each) for each in self.seen}
        return np.array([id(cell[0]) in own and not cell[0].is_calibration for cell in self.cells], dtype=bool)

    @cached_property
    def of_series(self) -> Array:
        """Of each cell the index of its series."""
        import numpy as np  # noqa: PLC0415

        index = {name: number for number, name in enumerate(self.series)}
        return np.array([index[cell[0].series] for cell in self.cells], dtype=int)

    @cached_property
    def of_unit(self) -> Array:
        """Of each cell the index of its unit."""
        import numpy as np  # noqa: PLC0415

        return np.array([self.unit_index[cell[0].unit] for cell in self.cells], dtype=int)

    @cached_property
    def logs(self) -> Array:
        """Of each cell the mean of its logarithms."""
        import numpy as np  # noqa: PLC0415

        return np.array([sum(each.log for each in cell) / len(cell) for cell in self.cells])

    @cached_property
    def sizes(self) -> Array:
        """Observations of each cell."""
        import numpy as np  # noqa: PLC0415

        return np.array([len(cell) for cell in self.cells], dtype=float)

    @cached_property
    def squared_errors(self) -> Array:
        """Of each cell the mean squared error of its observations."""
        import numpy as np  # noqa: PLC0415

        return np.array([sum(each.error**2 for each in cell) / len(cell) for cell in self.cells])


def incidence(units: Sequence[Unit]) -> dict[str, Array]:
    """For each component of an effect, which share of each unit is of which host, device, and device on a day.

    Of several GPUs the effect is their mean: by how much the slowest of them lies above it is the case's own.
    """
    import numpy as np  # noqa: PLC0415

    found: dict[str, Array] = {}
    for component, parts in (
        ("host", _hosts(units)),
        ("device", [list(unit.devices) for unit in units]),
        ("day", [[f"{device} on {unit.day}" for device in unit.devices] for unit in units]),
    ):
        index = {name: number for number, name in enumerate(dict.fromkeys(chain.from_iterable(parts)))}
        matrix = np.zeros((len(units), len(index)))
        for row, names in enumerate(parts):
            for name in names:
                matrix[row, index[name]] += 1 / len(names)
        found[component] = matrix
    return found


def _hosts(units: Sequence[Unit]) -> list[list[str]]:
    """Of each device of each unit: the very GPU is in one host, whatever that calls itself after a reboot."""
    of_device: dict[str, str] = {}
    of_name: dict[str, str] = {}
    found = []
    for unit in units:
        names = []
        for device, name in zip(unit.devices, unit.hosts, strict=True):
            host = of_device.get(device, of_name.get(name, name))
            of_device.setdefault(device, host)
            of_name.setdefault(name, host)
            names.append(host)
        found.append(names)
    return found


# Prediction: what a panel's observations tell of unknowns whose covariance is known before (Henderson 1975).


#: Other cases of a run may have changed themselves: beyond so many of their errors they count for less (Huber 1964),
#: found in so many rounds.
USUAL_ERRORS, ROUNDS = 1.5, 6


@dataclass(frozen=True)
class Prediction:
    """The best linear unbiased one of what a design (cells x unknowns) is about."""

    means: Array
    covariance: Array
    """Of the errors of ``means``."""
    centres: Array
    """Of each series of the panel its mean, without effects."""
    information: Array
    """What the observations alone tell of the unknowns: a precision, which may be singular."""
    sums: Array
    """Observations, weighted by what they tell of each unknown."""

    @property
    def pull(self) -> Array:
        """The prior covariance times it is ``means``."""
        return self.sums - self.information @ self.means

    def of(self, towards: Array, prior: Array) -> tuple[Array, Array]:
        """The same of other unknowns: means, and covariance of their errors.

        ``towards``: covariance (these x others) before anything is seen; ``prior``: that of the others.
        """
        seen = self.information @ towards
        return towards.T @ self.pull, prior - towards.T @ seen + seen.T @ self.covariance @ seen

    def excess(self, shares: Array, place: slice) -> float:
        """By how much what the unknowns at ``place`` have in ``shares`` (unknowns x parts) varies more than expected.

        Of one part whose prior variance is v, v + v² times this is the expected square.
        """
        inside = self.information[:, place] @ shares
        told = (shares * inside[place]).sum() - (inside * (self.covariance @ inside)).sum()
        return float(((shares.T @ self.pull[place]) ** 2).sum() - told)


def predicted(panel: Panel, design: Array, prior: Array, variances: Array) -> Prediction:
    """Of the unknowns of ``design``, whose covariance is ``prior``; ``variances`` are those of the cells."""
    return _Told.of(panel, design, variances).prediction(prior)


def doubted(panel: Panel, design: Array, prior: Array, variances: Array) -> Prediction:
    """The same where cells of the run itself that lie far off count for less: their cases may have changed.

    Other weights of few cells move the errors of few combinations of the unknowns alone (Woodbury 1950): one solution
    serves all rounds.
    """
    import numpy as np  # noqa: PLC0415 - only a judged case pays for it

    told = _Told.of(panel, design, variances)
    first, own = told.prediction(prior), np.flatnonzero(panel.may_have_changed)
    if not own.size:
        return first
    of_series, usual = panel.of_series[own], variances[own]
    moved = design[own] - told.crossed[of_series] / told.each[of_series, None]
    reach = first.covariance @ moved.T
    fitted = moved @ reach + (of_series[:, None] == of_series) / told.each[of_series]
    before = residuals(panel, design, first)[own]
    moves = np.zeros_like(fitted)
    far = np.ones_like(before)
    for _ in range(ROUNDS):
        left = before - fitted @ moves @ before
        far = np.maximum(1.0, abs(left) / (USUAL_ERRORS * np.sqrt(usual)))
        lost = np.diag((1 / far - 1) / usual)
        moves = np.linalg.solve(np.eye(len(own)) + lost @ fitted, lost)
    weighed = variances.copy()
    weighed[own] *= far
    return _Told.of(panel, design, weighed).with_covariance(first.covariance - reach @ moves @ reach.T)


def residuals(panel: Panel, design: Array, found: Prediction) -> Array:
    """Of each cell what is left of it."""
    return panel.logs - found.centres[panel.of_series] - design @ found.means


@dataclass(frozen=True)
class _Told:
    """What cells of these variances tell by themselves."""

    each: Array
    """Of each series the sum of its cells' weights; then of the weighted rows of the design, and of weighted cells."""
    crossed: Array
    logs: Array
    information: Array
    sums: Array

    @classmethod
    def of(cls, panel: Panel, design: Array, variances: Array) -> _Told:
        import numpy as np  # noqa: PLC0415

        weights, num, size = 1 / variances, len(panel.series), design.shape[1]
        each = np.bincount(panel.of_series, weights, num)
        logs = np.bincount(panel.of_series, weights * panel.logs, num)
        # A cell moves with a few of many unknowns: those of its unit.
        cells, places = np.nonzero(design)
        loads = weights[cells] * design[cells, places]
        crossed = np.bincount(panel.of_series[cells] * size + places, loads, num * size).reshape(num, size)
        sums = np.bincount(places, loads * panel.logs[cells], size)
        rank = np.arange(len(cells)) - np.searchsorted(cells, cells)
        few = int(rank.max(initial=0)) + 1
        held: Array = np.zeros((len(weights), few), dtype=int)
        shares = np.zeros((len(weights), few))
        held[cells, rank], shares[cells, rank] = places, design[cells, places]
        pairs = (held[:, :, None] * size + held[:, None, :]).ravel()
        products = (weights[:, None, None] * shares[:, :, None] * shares[:, None, :]).ravel()
        information = np.bincount(pairs, products, size * size).reshape(size, size)
        information -= crossed.T @ (crossed / each[:, None])
        return cls(each, crossed, logs, information, sums - crossed.T @ (logs / each))

    def prediction(self, prior: Array) -> Prediction:
        import numpy as np  # noqa: PLC0415

        covariance = np.linalg.solve(np.eye(len(prior)) + prior @ self.information, prior)
        return self.with_covariance((covariance + covariance.T) / 2)

    def with_covariance(self, covariance: Array) -> Prediction:
        means = covariance @ self.sums
        centres = (self.logs - self.crossed @ means) / self.each
        return Prediction(means, covariance, centres, self.information, self.sums)
