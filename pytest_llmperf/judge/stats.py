"""How launches of one spec scatter when nothing has changed, and how far some are from others beside that.

All is of the logarithm of their median step time, where +5 % and -5 % weigh the same: a mean plus independent
deviations of the host, of the site (the very GPUs), of the session (that site on that day) and of the launch, each
known by a standard deviation and how well that is known. A launch is the unit of evidence: its steps share hardware and
clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Any, Protocol, TypeAlias

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEAN_UP_TO, centre
from pytest_llmperf.records.steady_state import robust_sd
from pytest_llmperf.support import grouped
from pytest_llmperf.support.interpreter import np, special

#: Launches of two sides that took turns on the same hardware.
Pairs: TypeAlias = Sequence[tuple[Launch, Launch]]

# Of a robust standard deviation, and the fewest launches among which one can be called out.
_OUTLYING, _CALLED_OUT_FROM = 5.0, 3


@dataclass(frozen=True)
class Squares:
    """A sum of squared deviations, and its degrees of freedom."""

    total: float = 0.0
    df: float = 0.0


def summed(several: Sequence[Squares]) -> Squares:
    return Squares(math.fsum(each.total for each in several), sum(each.df for each in several))


def variance_of(shares: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The sum of variances, each with its degrees of freedom, and the sum's (Satterthwaite 1946)."""
    known = list(shares)
    total = math.fsum(share for share, _ in known)
    return total, total**2 / math.fsum(share**2 / df for share, df in known) if total > 0 else math.inf


@dataclass(frozen=True)
class Spread:
    """A standard deviation of logarithms, and by how many degrees of freedom it is known."""

    sd: float
    df: float

    def moderated(self, own: Squares) -> Spread:
        """This one as the prior of a case that itself showed ``own`` (Smyth 2004, limma)."""
        return Spread(math.sqrt((self.df * self.sd**2 + own.total) / (self.df + own.df)), self.df + own.df)


@dataclass(frozen=True)
class Scatter:
    """Why some launches of one case differ, in arrays of one row for each."""

    shifts: Any
    """What their GPUs are known to do: no difference of the case's."""
    shared: Sequence[tuple[Any, float]]
    """Covariances of what several of them share, and by how many degrees of freedom each is known."""
    launch: Spread
    """What each is off by itself, moderated by what these show."""
    lasting: Any
    """Which of them share what keeps one from knowing its own median."""
    gpu_df: float = math.inf
    """By how many degrees of freedom it is known what a GPU may do of which nothing tells by itself."""
    stands_alone: bool = False
    """Whether the case scatters unlike all others, as enough units show."""


@dataclass(frozen=True)
class Noise:
    """The standard deviation of each component."""

    host: Spread
    site: Spread
    session: Spread
    launch: Spread

    def moderated(self, candidates: Sequence[Launch], baseline: Sequence[Launch]) -> Noise:
        """This noise with what one case shows of it taken in. How tonight's launches differ from the baseline's is the
        question: only their scatter among themselves counts."""
        return _nested(
            self.launch.moderated(within_sessions(candidates, baseline)),
            lambda component, lower: getattr(self, component).moderated(between(baseline, component, lower)),
        )

    def usual(self, _: Sequence[Launch]) -> Noise:
        return self

    def scatter(self, candidates: Sequence[Launch], baseline: Sequence[Launch]) -> Scatter:
        """Of the launches of ``baseline`` and then ``candidates``: nested deviations, of no GPU by itself."""
        noise, label = self.moderated(candidates, baseline), labels([*baseline, *candidates])
        shared = [
            (spread.sd**2 * np.array([[a == b for b in label[name]] for a in label[name]], dtype=float), spread.df)
            for name, spread in (("host", noise.host), ("site", noise.site), ("session", noise.session))
        ]
        num = len(label["host"])
        return Scatter(np.zeros(num), shared, noise.launch, np.eye(num))


def _nested(launch: Spread, of: Callable[[str, Mapping[str, float]], Spread]) -> Noise:
    """Each component, from the launch upwards, by the standard deviations of those below it."""
    found = {"launch": launch}
    for component in ("session", "site", "host"):
        found[component] = of(component, {name: spread.sd for name, spread in found.items()})
    return Noise(**found)


#: What launches that share a component's deviation share one level further up.
_ABOVE: Mapping[str, str] = {"launch": "session", "session": "site", "site": "host", "host": ""}


def labels(launches: Sequence[Launch]) -> dict[str, list[str]]:
    """For each component, a label of each launch: launches with the same one share its deviation."""
    host_of: dict[str, str] = {}
    for launch in launches:  # the very GPUs are in one host, whatever it calls itself after a reboot
        host_of.setdefault(launch.site, launch.host)
    return {
        "": [""] * len(launches),
        "host": [host_of[launch.site] for launch in launches],
        "site": [launch.site for launch in launches],
        "session": [launch.session for launch in launches],
        "launch": [str(number) for number in range(len(launches))],
    }


def within_sessions(*groups: Sequence[Launch]) -> Squares:
    """Of the launches of each group about the mean of their session, together."""
    return summed([between(launches, "launch", {}) for launches in groups])


def between(launches: Sequence[Launch], component: str, lower: Mapping[str, float]) -> Squares:
    """Of the means of ``component``'s groups (hosts, sites, …) within what they share further up. The part that the
    standard deviations of the ``lower`` components explain is taken off."""
    label = labels(launches)
    families: dict[str, dict[str, list[int]]] = {}
    for index, (above, group) in enumerate(zip(label[_ABOVE[component]], label[component], strict=True)):
        families.setdefault(above, {}).setdefault(group, []).append(index)
    total, df = 0.0, 0
    for groups in families.values():
        if len(groups) > 1:
            means = [fmean(log_of(launches[index]) for index in group) for group in groups.values()]
            # A group's mean scatters by each lower component's variance over how many of it there are in the group.
            explained = fmean(
                sum(sd**2 / len({label[name][index] for index in group}) for name, sd in lower.items())
                for group in groups.values()
            )
            total += max(0.0, sum_of_squares(means) - (len(groups) - 1) * explained)
            df += len(groups) - 1
    return Squares(total, df)


def without_outliers(launches: Sequence[Launch], noise: Noise) -> list[Launch]:
    """A baseline's launches but for ones so far off that something was wrong with them."""

    def near(those: Sequence[tuple[float, Launch]], usual: float) -> Sequence[tuple[float, Launch]]:
        if len(those) < _CALLED_OUT_FROM:
            return those
        logs = [log for log, _ in those]
        centre, far = median(logs), _OUTLYING * max(robust_sd(logs), usual)
        return [each for each in those if abs(each[0] - centre) <= far]

    of_all = math.hypot(*(spread.sd for spread in vars(noise).values()))
    kept = near([(log_of(launch), launch) for launch in launches], of_all)
    of_a_site, sites = math.hypot(noise.session.sd, noise.launch.sd), grouped((each[1].site, each) for each in kept)
    return [launch for those in sites.values() for _, launch in near(those, of_a_site)]


def disagreement(launches: Sequence[Launch], noise: Noise, tolerance: float) -> str:
    """A line where launches of one session lie too far apart: one went wrong, nobody knows which; else empty."""
    far = max(math.log1p(tolerance), _OUTLYING * math.sqrt(2) * noise.launch.sd)
    for session in dict.fromkeys(launch.session for launch in launches):
        logs = [log_of(launch) for launch in launches if launch.session == session]
        if max(logs) - min(logs) > far:
            apart = math.expm1(max(logs) - min(logs))
            return f"launches of one session disagree: {len(logs)} of them are up to {apart * 100:.1f} % apart"
    return ""


def sum_of_squares(values: Sequence[float]) -> float:
    """About their mean."""
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)


def log_of(launch: Launch) -> float:
    """The logarithm of the launch's median step time: there +5 % and -5 % weigh the same. Of a user's own training,
    that of a token: its steps need not have as many in each launch."""
    return math.log(launch.median_step_seconds / (launch.tokens_per_step if launch.is_uneven else 1))


def work_of(launch: Launch) -> float:
    """The tokens of one GPU that ``log_of`` is of."""
    return (1 if launch.is_uneven else launch.tokens_per_step) / len(launch.ranks)


# Experience: what all baselines of a machine kind show of its noise and of its canaries.

# With fewer cases nothing can be said of how differently they scatter.
_CASES = 5
# However alike the cases look, one more may be different: a prior known better than this would not listen to it. Of
# hosts, sites and days a case itself has few, and they must be heard all the same.
_LEAST_DF, _MOST_DF, _MOST_DF_OF_GROUPS = 4.0, 10.0, 5.0
# Launches of 40 steps scatter by this much at least: their own medians are known to no better.
_LEAST_SD = 0.002
# One launch that went wrong in one baseline must not blind the gates of all: deviations count up to this many robust
# standard deviations, and a case's estimate up to this many times the middle one.
_MOST_DEVIATION, _MOST_ESTIMATE = 5.0, 8.0


@dataclass(frozen=True)
class Experience:
    """Noise, and the canaries' rates, of one machine kind."""

    noise: Noise
    canaries: Mapping[str, tuple[float, ...]]
    """By world size and name, e.g. ``"1 matmul_flops"``: every stored rate."""

    @classmethod
    def of(cls, cases: Sequence[Sequence[Launch]], prior: Noise) -> Experience:
        """Learn from the launches of each case; ``prior`` is what is believed before any was seen."""
        every = (launch for launches in cases for launch in launches)
        rates = grouped((f"{len(one.ranks)} {name}", rate) for one in every for name, rate in one.canary.items())
        cases = [without_outliers(launches, prior) for launches in cases]
        noise = _nested(
            _between_launches(cases, prior.launch),
            lambda component, lower: _between_groups(cases, component, getattr(prior, component), lower),
        )
        return cls(noise, {name: tuple(several) for name, several in rates.items()})


def _between_launches(cases: Sequence[Sequence[Launch]], prior: Spread) -> Spread:
    """Pooled over cases; its degrees of freedom say how alike the cases are (Smyth 2004, section 6.2)."""
    # Of each case that repeated a launch in a session: from the session's middle, scaled to a launch's deviation.
    deviations: list[list[list[float]]] = []
    for launches in cases:
        sessions = grouped((launch.session, log_of(launch)) for launch in launches)
        several = [logs for logs in sessions.values() if len(logs) > 1]
        scaled = [[(log - median(logs)) * math.sqrt(len(logs) / (len(logs) - 1)) for log in logs] for logs in several]
        deviations += [scaled] if scaled else []
    every = [value for case in deviations for logs in case for value in logs]
    most = _MOST_DEVIATION * max(_LEAST_SD, robust_sd(every, centre=0.0)) if every else 0.0
    # Scaled deviations' squares sum to n/(n - 1) times the sum of squares about the mean.
    shown = []
    for case in deviations:
        squares = (min(abs(value), most) ** 2 * (len(logs) - 1) / len(logs) for logs in case for value in logs)
        shown.append(Squares(math.fsum(squares), sum(len(logs) - 1 for logs in case)))
    pooled, alike = prior.moderated(summed(shown)), prior.df
    if len(shown) >= _CASES:
        positive = [(squares.total / squares.df, squares.df) for squares in shown if squares.total > 0]
        is_told = len(positive) >= _CASES
        alike = prior_of(positive, least=_LEAST_DF, most=_MOST_DF, halvings=6).df if is_told else _LEAST_DF
    return Spread(max(pooled.sd, _LEAST_SD), alike)


def prior_of(variances: Sequence[tuple[float, float]], *, least: float, most: float, halvings: int) -> Spread:
    """What these ``variances``, each with its degrees of freedom, tell of one more (Smyth 2004, section 6.2). Of
    logarithms, lest one of a hundred times the size moves it. Its degrees of freedom: ``least`` to ``most``."""
    logs = [math.log(each) - float(special.digamma(df / 2)) + math.log(df / 2) for each, df in variances]
    excess = variance(logs) - fmean(float(special.polygamma(1, df / 2)) for _, df in variances)
    for _ in range(halvings):  # trigamma falls: bisection finds where it is the excess
        middle = (least + most) / 2
        least, most = (middle, most) if special.polygamma(1, middle / 2) > excess else (least, middle)
    centre = fmean(logs) + float(special.digamma(most / 2)) - math.log(most / 2)
    return Spread(math.exp(centre / 2), most)


def _between_groups(cases: Sequence[Sequence[Launch]], level: str, prior: Spread, lower: Mapping[str, float]) -> Spread:
    """What moves a host, a site or a day moves every case alike: each counts once, however many cases it has."""
    if not (shown := [squares for launches in cases if (squares := between(launches, level, lower)).df]):
        return prior
    estimates = [squares.total / squares.df for squares in shown]
    most = max(_MOST_ESTIMATE * median(estimates), prior.sd**2)
    label = labels([launch for launches in cases for launch in launches])
    above = label[_ABOVE[level]]
    # Groups, less one for each mean that they scatter about.
    df = len(set(zip(above, label[level], strict=True))) - len(set(above))
    pooled = prior.moderated(Squares(df * fmean(min(estimate, most) for estimate in estimates), df))
    return Spread(pooled.sd, min(pooled.df, _MOST_DF_OF_GROUPS))


# Difference: how much slower launches are than those that are stored, or than the other of each pair.

# Keeps a covariance invertible where nothing was ever seen to vary: a millionth of a per cent, squared.
_NEXT_TO_NOTHING = 1e-16
# What that costs in precision: the variance of a median over that of a mean, at most.
_MEDIAN_VARIANCE = math.pi / 2
# How often an unchanged launch of a case that scatters unlike all others is no slower than that.
_BY_ITSELF = 0.995


@dataclass(frozen=True)
class Difference:
    """How much slower a measurement is than its baseline: ``log`` of the ratio of step times, and its error."""

    log: float
    error: float
    df: float
    launch_sd: float
    """Standard deviation of one more launch, or pair."""
    each: tuple[float, ...]
    """The same ``log`` of every launch, or pair, by itself."""
    of_gpus: float = 0.0
    """By how much slower the GPUs of the one are than those of the other, as others tell: no part of ``log``."""
    gpu_df: float = math.inf
    """Degrees of freedom of what GPUs may do of which nothing tells by itself; infinite where there are none."""
    by_itself: float = -math.inf
    """Of a case that scatters unlike all others: up to which ``log`` it is slower elsewhere when nothing changed."""


class Effects(Protocol):
    """Why launches differ: the ``Noise`` of a machine kind, or the ``Knowledge`` of its GPUs."""

    def usual(self, launches: Sequence[Launch], /) -> Noise: ...

    def scatter(self, candidates: Sequence[Launch], baseline: Sequence[Launch]) -> Scatter: ...


def difference(candidates: Sequence[Launch], baseline: Sequence[Launch], effects: Effects) -> Difference:
    """``candidates`` against what ``baseline`` expects of them where they ran. The expectation is the best linear
    unbiased prediction of a mixed model with an unknown mean (Henderson 1975; in geostatistics, ordinary kriging):
    launches that share most weigh most. What is known of the GPUs of both is taken off first, and what is not known of
    it is a part of the error; where nothing is known of any GPU, these are nested deviations of hosts, sites and
    sessions. Degrees of freedom are Satterthwaite's (1946)."""
    baseline = without_outliers(baseline, effects.usual(candidates))
    everyone, num = [*baseline, *candidates], len(baseline)
    found = effects.scatter(candidates, baseline)
    # A launch that ended before its median was known scatters by so much more.
    excess = [max(0.0, launch.median_error**2 - found.launch.sd**2) for launch in everyone]
    unsure = np.sqrt(excess)
    own = found.launch.sd**2 * np.eye(len(everyone)) + np.outer(unsure, unsure) * found.lasting
    parts = [*found.shared, (own, found.launch.df)]
    covariance: Any = sum(matrix for matrix, _ in parts)
    inverse = np.linalg.inv(covariance[:num, :num] + _NEXT_TO_NOTHING * np.eye(num))
    ones, towards = np.ones(num), covariance[:num, num:].mean(axis=1)
    unbiased = (1 - ones @ inverse @ towards) / (ones @ inverse @ ones)
    weights = inverse @ (towards + unbiased * ones)
    contrast = np.concatenate([-weights, np.full(len(candidates), 1 / len(candidates))])
    shares = [(float(contrast @ matrix @ contrast), df) for matrix, df in parts]
    if len(candidates) > MEAN_UP_TO:
        shares.append(((_MEDIAN_VARIANCE - 1) * found.launch.sd**2 / len(candidates), found.launch.df))
    variance, df = variance_of(shares)

    def slower(logs: Any) -> tuple[float, ...]:
        """Each of the candidates than what the others expect."""
        return tuple(float(log) - float(weights @ logs[:num]) for log in logs[num:])

    logs = np.array([log_of(launch) for launch in everyone])
    each = slower(logs - found.shifts)
    return Difference(
        log=centre(each),
        error=math.sqrt(variance),
        df=df,
        launch_sd=math.sqrt(found.launch.sd**2 + fmean(excess[num:])),
        each=each,
        of_gpus=centre(slower(logs)) - centre(each) if found.shifts.any() else 0.0,
        gpu_df=found.gpu_df,
        by_itself=quantile(_BY_ITSELF, df) * math.sqrt(variance) if found.stands_alone else -math.inf,
    )


def paired_difference(pairs: Pairs, noise: Noise) -> Difference:
    """The second of each pair against the first. What they share (hardware, day, neighbours) takes itself out."""
    logs = [log_of(after) - log_of(before) for before, after in pairs]
    # Before it was seen, a difference of two launches scatters by the square root of two more than one does.
    prior = Spread(noise.launch.sd * math.sqrt(2), noise.launch.df)
    spread = prior.moderated(Squares(sum_of_squares(logs), len(logs) - 1))
    # A pair whose medians are not known to that scatters by so much more.
    excess = fmean(max(0.0, a.median_error**2 + b.median_error**2 - spread.sd**2) for a, b in pairs)
    sd = math.sqrt(spread.sd**2 + excess)
    return Difference(fmean(logs), sd / math.sqrt(len(logs)), spread.df, sd, tuple(logs))


def quantile(probability: float, df: float) -> float:
    """Of Student's t: the value that it exceeds with ``1 - probability``."""
    return float(special.stdtrit(min(df, 1e6), probability))
