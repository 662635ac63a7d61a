"""Predictions of GPUs' effects are those of the textbook's formulas, solved in another way."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_llmperf.judge.gpu_knowledge import Knowledge
from pytest_llmperf.judge.gpu_panel import (
    ROUNDS,
    USUAL_ERRORS,
    Panel,
    cell_variances,
    design_of,
    doubted,
    predicted,
    unit_of,
)
from pytest_llmperf.support.interpreter import Array
from tests.gpu_nights import TONIGHT, World


def assert_same(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-9)


# Two of them side by side, and each of these by its calibration.
PAIR = (40, 41)


def in_full(panel: Panel, design: Array, prior: Array, variances: Array) -> tuple[Array, Array, Array]:
    """Means, covariance and what is left of the cells, by generalised least squares on the cells themselves."""
    series = np.eye(len(panel.series))[panel.of_series]
    inverse = np.linalg.inv(design @ prior @ design.T + np.diag(variances))
    centres = np.linalg.solve(series.T @ inverse @ series, series.T @ inverse @ panel.logs)
    without = inverse - inverse @ series @ np.linalg.solve(series.T @ inverse @ series, series.T @ inverse)
    means = prior @ design.T @ inverse @ (panel.logs - series @ centres)
    covariance = prior - prior @ design.T @ without @ design @ prior
    return means, covariance, panel.logs - series @ centres - design @ means


def centres(panel: Panel, design: Array, left: Array, means: Array) -> list[Array]:
    values = panel.logs - left - design @ means
    return [values[panel.of_series == number] for number in range(len(panel.series))]


@pytest.fixture(scope="module")
def knowledge() -> Knowledge:
    """Of a night in which one case is 4 % slower, on GPUs that work alone and in a pair."""
    world = World(seed=5)
    stored = world.history(launches=5, gpus=16, calibrated=True)
    known = Knowledge.of(stored)
    assert known is not None
    alone = [world.launch(case, PAIR[0], slower=0.04 * (case == 3), calibrated=True) for case in range(8)]
    together = [world.launch(case, PAIR, calibrated=True) for case in range(3)]
    return known.with_seen([*alone, *together])


@pytest.fixture(scope="module")
def panel(knowledge: Knowledge) -> Panel:
    return Panel.of(knowledge.stored, knowledge.seen)


def test_they_are_best_linear_unbiased_also_where_the_covariance_is_singular(
    knowledge: Knowledge, panel: Panel
) -> None:
    prior, design = knowledge.model.covariance(panel.units), design_of(knowledge.model, panel)
    assert np.linalg.matrix_rank(prior) < len(prior)  # of a pair's effect, which is its GPUs' mean
    variances = cell_variances(knowledge.model, panel)
    found = predicted(panel, design, prior, variances)
    means, covariance, _ = in_full(panel, design, prior, variances)
    assert_same(found.means, means)
    assert_same(found.covariance, covariance)
    assert np.abs(means).max() > 0.005


def test_what_is_doubted_is_found_as_by_solving_every_round(knowledge: Knowledge, panel: Panel) -> None:
    prior, design = knowledge.model.covariance(panel.units), design_of(knowledge.model, panel)
    variances = cell_variances(knowledge.model, panel)
    weighed = variances
    for _ in range(ROUNDS):
        left = in_full(panel, design, prior, weighed)[2]
        far = np.maximum(1.0, abs(left) / (USUAL_ERRORS * np.sqrt(variances)))
        weighed = np.where(panel.may_have_changed, variances * far, variances)
    assert (weighed > 1.5 * variances).any()
    found = doubted(panel, design, prior, variances)
    means, covariance, left = in_full(panel, design, prior, weighed)
    assert_same(found.means, means)
    assert_same(found.covariance, covariance)
    assert_same(found.centres, [np.mean(each) for each in centres(panel, design, left, means)])


def test_of_a_unit_that_was_seen_the_same_is_told_as_of_any_other(knowledge: Knowledge) -> None:
    told = knowledge.told("")
    means, covariance = told.of(told.shares.units)
    assert_same(means, told.prediction.means)
    assert_same(covariance, told.prediction.covariance)


def test_a_pair_is_told_the_mean_of_what_its_gpus_are(knowledge: Knowledge) -> None:
    world = World(seed=5)
    units = [unit_of(world.launch(0, gpus, TONIGHT)) for gpus in (*PAIR, PAIR)]
    means, _ = knowledge.told("").of(units)
    assert means[2] == pytest.approx((means[0] + means[1]) / 2, abs=1e-9)


def test_nothing_is_doubted_where_the_run_has_launched_nothing(knowledge: Knowledge) -> None:
    panel = Panel.of(knowledge.stored)
    prior, design = knowledge.model.covariance(panel.units), design_of(knowledge.model, panel)
    variances = cell_variances(knowledge.model, panel)
    plain, found = (way(panel, design, prior, variances) for way in (predicted, doubted))
    np.testing.assert_array_equal(found.means, plain.means)
