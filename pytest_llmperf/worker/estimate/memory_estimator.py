"""The memory a spec will need on a GPU, without one.

The real model takes a training step on fake tensors, which have sizes and no content, and every storage is recorded
from its birth to its death. It runs as on a CPU; what CUDA keeps differently is put in its place: the types that its
autocast works in, the attention kernels' and dropout's saved tensors, Liger's kernels. What was recorded is given to
an allocator like CUDA's, for a few steps. docs/explanation/memory.md says how well.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker import refusal
from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.estimate.caching_allocator import GRANULE, Recording, parts_at_peak
from pytest_llmperf.worker.estimate.gpu_emulation import GpuFunctions, as_on_gpu
from pytest_llmperf.worker.estimate.operator_counter import Counter, OperatorCounter, on_this_rank
from pytest_llmperf.worker.settings.attention import attentions_of, check_attention
from pytest_llmperf.worker.settings.liger import liger_kernels
from pytest_llmperf.worker.settings.parallelism import RESHARD_AFTER_FORWARD, replicas_and_shards
from pytest_llmperf.worker.settings.precision import DTYPES
from pytest_llmperf.worker.settings.recomputation import kept_operators


@contextmanager
def among_ranks(spec: TrainSpec) -> Iterator[ParallelismConfig]:
    """Be rank 0 of the spec's ranks, which are taken to be on one node, while this lasts.

    To be entered before any fake mode: a mesh is made of numbers. Rank 0 holds as much as any: where ranks are too
    many for a tensor's rows, the last ones hold less.
    """
    replicas, shards = replicas_and_shards(spec, spec.gpus)
    config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=spec.gpus)
    try:
        config.get_device_mesh("cpu")
        yield config
    finally:
        dist.destroy_process_group()


def shard(spec: TrainSpec, model: Any, config: ParallelismConfig) -> None:
    """Divide ``model``, of fake tensors, in place, as accelerate does on GPUs with the Trainer's arguments."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=RESHARD_AFTER_FORWARD,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    if spec.mixed_precision != "no":
        plugin.set_mixed_precision(spec.mixed_precision)
    # What it asks of an Accelerator; a real one would look for GPUs.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=config.get_device_mesh(),
        parallelism_config=config,
        mixed_precision=spec.mixed_precision,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    fsdp2_prepare_model(accelerator, model)


# cuBLAS's workspaces come from the same allocator: 32 MiB for each of two handles on Hopper.
_WORKSPACES = (32 * 2**20, 32 * 2**20)

_OPTIMIZERS = {"adamw_torch": torch.optim.AdamW, "adamw_torch_fused": torch.optim.AdamW, "sgd": torch.optim.SGD}


def plan(spec: TrainSpec, config: Mapping[str, Any], operators: OperatorCounter | None = None) -> dict[str, int]:
    """Bytes of one rank at its peak, by part; ``operators`` counts what the step runs.

    A ``ValueError``: an optimizer whose memory is not modelled, fp8, rows with padding, an attention that stands for no
    other here, or a model that transformers does not have, or not so (a ``RefusedError``).
    """
    _refuse_unmodelled(spec)
    hf_config = hf_config_of(config)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    check_attention(kind, hf_config, spec.attention)
    # Every fused attention keeps the same tensors, but for a mask; this one can be run anywhere.
    attention = "eager" if spec.attention == "eager" else "sdpa"
    if attention not in attentions_of(kind):
        raise ValueError(
            f"{spec.attention} is not modelled for {hf_config.model_type}: it is counted as sdpa, which "
            f"{hf_config.model_type} does not have; known: eager"
        )
    counter = Counter(hf_config.get_text_config().vocab_size, operators)
    with ExitStack() as stack:
        ranks = stack.enter_context(among_ranks(spec)) if spec.parallelism != "ddp" else None
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(as_on_gpu(liger=spec.liger, masks=attention == spec.attention, called=counter.called))
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=DTYPES[spec.model_precision], attn_implementation=attention
        )
        refusal.check_direction(model.config)
        model.train()
        functions = partial(
            GpuFunctions,
            _autocast(spec),
            counter.vocabulary_size,
            fused=spec.sdpa_backend != "math",
            called=counter.called,
        )
        _prepare(spec, model, functions)
        if ranks is not None:
            shard(spec, model, ranks)
        recording = _train(spec, model, counter, functions)
    parts = parts_at_peak(recording, _WORKSPACES)
    if spec.gpus > 1 and ranks is None:  # DDP reduces in buckets of its own, beside the gradients
        parts["buckets"] = parts["weights"]
    return parts


def _refuse_unmodelled(spec: TrainSpec) -> None:
    if spec.optimizer not in _OPTIMIZERS:
        raise ValueError(f"optimizer {spec.optimizer} is not modelled; known: {', '.join(_OPTIMIZERS)}")
    if spec.fp8 != "no":
        raise ValueError(
            f"fp8 {spec.fp8} is not modelled: its modules keep 16-bit values for the backward pass, and compiled, as "
            "they are used, 8-bit ones; known: no"
        )
    if spec.has_padding:
        raise ValueError(
            f"rows={spec.rows!r} are not modelled: their mask has a value for each score, and takes its causal kernel "
            "from fused attention; known: packed"
        )


def _prepare(spec: TrainSpec, model: Any, functions: Callable[[], GpuFunctions]) -> None:
    """Recomputation and Liger, as the Trainer switches them on."""

    @contextmanager
    def again(own: AbstractContextManager[Any]) -> Iterator[None]:
        with functions(), own:
            yield

    def recomputation() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What a layer's first pass and its second one run in: the second is computed as the first."""
        first, second = nullcontext(), nullcontext()
        if spec.checkpointing_policy == "selective":
            first, second = create_selective_checkpoint_contexts(list(kept_operators()))
        return first, again(second)

    if spec.gradient_checkpointing:
        kwargs = {"use_reentrant": False, "context_fn": recomputation}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    if spec.liger:
        from transformers.integrations.liger import apply_liger_kernel  # noqa: PLC0415 - not all have Liger

        apply_liger_kernel(model, liger_kernels(spec))


def _train(spec: TrainSpec, model: Any, counter: Counter, functions: Callable[[], GpuFunctions]) -> Recording:
    """A training step of an optimizer that has its states."""
    updated, pieces = _updated(model, counter)
    gradients = [own.grad for own in updated]
    with counter, counter.resizing():
        counter.part = "weights"
        for tensor in (*model.parameters(), *model.buffers()):
            counter.count(tensor)
        weights = counter.take()
        optimizer = _OPTIMIZERS[spec.optimizer](updated, foreach=True)
        _update(optimizer, counter)
        first_update = counter.take()
        counter.part = "activations"
        ids = torch.zeros(spec.micro_batch_size, spec.sequence_length, dtype=torch.long)
        num_micro_batches = min(2, spec.gradient_accumulation_steps)
        for number in range(1, num_micro_batches + 1):
            if spec.parallelism != "ddp":  # gradients are reduced, and so sharded, when they are whole
                model.set_requires_gradient_sync(number == num_micro_batches)
            # Of many, all but the first are as the second.
            with counter.times(1 if number < num_micro_batches else spec.gradient_accumulation_steps - number + 1):
                _forward_and_backward(spec, model, counter, ids, functions)
        micro_batches = counter.take()
        for own, gradient in zip(updated, gradients, strict=True):
            own.grad = gradient
        with counter.times(1):
            _update(optimizer, counter)
        return Recording(weights, first_update, micro_batches, counter.take(), pieces)


def _updated(model: Any, counter: Counter) -> tuple[list[torch.nn.Parameter], dict[int, int]]:
    """What stands for the model's parameters where the optimizer works on them, with gradients; none of it is counted.

    An optimizer works element by element. On shards it does the same, and need not ask how they are laid out; and
    parameters of one shape are as good as one that is as large as all of them, as long as they fill whole blocks. That
    leaves a tenth of the calls, which were half of the time. Beside them: by its bytes, how many each stands for.
    """
    own = [on_this_rank(parameter) for parameter in model.parameters()]
    numbers = collections.Counter((tuple(each.shape), each.dtype) for each in own)
    found: list[torch.nn.Parameter] = []
    pieces: dict[int, int] = {}
    for (shape, dtype), number in numbers.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        is_whole = num_bytes % GRANULE == 0
        if is_whole:
            pieces[number * num_bytes] = number
        for size in [(number, *shape)] if is_whole else [shape] * number:
            parameter = torch.nn.Parameter(torch.empty(size, dtype=dtype))
            parameter.grad = torch.empty(size, dtype=dtype)
            found.append(parameter)
    counter.ignore(found)
    counter.ignore([parameter.grad for parameter in found])
    return found, pieces


def _forward_and_backward(
    spec: TrainSpec, model: Any, counter: Counter, ids: torch.Tensor, functions: Callable[[], GpuFunctions]
) -> None:
    counter.part = "activations"
    autocast = _autocast(spec)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None), functions():
        output = model(input_ids=ids, labels=ids)
    if autocast is not None and output.logits is not None:
        output.logits = output.logits.float()  # accelerate gives back fp32
    loss = output.loss
    del output  # as the Trainer does: only the graph keeps what it needs
    counter.part = "gradients"
    loss.backward()


def _update(optimizer: torch.optim.Optimizer, counter: Counter) -> None:
    counter.part = "optimizer"
    optimizer.step()
    optimizer.zero_grad()


def _autocast(spec: TrainSpec) -> torch.dtype | None:
    return None if spec.mixed_precision == "no" else DTYPES[spec.mixed_precision]
