"""Of what the difference between two steps consists, and how it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.analysis.likely_causes import (
    ATTENTION,
    CATEGORIES,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    LOSS,
    MATRIX,
    NORM,
    OPTIMIZER,
    category,
)
from pytest_llmperf.analysis.step_difference import overlap_lost, parts_of, points_to, short_kernel, step_difference
from pytest_llmperf.records.trace import Trace, TraceRow
from tests.fakes import trace_of
from tests.golden import Golden

# Names as profilers of an H200 and of a CPU give them.
NAMES = [
    ("kernel", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", MATRIX),
    ("kernel", "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", MATRIX),
    ("kernel", "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize32x32x8", MATRIX),
    ("operator", "aten::addmm", MATRIX),
    ("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", ATTENTION),
    ("kernel", "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", ATTENTION),
    ("kernel", "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float>", ATTENTION),
    ("operator", "aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
    ("kernel", "_rms_norm_backward_kernel", NORM),
    ("kernel", "_swiglu_forward_kernel", NORM),
    ("kernel", "_triton_rope", NORM),
    ("kernel", "liger_cross_entropy_kernel", LOSS),
    ("kernel", "void at::native::(anonymous namespace)::cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>", LOSS),
    ("kernel", "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d", LOSS),
    ("kernel", "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LerpFunctor>", OPTIMIZER),
    ("operator", "aten::_foreach_addcdiv_", OPTIMIZER),
    ("collective", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", COMMUNICATION),
    ("copy", "Memcpy HtoD (Pinned -> Device)", COPIES),
    ("fill", "Memset (Device)", COPIES),
    ("kernel", "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", COPIES),
    ("kernel", "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add<c10::BFloat16>>", ELEMENTWISE),
    ("kernel", "a_kernel_of_tomorrow", ELEMENTWISE),
    # A norm of the gradients, Adam's denominator, and kernels that fuse nothing else than their names say.
    ("kernel", "void at::native::reduce_kernel<512, 1, ReduceOp<c10::BFloat16, NormTwoOps<c10::BFloat16>>>", OPTIMIZER),
    ("kernel", "void at::native::vectorized_elementwise_kernel<8, at::native::sqrt_kernel_cuda(lambda)>", OPTIMIZER),
    ("kernel", "void at::native::vectorized_elementwise_kernel<4, at::native::rsqrt_kernel_cuda(lambda)>", NORM),
    ("kernel", "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>", OPTIMIZER),
    ("kernel", "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", NORM),
    ("kernel", "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16>", NORM),
    ("kernel", "void at::native::vectorized_elementwise_kernel<4, threshold_kernel_impl<c10::BFloat16>>", NORM),
    ("kernel", "_layer_norm_backward_kernel", NORM),
    ("kernel", "_geglu_tanh_forward_kernel", NORM),
    ("kernel", "element_mul_kernel", LOSS),
    ("kernel", "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, true, false>", LOSS),
    ("kernel", "void (anonymous namespace)::softmax_warp_backward<float, c10::BFloat16, float, 10, false>", ATTENTION),
    ("kernel", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", ATTENTION),
    ("kernel", "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", ATTENTION),
    ("kernel", "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>", ATTENTION),
    ("kernel", "_attn_fwd", ATTENTION),
    ("kernel", "triton_tem_fused_flex_attention_2", ATTENTION),
    ("kernel", "triton_tem_fused_mm_3", MATRIX),
    ("kernel", "triton_tem_fused__scaled_mm_0", MATRIX),
    ("kernel", "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm>>", MATRIX),
    ("kernel", "triton_poi_fused_addmm_relu_1", NORM),
    ("kernel", "triton_poi_fused_addmm_view_4", ELEMENTWISE),
    ("kernel", "triton_per_fused__to_copy__unsafe_view_add_div_expand_mul_pow_sum_view_4", NORM),
    ("kernel", "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", NORM),
    ("kernel", "triton_poi_fused__unsafe_view_add_cat_mul_neg_slice_transpose_unsqueeze_view_1", NORM),
    ("kernel", "triton_poi_fused__to_copy_view_5", COPIES),
    ("kernel", "triton_poi_fused__to_copy_add_mul_5", ELEMENTWISE),
    ("kernel", "triton_red_fused__log_softmax__to_copy_nll_loss_forward_7", LOSS),
    ("kernel", "triton_poi_fused_native_dropout_0", NORM),
    ("kernel", "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<c10::BFloat16>", NORM),
    ("kernel", "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>", COPIES),
    ("kernel", "void kQuantizeBlockwise<float, 256, 2, 0, 0>(float*)", COPIES),
    ("kernel", "void transformer_engine::cast_transpose_general_kernel<8, 16, float>", COPIES),
    ("kernel", "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>", ELEMENTWISE),
    ("operator", "aten::mm", MATRIX),
    ("operator", "aten::linear", MATRIX),
    ("operator", "autograd::engine::evaluate_function: MmBackward0", MATRIX),
    ("operator", "autograd::engine::evaluate_function: NllLossBackward0", LOSS),
    ("operator", "aten::mul", ELEMENTWISE),
    ("operator", "aten::softmax", ATTENTION),
]


@pytest.mark.parametrize(("kind", "name", "expected"), NAMES)
def test_a_name_is_of_the_part_that_it_serves(kind: str, name: str, expected: str) -> None:
    assert category(kind, name) == expected


COUNTS = st.dictionaries(st.sampled_from([name for kind, name, _ in NAMES if kind == "kernel"]), st.integers(1, 300))


@given(COUNTS, COUNTS, st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 0.01))
def test_parts_add_up_to_the_step_and_their_changes_to_its_change(
    then: dict[str, int], now: dict[str, int], idle: float, more_idle: float, data: float
) -> None:
    before, after = (
        replace(made, step_seconds=made.busy_seconds + waits + data, data_seconds=data)
        for made, waits in ((trace_of({"kernel": then}), idle), (trace_of({"kernel": now}), more_idle))
    )
    assert sum(parts_of(before).values()) == pytest.approx(before.step_seconds)
    difference = step_difference(before, after)
    assert difference.unexplained == pytest.approx(0, abs=1e-9)
    assert sum(part.change for part in difference.parts) == pytest.approx(difference.change)
    moved = {change.name: change.count for part in difference.parts for change in part.names}
    assert moved == {
        name: now.get(name, 0) - then.get(name, 0) for name in {*then, *now} if now.get(name, 0) != then.get(name, 0)
    }
    assert difference.is_the_same_work == (then == now)
    assert points_to(difference).isascii()


def test_the_next_batch_and_the_host_are_waited_for_apart(golden: Golden) -> None:
    before = replace(trace_of({"kernel": {"gemm": 100}}), step_seconds=0.1)
    after = replace(before, step_seconds=0.16, data_seconds=0.04)
    golden(points_to(step_difference(before, after)))


def test_on_a_cpu_the_same_work_is_said_without_its_times_unless_it_waits_for_data(golden: Golden) -> None:
    before = replace(trace_of({"operator": {"aten::mm": 100}}), step_seconds=0.1)
    after = replace(before, step_seconds=0.16)
    same = "a traced step runs the same kernels, copies and waits; a CPU's times are noise"
    assert points_to(step_difference(before, after)) == same
    assert points_to(step_difference(before, after), of_speed=False) == same.partition(";")[0]
    waits = points_to(step_difference(before, replace(after, data_seconds=0.05)))
    golden(waits)
    more = replace(trace_of({"operator": {"aten::mm": 102}}), step_seconds=0.3)
    counted = points_to(step_difference(before, more))
    assert "aten::mm +2" in counted
    assert " ms" not in waits + counted


def test_what_is_waited_for_data_stands_first_only_where_it_is_what_a_change_is_about(golden: Golden) -> None:
    before = replace(trace_of({"kernel": {"gemm": 100}}), step_seconds=0.1)
    beside = points_to(step_difference(before, replace(before, step_seconds=0.16, data_seconds=0.02)))
    golden(beside)
    less = points_to(step_difference(replace(before, step_seconds=0.16, data_seconds=0.06), before))
    golden(less)


def test_an_exchange_counts_as_far_as_nothing_else_ran_beside_it(golden: Golden) -> None:
    trace = replace(
        trace_of({"kernel": {"gemm": 100}, "collective": {"nccl": 50}}), busy_seconds=0.11, step_seconds=0.11
    )
    hidden = replace(trace, exposed_seconds=0.01)
    assert parts_of(hidden)[COMMUNICATION] == 0.01
    slower = replace(trace, exposed_seconds=0.05, busy_seconds=0.15, step_seconds=0.15)
    golden(points_to(step_difference(hidden, slower)))


def overlapped(exposed: float, collective: float = 0.05) -> Trace:
    """A step of 100 ms of products and of exchanges, of which so much shows."""
    rows = [TraceRow("kernel", "gemm", 100.0, 0.1), TraceRow("collective", "nccl", 27.0, collective)]
    return Trace(
        rows=tuple(rows), steps=3, step_seconds=0.1 + exposed, busy_seconds=0.1 + exposed, exposed_seconds=exposed
    )


def test_overlap_that_is_lost_is_told_though_every_count_is_the_same(golden: Golden) -> None:
    golden(points_to(step_difference(overlapped(0.002), overlapped(0.017))))
    assert overlap_lost(overlapped(0.002), overlapped(0.017)) != ""


@pytest.mark.parametrize(
    "after",
    [overlapped(0.002), overlapped(0.004), overlapped(0.042, 0.09), replace(overlapped(0.017), rows=())],
    ids=["the same", "a little", "as much is hidden, and more takes longer", "nothing exchanges"],
)
def test_what_is_hidden_as_before_is_no_lost_overlap(after: Trace) -> None:
    assert overlap_lost(overlapped(0.002), after) == ""


def test_a_kernel_that_exchanges_is_a_part_of_the_step_too() -> None:
    trace = trace_of({"kernel": {"nvjet": 100, "one_shot_all_reduce_kernel": 20}})
    assert parts_of(trace)[COMMUNICATION] == pytest.approx(0.02)
    assert sum(parts_of(trace).values()) == pytest.approx(trace.step_seconds)


def test_what_went_and_what_came_is_named_before_what_took_longer(golden: Golden) -> None:
    rows = [TraceRow("kernel", "nvjet_gemm", 100.0, 0.1), TraceRow("kernel", "_rms_norm_backward_kernel", 33.0, 0.004)]
    before = Trace(rows=tuple(rows), steps=3, step_seconds=0.104, busy_seconds=0.104)
    name = (
        "void at::native::elementwise_kernel<2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float>>>"
    )
    rows = [TraceRow("kernel", "nvjet_gemm", 100.0, 0.12), TraceRow("kernel", name, 66.0, 0.034)]
    after = Trace(rows=tuple(rows), steps=3, step_seconds=0.154, busy_seconds=0.154)
    golden(points_to(step_difference(before, after)))


@given(st.text(min_size=1))
def test_a_kernel_is_short_in_a_line(name: str) -> None:
    assert len(short_kernel(name)) <= 44


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::elementwise_kernel<128, gpu_kernel_impl_nocast<BinaryFunctor<float, MulFunctor<float>>>",
            "elementwise_kernel<MulFunctor>",
        ),
        (
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>::Params)",
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, float>", "softmax_warp_forward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "cudnn_sdpa_sm90_flash_fprop_wgmma"),
        ("", "(unnamed)"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pinned)"),
        ("(", "("),
        ("noyau_\u00e9", "noyau_\\xe9"),
    ],
)
def test_a_short_name_says_what_is_done_in_ascii(name: str, short: str) -> None:
    assert short_kernel(name) == short


def test_every_category_is_shown() -> None:
    assert {expected for _, _, expected in NAMES} == set(CATEGORIES)
