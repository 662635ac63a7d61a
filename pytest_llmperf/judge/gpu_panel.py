"""How long things took on units of hardware, as arrays; and a model of what that tells of the hardware."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from pytest_llmperf.judge.stats import Spread, log_of
from pytest_llmperf.records.calibration import ALL_REDUCE, BF16_PRODUCT, COPY, host_of, site_of
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support import grouped
from pytest_llmperf.support.interpreter import Array, np, sparse

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


Measurement = tuple[str, Unit, str]


@dataclass(frozen=True)
class Observation:
    """One launch, or one part of a calibration: the logarithm of its seconds, and its standard error within it."""

    series: str
    """The digest of its case; of a calibration what was done, and by which versions: others are not comparable."""
    unit: Unit
    log: float
    error: float = 0.0
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
    def measurement(self) -> Measurement:
        """Which one it is: a baseline keeps rounded figures of what a run has seen whole."""
        return self.series, self.unit, self.at


def unit_of(launch: Launch) -> Unit:
    places = sorted((site_of([rank.place]), host_of([rank.place])) for rank in launch.ranks)
    return Unit(tuple(host for _, host in places), tuple(device for device, _ in places), launch.started_at[:10])


def observations_of(launches: Sequence[Launch]) -> list[Observation]:
    """What ``launches`` show, and their calibrations, each once."""
    shown = (
        Observation(one.digest, unit_of(one), log_of(one), one.median_error, one.health.sm_clock_mhz, one.started_at)
        for one in launches
    )
    return [*shown, *dict.fromkeys(calibrations_of(launches))]


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


#: What an effect is made of.
COMPONENTS = ("host", "device", "day")


@dataclass(frozen=True)
class Panel:
    """Cells: of each series on each of its units its observations, stored ones apart from a run's own. Arrays have a
    value for each cell: indices, the observations' mean, their number and their mean squared error."""

    units: Sequence[Unit]
    series: Sequence[str]
    of_series: Array
    of_unit: Array
    logs: Array
    sizes: Array
    squared_errors: Array
    may_have_changed: Array
    """Whether it is of a case that the run itself has launched."""

    @classmethod
    def of(cls, stored: Iterable[Observation], seen: Iterable[Observation] = (), first: Sequence[Unit] = ()) -> Panel:
        """``seen`` are the run's own; ``first``: units that come before all others."""
        both = ((is_seen, each) for is_seen, those in ((False, stored), (True, seen)) for each in those)
        cells = grouped(((is_seen, each.series, each.unit), each) for is_seen, each in both)
        tonight = [own and not cell[0].is_calibration for (own, *_), cell in cells.items()]
        units = {unit: number for number, unit in enumerate(dict.fromkeys([*first, *(unit for _, _, unit in cells)]))}
        series = {name: number for number, name in enumerate(dict.fromkeys(name for _, name, _ in cells))}
        return cls(
            units=list(units),
            series=list(series),
            of_series=np.array([series[name] for _, name, _ in cells], dtype=int),
            of_unit=np.array([units[unit] for _, _, unit in cells], dtype=int),
            logs=np.array([sum(each.log for each in cell) / len(cell) for cell in cells.values()]),
            sizes=np.array([len(cell) for cell in cells.values()], dtype=float),
            squared_errors=np.array([sum(each.error**2 for each in cell) / len(cell) for cell in cells.values()]),
            may_have_changed=np.array(tonight, dtype=bool),
        )


# The number of each part by component and name; the host of each device, and of each name of a host.
_Parts = tuple[dict[str, dict[str, int]], dict[str, str], dict[str, str]]


class Incidence(dict[str, Array]):
    """For each component of an effect, which share of each unit is of which host, device, and device on a day. Of
    several GPUs the effect is their mean: by how much the slowest of them lies above it is the case's own. Of units
    beside ones that are ``known`` the first columns are those of these."""

    def __init__(self, units: Sequence[Unit], known: Incidence | None = None) -> None:
        self.units = units
        # The very GPU is in one host, whatever that calls itself after a reboot.
        before: _Parts = known.parts if known else ({name: {} for name in COMPONENTS}, {}, {})
        index, of_device, of_name = {name: {**each} for name, each in before[0].items()}, {**before[1]}, {**before[2]}
        self.parts: _Parts = index, of_device, of_name
        places: dict[str, list[list[int]]] = {name: [] for name in COMPONENTS}
        for unit in units:
            hosts = []
            for device, name in zip(unit.devices, unit.hosts, strict=True):
                host = of_device.setdefault(device, of_name.get(name, name))
                of_name.setdefault(name, host)
                hosts.append(host)
            days = [f"{device} on {unit.day}" for device in unit.devices]
            for component, names in zip(COMPONENTS, (hosts, unit.devices, days), strict=True):
                numbers = index[component]
                places[component].append([numbers.setdefault(name, len(numbers)) for name in names])
        for component, rows in places.items():
            self[component] = np.zeros((len(units), len(index[component])))
            for row, columns in enumerate(rows):
                np.add.at(self[component][row], columns, 1 / len(columns))


# Prediction: what a panel's observations tell of unknowns whose covariance is known before (Henderson 1975).

#: Cases of a run that lie beyond so many of their errors count for less (Huber 1964), found in so many rounds.
USUAL_ERRORS, ROUNDS = 1.5, 6

#: What series that are not in a panel tell of some of its unknowns: which these are, their precision, weighted sums.
Rest: TypeAlias = tuple[Array, Array, Array]


@dataclass(frozen=True)
class CellSums:
    """What cells tell by themselves of the unknowns of a design (cells x unknowns)."""

    each: Array
    """Of each series the sum of its cells' weights; then of the weighted rows of the design, and of weighted cells."""
    crossed: Array
    logs: Array
    information: Array
    """A precision of the unknowns, which may be singular; then observations, weighted by what they tell of each."""
    sums: Array

    @classmethod
    def of(cls, panel: Panel, design: Array, variances: Array, rest: Rest | None = None) -> CellSums:
        num, width, weights = len(panel.series), design.shape[1], 1 / variances
        each, logs = (np.bincount(panel.of_series, values, num) for values in (weights, weights * panel.logs))
        # A cell moves with a few of many unknowns: those of its unit.
        cells, unknowns = np.nonzero(design)
        moves = design[cells, unknowns]
        weighted, place = weights[cells] * moves, panel.of_series[cells] * width + unknowns
        crossed = np.bincount(place, weighted, num * width).reshape(num, width)
        rows = sparse.csr_array((moves * np.sqrt(weights)[cells], (cells, unknowns)), shape=design.shape)
        information = (rows.T @ rows).toarray() - crossed.T @ (crossed / each[:, None])
        sums = np.bincount(unknowns, weighted * panel.logs[cells], width) - crossed.T @ (logs / each)
        if rest is not None:
            places, precision, weighted_sums = rest
            information[np.ix_(places, places)] += precision
            sums[places] += weighted_sums
        return cls(each, crossed, logs, information, sums)


@dataclass(frozen=True)
class Prediction:
    """The best linear unbiased one of the unknowns of a design."""

    told: CellSums
    covariance: Array
    """Of the errors of ``means``."""

    @cached_property
    def means(self) -> Array:
        return self.covariance @ self.told.sums

    @property
    def centres(self) -> Array:
        """Of each series of the panel its mean, without effects."""
        return (self.told.logs - self.told.crossed @ self.means) / self.told.each

    @property
    def pull(self) -> Array:
        """The prior covariance times it is ``means``."""
        return self.told.sums - self.told.information @ self.means

    def of(self, towards: Array, prior: Array) -> tuple[Array, Array]:
        """The same of other unknowns: means, and covariance of their errors. ``towards``: covariance (these x others)
        before anything is seen; ``prior``: that of the others."""
        seen = self.told.information @ towards
        return towards.T @ self.pull, prior - towards.T @ seen + seen.T @ self.covariance @ seen

    def excess(self, shares: Array, place: slice) -> float:
        """By how much what the unknowns at ``place`` have in ``shares`` (unknowns x parts) varies more than expected.
        Of one part whose prior variance is v, v + v² times this is the expected square."""
        inside = self.told.information[:, place] @ shares
        told = (shares * inside[place]).sum() - (inside * (self.covariance @ inside)).sum()
        return float(((shares.T @ self.pull[place]) ** 2).sum() - told)


def predicted(panel: Panel, design: Array, prior: Array, variances: Array, rest: Rest | None = None) -> Prediction:
    """Of the unknowns of ``design``, whose covariance is ``prior``; ``variances`` are those of the cells."""
    told = CellSums.of(panel, design, variances, rest)
    covariance = np.linalg.solve(np.eye(len(prior)) + prior @ told.information, prior)
    return Prediction(told, (covariance + covariance.T) / 2)


def doubted(panel: Panel, design: Array, prior: Array, variances: Array, rest: Rest | None = None) -> Prediction:
    """The same where the run's own cells that lie far off count for less: their cases may have changed. Weights of few
    cells move the errors of few combinations of the unknowns (Woodbury 1950): one solution serves all rounds."""
    first, own = predicted(panel, design, prior, variances, rest), np.flatnonzero(panel.may_have_changed)
    if not own.size:
        return first
    told, of_series, usual = first.told, panel.of_series[own], variances[own]
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
    return Prediction(CellSums.of(panel, design, weighed, rest), first.covariance - reach @ moves @ reach.T)


def residuals(panel: Panel, design: Array, found: Prediction) -> Array:
    """Of each cell what is left of it."""
    return panel.logs - found.centres[panel.of_series] - design @ found.means


# Model: how GPUs of a kind differ, and how each case feels that.

#: What of a GPU is told apart: how fast it is, and by how much more where a case runs at its power limit.
FACTORS = ("general", "at_power_limit")

# Standard deviations before anything was seen, and what that is worth in hosts, devices and days: eight H200 of one
# host differ by 0.6 %, hosts by as much; what is at the power limit and what is not were seen to move apart by half.
_EFFECTS: Mapping[str, Mapping[str, float]] = {
    "general": {"host": 0.006, "device": 0.006, "day": 0.003},
    "at_power_limit": {"host": 0.004, "device": 0.004, "day": 0.002},
}
EFFECTS_DF = 4.0
#: How far loadings lie about what is expected of them.
LOADING_SD = 0.4

# Twelve H200: what a GPU does to training a copy within its memory feels by 0.1 at any clock.
_OF_MEMORY = (0.1, 0.0)
# What is left to a case on a unit, before anything was seen, and what that is worth.
_OWN = Spread(0.003, 4.0)


@dataclass(frozen=True)
class Loading:
    """By how much of each of a GPU's effects a series moves, and how well that is known."""

    mean: Array
    covariance: Array
    expected: Array
    """Before its launches were compared."""


@dataclass(frozen=True)
class Model:
    """Standard deviations of logarithms."""

    effects: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: dict(_EFFECTS))
    """By factor: of hosts, of devices of a host, and of a device's days."""
    effects_df: float = EFFECTS_DF
    loadings: Mapping[str, Loading] = field(default_factory=dict)
    """By series."""
    own: Mapping[str, Spread] = field(default_factory=dict)
    """By series: what one launch on another unit is off by itself."""
    usual: Spread = _OWN
    alone: frozenset[str] = frozenset()
    """Series that scatter unlike the others, as those do that wait for their host: their own spread is theirs alone."""

    def loading(self, series: str) -> Loading:
        return self.loadings.get(series) or expected_loading(0.0, series)

    def own_spread(self, series: str) -> Spread:
        return self.own.get(series, self.usual)

    def covariance(self, units: Sequence[Unit]) -> Array:
        """Of the effects of ``units``, before any is seen: all of the first factor, then all of the next."""
        shares = Incidence(units)
        return self.between(shares, shares)

    def between(self, some: Incidence, others: Incidence) -> Array:
        """The same of ``some`` units with ``others``, which are known beside these."""
        alike = {name: shares @ others[name][:, : shares.shape[1]].T for name, shares in some.items()}
        (every, num), factors = alike["host"].shape, len(FACTORS)
        total = np.zeros((factors, every, factors, num))
        for number, factor in enumerate(FACTORS):
            total[number, :, number] = sum(self.effects[factor][name] ** 2 * alike[name] for name in alike)
        return total.reshape(factors * every, factors * num)


def expected_loading(limited: float, series: str = "") -> Loading:
    """Of a case that runs at the power limit (1), at the highest clock (0), or of which that is not known (0.5)."""
    mean = np.array(_OF_MEMORY if series.startswith(CALIBRATION_COPY) else (1.0, limited - 0.5))
    return Loading(mean, LOADING_SD**2 * np.eye(len(FACTORS)), mean)


@dataclass(frozen=True)
class Posterior:
    """The effects of a panel's units, as far as its observations tell them."""

    model: Model
    shares: Incidence
    prediction: Prediction

    def of(self, units: Sequence[Unit]) -> tuple[Array, Array]:
        """What is expected of ``units``, and the covariance of its errors; also of ones that the panel has not seen."""
        asked = Incidence(units, self.shares)
        return self.prediction.of(self.model.between(self.shares, asked), self.model.between(asked, asked))


def cell_variances(model: Model, panel: Panel) -> Array:
    """Of each cell about its series' mean and its unit's effect."""
    own = np.array([model.own_spread(name).sd ** 2 for name in panel.series])[panel.of_series]
    # Half of what is left is the launch's, which several of them average; one that does not know its median has more.
    launch = own / 2 + np.maximum(0.0, panel.squared_errors - own / 2)
    return own / 2 + launch / panel.sizes


def all_variances(model: Model, panel: Panel) -> Array:
    """The same, and what it is off because its series' loadings are not known: as the effects of any unit are large. Of
    many series such errors average out; where a calibration alone tells of a GPU they are most of what is wrong."""
    second = np.diag([sum(sd**2 for sd in model.effects[factor].values()) for factor in FACTORS])
    of_series = np.array([np.trace(model.loading(name).covariance @ second) for name in panel.series])
    return cell_variances(model, panel) + of_series[panel.of_series]


def design_of(model: Model, panel: Panel) -> Array:
    """Of each cell by how much it moves with each effect of each unit."""
    num, cells = len(panel.units), np.arange(len(panel.logs))
    loads = np.array([model.loading(name).mean for name in panel.series]).reshape(-1, len(FACTORS))
    matrix = np.zeros((len(cells), num * len(FACTORS)))
    for factor in range(len(FACTORS)):
        matrix[cells, panel.of_unit + factor * num] = loads[panel.of_series, factor]
    return matrix
