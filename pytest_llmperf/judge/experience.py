"""Experience: what all baselines of a machine kind show of its noise and of its canaries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from pytest_llmperf.judge.stats import Noise, Spread, by_session, sum_of_squares
from pytest_llmperf.measurement import Launch

# With fewer cases nothing can be said of how differently they scatter.
_CASES = 5

# However alike the cases look, one more may be different: a prior known better than this would not listen to it.
_LEAST_DF, _MOST_DF = 4.0, 40.0

_CLOSE = 0.1

# Launches of 40 steps scatter by this much at least: their own medians are known to no better.
_LEAST_SD = 0.002


@dataclass(frozen=True)
class Experience:
    """Noise, and the canaries' rates, of one machine kind."""

    noise: Noise
    canaries: Mapping[str, tuple[float, ...]]
    """By world size and name, e.g. ``"1 matmul_flops"``: every stored rate."""

    @classmethod
    def of(cls, cases: Sequence[Sequence[Launch]], prior: Noise) -> Experience:
        """Learn from the launches of each case; ``prior`` is what is believed before any was seen."""
        return cls(
            noise=Noise(
                site=_between_sites(cases, prior.site),
                session=_between_sessions(cases, prior.session),
                launch=_between_launches(cases, prior.launch),
            ),
            canaries=_canaries(launch for launches in cases for launch in launches),
        )


def _between_launches(cases: Sequence[Sequence[Launch]], prior: Spread) -> Spread:
    """Pooled over cases; its degrees of freedom say how alike the cases are (Smyth 2004, section 6.2)."""
    shown = []
    for launches in cases:
        sessions = [members for members in by_session(launches).values() if len(members) > 1]
        df = sum(len(members) - 1 for members in sessions)
        if df:
            shown.append((math.fsum(map(sum_of_squares, sessions)), df))
    pooled = prior.moderated(math.fsum(squares for squares, _ in shown), sum(df for _, df in shown))
    alike = prior.df if len(shown) < _CASES else _alikeness(shown)
    return Spread(max(pooled.sd, _LEAST_SD), alike)


def _alikeness(shown: Sequence[tuple[float, int]]) -> float:
    from scipy import special  # noqa: PLC0415 - only a judged case pays for it

    positive = [(squares / df, df) for squares, df in shown if squares > 0]
    if len(positive) < _CASES:
        return _LEAST_DF
    logs = [math.log(s2) - float(special.digamma(df / 2)) + math.log(df / 2) for s2, df in positive]
    excess = variance(logs) - fmean(float(special.polygamma(1, df / 2)) for _, df in positive)
    least, most = _LEAST_DF, _MOST_DF
    while most - least > _CLOSE:  # trigamma falls: bisection finds where it is the excess
        middle = (least + most) / 2
        least, most = (middle, most) if special.polygamma(1, middle / 2) > excess else (least, middle)
    return most


def _between_sessions(cases: Sequence[Sequence[Launch]], prior: Spread) -> Spread:
    """Days of one site. What moves them moves every case alike: a day counts once, however many cases it has."""
    estimates: list[float] = []
    days: set[tuple[str, str]] = set()
    for launches in cases:
        for site in {launch.site for launch in launches}:
            here = [launch for launch in launches if launch.site == site]
            estimates += _variance_of_means(list(by_session(here).values()))
            days |= {(site, launch.session) for launch in here}
    df = len(days) - len({site for site, _ in days})
    return prior.moderated(df * fmean(estimates), df) if estimates else prior


def _between_sites(cases: Sequence[Sequence[Launch]], prior: Spread) -> Spread:
    estimates: list[float] = []
    sites: set[str] = set()
    for launches in cases:
        here: dict[str, list[float]] = {}
        for launch in launches:
            here.setdefault(launch.site, []).append(math.log(launch.median_step_seconds))
        estimates += _variance_of_means(list(here.values()))
        sites |= here.keys()
    df = len(sites) - 1
    return prior.moderated(df * fmean(estimates), df) if estimates else prior


def _variance_of_means(groups: Sequence[Sequence[float]]) -> list[float]:
    """Between groups, the part within them taken off; empty where there is one group."""
    if len(groups) < 2:  # noqa: PLR2004 - a variance needs two
        return []
    within_df = sum(len(group) - 1 for group in groups)
    within = math.fsum(map(sum_of_squares, groups)) / within_df if within_df else 0.0
    taken_off = within * fmean(1 / len(group) for group in groups)
    return [max(0.0, variance(map(fmean, groups)) - taken_off)]


def _canaries(launches: Iterable[Launch]) -> dict[str, tuple[float, ...]]:
    rates: dict[str, tuple[float, ...]] = {}
    for launch in launches:
        for name, rate in launch.canary.items():
            key = f"{len(launch.ranks)} {name}"
            rates[key] = (*rates.get(key, ()), rate)
    return rates
