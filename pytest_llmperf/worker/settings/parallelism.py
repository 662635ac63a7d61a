"""Parallelism: DDP, or FSDP2 through accelerate, and how a model's weights were shared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pytest_llmperf.observe.device import collectives
from pytest_llmperf.settings.parallelism import ParallelismEvidence
from pytest_llmperf.settings.train_spec import TrainSpec

# FSDP lets go of a layer's weights when its forward pass is done, and gathers them again in the backward pass.
RESHARD_AFTER_FORWARD = True


def arguments(spec: TrainSpec, device: torch.device) -> Mapping[str, Any]:
    arguments: dict[str, Any] = {"ddp_backend": collectives(device), "ddp_find_unused_parameters": False}
    if spec.parallelism != "ddp":
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {"version": 2, "reshard_after_forward": RESHARD_AFTER_FORWARD}
    if spec.parallelism == "fsdp_hybrid":
        from accelerate.parallelism_config import ParallelismConfig  # noqa: PLC0415 - a script may have no accelerate

        replicas, shards = replicas_and_shards(spec, int(os.environ["LOCAL_WORLD_SIZE"]))
        arguments["parallelism_config"] = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    return arguments


def replicas_and_shards(spec: TrainSpec, on_this_node: int) -> tuple[int, int]:
    """How often FSDP repeats its shards, and over how many ranks; gathering stays within a node of several."""
    shards = spec.gpus
    if spec.parallelism == "fsdp_hybrid":
        shards = on_this_node if on_this_node < spec.gpus else spec.gpus // 2
    return spec.gpus // shards, shards


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks share its weights; accelerate shards the layers, and not always what is around them."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def seen_parallelism(model: nn.Module | None, ranks: int) -> ParallelismEvidence:
    """How the ranks share the work, and the sizes of the mesh that the weights are sharded over."""
    modules = list(model.modules()) if model is not None else []
    sharded = next((module for module in modules if isinstance(module, FSDPModule)), None)
    if sharded is None:
        is_ddp = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)
        return ParallelismEvidence(world_size=ranks, parallelism="ddp" if is_ddp else "none", mesh=[])
    meshes = {p.device_mesh.shape for module in modules for p in module.parameters() if isinstance(p, DTensor)}
    mesh = [size for size in max(meshes, key=len, default=()) if size > 1]
    cast_to = sharded._get_fsdp_state()._mp_policy.param_dtype  # noqa: SLF001 - told nowhere else
    return ParallelismEvidence(
        world_size=ranks,
        parallelism="fsdp_hybrid" if len(mesh) > 1 else "fsdp",
        mesh=mesh,
        gathered_dtype="" if cast_to is None else str(cast_to),
    )


WITNESSES = {
    "parallelism": lambda *_: lambda training: seen_parallelism(training.wrapped, training.trainer.args.world_size)
}
