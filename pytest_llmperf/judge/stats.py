"""The statistics of launches, on the logarithm of their median step time, where +5 % and -5 % weigh the same.

The unit of evidence is a launch: its steps share hardware, allocator and clocks. A launch's logarithm is a mean plus
three independent deviations: of the site (the very GPUs), of the session (that site on that day) and of the launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, median

from pytest_llmperf.measurement import Launch

# Up to here the centre of some launches is their mean; from here on their median, which one outlier cannot move.
_MEAN_UP_TO = 2
# Keeps a covariance invertible where nothing was ever seen to vary: a millionth of a per cent, squared.
_NEXT_TO_NOTHING = 1e-16
# What that costs in precision: the variance of a median over that of a mean, at most.
_MEDIAN_VARIANCE = math.pi / 2


def pooled_step_seconds(launches: Sequence[Launch]) -> float:
    """Step time of a measurement, in seconds: the centre of its launches' medians."""
    return math.exp(_centre([_log(launch) for launch in launches]))


def pooled_first_step_seconds(launches: Sequence[Launch]) -> float:
    """The first step's time, in seconds, pooled as steps are."""
    return geometric_mean(launch.first_step_seconds for launch in launches)


def pooled_tokens_per_second(launches: Sequence[Launch]) -> float:
    """Throughput over all ranks, in tokens/s."""
    return launches[0].tokens_per_step / pooled_step_seconds(launches)


@dataclass(frozen=True)
class Spread:
    """A standard deviation of logarithms, and by how many degrees of freedom it is known."""

    sd: float
    df: float

    def moderated(self, squares: float, df: float) -> Spread:
        """This one as the prior of a case that itself showed ``squares`` with ``df`` (Smyth 2004, limma)."""
        return Spread(math.sqrt((self.df * self.sd**2 + squares) / (self.df + df)), self.df + df)


@dataclass(frozen=True)
class Noise:
    """How launches of one spec scatter when nothing has changed."""

    site: Spread
    session: Spread
    launch: Spread


@dataclass(frozen=True)
class Difference:
    """How much slower a measurement is than its baseline: ``log`` of the ratio of step times, and its error."""

    log: float
    error: float
    df: float
    expected_log: float
    """Of the step time, in seconds, that the baseline expects at this site."""

    @property
    def baseline_step_seconds(self) -> float:
        return math.exp(self.expected_log)


def difference(candidates: Sequence[Launch], baseline: Sequence[Launch], noise: Noise) -> Difference:
    """``candidates`` against what ``baseline`` expects of their site.

    The expectation is the best linear unbiased prediction for a nested model with an unknown mean (Henderson 1975; in
    geostatistics, ordinary kriging): launches of the same session weigh most, then those of the same site. The
    launches' own scatter moderates ``noise.launch``; degrees of freedom are Satterthwaite's (1946).
    """
    import numpy as np  # noqa: PLC0415 - only a judged case pays for it

    baseline = without_outliers(baseline, noise)
    noise = moderated(noise, candidates, baseline)
    everyone, num = [*baseline, *candidates], len(baseline)
    sites, sessions = [launch.site for launch in everyone], [launch.session for launch in everyone]
    shared = {
        "site": np.array([[a == b for b in sites] for a in sites], dtype=float),
        "session": np.array([[a == b for b in sessions] for a in sessions], dtype=float),
        "launch": np.eye(len(everyone)),
    }
    spreads: Mapping[str, Spread] = vars(noise)
    covariance = sum(spreads[name].sd ** 2 * matrix for name, matrix in shared.items())
    inverse = np.linalg.inv(covariance[:num, :num] + _NEXT_TO_NOTHING * np.eye(num))
    ones, towards = np.ones(num), covariance[:num, num:].mean(axis=1)
    unbiased = (1 - ones @ inverse @ towards) / (ones @ inverse @ ones)
    weights = inverse @ (towards + unbiased * ones)

    expected = float(weights @ np.array([_log(launch) for launch in baseline]))
    contrast = np.concatenate([-weights, np.full(len(candidates), 1 / len(candidates))])
    parts = {name: spreads[name].sd ** 2 * float(contrast @ matrix @ contrast) for name, matrix in shared.items()}
    if len(candidates) > _MEAN_UP_TO:
        parts["launch"] += (_MEDIAN_VARIANCE - 1) * spreads["launch"].sd ** 2 / len(candidates)
    variance = sum(parts.values())
    df = variance**2 / sum(part**2 / spreads[name].df for name, part in parts.items()) if variance > 0 else math.inf
    return Difference(
        log=_centre([_log(launch) for launch in candidates]) - expected,
        error=math.sqrt(variance),
        df=df,
        expected_log=expected,
    )


def paired_difference(pairs: Sequence[tuple[Launch, Launch]], noise: Noise) -> Difference:
    """The second of each pair against the first. What they share (hardware, day, neighbours) takes itself out."""
    logs = [_log(after) - _log(before) for before, after in pairs]
    # Before it was seen, a difference of two launches scatters by the square root of two more than one does.
    prior = Spread(noise.launch.sd * math.sqrt(2), noise.launch.df)
    spread = prior.moderated(sum_of_squares(logs), len(logs) - 1)
    return Difference(
        log=fmean(logs),
        error=spread.sd / math.sqrt(len(logs)),
        df=spread.df,
        expected_log=fmean(_log(before) for before, _ in pairs),
    )


def moderated(noise: Noise, *groups: Sequence[Launch]) -> Noise:
    """``noise`` with the launches' scatter within their sessions taken in; groups may differ in their mean."""
    squares, df = 0.0, 0
    for group in groups:
        for members in by_session(group).values():
            squares += sum_of_squares(members)
            df += len(members) - 1
    return Noise(site=noise.site, session=noise.session, launch=noise.launch.moderated(squares, df))


def by_session(launches: Sequence[Launch]) -> dict[str, list[float]]:
    """The logarithms of step times, by session."""
    found: dict[str, list[float]] = {}
    for launch in launches:
        found.setdefault(launch.session, []).append(_log(launch))
    return found


def sum_of_squares(values: Sequence[float]) -> float:
    """About their mean."""
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)


# Of a robust standard deviation, and the fewest launches among which one can be called out.
_OUTLYING, _CALLED_OUT_FROM = 5.0, 4


def without_outliers(launches: Sequence[Launch], noise: Noise) -> list[Launch]:
    """A baseline's launches but for ones so far off that something was wrong with them."""
    if len(launches) < _CALLED_OUT_FROM:
        return list(launches)
    logs = [_log(launch) for launch in launches]
    centre = median(logs)
    usual = math.sqrt(noise.site.sd**2 + noise.session.sd**2 + noise.launch.sd**2)
    spread = max(1.4826 * median(abs(value - centre) for value in logs), usual)
    return [launch for launch, value in zip(launches, logs, strict=True) if abs(value - centre) <= _OUTLYING * spread]


def quantile(probability: float, df: float) -> float:
    """Of Student's t: the value that it exceeds with ``1 - probability``."""
    from scipy import special  # noqa: PLC0415 - only a judged case pays for it

    return float(special.stdtrit(min(df, 1e6), probability))


def _log(launch: Launch) -> float:
    return math.log(launch.median_step_seconds)


def _centre(values: Sequence[float]) -> float:
    return fmean(values) if len(values) <= _MEAN_UP_TO else median(values)
