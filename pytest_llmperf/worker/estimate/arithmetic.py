"""Arithmetic of a training step, counted where its operators run, on fake tensors as on real ones.

FLOPs are counted as the PaLM paper does (Chowdhery et al. 2022, appendix B), by operator instead of by formula:

- Products of matrices alone count, at 2 FLOPs for a multiplication and its addition. A batched product over an inner
  size of 1 (rotary embedding's angles) adds nothing up, and is elementwise.
- Attention is its two products over the full square of scores; no mask takes anything off.
- The backward pass of an operator is two products for each of its forward pass. The scores that fused attention
  computes again are none of the model's: whichever kernel runs, the number is the same.

A layer that checkpointing computes again is counted twice: a count is of the step that ran."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from inspect import getattr_static
from math import prod
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, masking_utils

from pytest_llmperf.support.files import shipped
from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.settings.attention import attentions_of

# What each operator computes, by its arguments.

_Arguments = Mapping[str, Any]

# What an operator returned, beside its arguments.
ANSWER = " answer"


def _matrices(given: _Arguments, first: str, second: str) -> int:
    """Of two matrices, or of a matrix and a vector."""
    return 2 * int(given[first].numel()) * prod(given[second].shape[1:])


def _batched(given: _Arguments, first: str, second: str) -> int:
    _, inner, columns = given[second].shape
    return 2 * int(given[first].numel()) * int(columns) if inner > 1 else 0


def _grouped(given: _Arguments, first: str, second: str) -> int:
    """As if with one matrix, since every row is in one group; two flat ones share what is summed over."""
    one, other = given[first], given[second]
    groups_of_columns = int(one.shape[0]) if one.dim() > other.dim() else 1
    return 2 * int(one.numel()) * int(other.shape[-1]) // groups_of_columns


def _convolved(given: _Arguments, place: str = ANSWER) -> int:
    places = given["input"] if given.get("transposed") else given[place]
    return 2 * int(places.numel()) * prod(given["weight"].shape[1:]) * sum(given.get("output_mask", (1,))[:2])


def _attention(given: _Arguments, sequence: int, products: int) -> int:
    """So often attention's two products; ``sequence``: the dimension that a sequence's tokens are in."""
    query, key, value = (_known(given, names) for names in (("query", "q"), ("key", "k"), ("value", "v")))
    sizes = int(query.shape[-1]) + int(value.shape[-1])
    rows, others = int(query.numel()) // int(query.shape[-1]), int(key.shape[sequence])
    # Where sequences of several lengths follow each other, where each ends.
    queries, keys = (_known(given, (f"cu_seqlens_{one}", f"cum_seq_{one}")) for one in ("q", "k"))
    if queries is None or keys is None:
        return products * 2 * rows * others * sizes
    if isinstance(keys, FakeTensor) or keys.device.type == "meta":  # any may be the longest
        return products * 2 * rows * int(_known(given, ("max_seqlen_k", "max_k"))) * sizes
    pairs = int((queries.diff() * keys.diff()).sum().item())
    return products * 2 * pairs * int(query.shape[-2]) * sizes


def _known(given: _Arguments, names: Iterable[str]) -> Any:
    """The argument under whichever of ``names`` an operator has it; ``None``: it was not given."""
    return next((given[name] for name in names if given.get(name) is not None), None)


_FORWARD, _BACKWARD = 1, 2
_HEADS_FIRST, _TOKENS_FIRST = -2, -3

#: Names of operators and functions, as PyTorch has them.
READ = shipped(__file__, "functions.ini")
_FACTORS = {"matrices": _matrices, "batched": _batched, "grouped": _grouped}
_PRODUCTS: Mapping[str, Callable[[_Arguments], int]] = {
    name: partial(own, first=factors.split()[0], second=factors.split()[1])
    for kind, own in _FACTORS.items()
    for factors, names in READ[kind].items()
    for name in names.split()
} | {
    "transformers::grouped_mm_fallback_backward": lambda given: _BACKWARD * _grouped(given, "input", "weight"),
    "aten::convolution": _convolved,
    "aten::convolution_overrideable": _convolved,
    "aten::convolution_backward": partial(_convolved, place="grad_output"),
}


@cache
def formula(function: OpOverload) -> Callable[[_Arguments], int] | None:
    """What ``function`` counts; ``None``: nothing."""
    name = function.name().partition(".")[0]
    if name in _PRODUCTS:
        return _PRODUCTS[name]
    namespace, _, own = name.partition("::")
    backward = "backward" in own or "bwd" in own
    products = _BACKWARD if backward else _FORWARD
    # The CPU's, CUDA's three kinds, and those of devices that bring their own.
    if namespace == "aten" and own.startswith("_scaled_dot_product_") and "_math" not in own:
        return partial(_attention, sequence=_HEADS_FIRST, products=products)
    # PyTorch's own kernels, flash-attn of every number, and what the hub builds of it under a name with a hash.
    is_kernel = "flash_attn" in namespace or own.startswith(("_flash_attention_", "_efficient_attention_"))
    if is_kernel and (backward or "forward" in own or "fwd" in own):
        return partial(_attention, sequence=_TOKENS_FIRST, products=products)
    return None


# Functions that are no operators: their kernels are Triton's, or run products in pieces of the tokens.


def _fused_linear_cross_entropy(context: Any, hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    """The vocabulary's product, and in the same call its gradients: those of what asks for one."""
    return 2 * int(hidden.numel()) * int(weight.shape[0]) * (1 + sum(context.needs_input_grad[:2]))


def _fused_experts(context: Any, _tokens: Any, gate_up: Any, down: Any, chosen: Any, *_: Any) -> int:
    """Each token by the matrices of the experts that were chosen for it; its backward pass is counted with it."""
    weights = prod(gate_up.shape[1:]) + prod(down.shape[1:])
    return 2 * int(chosen.numel()) * weights * (1 + _BACKWARD * any(context.needs_input_grad))


def _fused_feed_forward(context: Any, tokens: Any, *weights_and_factors: Any) -> int:
    weights = sum(int(weight.numel()) for weight in weights_and_factors[:3])
    rows = int(tokens.numel()) // int(tokens.shape[-1])
    return 2 * rows * weights * (1 + _BACKWARD * any(context.needs_input_grad))


_FUSED: Mapping[str, Callable[..., int]] = {
    "liger_kernel.ops.fused_linear_cross_entropy LigerFusedLinearCrossEntropyFunction": _fused_linear_cross_entropy,
    "liger_kernel.ops.fused_moe LigerFusedMoEFunction": _fused_experts,
    "liger_kernel.ops.mlp LigerMLPFunction": _fused_feed_forward,
}

#: Asked of each fake tensor that C++ looks at: two of three calls.
DEVICE = torch.ops.prim.device.default


class QuickMode(TorchDispatchMode):
    """A dispatch mode without the wrapper that keeps a compiler out of ``__torch_dispatch__``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def replaced(where: Any, **values: Any) -> Iterator[None]:
    """Let the attributes of ``where`` have these ``values`` while this lasts; a module's new one hides a builtin."""
    real = {name: getattr_static(where, name) for name in values if name in dir(where)}
    try:
        for name, value in values.items():
            setattr(where, name, value)
        yield
    finally:
        for name in values:
            setattr(where, name, real[name]) if name in real else delattr(where, name)


class Arithmetic(QuickMode):
    """Counts the FLOPs of what runs under it, by operator: ``with Arithmetic() as arithmetic: step()``. It sees each
    one below autograd, the backward pass's too; of a tensor in shards, this rank's products. ``called`` gets names."""

    supports_higher_order_operators = True

    def __init__(self, called: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self._called = called
        self.by_operator: dict[str, int] = defaultdict(int)
        """By an operator's name, ``aten::mm`` say."""
        self._is_silent = False
        self._patches = ExitStack()

    @property
    def flops(self) -> int:
        return sum(self.by_operator.values())

    def add(self, name: str, flops: int) -> None:
        """Count ``flops``, unless they are a part of what is counted as a whole."""
        if flops and not self._is_silent:
            self.by_operator[name] += flops

    @contextmanager
    def whole(self, name: str, flops: int) -> Iterator[None]:
        """Count ``flops`` for all that happens inside, and none of its parts."""
        self.add(name, flops)
        with replaced(self, _is_silent=True):
            yield

    def __enter__(self) -> Arithmetic:  # noqa: PYI034 - Self is newer than the oldest Python here
        for names, flops in _FUSED.items():
            module, function = names.split()
            if module in sys.modules:  # else nobody can call it
                self._patches.enter_context(_counted(self, getattr(sys.modules[module], function), flops))
        told = ShardingPropagator._propagate_tensor_meta_non_cached  # noqa: SLF001 - it has no other

        def unheard(*given: Any) -> Any:
            """The shape of what all ranks have together is found by the operator itself: that is no rank's work."""
            with self.whole("", 0):
                return told(*given)

        self._patches.enter_context(replaced(ShardingPropagator, _propagate_tensor_meta_non_cached=unheard))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls, and nothing that a device does
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to this rank's shard
        if isinstance(function, HigherOrderOperator):
            self._called(function.name())
            if products := {"flex_attention": _FORWARD, "flex_attention_backward": _BACKWARD}.get(function.name()):
                given = dict(zip(("query", "key", "value"), args, strict=False))
                self.add(function.name(), _attention(given, _HEADS_FIRST, products))
            return function(*args, **kwargs)
        flops, name = formula(function), function.name().partition(".")[0]
        answer = function(*args, **kwargs)
        self._called(name)
        if flops is not None:
            names = (argument.name for argument in function._schema.arguments)  # noqa: SLF001 - it has no other
            given = dict(zip(names, args, strict=False)) | kwargs
            self.add(name, flops({**given, ANSWER: answer}))
        return answer


def model_flops(config: Mapping[str, Any], sequence_length: int) -> float:
    """FLOPs of training for one token of a full sequence, of the model that ``config`` describes in its plain form.
    Those of one forward and one backward pass, nothing computed twice and nothing fused. Not in a process where Liger
    was ever applied: it patches classes for good. RefusedError, or whatever the model's code raises without content."""
    hf_config = hf_config_of(config)
    attention = "sdpa" if "sdpa" in attentions_of(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]) else "eager"
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16, attn_implementation=attention)
        model.eval()  # a layer that is left out at random asks for the content of a tensor
        ids = torch.zeros(1, sequence_length, dtype=torch.long)
        with Arithmetic() as arithmetic:
            model(input_ids=ids).logits.sum().backward()
    if not arithmetic.flops:
        raise ValueError(f"{hf_config.model_type}: not one product of matrices in a training step")
    return arithmetic.flops / sequence_length


def _counted(arithmetic: Arithmetic, function: Any, flops: Callable[..., int]) -> AbstractContextManager[None]:
    """``function`` of autograd is counted by its arguments, and what it calls is not."""
    forward, backward = function.forward, function.backward

    def counted_forward(context: Any, *args: Any, **kwargs: Any) -> Any:
        with arithmetic.whole(function.__name__, flops(context, *args, **kwargs)):
            return forward(context, *args, **kwargs)

    def quiet_backward(context: Any, *gradients: Any) -> Any:
        with arithmetic.whole(function.__name__, 0):
            return backward(context, *gradients)

    return replaced(function, forward=staticmethod(counted_forward), backward=staticmethod(quiet_backward))


@contextmanager
def as_on_gpu(*, liger: bool, masks: bool = True, called: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Let transformers take fake tensors as it does real ones, and Liger's kernels be launched by ``called`` alone.
    ``masks``: whether what SDPA cannot say otherwise (a sliding window) becomes one; other kernels are told of it."""
    # transformers takes fake tensors for tracing, and would build a mask that training does not.
    answers: dict[str, object] = {"is_tracing": False, "find_packed_sequence_indices": None}
    answers |= {} if masks else {"_ignore_causal_mask_sdpa": True}
    functions = {
        name: lambda *_, answer=answer, **__: answer for name, answer in answers.items() if hasattr(masking_utils, name)
    }
    with ExitStack() as stack:
        stack.enter_context(replaced(masking_utils, **functions))
        if liger:
            from liger_kernel import ops  # noqa: PLC0415 - only where Liger is asked for
            from triton.runtime import KernelInterface  # noqa: PLC0415 - comes with Liger

            for info in pkgutil.iter_modules(ops.__path__):
                module = importlib.import_module(f"{ops.__name__}.{info.name}")
                kernels = [name for name, value in vars(module).items() if isinstance(value, KernelInterface)]
                stack.enter_context(replaced(module, **{name: _NoKernel(name, called) for name in kernels}))
            # It also asks whether the loss's gradient is 1, in a backward pass, where no mode listens.
            stack.enter_context(replaced(torch, equal=lambda *_: True))
        yield


class _NoKernel:
    """Stands where a Triton kernel does: it is launched, and does nothing."""

    def __init__(self, name: str, called: Callable[[str], None]) -> None:
        self._name, self._called = f"liger::{name}", called

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_, **__: self._called(self._name)
