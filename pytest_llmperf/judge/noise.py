"""Noise: how launches of one spec scatter when nothing has changed, on the logarithm of their median step time.

A launch's logarithm is a mean plus independent deviations: of the host, of the site (the very GPUs), of the session
(that site on that day) and of the launch. Each is known by a standard deviation and how well that is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.steady_state import robust_sd

# Of a robust standard deviation, and the fewest launches among which one can be called out.
_OUTLYING, _CALLED_OUT_FROM = 5.0, 3


@dataclass(frozen=True)
class Squares:
    """A sum of squared deviations, and its degrees of freedom."""

    total: float = 0.0
    df: float = 0.0


@dataclass(frozen=True)
class Spread:
    """A standard deviation of logarithms, and by how many degrees of freedom it is known."""

    sd: float
    df: float

    def moderated(self, own: Squares) -> Spread:
        """This one as the prior of a case that itself showed ``own`` (Smyth 2004, limma)."""
        return Spread(math.sqrt((self.df * self.sd**2 + own.total) / (self.df + own.df)), self.df + own.df)


@dataclass(frozen=True)
class Noise:
    """The standard deviation of each component."""

    host: Spread
    site: Spread
    session: Spread
    launch: Spread

    def moderated(self, candidates: Sequence[Launch], baseline: Sequence[Launch]) -> Noise:
        """This noise with what one case shows of it taken in.

        How tonight's launches differ from the baseline's is the question: only their scatter among themselves counts.
        """
        within = [within_sessions(group) for group in (candidates, baseline)]
        launch = self.launch.moderated(Squares(math.fsum(s.total for s in within), sum(s.df for s in within)))
        session = self.session.moderated(between(baseline, "session", {"launch": launch.sd}))
        lower = {"launch": launch.sd, "session": session.sd}
        site = self.site.moderated(between(baseline, "site", lower))
        host = self.host.moderated(between(baseline, "host", {**lower, "site": site.sd}))
        return Noise(host=host, site=site, session=session, launch=launch)


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


def within_sessions(launches: Sequence[Launch]) -> Squares:
    """Of the launches about the mean of their session."""
    return between(launches, "launch", {})


def between(launches: Sequence[Launch], component: str, lower: Mapping[str, float]) -> Squares:
    """Of the means of ``component``'s groups (hosts, sites, …) within what they share further up.

    The part that the standard deviations of the ``lower`` components explain is taken off.
    """
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
    usual = math.hypot(*(spread.sd for spread in vars(noise).values()))
    kept = _near(launches, usual)
    of_a_site = math.hypot(noise.session.sd, noise.launch.sd)
    sites = dict.fromkeys(launch.site for launch in kept)
    return [near for site in sites for near in _near([launch for launch in kept if launch.site == site], of_a_site)]


def _near(launches: Sequence[Launch], usual: float) -> list[Launch]:
    """Those within five spreads of the middle, the spread being at least what is ``usual``."""
    if len(launches) < _CALLED_OUT_FROM:
        return list(launches)
    logs = [log_of(launch) for launch in launches]
    centre, far = median(logs), _OUTLYING * max(robust_sd(logs), usual)
    return [launch for launch, log in zip(launches, logs, strict=True) if abs(log - centre) <= far]


def disagreement(launches: Sequence[Launch], noise: Noise, tolerance: float) -> str:
    """A line where launches of one session lie further apart than noise and ``tolerance`` let them; else empty.

    One of them went wrong, and nobody can tell which.
    """
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
    """The logarithm of the launch's median step time: there +5 % and -5 % weigh the same."""
    return math.log(launch.median_step_seconds)
