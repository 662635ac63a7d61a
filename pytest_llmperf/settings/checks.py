"""What value each field of a TrainSpec may have by itself; ``combination_checks.py`` knows what goes together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmperf.support.quantities import A_TOLERANCE, is_tolerance
from pytest_llmperf.support.suggestions import hint

if TYPE_CHECKING:
    from pytest_llmperf.settings.train_spec import TrainSpec


# What the fields of a TrainSpec may say: the words, as transformers, PyTorch, torchao and Liger spell them.


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


_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, type(None)),
    "float | None": (float, int, type(None)),
}

_NAMES: Mapping[str, tuple[str, ...]] = {
    "model_precision": MODEL_PRECISIONS,
    "mixed_precision": MIXED_PRECISIONS,
    "attention": ATTENTIONS,
    "sdpa_backend": SDPA_BACKENDS,
    "torch_compile_mode": COMPILE_MODES,
    "torch_compile_scope": COMPILE_SCOPES,
    "fp8": FP8_RECIPES,
    "optimizer": RUNNABLE_OPTIMIZERS,
    "checkpointing_policy": CHECKPOINTING_POLICIES,
    "parallelism": PARALLELISMS,
    "data": DATA,
    "rows": ROWS,
    "tokenise": TOKENISING,
}

_COUNTS = ("gpus", "micro_batch_size", "sequence_length", "gradient_accumulation_steps", "steps", "min_steps")

# numpy, which the Trainer seeds too, takes no larger one.
_SEEDS = 2**32


def problems(spec: TrainSpec) -> Iterator[str]:
    """Why a value cannot be, a line each; a later one may only be asked for where no earlier one was found.

    Raises:
        SpecError: there is no such model, text or tokenizer.
    """
    yield from _types(spec)
    yield from _names(spec)
    yield from _texts(spec)
    yield from _numbers(spec)
    yield from _steps(spec)


def _types(spec: TrainSpec) -> Iterator[str]:
    for f in fields(spec):
        value, expected = getattr(spec, f.name), str(f.type)
        # bool is an int to Python, and never one to a user.
        if not isinstance(value, _TYPES[expected]) or (expected != "bool" and isinstance(value, bool)):
            yield f"TrainSpec: {f.name}={value!r} must be {expected}, not {type(value).__name__}"


def _names(spec: TrainSpec) -> Iterator[str]:
    if spec.optimizer in UNSUPPORTED_OPTIMIZERS:
        yield f"TrainSpec: optimizer={spec.optimizer!r}: {UNSUPPORTED_OPTIMIZERS[spec.optimizer]}"
    for name, known in _NAMES.items():
        value = getattr(spec, name)
        if value not in known:
            yield f"TrainSpec: unknown {name} {value!r}{hint(value, known)}; known: {_some(known)}"
    if spec.weights is not None and not _is_folder(spec.weights):
        yield f"TrainSpec: weights={spec.weights!r} names no folder, expected one as save_pretrained writes it"


def _texts(spec: TrainSpec) -> Iterator[str]:
    """Where no text is asked for, what says which one changes nothing, and would look as if it did."""
    if spec.data == "text":
        try:
            _ = spec.text_files.fingerprint, spec.tokenizer_files.fingerprint
        except OSError as error:
            yield f"TrainSpec: {error.filename}: cannot be read ({error.strerror})"
        return
    for f in fields(spec):
        value = getattr(spec, f.name)
        if f.name in (*OF_A_TEXT, "tokenise") and value != f.default:
            yield f"TrainSpec: {f.name}={value!r} without data='text' changes nothing"


def _numbers(spec: TrainSpec) -> Iterator[str]:
    positions = spec.architecture.max_sequence_length
    for name in _COUNTS:
        if getattr(spec, name) < 1:
            yield f"TrainSpec: {name}={getattr(spec, name)} must be at least 1"
    if spec.data_workers < 0:
        yield f"TrainSpec: data_workers={spec.data_workers} must be at least 0"
    if spec.data_prefetch is not None and spec.data_prefetch < 1:
        yield f"TrainSpec: data_prefetch={spec.data_prefetch} must be at least 1, or left out"
    length = spec.sequence_length
    if length < 2:  # noqa: PLR2004 - a causal model predicts the next token: one token has none
        yield f"{spec.id}: sequence_length=1 leaves no next token to predict; use at least 2"
    if positions is not None and length > positions:
        yield f"{spec.id}: sequence_length={length} exceeds the model's {positions} positions"
    for name in ("throughput_tolerance", "memory_tolerance"):
        value = getattr(spec, name)
        if value is not None and not is_tolerance(value):
            yield f"{spec.id}: {name}={value} must be {A_TOLERANCE}"
    if not 0 <= spec.seed < _SEEDS:
        yield f"{spec.id}: seed={spec.seed} must be at least 0 and below 2**32"


def _steps(spec: TrainSpec) -> Iterator[str]:
    warmup, steps, least = spec.warmup_steps, spec.steps, spec.min_steps
    if warmup < 1:
        yield f"{spec.id}: warmup_steps={warmup} must be at least 1: the first step is never steady"
    if warmup >= steps:
        yield f"{spec.id}: warmup_steps={warmup} leaves no step to measure of steps={steps}; lower it, or raise steps"
    default = next(f.default for f in fields(spec) if f.name == "min_steps")
    if least > steps and least != default:  # the default is nobody's word: steps bounds it
        yield f"{spec.id}: min_steps={least} is more than steps={steps}; lower it too, or raise steps"


def _is_folder(name: str) -> bool:
    try:
        return bool(name) and Path(name).is_dir()
    except OSError:  # too long a name, or a parent that may not be read
        return False


def _some(known: tuple[str, ...]) -> str:
    return ", ".join(known[:8]) + (f", … ({len(known)} in all)" if len(known) > 8 else "")  # noqa: PLR2004


# What of a TrainSpec cannot work together, and why: known before anything is launched.


# fp8 matrix units take operands in rows of 16 bytes.
_FP8_MULTIPLE = 16
_HYBRID_LEAST = 4


def problem(spec: TrainSpec) -> str | None:
    """Why these settings cannot train together and what to do instead, in one line; ``None`` where they can."""
    return next((line for rule in _RULES if (line := rule(spec))), None)


def _precisions(spec: TrainSpec) -> str | None:
    weights, autocast = spec.model_precision, spec.mixed_precision
    if autocast == weights == "fp16":
        return "fp16 weights with fp16 mixed precision: the gradient scaler refuses fp16 gradients; use fp32 weights"
    if {weights, autocast} == {"bf16", "fp16"}:
        return f"{weights} weights under {autocast} mixed precision; use one 16-bit type"
    if spec.tf32 and weights != "fp32":
        return f"tf32 acts on fp32 matrix products, and {spec.precision} has none; leave tf32=False"
    return None


def _attentions(spec: TrainSpec) -> str | None:
    if spec.attention == "flash_attention_2" and not _is_16_bit(spec):
        return "flash_attention_2 has no fp32 kernels; use bf16 or fp16, or attention='sdpa'"
    if spec.sdpa_backend != "auto" and spec.attention != "sdpa":
        return f"sdpa_backend={spec.sdpa_backend!r} acts on attention='sdpa', and this is {spec.attention}"
    if spec.sdpa_backend == "flash" and spec.has_padding:
        return (
            f"sdpa's flash kernel takes no mask, and rows={spec.rows!r} have one; use another backend, or rows='packed'"
        )
    heads = spec.architecture.geometry
    if spec.sdpa_backend == "efficient" and heads and heads.num_key_value_heads != heads.num_heads:
        return "sdpa's efficient kernel takes no shared key-value heads, and this model has them; use another backend"
    if spec.sdpa_backend in ("flash", "cudnn") and not _is_16_bit(spec):
        return f"sdpa's {spec.sdpa_backend} kernel takes no fp32; use bf16 or fp16, or sdpa_backend='auto'"
    return None


def _kernels(spec: TrainSpec) -> str | None:
    if spec.liger_kernels == "all":
        return None
    words = spec.liger_kernels.split("+")
    if not spec.liger:
        return f"liger_kernels={spec.liger_kernels!r} without liger=True changes nothing"
    unknown = [word for word in words if word not in LIGER_KERNELS]
    if unknown:
        return f"unknown Liger kernel {unknown[0]!r}; known: {', '.join(LIGER_KERNELS)}, joined by '+'"
    ordered = "+".join(name for name in LIGER_KERNELS if name in words)
    if ordered != spec.liger_kernels:
        return f"liger_kernels={spec.liger_kernels!r} must name each kernel once, in Liger's order: {ordered!r}"
    if "cross_entropy" in words and "fused_linear_cross_entropy" in words:
        return "Liger's cross_entropy and fused_linear_cross_entropy replace the same; name one of them"
    return None


def _modes(spec: TrainSpec) -> str | None:
    for name, default in (("torch_compile_mode", "default"), ("torch_compile_scope", "model")):
        if getattr(spec, name) != default and not spec.torch_compile:
            return f"{name}={getattr(spec, name)!r} without torch_compile=True changes nothing"
    if spec.checkpointing_policy != "full" and not spec.gradient_checkpointing:
        return f"checkpointing_policy={spec.checkpointing_policy!r} without gradient_checkpointing=True changes nothing"
    if spec.checkpointing_policy == "selective" and spec.attention == "flex_attention":
        return (
            "selective recomputation cannot keep what flex_attention gave; use another attention, or the policy 'full'"
        )
    if spec.checkpointing_policy == "selective" and spec.liger and "rope" in _kernels_of(spec):
        return (
            "Liger's rope kernel writes over the products that selective recomputation has kept, so that gradients are "
            "wrong and nothing says so; name the others in liger_kernels (a Llama has rms_norm, swiglu and "
            "fused_linear_cross_entropy), or use checkpointing_policy='full'"
        )
    return None


def _kernels_of(spec: TrainSpec) -> str:
    return "+".join(LIGER_KERNELS) if spec.liger_kernels == "all" else spec.liger_kernels


def _fp8(spec: TrainSpec) -> str | None:
    if spec.fp8 == "no":
        return None
    if "bf16" not in (spec.model_precision, spec.mixed_precision):
        return "fp8 products are made from bf16 ones; use bf16 weights or bf16 mixed precision"
    tokens = spec.micro_batch_size * spec.sequence_length
    if tokens % _FP8_MULTIPLE:
        return f"fp8 products need tokens in multiples of {_FP8_MULTIPLE}, and a micro-batch has {tokens}"
    return None


def _sharding(spec: TrainSpec) -> str | None:
    if spec.parallelism == "ddp":
        return None
    if spec.gpus == 1:
        return f"parallelism={spec.parallelism!r} has nothing to shard over on one GPU; use parallelism='ddp'"
    if spec.mixed_precision != "no" and spec.model_precision != "fp32":
        return (
            f"{spec.parallelism} under mixed precision keeps fp32 weights whatever was asked for (accelerate raises "
            "them); use fp32 weights (precision bf16-mixed), or no mixed precision (bf16-pure)"
        )
    if spec.mixed_precision == "fp16":
        return f"{spec.parallelism} with fp16 loss scaling was never tried here; use bf16"
    if spec.parallelism == "fsdp_hybrid" and (spec.gpus < _HYBRID_LEAST or spec.gpus % 2):
        return (
            f"fsdp_hybrid needs shards and replicas, so an even number of GPUs from {_HYBRID_LEAST} on, not {spec.gpus}"
        )
    return None


def _inputs(spec: TrainSpec) -> str | None:
    if spec.data_prefetch is not None and not spec.data_workers:
        return f"data_prefetch={spec.data_prefetch} without data_workers changes nothing: only workers fetch ahead"
    if spec.tokenise == "on_the_fly" and not spec.has_padding:
        return (
            "packed rows are cut from the tokens of all documents, so none can be made on the fly; use rows='padded' "
            "or 'padded_in_loss', or tokenise='ahead'"
        )
    return None


def _is_16_bit(spec: TrainSpec) -> bool:
    return bool({spec.model_precision, spec.mixed_precision} & {"bf16", "fp16"})


_RULES: tuple[Callable[[TrainSpec], str | None], ...] = (
    _precisions,
    _attentions,
    _kernels,
    _modes,
    _fp8,
    _sharding,
    _inputs,
)
