"""Why a case cannot run here, said before anything is launched. Pure, but for looking up installed packages."""

from __future__ import annotations

from importlib.util import find_spec

from pytest_llmperf.settings.train_spec import TrainSpec

_BITSANDBYTES = (
    "adamw_bnb_8bit adamw_8bit ademamix ademamix_8bit lion_8bit lion_32bit paged_adamw_32bit paged_adamw_8bit "
    "paged_ademamix_32bit paged_ademamix_8bit paged_lion_32bit paged_lion_8bit rmsprop_bnb rmsprop_bnb_8bit "
    "rmsprop_bnb_32bit"
)
_GALORE = (
    "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise "
    "galore_adafactor_layerwise"
)

# Module to look for -> (what installs it, the optimizers of transformers that it provides).
_OPTIMIZER_PACKAGES = {
    "torchao": ("torchao", "adamw_torch_4bit adamw_torch_8bit"),
    "bitsandbytes": ("bitsandbytes", _BITSANDBYTES),
    "galore_torch": ("galore-torch", _GALORE),
    "lomo_optim": ("lomo-optim", "lomo adalomo"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "schedulefree": ("schedulefree", "schedule_free_radam schedule_free_adamw schedule_free_sgd"),
    "apollo_torch": ("apollo-torch", "apollo_adamw apollo_adamw_layerwise"),
    "optimi": ("torch-optimi", "stable_adamw"),
}


def why_skip(spec: TrainSpec, *, num_gpus: int, num_cores: int) -> str | None:
    """The reason, or ``None`` where the case can run; ``num_gpus`` 0 is the CPU."""
    if num_gpus == 0:
        return _why_not_on_cpu(spec, num_cores) or missing_package(spec)
    if spec.gpus > num_gpus:
        return f"{spec.id} needs {spec.gpus} GPUs, this run may use {num_gpus} (--gpus)"
    return missing_package(spec)


def _why_not_on_cpu(spec: TrainSpec, num_cores: int) -> str | None:
    if spec.gpus > num_cores:
        return f"{spec.id} needs {spec.gpus} ranks, this CPU runs {num_cores} at a time"
    reasons = (
        (spec.liger, "Liger's Triton kernels need a GPU"),
        (spec.attention in ("flash_attention_2", "flex_attention"), f"{spec.attention} trains on a GPU only"),
        ("fp16" in (spec.mixed_precision, spec.model_precision), "fp16 training needs a GPU"),
        (spec.fp8 != "no", "fp8 products need a GPU's matrix units (Ada, Hopper or newer)"),
        (spec.sdpa_backend in ("efficient", "cudnn"), f"sdpa's {spec.sdpa_backend} kernel is a GPU's"),
        # accelerate would train with DDP there, and say nothing.
        (spec.parallelism != "ddp", "FSDP through accelerate shards over GPUs only"),
        (spec.tf32, "TF32 is a mode of the GPU's matrix units"),
        (not spec.data_pinned, "batches are pinned for copies to a GPU, and a CPU makes none"),
    )
    why = next((words for applies, words in reasons if applies), None)
    return why and f"{spec.id}: {why}; run with --gpus {spec.gpus}"


def missing_package(spec: TrainSpec) -> str | None:
    """The package that its settings need and this environment does not have, and how to install it."""
    if spec.liger and find_spec("liger_kernel") is None:
        return f"{spec.id} needs Liger: pip install 'pytest-llmperf[liger]'"
    if spec.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        return f"{spec.id} needs flash-attn: pip install 'pytest-llmperf[flash-attn]'"
    if spec.fp8 != "no" and find_spec("torchao") is None:
        return f"{spec.id} needs torchao: pip install 'pytest-llmperf[fp8]'"
    if spec.data == "text" and find_spec("datasets") is None:
        return f"{spec.id} needs datasets, which reads texts: pip install 'pytest-llmperf[text]'"
    for module, (distribution, optimizers) in _OPTIMIZER_PACKAGES.items():
        if spec.optimizer in optimizers.split() and find_spec(module) is None:
            return f"{spec.id} needs {distribution}: pip install {distribution}"
    return None
