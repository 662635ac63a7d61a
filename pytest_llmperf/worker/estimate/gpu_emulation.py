"""What CUDA does otherwise than a CPU, put in its place: so that a step on fake tensors keeps what a GPU's would."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from pytest_llmperf.worker.estimate.arithmetic import replaced

# What CUDA's autocast runs in fp32 (torch/include/ATen/autocast_mode.h), which the CPU's mostly does not. A power in
# the middle of an activation, as in GPT-2's, so makes fp32 of all that follows it.
IN_FP32 = """
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cross_entropy
    dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log
    log10 log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    native_layer_norm nll_loss norm nuclear_norm pdist poisson_nll_loss pow __pow__ reciprocal renorm rms_norm
    __rpow__ rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus tan triplet_margin_loss
"""
# The same, unless they are told a type; their inputs are not converted first.
SUMMED_IN_FP32 = "cumprod cumsum prod sum"


def _named(names: str) -> frozenset[Any]:
    """The functions of these names, in each place that they can be called from."""
    places = (torch, torch.Tensor, functional)
    return frozenset(getattr(place, name) for place in places for name in names.split() if hasattr(place, name))


_FP32, _SUMMED = _named(IN_FP32), _named(SUMMED_IN_FP32)


# Where attention's mask stands that is not named.
_MASK_POSITION = 3

# Questions for a tensor's content, for which a host waits, and the operators that ask them.
_WAITS = {torch.Tensor.item: "aten::item", torch.Tensor.__bool__: "aten::is_nonzero"}


class GpuFunctions(TorchFunctionMode):
    """Functions that keep other tensors on CUDA than on a CPU, under ``autocast``.

    ``fused``: whether attention is one kernel that keeps no matrix of scores. ``called`` is told by name of what is
    answered here, and would be an operator of the device.
    """

    def __init__(
        self,
        autocast: torch.dtype | None,
        vocabulary_size: int,
        *,
        fused: bool = True,
        called: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._autocast, self._vocabulary_size, self._fused = autocast, vocabulary_size, fused
        self._called = called

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        answer = _answer(function, args)
        if answer is not None:
            if function in _WAITS:
                self._called(_WAITS[function])
            return answer
        if function is torch.mm and "out" not in kwargs and args[0].shape[0] == self._vocabulary_size:
            return args[0].new_zeros(())  # on CUDA Liger adds this product to the weights' gradient in place
        if function is functional.dropout:
            return self._dropout(*args, **kwargs)
        if self._autocast is not None and function in _FP32:
            args, kwargs = (
                tree_map_only(torch.Tensor, lambda tensor: tensor.float() if _is_halved(tensor) else tensor, each)
                for each in (args, kwargs)
            )
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)
        if self._autocast is not None and function in _SUMMED and _is_halved(args[0]):
            kwargs = {"dtype": torch.float32, **kwargs}
        return function(*args, **kwargs)

    def _attention(
        self,
        *tensors: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention by one kernel, or by PyTorch's plain functions, which are the same on every device."""
        to = self._autocast
        query, key, value = (tensor if to is None else tensor.to(to) for tensor in tensors[:3])
        mask = tensors[3] if len(tensors) > _MASK_POSITION else attn_mask
        with torch.autocast("cpu", enabled=False):
            if self._fused:
                return _fused_attention(query, key, value, mask)
            return torch.ops.aten._scaled_dot_product_attention_math(  # noqa: SLF001 - the kernel has no other name
                query, key, value, mask, dropout_p=dropout_p, **kwargs
            )[0]

    @staticmethod
    def _dropout(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        del inplace
        return _Dropout.apply(tensor) if training and p > 0 else tensor


def _answer(function: Any, args: Any) -> float | None:
    """What a model asks of a tensor's content, which a fake one does not have; ``None`` where it asks nothing."""
    if function is torch.Tensor.item:
        return int(args[0].numel())  # Liger counts the labels that are not ignored
    if function is torch.Tensor.__bool__:
        return True  # whether a mask lets all through: nothing is padded
    if function is torch.rand and args and args[0] in ([], ()):
        return 1.0  # drawn by layerdrop, which leaves out a layer where it is small: none is
    return None


def _is_halved(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Keeps inputs, output and one fp32 number a row (Dao et al. 2022), and no matrix of scores.

    A mask is kept too, and where it says yes and no (a sliding window's does) each call makes numbers of it, in the
    queries' type and for each sequence of the batch. The CPU's kernel keeps just these, and takes fake tensors of any
    shape. It is a real operator, so that selective recomputation finds it among those that it keeps.
    """
    if mask is not None:
        blocked, open_ = query.new_full((), -math.inf), query.new_zeros(())
        mask = torch.where(mask.logical_not(), blocked, open_) if mask.dtype == torch.bool else mask.to(query.dtype)
    aten = torch.ops.aten
    if query.shape[-1] != value.shape[-1]:  # of another size in latent attention, which this kernel alone takes
        return aten._scaled_dot_product_efficient_attention(query, key, value, mask, compute_log_sumexp=True)[0]  # noqa: SLF001
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask)[0]  # noqa: SLF001


class _Dropout(torch.autograd.Function):
    """Keeps a mask of one byte an element."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(tensor, dtype=torch.bool))
        return torch.empty_like(tensor)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(gradients[0])


@contextmanager
def as_on_gpu(*, liger: bool, masks: bool = True, called: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Let transformers take fake tensors as it does real ones, and Liger's kernels be launched by nobody.

    ``masks``: whether what SDPA cannot say otherwise, as a sliding window, becomes one. Other kernels are told of it.
    ``called`` is told of each launch of a kernel of Liger's by its name.
    """
    # transformers takes fake tensors for tracing, and would build a mask that training does not.
    answers: dict[str, object] = {"is_tracing": False, "find_packed_sequence_indices": None}
    if not masks:
        answers["_ignore_causal_mask_sdpa"] = True
    functions = {
        name: lambda *_, answer=answer, **__: answer for name, answer in answers.items() if hasattr(masking_utils, name)
    }
    with ExitStack() as stack:
        stack.enter_context(replaced(masking_utils, **functions))
        if liger:
            _quiet_kernels(stack, called)
        yield


class _NoKernel:
    """Stands where a Triton kernel does: it is launched, and does nothing."""

    def __init__(self, name: str, called: Callable[[str], None]) -> None:
        self._name, self._called = f"liger::{name}", called

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_, **__: self._called(self._name)


def _quiet_kernels(stack: ExitStack, called: Callable[[str], None]) -> None:
    """Liger's functions with their own allocations, and none of their kernels."""
    from liger_kernel import ops  # noqa: PLC0415 - only where Liger is asked for
    from triton.runtime import KernelInterface  # noqa: PLC0415 - comes with Liger

    for info in pkgutil.iter_modules(ops.__path__):
        module = importlib.import_module(f"{ops.__name__}.{info.name}")
        kernels = [name for name, value in vars(module).items() if isinstance(value, KernelInterface)]
        stack.enter_context(replaced(module, **{name: _NoKernel(name, called) for name in kernels}))
    # It also asks whether the loss's gradient is 1, in a backward pass, where no mode listens.
    stack.enter_context(replaced(torch, equal=lambda *_: True))
