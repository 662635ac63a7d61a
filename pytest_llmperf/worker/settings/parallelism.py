"""Parallelism: DDP, FSDP2 through accelerate, or layers that ranks share, and how a model's weights were shared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_llmperf.observe.device import collectives
from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.parallelism import ParallelismEvidence, zero_stage
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

# FSDP lets go of a layer's weights when its forward pass is done, and gathers them again in the backward pass.
RESHARD_AFTER_FORWARD = True
# The stage of ZeRO that shares weights, beside gradients and states.
_WEIGHTS_TOO = 3


def arguments(spec: TrainSpec, device: torch.device) -> Mapping[str, Any]:
    arguments: dict[str, Any] = {"ddp_backend": collectives(device), "ddp_find_unused_parameters": False}
    if spec.parallelism in ("fsdp", "fsdp_hybrid", "context"):
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {"version": 2, "reshard_after_forward": RESHARD_AFTER_FORWARD}
    if zero_stage(spec):
        arguments["deepspeed"] = _deepspeed(spec)
    if spec.parallelism in (*_SIZES, "fsdp_hybrid"):
        from accelerate.parallelism_config import ParallelismConfig  # noqa: PLC0415 - a script may have no accelerate

        sizes: dict[str, Any] = mesh_sizes(spec, int(os.environ["LOCAL_WORLD_SIZE"]))
        if spec.parallelism == "sequence":
            from accelerate.utils import DeepSpeedSequenceParallelConfig  # noqa: PLC0415 - as above

            told = {"sp_seq_length": spec.sequence_length, "sp_seq_length_is_variable": False}
            sizes["sp_handler"] = DeepSpeedSequenceParallelConfig(**told, sp_attn_implementation=spec.attention)
        arguments["parallelism_config"] = ParallelismConfig(**sizes)
    return arguments


_SIZES = {"tensor": "tp_size", "context": "cp_size", "sequence": "sp_size"}


def _deepspeed(spec: TrainSpec) -> dict[str, Any]:
    """DeepSpeed's configuration as transformers' documentation has it, where the Trainer fills in what it knows."""
    zero: dict[str, Any] = {"stage": zero_stage(spec), "overlap_comm": True, "contiguous_gradients": True}
    sized = "reduce_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold".split()
    zero |= dict.fromkeys(sized if zero_stage(spec) == _WEIGHTS_TOO else [], "auto")
    asked = "train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping".split()
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, **dict.fromkeys(asked, "auto")}


def zero_config(spec: TrainSpec, model: Any) -> Mapping[str, Any]:
    """The same as the Trainer has filled it in."""
    from transformers import TrainingArguments  # noqa: PLC0415 - as above
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig  # noqa: PLC0415

    # Its values by default: a real one would look for GPUs.
    asked: Any = object.__new__(type("Asked", (TrainingArguments,), {"world_size": spec.gpus}))
    asked.bf16, asked.per_device_train_batch_size = spec.mixed_precision == "bf16", spec.micro_batch_size
    asked.gradient_accumulation_steps = spec.gradient_accumulation_steps
    filled = HfTrainerDeepSpeedConfig(_deepspeed(spec))
    filled.trainer_config_process(asked)
    filled.trainer_config_finalize(asked, model, spec.steps)
    return dict(filled.config)


def build_whole(spec: TrainSpec) -> None:
    """Let a model be made as it is without DeepSpeed, which divides it when training begins."""
    if zero_stage(spec):
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config  # noqa: PLC0415 - as above

        unset_hf_deepspeed_config()
    if spec.parallelism == "sequence":
        from deepspeed.comm import init_distributed  # noqa: PLC0415 - one that is not needed may not be there
        from deepspeed.runtime.sequence_parallel import parallel_state_sp as groups  # noqa: PLC0415 - as above
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 - as above

        init_distributed(verbose=False)  # accelerate asks it for groups before it has begun by itself
        # What a training before this one in the same process left.
        groups._SEQUENCE_PARALLEL_GROUP = groups._SEQUENCE_DATA_PARALLEL_GROUP = None  # noqa: SLF001
        with suppress(KeyError):
            del ALL_ATTENTION_FUNCTIONS[spec.attention]


def mesh_sizes(spec: TrainSpec, on_this_node: int) -> dict[str, int]:
    """As accelerate names them: FSDP has replicas of its shards where gathering stays within a node of several."""
    if spec.parallelism in _SIZES:
        return {_SIZES[spec.parallelism]: spec.gpus}
    shards = spec.gpus
    if spec.parallelism == "fsdp_hybrid":
        shards = on_this_node if on_this_node < spec.gpus else spec.gpus // 2
    return {"dp_replicate_size": spec.gpus // shards, "dp_shard_size": shards}


_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# An embedding is often tied to the last product, which would lose its weights: each rank keeps it as a whole.
_WHOLE = "embedding_rowwise"


def share_layers(spec: TrainSpec, model: PreTrainedModel, mesh: DeviceMesh | None = None) -> None:
    """Divide what transformers' plan names among all ranks, where that was asked for; the rest each has as a whole."""
    if spec.parallelism != "tensor":
        return
    from transformers.distributed import DistributedConfig  # noqa: PLC0415 - a script may have no transformers

    plan = {name: style for name, style in (model.config.base_model_tp_plan or {}).items() if style != _WHOLE}
    others = sorted({*plan.values()} - {*_STYLES})
    if others or not plan:
        has = f"in its plan {', '.join(others)}" if others else "no plan"
        raise RefusedError(
            f"{model.config.model_type} has {has} for tensor parallelism in transformers, expected colwise and rowwise "
            "layers alone: use another parallelism"
        )
    mesh = mesh or init_device_mesh(model.device.type, (spec.gpus,), mesh_dim_names=("tp",))
    styles = {f"{model.base_model_prefix}.{name}": _STYLES[style]() for name, style in plan.items()}
    parallelize_module(model, mesh, styles)
    # By these the Trainer and accelerate know of it.
    model._tp_size, model.config.distributed_config = spec.gpus, DistributedConfig(tp_size=spec.gpus)  # noqa: SLF001


def place_tokens(spec: TrainSpec, trainer: Trainer) -> None:
    """Have batches say where each token stands, which a rank that is given a part of each row cannot know."""
    collated = trainer.data_collator

    def placed(samples: Any) -> dict[str, Any]:
        batch = collated(samples)
        ids = batch["input_ids"]
        return {**batch, "position_ids": torch.arange(ids.shape[1]).repeat(len(ids), 1)}

    if spec.parallelism == "sequence":
        trainer.data_collator = placed


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks share its weights; accelerate shards the layers, and not always what is around them."""
    is_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    return is_fsdp or bool(_meshes(model)) or any(hasattr(each, "ds_numel") for each in model.parameters())


def zero_masters(model: nn.Module | None) -> list[torch.Tensor]:
    """What DeepSpeed's optimizer updates on this rank, in the place of parameters; nothing where it does not train."""
    own = getattr(model, "optimizer", None)
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")  # of stage 3, and before
    return next((list(found) for name in names if (found := getattr(own, name, None))), [])


def sharing(trainer: Trainer) -> int:
    """How many ranks compute each sequence together."""
    return int(trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size())


def _meshes(model: nn.Module) -> set[tuple[int, ...]]:
    return {p.device_mesh.shape for p in model.parameters() if isinstance(p, DTensor)}


def seen_parallelism(model: nn.Module | None, ranks: int) -> ParallelismEvidence:
    """How the ranks share the work, and the sizes of the mesh that the weights are sharded over."""
    modules = list(model.modules()) if model is not None else []
    if model is not None and hasattr(model, "zero_optimization_stage"):
        copies = {str(parameter.dtype) for parameter in modules[0].parameters()} - {"torch.float32"}
        stage = f"zero{model.zero_optimization_stage()}"
        return ParallelismEvidence(world_size=ranks, parallelism=stage, mesh=[], gathered_dtype=" ".join(copies))
    sharded = next((module for module in modules if isinstance(module, FSDPModule)), None)
    if sharded is None and model is not None and (shared := _meshes(model)):
        return ParallelismEvidence(world_size=ranks, parallelism="tensor", mesh=[*max(shared)])
    if sharded is None:
        is_ddp = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)
        return ParallelismEvidence(world_size=ranks, parallelism="ddp" if is_ddp else "none", mesh=[])
    mesh = [size for size in max(_meshes(modules[0]), key=len, default=()) if size > 1]
    cast_to = sharded._get_fsdp_state()._mp_policy.param_dtype  # noqa: SLF001 - told nowhere else
    kind = "fsdp_hybrid" if len(mesh) > 1 else "fsdp"
    return ParallelismEvidence(world_size=ranks, parallelism=kind, mesh=mesh, gathered_dtype=str(cast_to or ""))


def _seen(training: Training) -> ParallelismEvidence:
    """Beside the modules, whether the model was given a part of each sequence."""
    found = seen_parallelism(training.wrapped, training.trainer.args.world_size)
    of_parts = {"fsdp": "context", "zero3": "sequence"} if getattr(training.trainer, "parts", 1) > 1 else {}
    return replace(found, parallelism=of_parts.get(found.parallelism, found.parallelism))


WITNESSES = {"parallelism": lambda *_: _seen}
PREPARE = share_layers
