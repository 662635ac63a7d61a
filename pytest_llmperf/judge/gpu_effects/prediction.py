"""Prediction: what a panel's observations tell of unknowns whose covariance is known before (Henderson 1975).

Nothing inverts that covariance: it may be singular, where several GPUs do no more than the mean of what each does.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_llmperf.judge.gpu_effects.panel import Array, Panel

#: Other cases of a run may have changed themselves: beyond so many of their errors they count for less (Huber 1964),
#: found in so many rounds.
USUAL_ERRORS, ROUNDS = 1.5, 6


@dataclass(frozen=True)
class Prediction:
    """The best linear unbiased one of what a design (cells x unknowns) is about."""

    means: Array
    covariance: Array
    """Of the errors of ``means``."""
    centres: Array
    """Of each series of the panel its mean, without effects."""
    information: Array
    """What the observations alone tell of the unknowns: a precision, which may be singular."""
    sums: Array
    """Observations, weighted by what they tell of each unknown."""

    @property
    def pull(self) -> Array:
        """The prior covariance times it is ``means``."""
        return self.sums - self.information @ self.means

    def of(self, towards: Array, prior: Array) -> tuple[Array, Array]:
        """The same of other unknowns: means, and covariance of their errors.

        ``towards``: covariance (these x others) before anything is seen; ``prior``: that of the others.
        """
        seen = self.information @ towards
        return towards.T @ self.pull, prior - towards.T @ seen + seen.T @ self.covariance @ seen

    def excess(self, shares: Array, place: slice) -> float:
        """By how much what the unknowns at ``place`` have in ``shares`` (unknowns x parts) varies more than expected.

        Of one part whose prior variance is v, v + v² times this is the expected square.
        """
        inside = self.information[:, place] @ shares
        told = (shares * inside[place]).sum() - (inside * (self.covariance @ inside)).sum()
        return float(((shares.T @ self.pull[place]) ** 2).sum() - told)


def predicted(panel: Panel, design: Array, prior: Array, variances: Array) -> Prediction:
    """Of the unknowns of ``design``, whose covariance is ``prior``; ``variances`` are those of the cells."""
    return _Told.of(panel, design, variances).prediction(prior)


def doubted(panel: Panel, design: Array, prior: Array, variances: Array) -> Prediction:
    """The same where cells of the run itself that lie far off count for less: their cases may have changed.

    Other weights of few cells move the errors of few combinations of the unknowns alone (Woodbury 1950): one solution
    serves all rounds.
    """
    import numpy as np  # noqa: PLC0415 - only a judged case pays for it

    told = _Told.of(panel, design, variances)
    first, own = told.prediction(prior), np.flatnonzero(panel.may_have_changed)
    if not own.size:
        return first
    of_series, usual = panel.of_series[own], variances[own]
    moved = design[own] - told.crossed[of_series] / told.each[of_series, None]
    reach = first.covariance @ moved.T
    fitted = moved @ reach + (of_series[:, None] == of_series) / told.each[of_series]
    before = residuals(panel, design, first)[own]
    moves = np.zeros_like(fitted)
    far = np.ones_like(before)
    for _ in range(ROUNDS):
        left = before - fitted @ moves @ before
        far = np.maximum(1.0, abs(left) / (USUAL_ERRORS * np.sqrt(usual)))
        lost = np.diag((1 / far - 1) / usual)
        moves = np.linalg.solve(np.eye(len(own)) + lost @ fitted, lost)
    weighed = variances.copy()
    weighed[own] *= far
    return _Told.of(panel, design, weighed).with_covariance(first.covariance - reach @ moves @ reach.T)


def residuals(panel: Panel, design: Array, found: Prediction) -> Array:
    """Of each cell what is left of it."""
    return panel.logs - found.centres[panel.of_series] - design @ found.means


@dataclass(frozen=True)
class _Told:
    """What cells of these variances tell by themselves."""

    each: Array
    """Of each series the sum of its cells' weights; then of the weighted rows of the design, and of weighted cells."""
    crossed: Array
    logs: Array
    information: Array
    sums: Array

    @classmethod
    def of(cls, panel: Panel, design: Array, variances: Array) -> _Told:
        import numpy as np  # noqa: PLC0415

        weights = 1 / variances

        def by_series(values: Array) -> Array:
            return np.bincount(panel.of_series, weights * values, len(panel.series))

        each, logs = by_series(np.ones_like(weights)), by_series(panel.logs)
        crossed = np.stack([by_series(column) for column in design.T], axis=1)
        information = design.T @ (weights[:, None] * design) - crossed.T @ (crossed / each[:, None])
        return cls(each, crossed, logs, information, design.T @ (weights * panel.logs) - crossed.T @ (logs / each))

    def prediction(self, prior: Array) -> Prediction:
        import numpy as np  # noqa: PLC0415

        covariance = np.linalg.solve(np.eye(len(prior)) + prior @ self.information, prior)
        return self.with_covariance((covariance + covariance.T) / 2)

    def with_covariance(self, covariance: Array) -> Prediction:
        means = covariance @ self.sums
        centres = (self.logs - self.crossed @ means) / self.each
        return Prediction(means, covariance, centres, self.information, self.sums)
