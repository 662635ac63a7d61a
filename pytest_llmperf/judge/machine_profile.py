"""Experience: what all baselines of a machine kind show of its noise and of its canaries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from pytest_llmperf.judge.noise import Noise, Spread, Squares, between, labels, log_of, without_outliers
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.steady_state import robust_sd

# With fewer cases nothing can be said of how differently they scatter.
_CASES = 5

# However alike the cases look, one more may be different: a prior known better than this would not listen to it. Of
# hosts, sites and days a case itself has few, and they must be heard all the same.
_LEAST_DF, _MOST_DF, _MOST_DF_OF_GROUPS = 4.0, 10.0, 5.0

_CLOSE = 0.1

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
        stored, cases = cases, [without_outliers(launches, prior) for launches in cases]
        launch = _between_launches(cases, prior.launch)
        session = _between_groups(cases, "session", prior.session, {"launch": launch.sd})
        lower = {"launch": launch.sd, "session": session.sd}
        site = _between_groups(cases, "site", prior.site, lower)
        host = _between_groups(cases, "host", prior.host, {**lower, "site": site.sd})
        return cls(
            noise=Noise(host=host, site=site, session=session, launch=launch),
            canaries=_canaries(launch for launches in stored for launch in launches),
        )


def _between_launches(cases: Sequence[Sequence[Launch]], prior: Spread) -> Spread:
    """Pooled over cases; its degrees of freedom say how alike the cases are (Smyth 2004, section 6.2)."""
    shown = _winsorised([_deviations(launches) for launches in cases])
    pooled = prior.moderated(Squares(math.fsum(s.total for s in shown), sum(s.df for s in shown)))
    alike = prior.df if len(shown) < _CASES else _alikeness(shown)
    return Spread(max(pooled.sd, _LEAST_SD), alike)


def _deviations(launches: Sequence[Launch]) -> list[list[float]]:
    """From their session's middle, by session, each scaled to the standard deviation of a launch."""
    sessions: dict[str, list[float]] = {}
    for launch in launches:
        sessions.setdefault(launch.session, []).append(log_of(launch))
    return [
        [(value - median(members)) * math.sqrt(len(members) / (len(members) - 1)) for value in members]
        for members in sessions.values()
        if len(members) > 1
    ]


def _winsorised(cases: Sequence[Sequence[Sequence[float]]]) -> list[Squares]:
    """Of each case that repeated a launch in a session."""
    every = [value for sessions in cases for members in sessions for value in members]
    if not every:
        return []
    most = _MOST_DEVIATION * max(_LEAST_SD, robust_sd(every, centre=0.0))
    found = []
    for sessions in cases:
        df = sum(len(members) - 1 for members in sessions)
        # Scaled deviations' squares sum to n/(n - 1) times the sum of squares about the mean.
        total = math.fsum(
            min(abs(value), most) ** 2 * (len(members) - 1) / len(members) for members in sessions for value in members
        )
        found += [Squares(total, df)] if df else []
    return found


def _alikeness(shown: Sequence[Squares]) -> float:
    from scipy import special  # noqa: PLC0415 - only a judged case pays for it

    positive = [(squares.total / squares.df, squares.df) for squares in shown if squares.total > 0]
    if len(positive) < _CASES:
        return _LEAST_DF
    logs = [math.log(s2) - float(special.digamma(df / 2)) + math.log(df / 2) for s2, df in positive]
    excess = variance(logs) - fmean(float(special.polygamma(1, df / 2)) for _, df in positive)
    least, most = _LEAST_DF, _MOST_DF
    while most - least > _CLOSE:  # trigamma falls: bisection finds where it is the excess
        middle = (least + most) / 2
        least, most = (middle, most) if special.polygamma(1, middle / 2) > excess else (least, middle)
    return most


def _between_groups(
    cases: Sequence[Sequence[Launch]], component: str, prior: Spread, lower: Mapping[str, float]
) -> Spread:
    """What moves a host, a site or a day moves every case alike: each counts once, however many cases it has."""
    shown = [squares for launches in cases if (squares := between(launches, component, lower)).df]
    if not shown:
        return prior
    estimates = [squares.total / squares.df for squares in shown]
    most = max(_MOST_ESTIMATE * median(estimates), prior.sd**2)
    df = _independent([launch for launches in cases for launch in launches], component)
    pooled = prior.moderated(Squares(df * fmean(min(estimate, most) for estimate in estimates), df))
    return Spread(pooled.sd, min(pooled.df, _MOST_DF_OF_GROUPS))


def _independent(launches: Sequence[Launch], component: str) -> int:
    """Groups of ``component``, less one for each mean that they scatter about."""
    label = labels(launches)
    above = {"session": "site", "site": "host", "host": ""}[component]
    return len(set(zip(label[above], label[component], strict=True))) - len(set(label[above]))


def _canaries(launches: Iterable[Launch]) -> dict[str, tuple[float, ...]]:
    rates: dict[str, tuple[float, ...]] = {}
    for launch in launches:
        for name, rate in launch.canary.items():
            key = f"{len(launch.ranks)} {name}"
            rates[key] = (*rates.get(key, ()), rate)
    return rates
