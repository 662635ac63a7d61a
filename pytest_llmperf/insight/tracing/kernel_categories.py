"""Categories of kernels: which part of a training step a name belongs to.

By the names that cuBLAS (``nvjet``, ``gemm``, ``xmma``), cuDNN, CUTLASS, FlashAttention, NCCL, Liger, ATen, inductor
and CUPTI give, seen in traces of an H200; a name that nobody knows is elementwise, where nearly all of those belong.
"""

from __future__ import annotations

import re
from functools import cache

MATRIX, ATTENTION, NORM = "matrix products", "attention", "normalisation and activation"
LOSS, OPTIMIZER, COMMUNICATION = "loss", "optimizer", "communication"
COPIES, ELEMENTWISE = "copies and casts", "elementwise and others"

#: In the order in which they are shown.
CATEGORIES = (MATRIX, ATTENTION, NORM, LOSS, OPTIMIZER, COMMUNICATION, COPIES, ELEMENTWISE)

_BY_KIND = {"collective": COMMUNICATION, "copy": COPIES, "fill": COPIES}

# The first that fits: a fused kernel's name lists all that it does, a loss's softmax is no attention.
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        (COMMUNICATION, r"nccl|gloo|nvshmem|symm_mem|all_?reduce|all_?gather|reduce_?scatter|c10d::"),
        # The flag of a warp's softmax says whether its logarithm is taken.
        (LOSS, r"cross_?entropy|nll_?loss|log_?softmax|softmax_warp_\w+<[^<>]*\d, true|element_mul_kernel|kl_?div|jsd"),
        (ATTENTION, r"sdpa|fmha|flash(?!infer)|attention|_attn|attn_|softmax|flex|dot_do_o|convert_dq"),
        # The norm of two and the plain root are those of the gradients and of Adam's denominator.
        (
            OPTIMIZER,
            (
                r"multi_tensor|foreach|adam|lerp|addcdiv|addcmul|lpnorm|optimizer|sgd_|clip_grad|linalg_vector_norm"
                r"|Norm(One|Two|Inf)?Ops|(?<!r)sqrt(_kernel|_?$)"
            ),
        ),
        (
            MATRIX,
            (
                r"gemm|nvjet|xmma|cutlass|cublas|splitk|gemv|::mm$|::bmm|addmm|addbmm|baddbmm|::_?(int_)?mm\b|matmul|linear$"
                r"|scaled_mm|grouped_mm|triton_(tem|mm|bmm)_|MmBackward|LinearBackward"
            ),
        ),
        (
            NORM,
            (
                r"norm|swiglu|geglu|gelu|silu|relu|sigmoid|tanh|(?<!p)rope|rotary|rsqrt|dropout|threshold_kernel"
                r"|GammaBeta|cuCompute(Part)?Grad|RowwiseMoments"
            ),
        ),
        (
            COPIES,
            r"copy|memcpy|memset|cat_?array|chunk_cat|::cat|::contiguous|::clone|::to$|fill|zero_|quantiz|cast_|_cast",
        ),
    )
)

# Inductor's pointwise kernels and reductions are named after all that was fused into them: a product in such a name
# stood beside it, and a copy is one only where it does nothing else.
_COMPILED = re.compile(r"triton_(poi|red|per|for)_fused_")
_MOVED = "to_copy|copy|clone|unsafe_view|view|transpose|permute|expand|unsqueeze|squeeze|slice|select|split|cat|stack|t"
_COMPILED_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (category, re.compile(pattern))
    for category, pattern in (
        (LOSS, r"log_softmax|nll_loss|cross_entropy|softmax_online"),
        (ATTENTION, r"attention|sdpa|softmax|flex"),
        (OPTIMIZER, r"foreach|adam|lerp|addcdiv|addcmul"),
        # A mean of squares is a norm's, also without its root; what is negated, cut and joined is turned by a rope.
        (
            NORM,
            (
                r"norm|gelu|silu|relu|threshold|sigmoid|tanh|rsqrt|dropout|pow_sum|mean_(mul_)?pow|sum_(mul_)?pow"
                r"|(?=.*_neg)(?=.*_mul)(?=.*_(slice|cat|split))"
            ),
        ),
        (COPIES, rf"fused(_+({_MOVED}))+_\d+$"),
    )
)


@cache
def category(kind: str, name: str) -> str:
    """Of a row of a trace that keeps the device busy."""
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    rules = _COMPILED_RULES if _COMPILED.match(name) else _RULES
    return next((found for found, pattern in rules if pattern.search(name)), ELEMENTWISE)
