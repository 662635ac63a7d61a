"""Arithmetic: the FLOPs of a training step, counted where its operators run, on fake tensors as on real ones.

The convention is that of the PaLM paper (Chowdhery et al. 2022, appendix B), by operator instead of by formula:

- Products of matrices alone count, at 2 FLOPs for a multiplication and its addition; elementwise work does not. A
  batched product over an inner size of 1 (rotary embedding's angles) adds nothing up, and is elementwise.
- Attention is its two products over the full square of scores. No mask takes anything off: neither a causal one nor a
  window.
- The backward pass of an operator is two products for each of its forward pass. The scores that fused attention
  computes again are none of the model's: whichever kernel runs, the number is the same.

A layer that is computed again in the backward pass (checkpointing) does run twice and is counted twice: a count is of
the step that ran. ``model_flops`` counts a model's plain form, in which nothing is.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.estimate.operator_flops import ANSWER, FUSED, formula, higher_order
from pytest_llmperf.worker.settings.attention import attentions_of

# QuickMode: a dispatch mode that is called for each operator of a step, where nothing is compiled.


#: Asked of each fake tensor that C++ looks at: two of three calls.
DEVICE = torch.ops.prim.device.default


class QuickMode(TorchDispatchMode):
    """Without the wrapper that keeps a compiler out of ``__torch_dispatch__``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Arithmetic(AbstractContextManager["Arithmetic"]):
    """Counts the FLOPs of whatever runs under it, by operator: ``with Arithmetic() as arithmetic: step()``.

    A mode of fake tensors may be around it or inside; of a tensor in shards, this rank's products are counted.
    """

    def __init__(self) -> None:
        self.by_operator: dict[str, int] = defaultdict(int)
        """By an operator's name, ``aten::mm`` say."""
        self._is_silent = False
        self._active = ExitStack()

    @property
    def flops(self) -> int:
        """Of all operators."""
        return sum(self.by_operator.values())

    def add(self, name: str, flops: int) -> None:
        """Count ``flops``, unless they are a part of what is counted as a whole."""
        if flops and not self._is_silent:
            self.by_operator[name] += flops

    @contextmanager
    def whole(self, name: str, flops: int) -> Iterator[None]:
        """Count ``flops`` for all that happens inside, and none of its parts."""
        self.add(name, flops)
        before, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = before

    def __enter__(self) -> Arithmetic:  # noqa: PYI034 - Self is newer than the oldest Python here
        with ExitStack() as stack:
            for module, function, flops in FUSED:
                if module in sys.modules:  # else nobody can call it
                    stack.enter_context(_counted(self, getattr(sys.modules[module], function), flops))
            stack.enter_context(_Mode(self))
            self._active = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._active.close()


class _Mode(QuickMode):
    """Sees each operator below autograd, those of the backward pass too."""

    supports_higher_order_operators = True

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self._arithmetic = arithmetic

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it does to this rank's shard
        if isinstance(function, HigherOrderOperator):
            self._arithmetic.add(function.name(), higher_order(function, args))
            return function(*args, **kwargs)
        flops = formula(function)
        answer = function(*args, **kwargs)
        if flops is None:
            return answer
        names = (argument.name for argument in function._schema.arguments)  # noqa: SLF001 - it has no other
        given = dict(zip(names, args, strict=False)) | kwargs
        name = function.name().partition(".")[0]
        self._arithmetic.add(name, flops({**given, ANSWER: answer}))
        return answer


def model_flops(config: Mapping[str, Any], sequence_length: int) -> float:
    """FLOPs of training for one token of a full sequence, of the model that ``config`` describes in its plain form.

    Nothing is computed twice and nothing fused, so that they depend on nothing but the two: no checkpointing, Liger or
    compiler changes them. They are those of one forward and one backward pass, whose loss has no products. Not in a
    process where Liger was ever applied: it patches a family's classes for good.

    Raises:
        RefusedError: transformers has no such model.
        Exception: whatever the model's code raises where tensors have no content.
    """
    hf_config = hf_config_of(config)
    there = attentions_of(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.bfloat16, attn_implementation="sdpa" if "sdpa" in there else "eager"
        )
        model.eval()  # a layer that is left out at random asks for the content of a tensor
        ids = torch.zeros(1, sequence_length, dtype=torch.long)
        with Arithmetic() as arithmetic:
            model(input_ids=ids).logits.sum().backward()
    if not arithmetic.flops:
        raise ValueError(f"{hf_config.model_type}: not one product of matrices in a training step")
    return arithmetic.flops / sequence_length


@contextmanager
def _counted(arithmetic: Arithmetic, function: Any, flops: Callable[..., int]) -> Iterator[None]:
    """``function`` of autograd is counted by its arguments, and what it calls is not."""
    forward, backward = function.forward, function.backward

    def counted_forward(context: Any, *args: Any, **kwargs: Any) -> Any:
        with arithmetic.whole(function.__name__, flops(context, *args, **kwargs)):
            return forward(context, *args, **kwargs)

    def quiet_backward(context: Any, *gradients: Any) -> Any:
        with arithmetic.whole(function.__name__, 0):
            return backward(context, *gradients)

    function.forward, function.backward = staticmethod(counted_forward), staticmethod(quiet_backward)
    try:
        yield
    finally:
        function.forward, function.backward = staticmethod(forward), staticmethod(backward)
