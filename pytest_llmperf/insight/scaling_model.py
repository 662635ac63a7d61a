"""How fast more GPUs will train: the model of a step (``communication_model.py``) fitted to the few widths measured.

Few points cannot tell seven coefficients: what they do not tell rests on what is believed of any machine, and the
interval of a prediction says how little that is. Pure. Rates are tokens/s per GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pytest_llmperf.insight.communication_model import (
    NAMES,
    Coefficients,
    Workload,
    all_reduce_seconds,
    chosen_algorithm,
    exposed_seconds,
    step_seconds,
)

#: Standard deviations (of the logarithm) that launches on one host, and other hosts, were seen to have.
POINT_NOISE, HOST_NOISE = 0.01, 0.02

#: Of the prediction's interval.
CONFIDENCE = 0.90

_SAMPLES = 2000
# A logarithm this far from what is believed, a factor of 20, is of no machine: exp() stays finite.
_FARTHEST = 3.0
# The same figures give the same interval, everywhere.
_SEED = 15


# Median and factor of one standard deviation, believed before anything was measured. Bandwidths: between PCIe and
# NVLink 4; between one 100 Gb/s card and eight of 400. Shares: a few of what is known of DDP, and wide.
_BELIEFS: Mapping[str, tuple[float, float]] = {
    "overhead_share": (0.01, 2.5),
    "exposed_share": (0.3, 2.0),
    "intra_node_bandwidth": (200e9, 2.0),
    "inter_node_bandwidth": (60e9, 2.5),
    "latency_factor": (1.0, 2.0),
    "straggling_share": (0.003, 2.0),
}
# Of the compute: the measured widths decide.
_UNKNOWN = 2.0


@dataclass(frozen=True)
class Prior:
    """What is believed of the coefficients before a fit: of their logarithms, mean and covariance."""

    mean: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    points: int = 0
    """How many measured widths it rests on."""


def general_prior(points: Mapping[int, float], workload: Workload) -> Prior:
    """What is believed of any machine; of the compute, that the narrowest point is about right."""
    compute = workload.tokens_per_step_per_gpu / points[min(points)]
    beliefs = {"compute_seconds": (compute, _UNKNOWN), **_BELIEFS}
    scatter = [math.log(beliefs[name][1]) ** 2 for name in NAMES]
    return Prior(
        tuple(math.log(beliefs[name][0]) for name in NAMES),
        tuple(
            tuple(value if row == column else 0.0 for column in range(len(NAMES))) for row, value in enumerate(scatter)
        ),
    )


@dataclass(frozen=True)
class Fit:
    """Coefficients by which the model meets the measured points as well as is believable, and how sure they are."""

    workload: Workload
    points: Mapping[int, float]
    """GPUs and tokens/s per GPU."""
    prior: Prior
    logarithms: Prior
    """The same of the coefficients after the fit."""
    point_noise: float
    """Standard deviation of a point's logarithm: ``POINT_NOISE``, or more where the model misses the points by more."""

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(*map(math.exp, self.logarithms.mean))

    def spread(self, name: str) -> float:
        """Standard deviation of a coefficient's logarithm."""
        index = NAMES.index(name)
        return math.sqrt(self.logarithms.covariance[index][index])

    def learned(self, name: str) -> bool:
        """Whether the points told anything of this coefficient: its variance fell by half at least."""
        index = NAMES.index(name)
        return self.logarithms.covariance[index][index] < self.prior.covariance[index][index] / 2

    @cached_property
    def samples(self) -> list[Coefficients]:
        """Coefficients that are believable too, by Student's t with a degree of freedom for each point."""
        import numpy as np  # noqa: PLC0415 - only a fit pays for it

        random = np.random.default_rng(_SEED)
        mean, covariance = np.array(self.logarithms.mean), np.array(self.logarithms.covariance)
        # Not by singular vectors, whose signs are another with another processor: the draws would be others, too.
        normal = random.standard_normal((_SAMPLES, len(NAMES))) @ np.linalg.cholesky(covariance).T
        freedom = self.logarithms.points
        heavy = np.sqrt(random.chisquare(freedom, size=(_SAMPLES, 1)) / freedom)
        return [
            Coefficients(*map(math.exp, row))
            for row in (mean + np.clip(normal / heavy, -_FARTHEST, _FARTHEST)).tolist()
        ]


def fit(points: Mapping[int, float], workload: Workload, prior: Prior | None = None) -> Fit:
    """The model held to ``points`` (GPUs, tokens/s per GPU) by least squares, what is believed counting as points too.

    The covariance is that of the linearised problem at its solution. Where the model misses the points by more than
    ``POINT_NOISE``, they are taken to be as noisy as that, and it is held to them once more.

    Raises:
        ValueError: no points, or some that are none.
    """
    if not points or not all(gpus >= 1 and 0 < rate < math.inf for gpus, rate in points.items()):
        raise ValueError(f"points={dict(points)}: expected GPUs and tokens/s per GPU, all above 0")
    prior = prior or general_prior(points, workload)
    noise = POINT_NOISE
    found = _least_squares(points, workload, prior, noise)
    # The prior's residuals make up for the coefficients: a degree of freedom is left for each point.
    misfit = 2 * float(found.cost) / len(points)
    if misfit > 1:
        noise *= math.sqrt(misfit)
        found = _least_squares(points, workload, prior, noise)
    return Fit(workload, dict(points), prior, _after(found, prior.points + len(points)), noise)


def _least_squares(points: Mapping[int, float], workload: Workload, prior: Prior, noise: float) -> Any:
    import numpy as np  # noqa: PLC0415 - only a fit pays for it
    from scipy.optimize import least_squares  # noqa: PLC0415 - the same

    mean = np.array(prior.mean)
    whiten = np.linalg.inv(np.linalg.cholesky(np.array(prior.covariance)))
    measured = {gpus: math.log(workload.tokens_per_step_per_gpu / rate) for gpus, rate in points.items()}

    def residuals(logarithms: Any) -> Any:
        known = Coefficients(*map(math.exp, np.clip(logarithms, mean - _FARTHEST, mean + _FARTHEST)))
        data = [(math.log(step_seconds(n, workload, known)) - seen) / noise for n, seen in measured.items()]
        return np.concatenate([data, whiten @ (logarithms - mean)])

    return least_squares(residuals, mean)


def _after(found: Any, points: int) -> Prior:
    import numpy as np  # noqa: PLC0415 - only a fit pays for it

    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return Prior(tuple(found.x.tolist()), tuple(tuple(row) for row in covariance.tolist()), points)


def transferred(found: Fit, points: Mapping[int, float], workload: Workload) -> Prior:
    """What ``found`` says of a machine's network, believed of another model on it.

    That model's compute is its own; how well it hides an all-reduce is not known better than before.
    """
    start, learned = general_prior(points, workload), found.logarithms
    compute, size = NAMES.index("compute_seconds"), range(len(NAMES))
    own = [NAMES.index(name) for name in ("overhead_share", "exposed_share")]

    def believed(row: int, column: int) -> float:
        if compute in (row, column):
            return start.covariance[row][column]
        again = start.covariance[row][column] if row == column and row in own else 0.0
        return learned.covariance[row][column] + again

    return Prior(
        tuple(start.mean[index] if index == compute else learned.mean[index] for index in size),
        tuple(tuple(believed(row, column) for column in size) for row in size),
        learned.points,
    )


@dataclass(frozen=True)
class Prediction:
    """Of one width."""

    gpus: int
    nodes: int
    algorithm: str
    step_seconds: float
    all_reduce_seconds: float
    exposed_seconds: float
    rate: float
    """Tokens/s per GPU."""
    low: float
    high: float
    """Between these a measurement on other hosts of the kind would lie, ``CONFIDENCE`` of the time."""
    efficiency: float
    """Against one GPU of the model's own."""


def predict(found: Fit, gpus: int) -> Prediction:
    """The rate at ``gpus``, its parts and its interval: uncertain coefficients, and hosts that differ."""
    workload, known = found.workload, found.coefficients
    algorithm = chosen_algorithm(gpus, workload, known)
    seconds = step_seconds(gpus, workload, known)
    low, high = _interval(found, gpus)
    return Prediction(
        gpus=gpus,
        nodes=math.ceil(gpus / workload.gpus_per_node),
        algorithm=algorithm,
        step_seconds=seconds,
        all_reduce_seconds=all_reduce_seconds(gpus, algorithm, workload, known),
        exposed_seconds=exposed_seconds(gpus, workload, known),
        rate=workload.tokens_per_step_per_gpu / seconds,
        low=low,
        high=high,
        efficiency=known.compute_seconds / seconds,
    )


def _interval(found: Fit, gpus: int) -> tuple[float, float]:
    import numpy as np  # noqa: PLC0415 - only a fit pays for it

    tokens = found.workload.tokens_per_step_per_gpu
    rates = np.array([tokens / step_seconds(gpus, found.workload, known) for known in found.samples])
    scatter = np.random.default_rng(_SEED + gpus).normal(0.0, HOST_NOISE, size=len(rates))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(rates * np.exp(scatter), [tail, 1 - tail]).tolist()
    return low, high
