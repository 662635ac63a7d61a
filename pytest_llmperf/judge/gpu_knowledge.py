"""Knowledge: what is stored of a machine kind's GPUs and what a run has seen on its own; and of a case by that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from pytest_llmperf.judge.gpu_model import EFFECTS_DF, FACTORS, Model, Posterior, learn, robust
from pytest_llmperf.judge.gpu_panel import Observation, Panel, Unit, calibrations_of, observations_of, unit_of
from pytest_llmperf.judge.stats import Noise, Scatter, Spread, within_sessions
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support.interpreter import np, one_thread

#: Of a GPU that nobody knows one case cannot be told from it: what has changed by itself would be taken for the GPU,
#: and the next case for changed. So many others that most of them have not.
FEWEST_CASES = 4

# Logarithms: chips of one kind differ by a fiftieth, and what a tenth is apart is something else. A calibration that is
# faster than a chip can well be, in standard deviations, is none either; a slow one may be a bad chip's.
_FURTHEST, _FASTEST = 0.1, 4.0


class _Stored:
    """What each case asks of the same stored observations, found once."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        launches = [each for each in observations if not each.is_calibration]
        self.measurements = {each.measurement for each in observations}
        self.series = {each.series for each in observations}
        self.usual_logs = _usual_of_calibrations(observations)
        self.told_apart = {device for device, _ in compared(launches)}
        self.devices: dict[str, set[str]] = {}
        """That launches of each series were on."""
        for each in launches:
            self.devices.setdefault(each.series, set()).update(each.unit.devices)
        self.of_gpus = [each for each in observations if each.tells_of_gpu]


@dataclass(frozen=True)
class Knowledge:
    """Of the GPUs of one machine kind."""

    model: Model
    stored: Sequence[Observation]
    """Of all baselines, from before this run recorded anything."""
    seen: Sequence[Observation] = field(default=())
    """By this run so far."""
    _told: dict[tuple[str, frozenset[Observation]], Posterior] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, cases: Sequence[Sequence[Launch]]) -> Knowledge | None:
        """From the stored launches of each case; ``None``: too little to tell GPUs and cases apart."""
        shown = observations_of([launch for launches in cases for launch in launches])
        # Calibrations that are nowhere near the others of their series are none, whoever wrote them.
        usual = _usual_of_calibrations(shown)
        stored = [each for each in shown if abs(each.log - usual.get(each.series, each.log)) <= _FURTHEST]
        model = learn(stored)
        return cls(model, stored) if model else None

    def with_seen(self, launches: Sequence[Launch]) -> Knowledge:
        """Beside what a run's ``launches`` show; what a baseline keeps of the same is left out, else it counted twice.

        A calibration of today may be stored by now, and launches that another start of a SLURM job has made.
        """
        seen = {each.measurement: each for each in observations_of(launches) if self._believes(each)}
        if self._of_stored.measurements.isdisjoint(seen):
            found = Knowledge(self.model, self.stored, tuple(seen.values()))
            found.__dict__["_of_stored"] = self._of_stored
            return found
        stored = [each for each in self.stored if each.measurement not in seen]
        return Knowledge(self.model, stored, tuple(seen.values()))

    @cached_property
    def _of_stored(self) -> _Stored:
        return _Stored(self.stored)

    def scatter(self, candidates: Sequence[Launch], baseline: Sequence[Launch]) -> Scatter:
        """Of the launches of ``baseline`` and then ``candidates``, by what all other cases, and calibrations, tell."""
        series, calibrations = candidates[0].digest, [*calibrations_of(candidates)]
        units = [unit_of(each) for each in (*baseline, *candidates)]
        size, loading, own = len(units), self.model.loading(series), self.model.own_spread(series)
        # Half of the variance is shared by all launches on a unit, half is the launch's; those that were repeated know
        # that better.
        half = Spread(own.sd / math.sqrt(2), own.df)
        same = np.array([[float(a == b) for b in units] for a in units])
        with one_thread():
            effects, covariance = self.told(series, calibrations).of(units)
            loads = np.kron(loading.mean, np.eye(size))
            # Of each two factors what both move: their effects, and that these are not known.
            second = (np.outer(effects, effects) + covariance).reshape(len(FACTORS), size, len(FACTORS), size)
            shared = [
                (loads @ covariance @ loads.T, self.model.effects_df),
                (np.einsum("ab,aibj->ij", loading.covariance, second), own.df),
                (half.sd**2 * same, half.df),
            ]
        return Scatter(
            shifts=loads @ effects,
            shared=shared,
            launch=half.moderated(within_sessions(baseline, candidates)),
            # A host that a launch waits for, say, is there in the next one too.
            lasting=same,
            gpu_df=math.inf if self.tells_of(map(unit_of, candidates), series, calibrations) else EFFECTS_DF,
        )

    def told(self, series: str, more: Iterable[Observation] = ()) -> Posterior:
        """What all but ``series``, and ``more``, tell of the effects of GPUs."""
        added = self._added(more)
        key = (series, added)
        if key not in self._told:
            seen = (*self.seen, *sorted(added, key=lambda each: (each.series, each.unit.devices, each.at)))
            stored, tonight = ([each for each in group if each.series != series] for group in (self.stored, seen))
            cases = _cases(tonight)
            # Of cases those on GPUs that enough of them were on.
            known = [
                each
                for each in tonight
                if each.is_calibration or all(len(cases[device]) >= FEWEST_CASES for device in each.unit.devices)
            ]
            self._told[key] = robust(self.model, Panel.of(stored, known))
        return self._told[key]

    def tells_of(
        self, units: Iterable[Unit], series: str, more: Iterable[Observation] = (), *, by_its_cases: bool = True
    ) -> bool:
        """Whether something tells of each GPU of ``units`` by itself what a launch of ``series`` there is worth.

        What no change of this run's software moves with its cases does, a comparable calibration of that day or stored
        launches of the very GPU; and ``by_its_cases`` enough other cases of this run.
        """
        stored = self._of_stored
        launched = stored.told_apart | stored.devices.get(series, set())
        if by_its_cases:
            cases = _cases([each for each in self.seen if each.series != series])
            launched |= {device for device, several in cases.items() if len(several) >= FEWEST_CASES}
        calibrated = self.calibrated_places((*self.seen, *self._added(more)))
        places = ((device, unit.day) for unit in units for device in unit.devices)
        return all(place in calibrated or place[0] in launched for place in places)

    def calibrated_places(self, seen: Iterable[Observation]) -> set[tuple[str, str]]:
        """The devices, and on which day, whose calibration is comparable with one from before this run.

        Those that a run has made with new versions agree with one another alone.
        """
        stored = self._of_stored
        return compared([*stored.of_gpus, *(one for one in seen if one.tells_of_gpu and one.series in stored.series)])

    def _added(self, more: Iterable[Observation]) -> frozenset[Observation]:
        """What of ``more`` is new, and believed."""
        known, own = self._of_stored.measurements, {each.measurement for each in self.seen}
        new = (each for each in more if each.measurement not in known and each.measurement not in own)
        return frozenset(each for each in new if self._believes(each))

    def _believes(self, each: Observation) -> bool:
        """Whether it is no calibration that a chip of this kind cannot give."""
        usual = self._of_stored.usual_logs
        if not each.is_calibration or each.series not in usual:  # else it is comparable with nothing
            return True
        loading, off = self.model.loading(each.series).mean, each.log - usual[each.series]
        variance = sum(
            (load * sd) ** 2
            for load, factor in zip(loading, FACTORS, strict=True)
            for sd in self.model.effects[factor].values()
        )
        least = _FASTEST * math.sqrt(variance + self.model.own_spread(each.series).sd ** 2)
        return -least <= off <= _FURTHEST

    @property
    def units(self) -> tuple[Unit, ...]:
        """On which this run has launched."""
        return tuple(dict.fromkeys(each.unit for each in self.seen if not each.is_calibration))

    def usual(self, launches: Sequence[Launch]) -> Noise:
        """How launches of the case of these scatter where nothing is taken off."""
        model, half = self.model, self.model.own_spread(launches[0].digest).sd / math.sqrt(2)
        host, device, day = (
            math.hypot(*(model.effects[factor][part] for factor in FACTORS)) for part in ("host", "device", "day")
        )
        spreads = {"host": host, "site": device, "session": math.hypot(day, half), "launch": half}
        return Noise(**{name: Spread(sd, model.effects_df) for name, sd in spreads.items()})


def _usual_of_calibrations(observations: Sequence[Observation]) -> dict[str, float]:
    logs: dict[str, list[float]] = {}
    for each in observations:
        if each.is_calibration:
            logs.setdefault(each.series, []).append(each.log)
    return {series: median(several) for series, several in logs.items()}


def _cases(seen: Sequence[Observation]) -> dict[str, set[str]]:
    """Of each device those that were on it."""
    cases: dict[str, set[str]] = {}
    for each in seen:
        if not each.is_calibration:
            for device in each.unit.devices:
                cases.setdefault(device, set()).add(each.series)
    return cases


def compared(observations: Sequence[Observation]) -> set[tuple[str, str]]:
    """The devices, and on which day, that ``observations`` tell from others: what one alone has done says nothing."""
    of_series: dict[str, set[tuple[str, str]]] = {}
    for each in observations:
        of_series.setdefault(each.series, set()).update((device, each.unit.day) for device in each.unit.devices)
    several = (places for places in of_series.values() if len({device for device, _ in places}) > 1)
    return {place for places in several for place in places}
