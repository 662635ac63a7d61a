"""What a spec asked for, held against what a launch's evidence says was active. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from pytest_llmperf.settings.checks import LIGER_KERNELS
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.suggestions import hint

_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


#: What no setting asks for and each launch shows; a model of which a part is never trained declares it.
LEARNING = "learning"


def declarable() -> tuple[str, ...]:
    """The settings that can be declared to change nothing, since evidence tells."""
    return (*_CHECKS, LEARNING)


def undeclarable(inactive: frozenset[str]) -> Iterator[str]:
    """A line for each name that cannot be declared inactive."""
    known = declarable()
    for name in sorted(inactive.difference(known)):
        yield f"{name!r} cannot be declared inactive{hint(name, known) or '; known: ' + ', '.join(known)}"


def contradictions(spec: TrainSpec, evidence: Mapping[str, Any], inactive: frozenset[str]) -> Iterator[str]:
    """A line for each setting that was not what ``spec`` asked for; of ``inactive`` ones, for each that was."""
    moot = _MOOT.get(evidence.get("device_type", ""), frozenset())
    for name, check in _CHECKS.items():
        if name in moot:
            continue
        try:
            line = check(spec, evidence)
        except KeyError as missing:
            # Absence proves neither.
            yield f"no evidence of {missing.args[0]} was recorded{_why_not(evidence)}"
            continue
        declared = name in inactive and getattr(spec, name) not in (False, "no")
        if declared and line is None:
            yield f"{name} was declared to be inactive, and was active"
        elif line is not None and not declared:
            yield line


def _why_not(evidence: Mapping[str, Any]) -> str:
    failed = evidence.get("uncollected", {})
    return f" (collecting it failed: {'; '.join(f'{name}: {why}' for name, why in failed.items())})" if failed else ""


def _liger(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    patched = evidence["liger_modules"] + len(evidence.get("liger_functions", ()))  # old records do not tell of those
    if spec.liger and not patched:
        note = evidence.get("liger_note")
        return "asked for liger, nothing was patched" + (f" ({note})" if note else "")
    if patched and not spec.liger:
        return f"liger was not asked for, and {patched} modules were patched"
    return None if spec.liger_kernels == "all" else _chosen_kernels(spec, evidence)


def _chosen_kernels(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    """Of a choice of Liger's kernels: each replaces a module's forward pass, or a function."""
    forwards = " ".join(evidence["liger_forwards"]).lower()
    ran = {kernel for kernel, mark in _LIGER_MARKS.items() if mark in forwards} | {*evidence["liger_functions"]}
    if ran == {*spec.liger_kernels.split("+")}:
        return None
    told = "+".join(name for name in LIGER_KERNELS if name in ran)
    return f"asked for the Liger kernels {spec.liger_kernels}, the run had {told or 'none'}"


# How the name of the forward pass of each begins or goes on, in small letters.
_LIGER_MARKS = {
    "rms_norm": "rmsnorm",
    "layer_norm": "layernorm",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "fused_linear_cross_entropy": "lce_forward",
}


def _attention(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    asked, ran = spec.attention, evidence["attention"]
    if asked != ran:
        return f"asked for attention {asked}, the model ran {ran}"
    # Old records have no kernel, and not every one can be watched.
    kernel = evidence.get("attention_kernel", "unknown")
    if kernel == "unknown":
        return None
    if spec.sdpa_backend != "auto":
        ran = "math" if kernel in ("", _MATH) else kernel
        return None if spec.sdpa_backend in ran else f"asked for sdpa's {spec.sdpa_backend} kernel, the run had {ran}"
    if _KERNELS[asked](kernel):
        return None
    if asked == "sdpa" and kernel in ("", _MATH):
        # On a CPU it may be the only one there is; on a GPU it is what sdpa is there to avoid.
        is_off = evidence.get("setup", {}).get("torch", {}).get("sdpa_kernels") == ["math"]
        line = f"asked for attention sdpa, {_TURNED_OFF if is_off else _FELL_BACK}"
        return line if evidence.get("device_type", "cpu") != "cpu" else None
    return f"asked for attention {asked}, the operators that ran were {kernel or 'plain matrix products'}"


_MATH = "aten._scaled_dot_product_attention_math.default"
_TURNED_OFF = (
    "this environment turns its fused kernels off (torch.backends.cuda.enable_flash_sdp, ...); "
    "use sdpa_backend='math' if that is meant"
)
_FELL_BACK = (
    "PyTorch fell back to its math kernel: no fused one took these inputs "
    "(torch.backends.cuda.can_use_flash_attention(..., debug=True) says why)"
)

# What the operators of each attention are called; eager's are matrix products and a softmax, like anything else's.
_KERNELS: Mapping[str, Callable[[str], bool]] = {
    "eager": lambda kernel: not kernel,
    "sdpa": lambda kernel: "scaled_dot_product" in kernel and kernel != _MATH,
    "flash_attention_2": lambda kernel: "flash_attn" in kernel,
    "flex_attention": lambda kernel: "flex_attention" in kernel,
}


def _saved(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _equal("save_checkpoint", spec.save_checkpoint, bool(evidence.get("checkpoint_bytes")))


def _weights(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    """By element, less what the model's own class keeps in another type, as fp32 routers; old records have none."""
    kept = evidence.get("kept_dtypes", {})
    seen = [dtype for dtype, number in sorted(evidence["parameter_dtypes"].items()) if number > kept.get(dtype, 0)]
    return _equal("weights of", _DTYPES[spec.model_precision], ", ".join(seen))


def _autocast(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    seen = evidence["autocast_dtype"] or evidence.get("gathered_dtype") or None
    if spec.mixed_precision == "no":
        return None if seen is None else f"asked for no autocast, the run had autocast to {seen}"
    return _equal("autocast to", _DTYPES[spec.mixed_precision], seen or "none")


def _tf32(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _equal("tf32", spec.tf32, evidence["tf32"])


def _world_size(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _equal("world size", spec.gpus, evidence["world_size"])


def _checkpointing(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    line = _equal("gradient checkpointing", spec.gradient_checkpointing, evidence["gradient_checkpointing"])
    if line or not spec.gradient_checkpointing:
        return line
    return _as_before("recomputation", spec, evidence, "checkpointing_policy")


def _compile(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    line = _equal("torch_compile", spec.torch_compile, evidence["torch_compile"])
    if line or not spec.torch_compile:
        return line
    if evidence.get("compiled_graphs", 1) == 0:
        return "asked for torch_compile, no graph was compiled"
    mode = _as_before("torch_compile's mode", spec, evidence, "torch_compile_mode")
    return mode or _as_before("torch_compile's scope", spec, evidence, "torch_compile_scope")


def _fp8(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    converted = evidence.get("fp8_modules", 0)  # old records have none, and no fp8
    if spec.fp8 == "no":
        return f"fp8 was not asked for, and {converted} modules had it" if converted else None
    if not converted:
        return "asked for fp8, no linear layer was converted"
    left = evidence.get("linear_modules", 0)
    if left > converted:
        return f"asked for fp8, {left} linear layers were left as they were and {converted} converted"
    return _equal("fp8's recipe", spec.fp8, evidence.get("fp8_recipe", spec.fp8))


def _as_before(what: str, spec: TrainSpec, evidence: Mapping[str, Any], name: str) -> str | None:
    """A setting that came later: records from before have no evidence, and did what is the default now."""
    default = next(f.default for f in fields(spec) if f.name == name)
    return _equal(what, getattr(spec, name), evidence.get(name, default))


def _parallelism(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    if spec.gpus == 1:
        return None
    return _equal("parallelism", spec.parallelism, evidence.get("parallelism", "ddp"))  # older records knew no other


def _optimizer(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    if spec.optimizer in ("adamw_torch", "adamw_torch_fused"):
        asked = ("AdamW", spec.optimizer == "adamw_torch_fused")
        return _equal("optimizer (class, fused)", asked, (evidence["optimizer"], evidence["optimizer_fused"]))
    seen, words = evidence["optimizer"], spec.optimizer.split("_")
    if seen in ("", "NoneType"):
        return f"asked for optimizer {spec.optimizer}, none was seen"
    if not all(part in seen.lower() for part in optimizer_class(spec.optimizer)):
        return f"asked for optimizer {spec.optimizer}, the run had {seen}"
    # bitsandbytes has one class for all sizes of state, paged or not; old records do not tell.
    bits = next((word for word in words if word.endswith("bit")), "32bit" if "bnb" in words else "")
    if bits not in seen.lower() and evidence.get("optimizer_bits", bits) != bits:
        return f"asked for optimizer {spec.optimizer}, the run had {seen} without {bits} states"
    if "paged" in words and not evidence.get("optimizer_paged", True):
        return f"asked for optimizer {spec.optimizer}, the run had {seen} without paging"
    return None


def optimizer_class(name: str) -> tuple[str, ...]:
    """What the class of transformers' optimizer ``name`` is called, in parts and small letters; empty: nobody knows."""
    words = name.split("_")
    if "layerwise" in words:  # one optimizer for each weight, behind a dummy
        return ("layerwise",)
    return tuple(part for word, part in _OPTIMIZER_CLASSES.items() if word in words)


# By the words of transformers' names.
_OPTIMIZER_CLASSES = {"adamw": "adam", "schedule": "schedulefree"} | {
    word: word
    for word in "adafactor adagrad adalomo ademamix anyprecision apollo galore grokadamw lion lomo radam rmsprop sgd "
    "stable".split()
}


def _equal(what: str, asked: object, seen: object) -> str | None:
    return None if asked == seen else f"asked for {what} {asked}, the run had {seen}"


def _data(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    seen = evidence.get("data")
    if spec.data == "random":  # of which nothing is told
        return None if seen is None else f"asked for random tokens, the run read the text {seen.get('text')}"
    asked = {
        "text": spec.text_files.fingerprint,
        "split": spec.split,
        "tokenizer": spec.tokenizer_files.fingerprint,
        "rows": spec.rows,
    }
    seen = evidence["data"]
    return next((line for name in asked if (line := _equal(f"the data's {name}", asked[name], seen[name]))), None)


def _data_workers(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    line = _as_before("data workers", spec, evidence, "data_workers")
    if line or spec.data_prefetch is None:
        return line
    return _as_before("a prefetch of", spec, evidence, "data_prefetch")


def _pinned(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    return _as_before("pinned batches", spec, evidence, "data_pinned")


def _tokenised(spec: TrainSpec, evidence: Mapping[str, Any]) -> str | None:
    """By the process that fetches, and by no other; records that do not tell of it had all tokens ahead."""
    by = evidence.get("tokenised_by", "")
    fetching = "workers" if spec.data_workers else "rank"
    if spec.tokenise == "on_the_fly":
        return None if by == fetching else f"asked for tokens on the fly by the {fetching}, made by {by or 'nobody'}"
    makers = {"rank", "workers"} & {*by.split()}
    return f"asked for tokens ahead, made on the fly by the {by}" if makers else None


_CHECKS: Mapping[str, Callable[[TrainSpec, Mapping[str, Any]], str | None]] = {
    "liger": _liger,
    "attention": _attention,
    "model_precision": _weights,
    "mixed_precision": _autocast,
    "tf32": _tf32,
    "gpus": _world_size,
    "gradient_checkpointing": _checkpointing,
    "save_checkpoint": _saved,
    "torch_compile": _compile,
    "fp8": _fp8,
    "parallelism": _parallelism,
    "optimizer": _optimizer,
    "data": _data,
    "data_workers": _data_workers,
    "data_pinned": _pinned,
    "tokenise": _tokenised,
}

# What is neither active nor inactive there: a CPU has nothing to pin.
_MOOT = {"cpu": frozenset({"data_pinned"})}
