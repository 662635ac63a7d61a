"""FSDP on one rank of many that are not there: accelerate and FSDP divide a model of fake tensors as they do on GPUs.

Nothing of FSDP is modelled here. Its own code gathers, lets go, reduces and reshards; only the collectives, which on
the GPUs take no memory of the allocator's beyond the buffers that FSDP gives them, go nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.testing._internal.distributed.fake_pg import FakeStore

from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.worker.build import RESHARD_AFTER_FORWARD, replicas_and_shards


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
    """Divide ``model`` in place, as accelerate does with the Trainer's arguments."""
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
