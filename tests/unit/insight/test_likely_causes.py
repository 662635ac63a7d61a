"""What a change of counts is known to come from: a step like Llama's, and the same with one thing done otherwise."""

from __future__ import annotations

import pytest

from pytest_llmperf.analysis.likely_causes import likely_causes
from pytest_llmperf.analysis.step_difference import points_to, step_difference
from tests.fakes import trace_of
from tests.golden import Golden

Names = dict[str, float]

PRODUCTS: Names = {"nvjet_sm90_tst_128x256_64x4_NTN": 113, "nvjet_sm90_tst_256x128_64x4_TNT": 226}
TF32: Names = {"sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32": 339}
PLAIN: Names = {"sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8": 300, "void cutlass_80_simt_sgemm_128x32": 39}
CUDNN: Names = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": 16,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": 16,
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>": 16,
}
FLASH: Names = {
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>": 16,
    "void flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>": 16,
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>": 16,
}
MEMORY_EFFICIENT: Names = {
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": 16,
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)": 16,
}
EAGER: Names = {
    "nvjet_sm90_tst_192x192_64x4_NNN": 96,
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>": 16,
    "void (anonymous namespace)::softmax_warp_backward<float, float, float, 10, false, false>": 16,
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<MulFunctor>>": 32,
}
LIGER_NORM: Names = {"_rms_norm_forward_kernel": 33, "_rms_norm_backward_kernel": 33}
LIGER_REST: Names = {
    "_swiglu_forward_kernel": 16,
    "_swiglu_backward_kernel": 16,
    "_triton_rope": 32,
    "liger_cross_entropy_kernel": 56,
    "element_mul_kernel": 2,
}
FOREACH: Names = {
    "void at::native::multi_tensor_apply_kernel<ScalarListMetadata<float, 3>, PointwiseOpScalarListFunctor>": 60,
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor>": 60,
}
SINGLE: Names = {
    "void at::native::vectorized_elementwise_kernel<8, at::native::addcdiv_cuda_kernel>": 146,
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor>": 60,
}
FUSED: Names = {"void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>": 60}
UNFUSED: Names = {"void at::native::elementwise_kernel<128, 2, BinaryFunctor<MulFunctor<float>>>": 66}
WHOLE: Names = {**PRODUCTS, **CUDNN, **LIGER_NORM, **LIGER_REST, **FOREACH}


def without(*gone: Names, **_: Names) -> Names:
    return {name: count for name, count in WHOLE.items() if not any(name in names for names in gone)}


def causes(before: Names, after: Names) -> tuple[str, ...]:
    return likely_causes(trace_of({"kernel": before}), trace_of({"kernel": after}))


def times(names: Names, factor: float) -> Names:
    return {name: factor * count for name, count in names.items()}


COMPILED: Names = {**WHOLE, "triton_poi_fused_mul_silu_0": 16, "triton_red_fused_add_mean_pow_rsqrt_1": 16}
BROKEN: Names = {
    **WHOLE,
    "triton_poi_fused_mul_silu_0": 16,
    "triton_red_fused_add_mean_pow_0": 16,
    "triton_poi_fused_rsqrt_1": 16,
}
CAST = "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>"
CASTING = {**WHOLE, CAST: 35.0}
MICRO_BATCHES = {**times(WHOLE, 2), **FOREACH}
RECOMPUTED: Names = {
    **WHOLE,
    "nvjet_sm90_tst_128x256_64x4_NTN": 225,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": 32,
    "_rms_norm_forward_kernel": 65,
    "_swiglu_forward_kernel": 32,
}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (WHOLE, WHOLE, ()),
        (WHOLE, {**without(CUDNN), **EAGER}, ("attention is eager: products, a softmax, casts (was cuDNN)",)),
        ({**without(CUDNN), **EAGER}, WHOLE, ("attention by cuDNN kernels (was eager)",)),
        (WHOLE, {**without(CUDNN), **FLASH}, ("attention by FlashAttention kernels (was cuDNN)",)),
        (WHOLE, {**without(CUDNN), **MEMORY_EFFICIENT}, ("attention by memory-efficient kernels (was cuDNN)",)),
        (WHOLE, {**without(LIGER_NORM), **UNFUSED}, ("fused kernels gone: _rms_norm_* 66",)),
        (
            WHOLE,
            {**without(LIGER_NORM, LIGER_REST), **UNFUSED},
            ("fused kernels gone: _rms_norm_* 66, liger_cross_entropy_* 56, _swiglu_* 32, _triton_rope 32 and 1 more",),
        ),
        (
            {**without(PRODUCTS), **TF32},
            {**without(PRODUCTS), **PLAIN},
            ("matrix products in plain fp32, without tensor cores (TF32, autocast)",),
        ),
        (
            {**without(PRODUCTS), **PLAIN},
            {**without(PRODUCTS), **TF32},
            ("matrix products on tensor cores, that were plain fp32 (TF32, autocast)",),
        ),
        (WHOLE, {**without(FOREACH), **SINGLE}, ("the optimizer's step is one tensor at a time (was foreach)",)),
        (WHOLE, {**without(FOREACH), **FUSED}, ("the optimizer's step is fused (was foreach)",)),
        (WHOLE, MICRO_BATCHES, ("every kernel of forward and backward twice (micro-batches of a step)",)),
        (
            MICRO_BATCHES,
            WHOLE,
            ("every kernel of forward and backward once instead of twice (micro-batches of a step)",),
        ),
        (WHOLE, times(WHOLE, 3), ("every kernel 3 times",)),
        (COMPILED, WHOLE, ("no layer is compiled, as 32 kernels of a step were",)),
        (WHOLE, COMPILED, ("32 kernels of a step are compiled, none was",)),
        (COMPILED, BROKEN, ("other graphs are compiled: 16 of inductor's kernels gone, 32 new",)),
        (CASTING, {**CASTING, CAST: 147}, ("casts and copies +112 alone (dtypes, autocast's cache)",)),
        (CASTING, {**CASTING, CAST: 147, "nvjet_sm90_tst_192x192": 1}, ()),
        (
            WHOLE,
            RECOMPUTED,
            ("forward kernels once more: activations are recomputed (gradient checkpointing) or a model runs twice",),
        ),
        (
            RECOMPUTED,
            WHOLE,
            ("forward kernels less often: activations are not recomputed as they were (gradient checkpointing)",),
        ),
        (
            {},
            WHOLE,
            ("fused kernels new: _rms_norm_* 66, liger_cross_entropy_* 56, _swiglu_* 32, _triton_rope 32 and 1 more",),
        ),
    ],
)
def test_a_step_that_is_done_otherwise_says_how(before: Names, after: Names, said: tuple[str, ...]) -> None:
    assert causes(before, after) == said


def test_operators_of_a_cpu_say_it_too(golden: Golden) -> None:
    fused = {"aten::addmm": 40.0, "aten::_scaled_dot_product_flash_attention_for_cpu": 2, "aten::_foreach_addcdiv_": 1}
    # Where there is no kernel for lists, its operator calls those of single tensors.
    slow = {**fused, "aten::addcdiv_": 20}
    eager = {"aten::addmm": 40, "aten::bmm": 8, "aten::_softmax": 2, "aten::addcdiv_": 20}
    assert likely_causes(trace_of({"operator": fused}), trace_of({"operator": slow})) == ()
    golden(likely_causes(trace_of({"operator": slow}), trace_of({"operator": eager})))


def test_operators_of_a_cpu_are_recomputed_as_kernels_are(golden: Golden) -> None:
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    once = {"aten::mm": 45.0, attention: 2, f"{attention}_backward": 2, "aten::silu": 2, "aten::silu_backward": 2}
    again = {**once, "aten::mm": 59, attention: 4, "aten::silu": 4}
    said = ("forward kernels once more: activations are recomputed (gradient checkpointing) or a model runs twice",)
    assert likely_causes(trace_of({"operator": once}), trace_of({"operator": again})) == said
    # Of eight layers one, which is not what checkpointing does: its own words would mislead.
    deep = {"aten::mm": 100.0, attention: 8, f"{attention}_backward": 8}
    golden(likely_causes(trace_of({"operator": deep}), trace_of({"operator": {**deep, "aten::mm": 104, attention: 9}})))
    # Another layer is computed backwards as well.
    deeper = {**again, f"{attention}_backward": 4, "aten::silu_backward": 4}
    assert likely_causes(trace_of({"operator": once}), trace_of({"operator": deeper})) == ()


def test_an_allocator_at_its_limit_is_told_and_one_that_asks_now_and_then_is_not(golden: Golden) -> None:
    before = trace_of({"kernel": WHOLE, "allocation": {"cudaMalloc": 0.333333}})
    assert likely_causes(before, trace_of({"kernel": WHOLE})) == ()
    seldom = trace_of({"kernel": WHOLE, "allocation": {"cudaMalloc": 0.666667, "cudaFree": 0.333333}})
    assert likely_causes(before, seldom) == ()
    often = trace_of({"kernel": WHOLE, "allocation": {"cudaMalloc": 3.333333, "cudaFree": 4}})
    golden(points_to(step_difference(before, often)))
