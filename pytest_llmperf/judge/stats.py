"""The statistics of launches, on the logarithm of their median step time, where +5 % and -5 % weigh the same.

The unit of evidence is a launch: its steps share hardware, allocator and clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pytest_llmperf.judge.noise import Noise, Spread, Squares, labels, log_of, sum_of_squares, without_outliers
from pytest_llmperf.records.launch import Launch

# Up to here the centre of some launches is their mean; from here on their median, which one outlier cannot move.
_MEAN_UP_TO = 2
# Keeps a covariance invertible where nothing was ever seen to vary: a millionth of a per cent, squared.
_NEXT_TO_NOTHING = 1e-16
# What that costs in precision: the variance of a median over that of a mean, at most.
_MEDIAN_VARIANCE = math.pi / 2


def pooled_step_seconds(launches: Sequence[Launch]) -> float:
    """Step time of a measurement, in seconds: the centre of its launches' medians."""
    return math.exp(_centre([log_of(launch) for launch in launches]))


def pooled_tokens_per_second(launches: Sequence[Launch]) -> float:
    """Throughput over all ranks, in tokens/s."""
    return launches[0].tokens_per_step / pooled_step_seconds(launches)


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


def difference(candidates: Sequence[Launch], baseline: Sequence[Launch], noise: Noise) -> Difference:
    """``candidates`` against what ``baseline`` expects of their site.

    The expectation is the best linear unbiased prediction for a nested model with an unknown mean (Henderson 1975; in
    geostatistics, ordinary kriging): launches of the same session weigh most, then those of the same site, then those
    of the same host. The case's own scatter moderates ``noise``; degrees of freedom are Satterthwaite's (1946).
    """
    import numpy as np  # noqa: PLC0415 - only a judged case pays for it

    baseline = without_outliers(baseline, noise)
    noise = noise.moderated(candidates, baseline)
    everyone, num = [*baseline, *candidates], len(baseline)
    label = labels(everyone)
    shared = {name: np.array([[a == b for b in label[name]] for a in label[name]], dtype=float) for name in vars(noise)}
    # A launch that ended before its median was known scatters by that much more.
    excess = [max(0.0, launch.median_error**2 - noise.launch.sd**2) for launch in everyone]
    spreads: Mapping[str, Spread] = vars(noise)
    covariance = sum(spreads[name].sd ** 2 * matrix for name, matrix in shared.items()) + np.diag(excess)
    inverse = np.linalg.inv(covariance[:num, :num] + _NEXT_TO_NOTHING * np.eye(num))
    ones, towards = np.ones(num), covariance[:num, num:].mean(axis=1)
    unbiased = (1 - ones @ inverse @ towards) / (ones @ inverse @ ones)
    weights = inverse @ (towards + unbiased * ones)

    expected = float(weights @ np.array([log_of(launch) for launch in baseline]))
    contrast = np.concatenate([-weights, np.full(len(candidates), 1 / len(candidates))])
    parts = {name: spreads[name].sd ** 2 * float(contrast @ matrix @ contrast) for name, matrix in shared.items()}
    parts["launch"] += float(contrast**2 @ np.array(excess))
    if len(candidates) > _MEAN_UP_TO:
        parts["launch"] += (_MEDIAN_VARIANCE - 1) * spreads["launch"].sd ** 2 / len(candidates)
    variance = sum(parts.values())
    df = variance**2 / sum(part**2 / spreads[name].df for name, part in parts.items()) if variance > 0 else math.inf
    logs = [log_of(launch) for launch in candidates]
    return Difference(
        log=_centre(logs) - expected,
        error=math.sqrt(variance),
        df=df,
        launch_sd=math.sqrt(noise.launch.sd**2 + fmean(excess[num:])),
        each=tuple(value - expected for value in logs),
    )


def paired_difference(pairs: Sequence[tuple[Launch, Launch]], noise: Noise) -> Difference:
    """The second of each pair against the first. What they share (hardware, day, neighbours) takes itself out."""
    logs = [log_of(after) - log_of(before) for before, after in pairs]
    # Before it was seen, a difference of two launches scatters by the square root of two more than one does.
    prior = Spread(noise.launch.sd * math.sqrt(2), noise.launch.df)
    spread = prior.moderated(Squares(sum_of_squares(logs), len(logs) - 1))
    # A pair whose medians are not known to that scatters by so much more.
    excess = fmean(max(0.0, a.median_error**2 + b.median_error**2 - spread.sd**2) for a, b in pairs)
    sd = math.sqrt(spread.sd**2 + excess)
    return Difference(
        log=fmean(logs),
        error=sd / math.sqrt(len(logs)),
        df=spread.df,
        launch_sd=sd,
        each=tuple(logs),
    )


def quantile(probability: float, df: float) -> float:
    """Of Student's t: the value that it exceeds with ``1 - probability``."""
    from scipy import special  # noqa: PLC0415 - only a judged case pays for it

    return float(special.stdtrit(min(df, 1e6), probability))


def _centre(values: Sequence[float]) -> float:
    return fmean(values) if len(values) <= _MEAN_UP_TO else median(values)
