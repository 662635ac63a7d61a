"""What all baselines of a machine kind, and what a run has seen, tell of its GPUs and of how each case feels them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from pytest_llmperf.judge import gpu_panel
from pytest_llmperf.judge.gpu_panel import FACTORS, Loading, Measurement, Model, Observation, Panel, Posterior, Unit
from pytest_llmperf.judge.stats import Noise, Scatter, Spread, prior_of, within_sessions
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support import grouped
from pytest_llmperf.support.interpreter import Array, np, one_thread, sparse, special

# What is believed before anything was seen.
_BEFORE = Model()
# A clock that is lower than the highest by so much is the power limit's.
_LIMITED = 0.08
_LEAST_DF, _MOST_DF = 3.0, 5.0
# Of series that scatter alike so many have a ratio of variances below its limit.
_ALIKE = 0.95
# Less is not believed: launches of 40 steps know their own median to no better.
_LEAST_OWN = 0.001
# It moves no figure by a hundredth of a per cent after half as many.
_ROUNDS = 15
# Degrees of freedom from which on the own spread of a case that is unlike the others is taken for known: five units.
_KNOWN_BY = 3.0
# Fewer units, or cases that were seen on several, tell GPUs and cases not apart.
_LEAST_UNITS, _LEAST_SERIES = 3, 3


def learn(observations: Sequence[Observation]) -> Model | None:
    """From what is stored of a machine kind; ``None``: too little to tell its GPUs and its cases apart. Expectation
    maximisation (Dempster, Laird and Rubin 1977) of a mixed model with common factors: given loadings and variances the
    effects are best linear unbiased predictions (Henderson 1975); given these, a series' loadings are a regression that
    is shrunk towards what its clock lets expect, what is left of each series moderates what is left of all (Smyth
    2004), and variances are what the predictions and their errors show."""
    panel = Panel.of(observations)
    on_units = grouped((each.series, each.unit) for each in observations)
    several = [units for units in map(set, on_units.values()) if len(units) > 1]
    if len(several) < _LEAST_SERIES or len(set().union(*several)) < _LEAST_UNITS:
        return None
    every = grouped((each.series, each.clock_mhz) for each in observations)
    clocks = {name: [clock for clock in told if clock] for name, told in every.items()}
    highest = max((clock for told in clocks.values() for clock in told), default=0.0)
    limits = {name: min(1.0, (1 - median(told) / highest) / _LIMITED) if told else 0.5 for name, told in clocks.items()}
    model = Model(loadings={name: gpu_panel.expected_loading(share, name) for name, share in limits.items()})
    with one_thread():
        for _ in range(_ROUNDS):
            model = _better(model, panel)
    hosts = gpu_panel.Incidence(panel.units)["host"].shape[1]
    return replace(model, effects_df=gpu_panel.EFFECTS_DF + hosts - 1)


def _better(model: Model, panel: Panel) -> Model:
    variances = gpu_panel.cell_variances(model, panel)
    found = gpu_panel.predicted(panel, gpu_panel.design_of(model, panel), model.covariance(panel.units), variances)
    loadings, totals, dfs = _regressed(model, panel, found, 1 / variances)
    # What is usual of a series.
    several = [(total / df, df) for total, df in zip(totals, dfs, strict=True) if df >= 1 and total > 0]
    usual = _BEFORE.usual
    if len(several) >= _LEAST_SERIES:
        shown = prior_of(several, least=_LEAST_DF, most=_MOST_DF, halvings=20)
        weight = _BEFORE.usual.df / (_BEFORE.usual.df + len(several))
        log = weight * math.log(_BEFORE.usual.sd) + (1 - weight) * math.log(shown.sd)
        usual = Spread(max(_LEAST_OWN, math.exp(log)), shown.df)
    left = dict(zip(panel.series, zip(totals, dfs, strict=True), strict=True))
    own = {name: _own(*each, usual) for name, each in left.items()}
    alone = frozenset(name for name, each in left.items() if _stands_alone(*each, usual))
    return Model(effects=_spread(model, panel, found), loadings=loadings, own=own, usual=usual, alone=alone)


def _stands_alone(total: float, df: float, usual: Spread) -> bool:
    return df >= 1 and total / df > usual.sd**2 * float(special.fdtri(df, usual.df, _ALIKE))


def _own(total: float, df: float, usual: Spread) -> Spread:
    """Of one series: what is left of it, moderated by what is usual; of one that is not like the others, that alone. A
    case that waits for its host scatters ten times as much as most do: halfway to these is too little for it."""
    if _stands_alone(total, df, usual):
        return Spread(math.sqrt(total / df), df)
    sd = math.sqrt((usual.df * usual.sd**2 + total) / (usual.df + df))
    return Spread(max(sd, _LEAST_OWN), usual.df + df)


def _regressed(
    model: Model, panel: Panel, found: gpu_panel.Prediction, weights: Array
) -> tuple[dict[str, Loading], list[float], list[float]]:
    """The loading of each series, what is left of it (of one launch's variance), and its degrees of freedom."""
    factors, num, of_series = range(len(FACTORS)), len(panel.units), panel.of_series
    cells = np.arange(len(of_series))

    def sums(values: Array) -> Array:
        return np.bincount(of_series, values, len(panel.series))

    whole, sizes = sums(weights), sums(np.ones(len(cells)))
    effects = found.means.reshape(len(factors), num)[:, panel.of_unit]
    about = panel.logs - (sums(weights * panel.logs) / whole)[of_series]
    moved = [each - (sums(weights * each) / whole)[of_series] for each in effects]
    by_unit = sparse.csr_array((weights, (of_series, panel.of_unit)), shape=(len(panel.series), num))
    # What is not known of the effects: a part of what they moved, and of what is left.
    unknown, known = np.zeros((2, len(panel.series), len(factors), len(factors)))
    for a in factors:
        for b in factors:
            block = found.covariance[a * num : (a + 1) * num, b * num : (b + 1) * num]
            shared = (by_unit * (by_unit @ block)).sum(axis=1) / whole
            unknown[:, a, b] = sums(weights * np.diag(block)[panel.of_unit]) - shared
            known[:, a, b] = unknown[:, a, b] + sums(weights * moved[a] * moved[b])
    prior = np.eye(len(factors)) / gpu_panel.LOADING_SD**2
    expected = np.array([model.loading(name).expected for name in panel.series])
    spread = np.linalg.inv(prior + known)
    towards = expected @ prior + np.stack([sums(weights * each * about) for each in moved], axis=1)
    mean = np.einsum("sab,sb->sa", spread, towards)
    left = about - sum(each * mean[of_series, a] for a, each in enumerate(moved))
    spent = np.where(sizes > 1, np.einsum("sab,sba->s", spread, known), 0.0)
    totals = (sums(weights * left**2) + np.einsum("sa,sab,sb->s", mean, unknown, mean)) / (whole / sizes)
    loadings = {name: Loading(*each) for name, *each in zip(panel.series, mean, spread, expected, strict=True)}
    return loadings, totals.tolist(), np.maximum(0.0, sizes - 1 - spent).tolist()


def _spread(model: Model, panel: Panel, found: gpu_panel.Prediction) -> dict[str, dict[str, float]]:
    num = len(panel.units)
    spreads: dict[str, dict[str, float]] = {}
    for number, factor in enumerate(FACTORS):
        place = slice(number * num, (number + 1) * num)
        for component, shares in gpu_panel.Incidence(panel.units).items():
            variance_of = model.effects[factor][component] ** 2
            # The expected sum of squares of this component's own deviations.
            total = shares.shape[1] * variance_of + variance_of**2 * found.excess(shares, place)
            before = _BEFORE.effects[factor][component] ** 2 * gpu_panel.EFFECTS_DF
            sd = math.sqrt((before + total) / (gpu_panel.EFFECTS_DF + shares.shape[1]))
            spreads.setdefault(factor, {})[component] = sd
    return spreads


# Knowledge: what is stored, and what a run has seen.

#: Of a GPU that nobody knows one case cannot be told from it: what has changed by itself would be taken for the GPU,
#: and the next case for changed. So many others that most of them have not.
FEWEST_CASES = 4

# Logarithms: chips of one kind differ by a fiftieth, and what a tenth is apart is something else. A calibration that is
# faster than a chip can well be, in standard deviations, is none either; a slow one may be a bad chip's.
_FURTHEST, _FASTEST = 0.1, 4.0


class _Stored:
    """What each case asks of the same stored observations, found once."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.observations, self._less = observations, dict[frozenset[Measurement], _Stored]()
        launches = [each for each in observations if not each.is_calibration]
        self.measurements = {each.measurement for each in observations}
        self.series = grouped((each.series, each) for each in observations)
        self.usual_logs = _usual_of_calibrations(observations)
        self.told_apart = {device for device, _ in compared(launches)}
        self.of_gpus = [each for each in observations if each.tells_of_gpu]

    def without(self, measurements: frozenset[Measurement]) -> _Stored:
        if not measurements:
            return self
        if measurements not in self._less:
            kept = [each for each in self.observations if each.measurement not in measurements]
            self._less[measurements] = _Stored(kept)
        return self._less[measurements]


class _Sums:
    """What stored series tell of the effects of GPUs, found once for all cases: each leaves a few of them out."""

    @one_thread()
    def __init__(self, model: Model, stored: _Stored) -> None:
        self._model, self._stored = model, stored
        self.units = list(dict.fromkeys(each.unit for several in stored.series.values() for each in several))
        self._left_out, self._left = frozenset[str](), self._of(stored.series)

    def without(self, series: str, others: Collection[str], num: int) -> gpu_panel.Rest:
        """All but ``series`` and ``others``, of the effects of so many units, of which its own are the first."""
        names = frozenset(others)
        if names != self._left_out:  # a run launches one case after another, so it is a few more
            more, again = self._of(names - self._left_out), self._of(self._left_out - names)
            self._left = tuple(left - a + b for left, a, b in zip(self._left, more, again, strict=True))
            self._left_out = names
        known = np.arange(len(self.units))
        places = np.concatenate([known + number * num for number in range(len(FACTORS))])
        own = self._of({series} - names)
        return places, self._left[0] - own[0], self._left[1] - own[1]

    def changed(self, stored: _Stored) -> list[str]:
        """Series of which ``stored`` has fewer observations."""
        if stored is self._stored:
            return []
        return [name for name, those in self._stored.series.items() if len(those) != len(stored.series.get(name, ()))]

    def _of(self, series: Iterable[str]) -> tuple[Array, Array]:
        if not (stored := [each for name in series for each in self._stored.series.get(name, ())]):
            return 0.0, 0.0
        panel = Panel.of(stored, first=self.units)
        variances, design = gpu_panel.all_variances(self._model, panel), gpu_panel.design_of(self._model, panel)
        told = gpu_panel.CellSums.of(panel, design, variances)
        return told.information, told.sums


def robust(model: Model, panel: Panel, rest: gpu_panel.Rest | None = None) -> Posterior:
    """The effects, where other cases of the run itself are doubted; ``rest``: what series beside the panel's tell."""
    shares, design = gpu_panel.Incidence(panel.units), gpu_panel.design_of(model, panel)
    prior, variances = model.between(shares, shares), gpu_panel.all_variances(model, panel)
    return Posterior(model, shares, gpu_panel.doubted(panel, design, prior, variances, rest))


@dataclass(frozen=True)
class Knowledge:
    model: Model
    stored: Sequence[Observation]
    """Of all baselines, from before this run recorded anything."""
    seen: Sequence[Observation] = field(default=())
    _told: dict[tuple[str, frozenset[Observation]], Posterior] = field(default_factory=dict, compare=False, repr=False)
    _shown: dict[int, tuple[Launch, list[Observation]]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, cases: Sequence[Sequence[Launch]]) -> Knowledge | None:
        """From the stored launches of each case; ``None``: too little to tell GPUs and cases apart."""
        shown = gpu_panel.observations_of([launch for launches in cases for launch in launches])
        # Calibrations that are nowhere near the others of their series are none, whoever wrote them.
        usual = _usual_of_calibrations(shown)
        stored = [each for each in shown if abs(each.log - usual.get(each.series, each.log)) <= _FURTHEST]
        model = learn(stored)
        return cls(model, stored) if model else None

    def with_seen(self, launches: Sequence[Launch]) -> Knowledge:
        """Beside what a run's ``launches`` show; what a baseline keeps of the same is left out, else it counted twice.
        A calibration of today may be stored by now, and launches that another start of a SLURM job has made."""
        for launch in launches:  # which a run keeps, and shows again with each case
            if id(launch) not in self._shown:
                believed = [each for each in gpu_panel.observations_of([launch]) if self._believes(each)]
                self._shown[id(launch)] = launch, believed
        shown = (each for launch in launches for each in self._shown[id(launch)][1])
        seen = {each.measurement: each for each in shown}
        stored = self._of_stored.without(frozenset(self._of_stored.measurements & seen.keys()))
        found = Knowledge(self.model, stored.observations, tuple(seen.values()))
        found.__dict__.update(_sums=self._sums, _of_stored=stored)
        return found

    @cached_property
    def _of_stored(self) -> _Stored:
        return _Stored(self.stored)

    @cached_property
    def _sums(self) -> _Sums:
        return _Sums(self.model, self._of_stored)

    def scatter(self, candidates: Sequence[Launch], baseline: Sequence[Launch]) -> Scatter:
        """Of the launches of ``baseline`` and then ``candidates``, by what all other cases, and calibrations, tell."""
        series, calibrations = candidates[0].digest, [*gpu_panel.calibrations_of(candidates)]
        units = [gpu_panel.unit_of(each) for each in (*baseline, *candidates)]
        size, loading, own = len(units), self.model.loading(series), self.model.own_spread(series)
        # Half of the variance is a unit's, half a launch's; launches that were repeated know that better.
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
        is_known = self.tells_of(map(gpu_panel.unit_of, candidates), series, calibrations)
        return Scatter(
            shifts=loads @ effects,
            shared=shared,
            launch=half.moderated(within_sessions(baseline, candidates)),
            # A host that a launch waits for, say, is there in the next one too.
            lasting=same,
            gpu_df=math.inf if is_known else gpu_panel.EFFECTS_DF,
            stands_alone=series in self.model.alone and own.df >= _KNOWN_BY,
        )

    def told(self, series: str, more: Iterable[Observation] = ()) -> Posterior:
        """What all but ``series``, and ``more``, tell of the effects of GPUs."""
        added = self._added(more)
        key = (series, added)
        if key not in self._told:
            seen = (*self.seen, *sorted(added, key=lambda each: (each.series, each.unit.devices, each.at)))
            tonight = [each for each in seen if each.series != series]
            cases = _cases(tonight)
            # Of cases those on GPUs that enough of them were on.
            known = [
                each
                for each in tonight
                if each.is_calibration or all(len(cases[device]) >= FEWEST_CASES for device in each.unit.devices)
            ]
            # Of the other series, which are the most, sums are known.
            names = dict.fromkeys([*(each.series for each in known), *self._sums.changed(self._of_stored)])
            stored = [each for name in names if name != series for each in self._of_stored.series.get(name, ())]
            panel = Panel.of(stored, known, self._sums.units)
            self._told[key] = robust(self.model, panel, self._sums.without(series, names, len(panel.units)))
        return self._told[key]

    def tells_of(
        self, units: Iterable[Unit], series: str, more: Iterable[Observation] = (), *, by_its_cases: bool = True
    ) -> bool:
        """Whether something tells of each GPU of ``units`` by itself what a launch of ``series`` there is worth. What
        no change of this run's software moves with its cases does, a comparable calibration of that day or stored
        launches of the very GPU; and ``by_its_cases`` enough other cases of this run."""
        own = (each.unit.devices for each in self._of_stored.series.get(series, ()))  # of a case, so no calibrations
        launched = self._of_stored.told_apart.union(*own)
        if by_its_cases:
            cases = _cases([each for each in self.seen if each.series != series])
            launched |= {device for device, several in cases.items() if len(several) >= FEWEST_CASES}
        rest = {(device, unit.day) for unit in units for device in unit.devices if device not in launched}
        return not rest or rest <= self.calibrated_places((*self.seen, *self._added(more)))

    def calibrated_places(self, seen: Iterable[Observation]) -> set[tuple[str, str]]:
        """The devices, and on which day, whose calibration is comparable with one from before this run. Those that a
        run has made with new versions agree with one another alone."""
        stored = self._of_stored
        return compared([*stored.of_gpus, *(one for one in seen if one.tells_of_gpu and one.series in stored.series)])

    def _added(self, more: Iterable[Observation]) -> frozenset[Observation]:
        """What of ``more`` is new, and believed."""
        known = self._of_stored.measurements, self._seen_measurements
        new = (each for each in more if not any(each.measurement in those for those in known))
        return frozenset(each for each in new if self._believes(each))

    @cached_property
    def _seen_measurements(self) -> set[Measurement]:
        return {each.measurement for each in self.seen}

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
        effects = [model.effects[factor] for factor in FACTORS]
        host, device, day = (math.hypot(*(each[part] for each in effects)) for part in ("host", "device", "day"))
        spreads = {"host": host, "site": device, "session": math.hypot(day, half), "launch": half}
        return Noise(**{name: Spread(sd, model.effects_df) for name, sd in spreads.items()})


def _usual_of_calibrations(observations: Sequence[Observation]) -> dict[str, float]:
    logs = grouped((each.series, each.log) for each in observations if each.is_calibration)
    return {series: median(several) for series, several in logs.items()}


def _cases(seen: Sequence[Observation]) -> dict[str, set[str]]:
    launched = (each for each in seen if not each.is_calibration)
    cases = grouped((device, each.series) for each in launched for device in each.unit.devices)
    return {device: {*series} for device, series in cases.items()}


def compared(observations: Sequence[Observation]) -> set[tuple[str, str]]:
    """The devices, and on which day, that ``observations`` tell from others: what one alone has done says nothing."""
    each_place = ((each.series, (device, each.unit.day)) for each in observations for device in each.unit.devices)
    several = (places for places in grouped(each_place).values() if len({device for device, _ in places}) > 1)
    return {place for places in several for place in places}
