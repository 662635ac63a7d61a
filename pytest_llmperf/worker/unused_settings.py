"""Unused settings: what a model's configuration describes and the model that was built does not do.

A setting counts as used where the code of the model, of its configuration or of what all models share says its name.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from pytest_llmperf.worker.setup import NOT_WORK

# Told by themselves, or about how a file is stored and read.
_TOLD_APART = frozenset({"architectures", "auto_map", "quantization_config", "model_type", "text_config"})
_OF_THE_FILE = NOT_WORK | {"torch_dtype", "dtype", "use_cache", "initializer_range", "attn_implementation"}

# Older files say how text is generated, and for which tasks; layers for further tokens and experts are work.
_OF_GENERATING = {*GenerationConfig().to_dict()} - {"use_mtp", "top_k"}
_NOT_OF_A_STEP = _TOLD_APART | _OF_THE_FILE | _OF_GENERATING | {"task_specific_params", "tokenizer_class", "prefix"}

_OF_OTHERS = ("_token_id", "_token_index", "_config")

# What all families share, beside the files of their own.
_SHARED = r"transformers\.(modeling_\w+|masking_utils|activations|cache_utils|loss\.loss_utils|integrations\.moe)"

_MOST = 6


def unused_settings(config: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """A line for each thing that ``config``, as its file has it, asks for and ``model`` does not do."""
    return list(_lines(config, model))


def _lines(config: Mapping[str, Any], model: PreTrainedModel) -> Iterator[str]:
    built = type(model).__name__
    named = [str(name) for name in config.get("architectures") or ()]
    if model.config.model_type != config.get("model_type"):
        yield f"of {config['model_type']} the text part ({model.config.model_type}) is trained: tokens use no other"
    elif named and built not in named:
        yield f"its configuration names the class {', '.join(named)}, trained is {built}"
    if config.get("auto_map"):
        yield f"its configuration's own code (auto_map) is not run, trained is transformers' {built}"
    quantization = config.get("quantization_config")
    if quantization and not getattr(model, "is_quantized", False):
        method = quantization.get("quant_method", "") if isinstance(quantization, Mapping) else ""
        kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
        yield f"its configuration's quantization_config ({method or 'no method'}) is not applied: weights are {kinds}"
    unused = sorted(_unused(config, model))
    if unused:
        more = f" and {len(unused) - _MOST} more" if len(unused) > _MOST else ""
        yield f"its configuration has settings that {built} does not use: {', '.join(unused[:_MOST])}{more}"


def _unused(config: Mapping[str, Any], model: PreTrainedModel) -> Iterator[str]:
    text = config.get("text_config")
    kind = type(model.config)
    settings = {**config, **text} if isinstance(text, Mapping) else config
    if isinstance(text, Mapping) and kind.model_type != config.get("model_type"):
        settings = text  # the rest is of other parts
    words, own = _words(model), _source(kind.__module__)
    for name, value in settings.items():
        # Of what is off, empty or another part's nothing is asked.
        if not value or name in _NOT_OF_A_STEP or name.endswith(_OF_OTHERS):
            continue
        names = {name, kind.attribute_map.get(name, name)} | {k for k, v in kind.attribute_map.items() if v == name}
        # Layers that predict further tokens are spoken of where text is generated; who has some names them so.
        is_further = _FURTHER.search(name) and not any(_FURTHER.search(each) for each, _ in model.named_modules())
        if is_further or not any(each in words or _reads(own, each) for each in names):
            yield name


_FURTHER = re.compile(r"mtp|nextn")


def _reads(source: str, name: str) -> bool:
    """Whether a configuration's code computes with ``name``: a field that is declared alone has no effect."""
    return re.search(rf"self\.{re.escape(name)}\b|kwargs\.\w+\(\s*[\"\']{re.escape(name)}\b", source) is not None


def _words(model: PreTrainedModel) -> set[str]:
    names = {type(module).__module__ for module in model.modules()}
    names |= {name for name in list(sys.modules) if re.fullmatch(_SHARED, name)}
    sources = (_source(name) for name in names if not name.startswith("torch."))
    return {word for source in sources for word in re.findall(r"[A-Za-z_]\w+", source)}


def _source(module: str) -> str:
    with suppress(OSError, TypeError, KeyError):
        return Path(inspect.getsourcefile(sys.modules[module]) or "").read_text(encoding="utf-8")
    return ""
