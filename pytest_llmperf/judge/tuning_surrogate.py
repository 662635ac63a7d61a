"""Surrogate: what some measured configurations say of all others, by a Gaussian process over their traits.

The logarithm of a step's cost is a sum of what each trait brings and, smaller, of what each two bring together: a
kernel that is additive in first- and second-order terms (Duvenaud, Nickisch and Rasmussen 2011, "Additive Gaussian
processes"), whose scale is the one of greatest likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_llmperf.support.interpreter import np

# Standard deviations, in logarithms, before anything is known: of a trait's effect, of the micro-batch's, and of what
# two traits bring together. Their shares count; the scale of all of them is learnt.
_TRAIT, _SIZE, _TOGETHER = 0.10, 0.25, 0.02
# How far off the prior's differences may be, as a fraction of them: what is counted is not what is measured.
_PRIOR = 0.7
# In doublings: so far from one another two micro-batches still say something of each other.
_DOUBLINGS = 2.0
# Of a trial of few steps, beside its own error.
_NOISE = 0.004
# Of the common mean: nothing is known of it.
_MEAN = 3.0
_SEED = 15
_SCALES = (0.3, 0.5, 0.8, 1.25, 2.0, 3.2)


@dataclass(frozen=True)
class Prediction:
    """Of each configuration the logarithm of its cost: arrays of one length."""

    mean: Any
    sd: Any


@dataclass(frozen=True)
class _Solved:
    """The system of what was seen."""

    scale: float
    centre: float
    covariance: Any
    weights: Any


class Surrogate:
    """Of the configurations with these traits, each a mapping of the same names; ``size`` is the one that is a number.

    ``prior`` is what is expected of each before anything is measured, up to a constant: logarithms, none where nothing
    is.
    """

    def __init__(self, traits: Sequence[Mapping[str, Any]], size: str, prior: Sequence[float] | None = None) -> None:
        names = [name for name in (traits[0] if traits else {}) if name != size]
        columns = []
        for name in names:
            codes: dict[str, int] = {}
            columns.append([codes.setdefault(str(one[name]), len(codes)) for one in traits])
        self._codes = np.array(columns, dtype=np.int16).T.reshape(len(traits), len(names))
        self._sizes = np.array([math.log2(one[size]) for one in traits]) if traits and size in traits[0] else None
        self._prior = np.zeros(len(traits)) if prior is None else np.asarray(prior, dtype=float)
        self._weight = self._prior - self._prior.mean()
        self._rows: dict[int, Any] = {}

    def predict(self, seen: Sequence[int], logs: Sequence[float], errors: Sequence[float]) -> Prediction:
        """Of all, where those of the indices ``seen`` have these ``logs``, known to within ``errors``."""
        solved = self._solved(seen, logs, errors)
        cross = solved.scale**2 * self._rows_of(seen) + _MEAN**2
        own = solved.scale**2 * (self._own() + _PRIOR**2 * self._weight**2) + _MEAN**2
        variance = own - (cross * np.linalg.solve(solved.covariance, cross)).sum(axis=0)
        mean = self._prior + solved.centre + cross.T @ solved.weights
        return Prediction(mean, np.sqrt(np.maximum(variance, 1e-12)))

    def draws(
        self, seen: Sequence[int], logs: Sequence[float], errors: Sequence[float], numbers: Sequence[int], count: int
    ) -> Any:
        """So many worlds that agree with what was seen, as ``predict`` has it: in each the logarithms of ``numbers``.

        An array of ``count`` rows. What two configurations have in common they have in each world.
        """
        solved, places = self._solved(seen, logs, errors), list(numbers)
        cross = solved.scale**2 * self._rows_of(seen)[:, places] + _MEAN**2
        own = solved.scale**2 * self._rows_of(places)[:, places] + _MEAN**2
        mean = self._prior[places] + solved.centre + cross.T @ solved.weights
        covariance = own - cross.T @ np.linalg.solve(solved.covariance, cross)
        values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
        normal = np.random.default_rng(_SEED).standard_normal((count, len(places)))
        return mean + (normal * np.sqrt(np.maximum(values, 0.0))) @ vectors.T

    def _solved(self, seen: Sequence[int], logs: Sequence[float], errors: Sequence[float]) -> _Solved:
        among = self._rows_of(seen)[:, list(seen)]
        noise = np.diag([_NOISE**2 + error**2 for error in errors])
        found = np.asarray(logs, dtype=float) - self._prior[list(seen)]
        centre = float(found.mean())
        scale = max(_SCALES, key=lambda one: _likelihood(one**2 * among + noise, found - centre))
        covariance = scale**2 * among + _MEAN**2 + noise
        return _Solved(scale, centre, covariance, np.linalg.solve(covariance, found - centre))

    def _rows_of(self, numbers: Sequence[int]) -> Any:
        """Covariances of each with all, at scale 1."""
        rows = np.stack([self._row(number) for number in numbers])
        return rows + _PRIOR**2 * np.outer(self._weight[list(numbers)], self._weight)

    def _own(self) -> float:
        num = self._codes.shape[1]
        size = 0.0 if self._sizes is None else _SIZE**2
        features = num + (self._sizes is not None)
        return float(num * _TRAIT**2 + size + features * (features - 1) / 2 * _TOGETHER**2)

    def _row(self, index: int) -> Any:
        """The covariance of one with all, at scale 1."""
        if index not in self._rows:
            same = (self._codes == self._codes[index]).astype(float)
            total, squares, row = same.sum(axis=1), same.sum(axis=1), _TRAIT**2 * same.sum(axis=1)
            if self._sizes is not None:
                near = np.exp(-((self._sizes - self._sizes[index]) ** 2) / (2 * _DOUBLINGS**2))
                total, squares, row = total + near, squares + near**2, row + _SIZE**2 * near
            self._rows[index] = row + _TOGETHER**2 * (total**2 - squares) / 2
        return self._rows[index]


def _likelihood(covariance: Any, found: Any) -> float:
    """The logarithm of it, up to a constant, of ``found`` with an unknown mean."""
    whole = covariance + _MEAN**2
    sign, determinant = np.linalg.slogdet(whole)
    return -math.inf if sign <= 0 else float(-0.5 * (found @ np.linalg.solve(whole, found) + determinant))
