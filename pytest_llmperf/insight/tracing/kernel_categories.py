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
        (COMMUNICATION, r"nccl|gloo|all_?reduce|all_?gather|reduce_?scatter|c10d::"),
        (LOSS, r"cross_entropy|nll_loss|log_?softmax|element_mul_kernel"),
        (ATTENTION, r"sdpa|fmha|flash(?!infer)|attention|softmax|flex|dot_do_o|convert_dq"),
        (
            OPTIMIZER,
            r"multi_tensor|foreach|adam|lerp|addcdiv|addcmul|lpnorm|optimizer|sgd_|clip_grad|linalg_vector_norm",
        ),
        (MATRIX, r"gemm|nvjet|xmma|cutlass|cublas|splitk|gemv|::mm|addmm|::bmm|baddbmm|matmul|_scaled_mm|grouped_mm"),
        (NORM, r"norm|swiglu|geglu|gelu|silu|relu|sigmoid|tanh|rope|rotary|rsqrt|dropout"),
        (COPIES, r"copy|memcpy|memset|cat_?array|::cat|::contiguous|::clone|::to$|fill|zero_"),
    )
)


@cache
def category(kind: str, name: str) -> str:
    """Of a row of a trace that keeps the device busy."""
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    return next((found for found, pattern in _RULES if pattern.search(name)), ELEMENTWISE)
