"""Exchanges: what a rank of so many sends and receives in a step, counted without the others, by kind and bytes.

FSDP runs its own code on a process group whose other ranks are not there. DDP's reducer takes no fake tensors: its own
function makes the buckets, in the order in which the backward pass has the gradients."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from pytest_llmperf.observe.places import exchange_name
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings.parallelism import RESHARD_AFTER_FORWARD, replicas_and_shards


@contextmanager
def among_ranks(spec: TrainSpec, ranks_per_node: int = 0) -> Iterator[ParallelismConfig]:
    """Be rank 0 of the spec's ranks while this lasts, on one node where nobody says otherwise; before any fake mode: a
    mesh is made of numbers. Rank 0 holds as much as any: of too few rows the last ranks hold less."""
    replicas, shards = replicas_and_shards(spec, ranks_per_node or spec.gpus)
    config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=spec.gpus)
    try:
        config.get_device_mesh("cpu")
        yield config
    finally:
        dist.destroy_process_group()


def shard(spec: TrainSpec, model: Any, config: ParallelismConfig) -> None:
    """Divide ``model`` in place, as accelerate does on GPUs with the Trainer's arguments."""
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


def first_chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """What rank 0 gets of ``tensor``."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


def padding_bytes(model: Any) -> int:
    """What the shards of all ranks have beyond the model: rows are dealt out whole, and each rank gets as many."""
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    shards = ((each, each.device_mesh.size(-1) * each._local_tensor.nbytes) for each in sharded)  # noqa: SLF001
    return sum(num_bytes - each.numel() * each.element_size() for each, num_bytes in shards)


class Exchanges:
    def __init__(self) -> None:
        self.found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        """By kind and dimension of the mesh: how many, their bytes, and further bytes for each rank that there is."""
        self.times = 1
        """How often what is seen now is done in a step."""

    def saw(self, function: Any, args: Any) -> None:
        """An operator of ``c10d`` was called: its bytes are the whole's, as ``observe/places.py`` counts them."""
        kind = function.name().partition("::")[2].partition(".")[0]
        if kind == "wait_tensor":
            return
        named = [each for each in args if isinstance(each, str)]
        boxed = [each for each in args if isinstance(each, torch.ScriptObject)]
        find = dist.distributed_c10d._resolve_process_group  # noqa: SLF001 - functional operators have a name alone
        group = dist.ProcessGroup.unbox(boxed[0]) if boxed else find(named[-1])
        sizes = [sum(leaf.nbytes for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)) for each in args]
        # Of accumulated gradients all but the last pass reduce nothing.
        self.add(exchange_name(kind, group.group_desc), max(sizes), times=1 if "reduce" in kind else self.times)

    def add(self, name: str, whole: int, each: int = 0, times: int = 1) -> None:
        for at, amount in enumerate((1, whole, each)):
            self.found[name][at] += times * amount

    def add_ddp(self, model: Any, gradients: list[torch.nn.Parameter]) -> None:
        """Of its forward pass the buffers, of its backward pass the ``gradients``, in the order in which they come."""
        first, most = dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20  # noqa: SLF001 - DDP takes it from there
        for kind, tensors, limits in (
            ("broadcast", [*model.buffers()], [250 * 2**20]),
            ("all_reduce", gradients, [first, most]),
        ):
            buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits) if tensors else ([], [])  # noqa: SLF001
            for bucket in buckets:
                self.add(kind, sum(tensors[index].nbytes for index in bucket))

    def add_trainer(self, model: Any) -> None:
        """Of the Trainer: a step's tokens, which it adds up where a model's loss can be told their number."""
        parameters = inspect.signature(model.forward).parameters.values()
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
            self.add("all_gather", 0, torch.long.itemsize)
