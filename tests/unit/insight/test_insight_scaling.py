"""The model of a step on many GPUs, its fit to few, and what it says of the published widths."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.insight import chapter15
from pytest_llmperf.insight.communication_model import (
    BUCKET_BYTES,
    NAMES,
    Coefficients,
    Workload,
    all_reduce_seconds,
    chosen_algorithm,
    exposed_seconds,
    num_weights,
    step_seconds,
)
from pytest_llmperf.insight.ladder import Rung
from pytest_llmperf.insight.scaling_model import POINT_NOISE, Fit, fit, predict, transferred
from pytest_llmperf.spec.models import resolve
from tests.examples import examples

KNOWN = Coefficients(
    compute_seconds=1.0,
    overhead_share=0.01,
    exposed_share=0.25,
    intra_node_bandwidth=100e9,
    inter_node_bandwidth=25e9,
    latency_factor=1.0,
    straggling_share=0.002,
)
WORK = Workload(tokens_per_step_per_gpu=10_000, gradient_bytes=4e9, gpus_per_node=4)
PARAMETERS = {"llama-3.2-1b": 1_235_814_400, "opt-1.3b": 1_315_758_080}  # as launches counted them


def published(rungs: tuple[Rung, ...]) -> dict[int, float]:
    return {rung.spec.gpus: rung.published_rate for rung in rungs if rung.published_rate}


def workload(rungs: tuple[Rung, ...], algorithm: str) -> Workload:
    spec = rungs[0].spec
    tokens = spec.sequences_per_step * spec.sequence_length
    return Workload(tokens, 2.0 * PARAMETERS[spec.model], chapter15.GPUS_PER_NODE, algorithm)


def fit_of_llama(algorithm: str, most: int = 8) -> Fit:
    points = published(chapter15.LLAMA_WIDTHS)
    shown = {gpus: rate for gpus, rate in points.items() if gpus <= most}
    return fit(shown, workload(chapter15.LLAMA_WIDTHS, algorithm))


class TestAllReduce:
    def test_a_ring_by_hand(self) -> None:
        # 160 buckets; 4 GPUs: 2*3/4 * 4e9/100e9 s and 6 hops of 3.4 us; 8 on two nodes at 25 GB/s: 12 hops and 2.
        buckets = math.ceil(4e9 / BUCKET_BYTES)
        four = 1.5 * 0.04 + buckets * 6 * 3.4e-6
        eight = 1.75 * 0.16 + buckets * (12 * 3.4e-6 + 2 * 9.6e-6)
        assert all_reduce_seconds(4, "ring", WORK, KNOWN) == pytest.approx(four)
        assert all_reduce_seconds(8, "ring", WORK, KNOWN) == pytest.approx(eight)

    def test_a_tree_by_hand(self) -> None:
        # 32 GPUs on eight nodes: 2*V/B; up and down 3 hops inside and log2(8) between.
        expected = 2 * 0.16 + 153 * 2 * (3 * 28e-6 + 3 * 50e-6)
        assert all_reduce_seconds(32, "tree", WORK, KNOWN) == pytest.approx(expected)

    def test_one_gpu_has_nobody_to_talk_to(self) -> None:
        assert all_reduce_seconds(1, "ring", WORK, KNOWN) == exposed_seconds(1, WORK, KNOWN) == 0
        assert step_seconds(1, WORK, KNOWN) == KNOWN.compute_seconds

    def test_rings_win_where_few_are_and_trees_where_many_are(self) -> None:
        assert chosen_algorithm(8, WORK, KNOWN) == "ring"
        assert chosen_algorithm(1024, WORK, KNOWN) == "tree"
        assert chosen_algorithm(1024, replace(WORK, algorithm="ring"), KNOWN) == "ring"

    def test_what_outlasts_the_backward_pass_is_all_seen(self) -> None:
        slow = replace(KNOWN, inter_node_bandwidth=1e9)
        whole = all_reduce_seconds(8, "ring", WORK, slow)
        assert exposed_seconds(8, WORK, slow) == pytest.approx(0.01 + whole - 2 / 3)
        hidden = all_reduce_seconds(4, "ring", WORK, slow)
        assert exposed_seconds(4, WORK, slow) == pytest.approx(0.01 + 0.25 * hidden)


@given(st.integers(1, 2048), st.floats(1e8, 1e11), st.sampled_from(["auto", "ring", "tree"]))
def test_more_to_reduce_is_never_faster(gpus: int, gradient_bytes: float, algorithm: str) -> None:
    work = replace(WORK, gradient_bytes=gradient_bytes, algorithm=algorithm)
    more = replace(work, gradient_bytes=2 * gradient_bytes)
    assert KNOWN.compute_seconds <= step_seconds(gpus, work, KNOWN) <= step_seconds(gpus, more, KNOWN)


@given(st.integers(1, 512), st.sampled_from(["auto", "ring", "tree"]))
def test_twice_the_gpus_are_never_faster_each(gpus: int, algorithm: str) -> None:
    work = replace(WORK, algorithm=algorithm)
    # A tree of half a node and one of a whole are the same.
    assert step_seconds(gpus, work, KNOWN) <= step_seconds(2 * gpus, work, KNOWN) * (1 + 1e-9)


@pytest.mark.parametrize("model", list(PARAMETERS))
def test_weights_are_counted(model: str) -> None:
    geometry = resolve(model).geometry
    assert geometry is not None
    assert num_weights(geometry) == pytest.approx(PARAMETERS[model], rel=0.004)


class TestFit:
    def test_points_of_the_model_itself_are_met(self) -> None:
        points = {gpus: 10_000 / step_seconds(gpus, WORK, KNOWN) for gpus in (1, 2, 4, 8, 16)}
        found = fit(points, WORK)
        assert found.point_noise == POINT_NOISE
        for gpus, rate in points.items():
            assert predict(found, gpus).rate == pytest.approx(rate, rel=0.01)
        prediction = predict(found, 64)
        assert prediction.low < 10_000 / step_seconds(64, WORK, KNOWN) < prediction.high

    def test_points_that_disagree_widen_the_interval(self) -> None:
        points = {1: 10_000.0, 2: 9_800.0, 4: 9_700.0}
        calm = predict(fit(points, WORK), 2)
        odd = fit(points | {2: 8_000.0}, WORK)
        assert odd.point_noise > 3 * POINT_NOISE
        assert predict(odd, 2).high / predict(odd, 2).low > calm.high / calm.low

    def test_what_no_point_tells_is_belief_and_stays_wide(self) -> None:
        inside = fit({1: 72_271.0, 2: 70_114.0, 4: 69_707.0, 8: 69_250.0}, replace(WORK, gpus_per_node=8))
        assert inside.learned("compute_seconds")
        assert not inside.learned("inter_node_bandwidth")
        near, far = predict(inside, 8), predict(inside, 16)
        assert far.high / far.low > 1.2 * near.high / near.low

    def test_the_same_points_give_the_same_interval(self) -> None:
        assert predict(fit_of_llama("auto"), 32) == predict(fit_of_llama("auto"), 32)

    def test_it_believes_no_less_than_before(self) -> None:
        found = fit_of_llama("auto")
        for index, name in enumerate(NAMES):
            assert found.spread(name) ** 2 <= found.prior.covariance[index][index] * 1.01

    @examples(25)
    @given(st.lists(st.floats(0.3, 1.0), min_size=1, max_size=4), st.sampled_from([1, 2, 8, 16]))
    def test_any_points_give_a_finite_prediction_inside_its_interval(self, shares: list[float], per_node: int) -> None:
        points = {2**index: 20_000 * share for index, share in enumerate(shares)}
        prediction = predict(fit(points, replace(WORK, gpus_per_node=per_node)), 256)
        assert 0 < prediction.low < prediction.high < math.inf
        assert 0 < prediction.rate < prediction.high
        assert 0 < prediction.efficiency <= 1

    @pytest.mark.parametrize("points", [{}, {1: 0.0}, {1: math.nan}, {1: math.inf}, {0: 1.0}])
    def test_points_that_are_none(self, points: dict[int, float]) -> None:
        with pytest.raises(ValueError, match="expected GPUs and tokens/s per GPU"):
            fit(points, WORK)


class TestPublished:
    """The errors that docs/explanation/scaling-model.md tells."""

    @pytest.mark.parametrize(
        ("algorithm", "sixteen", "thirty_two"), [("ring", -0.0055, -0.0160), ("tree", -0.0133, -0.0237)]
    )
    def test_llama_fitted_up_to_eight(self, algorithm: str, sixteen: float, thirty_two: float) -> None:
        points, found = published(chapter15.LLAMA_WIDTHS), fit_of_llama(algorithm)
        for gpus, error in ((16, sixteen), (32, thirty_two)):
            prediction = predict(found, gpus)
            assert prediction.rate / points[gpus] - 1 == pytest.approx(error, abs=0.002)
            assert prediction.low < points[gpus] < prediction.high

    @pytest.mark.parametrize(("algorithm", "error"), [("ring", -0.104), ("tree", -0.120)])
    def test_opt_by_one_gpu_and_llamas_network(self, algorithm: str, error: float) -> None:
        points, work = published(chapter15.OPT_WIDTHS), workload(chapter15.OPT_WIDTHS, algorithm)
        one = {1: points[1]}
        prediction = predict(fit(one, work, transferred(fit_of_llama(algorithm), one, work)), 32)
        assert prediction.rate / points[32] - 1 == pytest.approx(error, abs=0.005)
        assert prediction.low < points[32] < prediction.high
