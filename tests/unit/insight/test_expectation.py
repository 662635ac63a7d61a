"""What stored cases say of one that is not among them: how far off that is, and what it may not say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from pytest_llmperf.analysis.expectation import Case, Expectation, estimated, expected, filled, standing, with_error
from pytest_llmperf.records.launch import OLDER
from pytest_llmperf.records.trace import Trace, TraceRow
from pytest_llmperf.run.derived_metrics import newest_launch, rates_of, stored_cases
from pytest_llmperf.settings.optimizer import update_flops
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tools.expected_rates import BASELINES, WAYS, Told, summary, told

H200, H100 = "nvidia-h200-140gib", "nvidia-h100-80gb-hbm3-80gib"
SPEC = TrainSpec(model="llama-3.2-1b", micro_batch_size=4)


@pytest.fixture(scope="module")
def stored() -> list[Case]:
    return stored_cases(BASELINES)


@pytest.fixture(scope="module")
def found(stored: list[Case]) -> Mapping[str, list[Told]]:
    """All ways, of the cases that both kinds of GPU have."""
    return told(stored)


def trace_of(seconds: float, **kernels: float) -> Trace:
    rows = tuple(TraceRow("kernel", name, 1, each) for name, each in sorted(kernels.items()))
    return Trace(rows=rows, steps=3, step_seconds=seconds, busy_seconds=sum(kernels.values()))


def case(spec: TrainSpec, seconds: float, kind: str = H200, **kernels: float) -> Case:
    return Case(spec=spec, kind=kind, step_seconds=seconds, trace=trace_of(seconds, **kernels))


def found_of(asked: Case, *stored: Case) -> Expectation:
    found = estimated(asked, filled(stored))
    assert found is not None
    return found


@pytest.mark.simulated
def test_each_stored_case_is_told_by_all_others(found: Mapping[str, list[Told]]) -> None:
    cases, near, median, most, inside = summary(found["all others"])
    assert (int(cases) >= 130, int(near) / int(cases) >= 0.9) == (True, True)
    assert (float(median[:-2]) <= 1.6, float(most[:-2]) <= 5.1) == (True, True)
    assert 0.89 <= int(inside) / int(cases) <= 0.97


@pytest.mark.simulated
@pytest.mark.parametrize("kind", [H100, H200])
def test_nine_of_ten_cases_of_each_kind_of_gpu_are_in_their_range(found: Mapping[str, list[Told]], kind: str) -> None:
    """Also where no case of the same settings, or of the same model, told of them."""
    ways = [[one for one in told if one.case.kind == kind] for told in found.values()]
    inside = [sum(one.is_within for one in told) / len(told) for told in ways]
    assert min(inside) >= 0.89  # 52 of 58
    assert median(one.found.error for one in ways[0]) < 0.2, "a range that says something"


def test_a_longer_sequence_of_as_many_tokens_is_another_case() -> None:
    asked = Case(spec=replace(SPEC, micro_batch_size=1, sequence_length=4096), kind=H200)
    assert found_of(asked, case(SPEC, 0.1, gemm=0.1)).far == pytest.approx(2.0)


def test_rows_of_unknown_length_tell_nothing_and_are_told_nothing() -> None:
    """A step of theirs has as many tokens as its documents."""
    uneven = replace(SPEC, data="text", rows="padding_free", attention="flash_attention_2")
    assert Case(spec=uneven, kind=H200).work is None


def test_many_errors_of_another_model_count_as_one() -> None:
    """A model that many cases are stored of says of another one no more than a model of a single case does."""
    own, other = case(SPEC, 0.1, gemm=0.1), case(replace(SPEC, model="opt-1.3b"), 0.1, gemm=0.1)
    found = found_of(Case(spec=SPEC, kind=H200), own)
    same = [(own, found.far, 0.01 * number) for number in range(1, 20)]
    assert with_error(found, same).error == pytest.approx(0.18)
    assert with_error(found, [*same, *[(other, found.far, 0.9)] * 40]).error == pytest.approx(0.19)
    assert with_error(found, [*same[:8], *[(other, found.far, 0.9)] * 2]).error == pytest.approx(0.9)


@pytest.mark.simulated
def test_a_first_launch_on_a_gpu_without_baselines_is_in_its_range(found: Mapping[str, list[Told]]) -> None:
    first = [one for one in found["another kind of GPU"] if one.case.kind == H100]
    assert len(first) == 48
    assert sum(one.is_within for one in first) >= 0.9 * len(first), "as a range promises"
    assert max(one.found.error for one in first if one.found.far < 1) < 0.25, "a range that says something"


@pytest.mark.simulated
def test_what_is_less_alike_has_a_wider_range(found: Mapping[str, list[Told]]) -> None:
    widths = [summary(found[way])[3] for way in WAYS]
    assert float(widths[0][:-2]) < float(widths[1][:-2])


def test_each_kind_of_work_is_scaled_by_itself() -> None:
    one = case(SPEC, 0.1, gemm=0.06, adamw=0.04)
    parts = found_of(Case(spec=replace(SPEC, micro_batch_size=8), kind=H200), one).parts
    assert parts["matrix products"] == pytest.approx(0.12)
    assert parts["optimizer"] == pytest.approx(0.04)


def test_adapters_have_a_third_less_products_and_no_use_of_the_chip_for_those_they_leave_out() -> None:
    full, adapters = (Case(spec=replace(SPEC, lora=lora), kind=H200) for lora in (False, True))
    works = [each.work or {} for each in (full, adapters)]
    of_all, of_some = (work["matrix products"] - work["moved"] for work in works)
    assert of_some == pytest.approx(of_all * 2 / 3)
    uses = [found_of(each, case(each.spec, 0.1, gemm=0.1)).mfu or 0 for each in (full, adapters)]
    assert uses[1] == pytest.approx(uses[0] * 2 / 3, rel=0.03)


def test_an_optimizer_updates_what_is_trained_alone() -> None:
    adapters = replace(SPEC, lora=True, lora_rank=8)
    work = [
        (Case(spec=spec, kind=H200).work or {})["optimizer"] for spec in (adapters, replace(adapters, lora_rank=64))
    ]
    assert work == [5_636_096, 8 * 5_636_096]  # as PEFT counts them


def work_of(**changes: Any) -> Mapping[str, float]:
    return Case(spec=replace(SPEC, **changes), kind=H200).work or {}


def test_thin_products_take_the_time_of_their_bytes() -> None:
    """Adapters' by the layers that have some; each chunk of Liger's loss adds to a gradient that adapters have not."""
    full, few, every = (work_of(lora=True, lora_targets=each)["moved"] for each in ("all-linear", "q_proj", "v_proj"))
    assert full > few + every > 0 == work_of()["moved"]
    fused = work_of(liger=True)["moved"]
    assert fused == work_of(liger=True, micro_batch_size=8)["moved"] > 0
    assert work_of(liger=True, lora=True)["moved"] - full == pytest.approx(fused / 2)
    assert work_of(liger=True, liger_kernels="rms_norm", loss="chunked")["moved"] == 0


def test_fused_attention_of_short_sequences_moves_bytes_and_eager_writes_its_scores() -> None:
    def longer(**changes: Any) -> float:
        once, twice = (work_of(**changes, sequence_length=length)["attention"] for length in (1024, 2048))
        return twice / once

    assert longer(attention="eager") == 4
    assert 2 < longer() < longer(micro_batch_size=8) * 1.001 < 4


def test_activations_that_are_made_again_are_a_third_more_and_products_are_counted() -> None:
    once, again = work_of(), work_of(gradient_checkpointing=True)
    assert again["normalisation and activation"] == pytest.approx(once["normalisation and activation"] * 4 / 3)
    assert again["attention"] == pytest.approx(once["attention"] * 9 / 7)
    assert again["loss"] == once["loss"]


def test_dropout_of_adapters_and_casts_to_fp8_are_activations() -> None:
    adapters, dropped = (work_of(lora=True, lora_dropout=each) for each in (0.0, 0.1))
    assert dropped["normalisation and activation"] > adapters["normalisation and activation"]
    assert dropped["matrix products"] == adapters["matrix products"]
    fp8, halves = work_of(fp8="tensorwise"), work_of()
    assert fp8["normalisation and activation"] > halves["normalisation and activation"]
    assert 0.5 < fp8["matrix products"] / halves["matrix products"] < 1, "the vocabulary's stay as they are"


@pytest.mark.parametrize(
    "chosen", [{"fp8": "rowwise"}, {"sdpa_backend": "flash"}, {"loss": "chunked"}, {"attention": "eager"}]
)
def test_a_choice_that_no_case_has_is_told_by_none(chosen: Mapping[str, Any]) -> None:
    asked, stored = Case(spec=replace(SPEC, **chosen), kind=H200), filled([case(SPEC, 0.1, gemm=0.1)])
    assert estimated(asked, stored) is None
    assert estimated(asked, [*stored, replace(asked, step_seconds=0.1, scaled=stored[0].parts)]) is not None


def test_states_that_are_paged_to_the_host_are_counted_by_nobody() -> None:
    assert work_of(optimizer="paged_adamw_32bit") == {}


def test_fp16_tells_of_bf16_as_of_itself() -> None:
    mixed = [replace(SPEC, model_precision="fp32", mixed_precision=each) for each in ("fp16", "bf16")]
    half, other = (Case(spec=each, kind=H200) for each in mixed)
    assert set(half.far(other).values()) == {0.0}


def test_of_a_chip_by_rates_alone_fused_attention_is_products_and_written_scores_are_memory() -> None:
    for attention, slower in (("sdpa", 1.0), ("eager", 2.0)):
        spec = replace(SPEC, attention=attention)
        known = replace(case(spec, 0.1, gemm=0.06, softmax=0.04), rates=(8e14, 4e12))
        parts = found_of(Case(spec=spec, kind="new", rates=(8e14, 2e12)), known).parts
        assert parts["attention"] == pytest.approx(0.04 * slower)


def test_products_of_muons_update_are_work() -> None:
    """Five iterations of three products on each hidden matrix, as they are counted on fake tensors."""
    muon = replace(SPEC, optimizer="muon")
    works = [(Case(spec=spec, kind=H200).work or {})["matrix products"] for spec in (muon, SPEC)]
    assert works[0] - works[1] == update_flops(muon) > 0 == update_flops(SPEC)


def test_what_decides_a_kind_of_work_tells_most_of_it() -> None:
    eager = case(replace(SPEC, attention="eager", liger=True), 0.2, gemm=0.1, softmax=0.1)
    fused = case(replace(SPEC, optimizer="sgd"), 0.11, gemm=0.1, flash_fwd=0.01)
    parts = found_of(Case(spec=SPEC, kind=H200), eager, fused).parts
    assert parts["attention"] == pytest.approx(0.01, rel=0.1)


def test_another_kind_of_gpu_is_worth_what_common_cases_say_of_each_kind_of_work() -> None:
    other = replace(SPEC, micro_batch_size=8)
    here, there = case(other, 0.2, gemm=0.1, adamw=0.1), case(other, 0.25, H100, gemm=0.1, adamw=0.15)
    parts = found_of(Case(spec=SPEC, kind=H100), here, there, case(SPEC, 0.14, gemm=0.06, adamw=0.08)).parts
    assert parts["optimizer"] == pytest.approx(0.12 * 1.0, rel=0.3)
    assert parts["optimizer"] > 0.09


def test_without_a_common_case_the_chips_rates_make_a_range() -> None:
    known = replace(case(SPEC, 0.14, gemm=0.06, adamw=0.08), rates=(8e14, 4e12))
    asked = Case(spec=SPEC, kind="new", rates=(8e14, 2e12))
    found = found_of(asked, known)
    assert found.parts["matrix products"] == pytest.approx(0.06)
    assert found.parts["optimizer"] == pytest.approx(0.08 * math.sqrt(2))
    assert found.error == pytest.approx(math.log(2) / 2 * found.parts["optimizer"] / found.step_seconds)


@pytest.mark.parametrize(
    "asked",
    [
        Case(spec=SPEC, kind="some chip"),
        Case(spec=replace(SPEC, model="llama-tiny"), kind=H200),
        Case(spec=replace(SPEC, model="mixtral-tiny"), kind=H200),
    ],
    ids=["a chip that nobody knows", "a step far from all others", "a model whose arithmetic nobody counted"],
)
def test_of_what_nothing_is_known_nothing_is_said(asked: Case) -> None:
    assert expected(asked, filled([case(SPEC, 0.1, gemm=0.1)]), []) is None


def test_what_no_trace_tells_is_divided_as_others_are() -> None:
    bare = Case(spec=replace(SPEC, micro_batch_size=8), kind=H200, step_seconds=0.32)
    (_, one) = filled([case(SPEC, 0.1, gemm=0.06, adamw=0.04), bare])
    assert one.parts["matrix products"] == pytest.approx(0.32 * 0.12 / 0.16)


def test_a_slow_launch_is_told_where_it_loses(stored: list[Case], golden: Golden) -> None:
    """Asked for fused attention, trained with eager, and its host waited."""
    fused, eager = (
        next(one for one in stored if one.kind == H200 and one.spec.id == f"llama-3.2-1b-bf16-{how}-mbs7-gpus1")
        for how in ("sdpa", "eager")
    )
    found = estimated(fused, [one for one in filled(stored) if one is not fused])
    launch = newest_launch(eager.spec, H200, BASELINES)
    assert found is not None
    assert launch is not None
    golden(standing(found, launch))
    trace = replace(launch.trace, step_seconds=2 * launch.trace.step_seconds)
    ranks = tuple(replace(one, step_seconds=tuple(2 * each for each in one.step_seconds)) for one in launch.ranks)
    golden(standing(found, replace(launch, trace=trace, ranks=ranks)))
    golden(standing(found, replace(launch, trace=Trace(none=OLDER))))


def test_what_is_within_the_range_is_plausible(golden: Golden) -> None:
    one = case(SPEC, 0.1, gemm=0.1)
    found = replace(found_of(Case(spec=SPEC, kind=H200), one), error=0.02)
    launch = launch_of(SPEC, Fake(step_seconds=0.101))
    golden(standing(found, launch))
    golden(standing(found, launch_of(SPEC, Fake(step_seconds=0.05))))


def test_rates_of_a_chip_are_those_of_its_launches() -> None:
    launch = replace(launch_of(SPEC), canary={"matmul_flops": 8e14, "copy_bytes_per_second": 4e12})
    assert rates_of([launch, launch_of(SPEC)]) == (8e14, 4e12)
    assert rates_of([launch_of(SPEC)]) is None


def test_adapters_are_told_by_adapters_alone() -> None:
    asked, stored = Case(spec=replace(SPEC, lora=True), kind=H200), filled([case(SPEC, 0.1, gemm=0.1)])
    assert expected(asked, stored, []) is None
    assert expected(replace(asked, spec=replace(SPEC, seed=7)), stored, []) is not None
