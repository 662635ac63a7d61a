"""``python -m pytest_llmperf.worker.plan``: the memory a spec will need on a GPU, without one.

The real model takes a training step on fake tensors, which have sizes and no content, and every storage is counted
from its birth to its death. It runs as on a CPU; what CUDA keeps differently is put in its place: the types that its
autocast works in, the attention kernels' and dropout's saved tensors, Liger's kernels. docs/memory.md says how well.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, masking_utils

from pytest_llmperf.spec import TrainSpec
from pytest_llmperf.worker.build import DTYPES, liger_kernels

# The allocator's granule.
_BLOCK = 512

# cuBLAS's workspaces come from the same allocator: 32 MiB for each of two handles on Hopper.
_WORKSPACE = 2 * 32 * 2**20

_OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_torch": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_torch_fused": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, foreach=True),
}
# Functions that CUDA's autocast runs in fp32, and the CPU's does not.
_FP32 = frozenset({functional.layer_norm, functional.softmax, torch.softmax, functional.cross_entropy})


def plan(spec: TrainSpec, config: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of one rank at its peak, by part.

    Raises:
        ValueError: an optimizer whose memory is not modelled, or a model that transformers does not have.
    """
    if spec.optimizer not in _OPTIMIZERS:
        raise ValueError(f"optimizer {spec.optimizer} is not modelled; known: {', '.join(_OPTIMIZERS)}")
    if spec.sdpa_backend == "math":
        raise ValueError("sdpa_backend math is not modelled; attention eager keeps much the same")
    for name, modelled in (("fp8", "no"), ("parallelism", "ddp"), ("checkpointing_policy", "full")):
        if getattr(spec, name) != modelled:
            raise ValueError(f"{name} {getattr(spec, name)} is not modelled; known: {modelled}")
    hf_config = _hf_config(config)
    # Every fused attention keeps the same tensors; this one can be run anywhere.
    attention = "eager" if spec.attention == "eager" else "sdpa"
    with FakeTensorMode(allow_non_fake_inputs=True), _cuda_like(spec):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=DTYPES[spec.model_precision], attn_implementation=attention
        )
        model.train()
        counter = _Counter(model.config.get_text_config().vocab_size)
        if spec.gradient_checkpointing:
            # What is computed again in the backward pass is computed as in the forward pass.
            again = partial(_CudaFunctions, _autocast(spec), counter.vocabulary_size)
            kwargs = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), again())}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        if spec.liger:
            from transformers.integrations.liger import apply_liger_kernel  # noqa: PLC0415 - not all have Liger

            apply_liger_kernel(model, liger_kernels(spec))
        with counter:
            _train(spec, model, counter)
    parts = dict(counter.at_peak)
    parts["workspace"] = _WORKSPACE
    if spec.gpus > 1:  # DDP reduces in buckets of its own, beside the gradients
        parts["buckets"] = parts["weights"]
    return parts


def _hf_config(config: Mapping[str, Any]) -> Any:
    if config["model_type"] not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers {version('transformers')} has no model type {config['model_type']!r}, "
            "and code that comes with a model is never run"
        )
    hf_config = AutoConfig.for_model(**config)
    hf_config.use_cache = False
    return hf_config


def _train(spec: TrainSpec, model: Any, counter: _Counter) -> None:
    """A training step of an optimizer that has its states."""
    counter.part = "weights"
    for tensor in (*model.parameters(), *model.buffers()):
        counter.count(tensor)
    optimizer = _OPTIMIZERS[spec.optimizer](model.parameters())
    # The step that makes the states takes less memory than any later one: gradients are all that it needs here.
    counter.part = "gradients"
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    _update(optimizer, counter)
    autocast = _autocast(spec)
    counter.part = "activations"
    ids = torch.zeros(spec.micro_batch_size, spec.sequence_length, dtype=torch.long)
    for _ in range(min(2, spec.gradient_accumulation_steps)):
        counter.part = "activations"
        with (
            torch.autocast("cpu", dtype=autocast, enabled=autocast is not None),
            _CudaFunctions(autocast, counter.vocabulary_size),
        ):
            output = model(input_ids=ids, labels=ids)
        if autocast is not None and output.logits is not None:
            output.logits = output.logits.float()  # accelerate gives back fp32
        loss = output.loss
        del output  # as the Trainer does: only the graph keeps what it needs
        counter.part = "gradients"
        loss.backward()
        del loss
    _update(optimizer, counter)


def _update(optimizer: torch.optim.Optimizer, counter: _Counter) -> None:
    counter.part = "optimizer"
    optimizer.step()
    optimizer.zero_grad()


def _autocast(spec: TrainSpec) -> torch.dtype | None:
    return None if spec.mixed_precision == "no" else DTYPES[spec.mixed_precision]


class _Counter(TorchDispatchMode):
    """Counts living storages, by part, and remembers the parts at the peak."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.part = "weights"
        self.at_peak: dict[str, int] = {}
        self.vocabulary_size = vocabulary_size
        self._now: dict[str, int] = {}
        self._living: dict[int, weakref.ref[Any]] = {}
        self._peak = 0

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` unless it is counted."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._living:
            return
        part = self._part_of(tensor)
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK

        def gone(_: object) -> None:
            if self._living.pop(key, None) is not None:
                self._now[part] -= size

        self._living[key] = weakref.ref(storage, gone)
        self._now[part] = self._now.get(part, 0) + size
        if sum(self._now.values()) > self._peak:
            self._peak, self.at_peak = sum(self._now.values()), dict(self._now)

    def _part_of(self, tensor: torch.Tensor) -> str:
        if self.part != "weights" and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary_size:
            return "logits"
        # What a backward pass makes in the shape of activations are gradients of activations.
        return "activations" if self.part == "gradients" and tensor.dim() > 2 else self.part  # noqa: PLR2004

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.count, made)
        return made


class _CudaFunctions(TorchFunctionMode):
    """Functions that keep other tensors on CUDA than on a CPU."""

    def __init__(self, autocast: torch.dtype | None, vocabulary_size: int) -> None:
        super().__init__()
        self._autocast, self._vocabulary_size = autocast, vocabulary_size

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            query, key, value = (self._cast(tensor) for tensor in args[:3])
            return _FusedAttention.apply(query, key, value)
        if function is torch.Tensor.item:
            return args[0].numel()  # Liger counts the labels that are not ignored
        if function is torch.mm and "out" not in kwargs and args[0].shape[0] == self._vocabulary_size:
            return args[0].new_zeros(())  # on CUDA Liger adds this product to the weights' gradient in place
        if function is functional.dropout:
            return self._dropout(*args, **kwargs)
        if self._autocast is not None and function in _FP32:
            args, kwargs = (tree_map_only(torch.Tensor, _to_fp32, each) for each in (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._autocast is None else tensor.to(self._autocast)

    @staticmethod
    def _dropout(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        del inplace
        return _Dropout.apply(tensor) if training and p > 0 else tensor


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


class _FusedAttention(torch.autograd.Function):
    """Keeps inputs, output and one fp32 number a row (Dao et al. 2022), and no matrix of scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, torch.empty(query.shape[:3], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


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
def _cuda_like(spec: TrainSpec) -> Iterator[None]:
    """Transformers takes fake tensors for tracing, and would build a mask that training does not."""
    answers = {"is_tracing": False, "find_packed_sequence_indices": None}
    real = {name: getattr(masking_utils, name) for name in answers if hasattr(masking_utils, name)}
    for name in real:
        setattr(masking_utils, name, lambda *_, answer=answers[name], **__: answer)
    try:
        with _quiet_kernels() if spec.liger else nullcontext():
            yield
    finally:
        for name, function in real.items():
            setattr(masking_utils, name, function)


class _NoKernel:
    """Stands where a Triton kernel does: it is launched, and does nothing."""

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def _quiet_kernels() -> Iterator[None]:
    """Liger's functions with their own allocations, and none of their kernels."""
    from liger_kernel import ops  # noqa: PLC0415 - only where Liger is asked for
    from triton.runtime import KernelInterface  # noqa: PLC0415 - comes with Liger

    replaced = []
    names = [f"{ops.__name__}.{info.name}" for info in pkgutil.iter_modules(ops.__path__)]
    for module in map(importlib.import_module, names):
        for name, value in list(vars(module).items()):
            if isinstance(value, KernelInterface):
                replaced.append((module, name, value))
                setattr(module, name, _NoKernel())
    # It also asks whether the loss's gradient is 1, in a backward pass, where no mode listens.
    replaced.append((torch, "equal", torch.equal))
    torch.equal = lambda *_: True
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def main() -> int:
    """Read a spec and its model's configuration; print the parts, or why there are none, as JSON."""
    request = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"parts": plan(TrainSpec.from_dict(request["spec"]), request["model_config"])}
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything, and who asked wants one line
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "  # 'x' alone says nothing
        answer = {"error": kind + " ".join(str(error).split())}
    json.dump(answer, sys.stdout)
    return 0 if "parts" in answer else 1


if __name__ == "__main__":
    sys.exit(main())
