"""What the fields of a TrainSpec may say: the words, as transformers, PyTorch, torchao and Liger spell them."""

from __future__ import annotations

from collections.abc import Mapping

MODEL_PRECISIONS = ("fp32", "bf16", "fp16")
MIXED_PRECISIONS = ("no", "bf16", "fp16")
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
#: SDPA's kernels as torch.nn.attention.SDPBackend calls them; ``auto`` leaves the choice to PyTorch.
SDPA_BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")
#: ``fsdp`` shards over all ranks; ``fsdp_hybrid`` over the ranks of a node (in one node: over half of them), and keeps
#: replicas of that.
PARALLELISMS = ("ddp", "fsdp", "fsdp_hybrid")
#: ``full`` recomputes whole layers; ``selective`` keeps what matrix products and attention gave.
CHECKPOINTING_POLICIES = ("full", "selective")
#: ``layers`` compiles each repeated layer by itself and leaves the rest alone: PyTorch's regional compilation.
COMPILE_SCOPES = ("model", "layers")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: torchao's recipes for the products of linear layers; ``no`` leaves them in the compute precision.
FP8_RECIPES = ("no", "tensorwise", "rowwise", "rowwise_with_gw_hp")
#: What Liger's patches can be told to replace, by its own words.
LIGER_KERNELS = (
    "rope",
    "rms_norm",
    "layer_norm",
    "swiglu",
    "geglu",
    "cross_entropy",
    "fused_linear_cross_entropy",
)
DATA = ("random", "text")
#: The fields that say which text, and how it is read.
OF_A_TEXT = ("text", "split", "tokenizer", "rows")
#: How a text becomes rows of ``sequence_length``: one stream cut into ``packed`` ones; or a document a row, ``padded``
#: with what counts in no loss, or, as many a course has it, with padding that counts like any other token.
ROWS = ("packed", "padded", "padded_in_loss")

#: When a text is made tokens: before anything is timed, or each row as it is fetched.
TOKENISING = ("ahead", "on_the_fly")

#: One word for the pair (model_precision, mixed_precision) and TF32, the chapter's steps first.
PRECISIONS: Mapping[str, tuple[str, str, bool]] = {
    "fp32": ("fp32", "no", False),
    "tf32": ("fp32", "no", True),
    "bf16-mixed": ("fp32", "bf16", False),
    "bf16": ("bf16", "bf16", False),
    "bf16-pure": ("bf16", "no", False),
    "fp16-mixed": ("fp32", "fp16", False),
    "fp16-pure": ("fp16", "no", False),
}

#: transformers' own names (``OptimizerNames``), kept here because this process does not import transformers;
#: a test of the worker holds this list against the installed one.
OPTIMIZERS = tuple(
    "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adafactor adamw_anyprecision "
    "adamw_torch_4bit adamw_torch_8bit ademamix sgd adagrad adamw_bnb_8bit adamw_8bit ademamix_8bit lion_8bit "
    "lion_32bit paged_adamw_32bit paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit paged_lion_32bit "
    "paged_lion_8bit rmsprop rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw galore_adamw_8bit "
    "galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise lomo adalomo "
    "grokadamw schedule_free_radam schedule_free_adamw schedule_free_sgd apollo_adamw apollo_adamw_layerwise "
    "stable_adamw".split()
)

_TARGETS = "it needs optim_target_modules, for which TrainSpec has no field"
_LOMO = "it needs the package lomo-optim, which is not supported here"

#: Those of them that nothing a TrainSpec offers can make run, and why.
UNSUPPORTED_OPTIMIZERS: Mapping[str, str] = {
    "adamw_torch_xla": "it runs on TPUs, through torch_xla",
    "adamw_torch_npu_fused": "it runs on Ascend NPUs, through torch_npu",
    "adamw_anyprecision": "it needs torchdistx, which is made for no torch of today",
    **{name: _TARGETS for name in OPTIMIZERS if name.startswith(("galore_", "apollo_"))},
    "lomo": _LOMO,
    "adalomo": _LOMO,
}

RUNNABLE_OPTIMIZERS = tuple(name for name in OPTIMIZERS if name not in UNSUPPORTED_OPTIMIZERS)
