"""From a spec to the model and the Trainer's arguments; each setting's part is its twin's in ``settings/``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from pytest_llmperf.observe.environment import NOT_WORK
from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import arguments, attention, of_twins, optimizer, parallelism, precision

T = TypeVar("T")

# Of what a configuration says, the values under which every token sees those that follow it, and what to write instead.
_SEES_AHEAD: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("is_decoder", (False,), "true"),  # bert, roberta, electra, …
    ("causal", (False,), "true"),  # xlm
    ("attn_type", ("bi",), '"uni"'),  # xlnet
    ("use_bidirectional_attention", (True, "all"), "false"),  # gemma's embedding models
)
# Their configuration has the field, and their code does not look at it.
_CAUSAL_ANYWAY = frozenset({"gpt_neox", "gpt_neox_japanese"})
# A prefix that is seen by all: no setting makes it a plain causal model.
_NEVER_CAUSAL = frozenset({"cpmant"})


@contextmanager
def of_what_cannot_be_built(model_type: str) -> Iterator[None]:
    """Refuse a configuration that transformers does not take, in here, for itself or for a model of it."""
    try:
        yield
    except (MemoryError, RuntimeError):  # a lack of memory, or of a device
        raise
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        line = f"{attention.transformers_version()} cannot build {model_type} from this configuration: {why[:300]}"
        raise RefusedError(line) from error


def check_direction(hf_config: Any) -> None:
    """Refuse a model that is not causal, by its configuration once it was built: some classes set what makes it so."""
    name, expected = hf_config.model_type, "its tokens see those after them; expected a causal"
    if name in _NEVER_CAUSAL:
        raise RefusedError(f"{name} is no causal model, {expected} language model")
    for key, values, instead in _SEES_AHEAD:
        value = getattr(hf_config, key, None)
        if value in values and name not in _CAUSAL_ANYWAY:
            write = f'write "{key}": {instead} into its configuration'
            raise RefusedError(f"{name} with {key}={value} is no causal model, {expected} one: {write}")


def hf_config_of(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a causal language model, without a cache; of one that sees or hears, its text part's: others
    would get no gradient. RefusedError: transformers has no such model, or does not take this configuration."""
    if config["model_type"] not in CONFIG_MAPPING:
        raise RefusedError(
            f"{attention.transformers_version()} has no model type {config['model_type']!r}, and code that comes with "
            "a model is never run; expected a type that it has"
        )
    # Fresh each time, since a failed attention's name stays on it; a copy, since transformers writes into its parts.
    with of_what_cannot_be_built(config["model_type"]):
        hf_config = AutoConfig.for_model(**deepcopy(dict(config)))
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RefusedError(
            f"{attention.transformers_version()} has no causal language model of type {config['model_type']!r}; "
            "expected one, e.g. a llama"
        )
    with of_what_cannot_be_built(config["model_type"]):  # some have two, and cannot say which
        text = hf_config.get_text_config()
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING and text.model_type != hf_config.model_type:
        hf_config = text
    hf_config.use_cache = False
    return hf_config


def checked_config(spec: TrainSpec, config: Mapping[str, Any]) -> PreTrainedConfig:
    """As ``hf_config_of``; RefusedError, too, where the model does not have the spec's attention or open settings."""
    hf_config = hf_config_of(config)
    attention.check_attention(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)], hf_config, spec.attention)
    arguments.check_configuration(spec, hf_config)
    arguments.check_values(spec)
    return hf_config


def build_model(spec: TrainSpec, config: Mapping[str, Any], device: torch.device) -> PreTrainedModel:
    """The model on ``device`` in the spec's precision: random weights, or ``spec.weights``. FileNotFoundError: no
    folder of weights. RefusedError: transformers has no such model, or not with this attention, or it is not causal."""
    attention.choose_sdpa(spec)
    hf_config = checked_config(spec, config)
    given = model_arguments(spec, spec.attention)
    if spec.weights is None:
        # Drawing 1.2e9 weights takes a minute on the host and half a second on the GPU.
        with device, of_what_cannot_be_built(hf_config.model_type):
            model = AutoModelForCausalLM.from_config(hf_config, **given)
    elif Path(spec.weights).is_dir():
        given |= {"config": hf_config, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(spec.weights, **given).to(device)
    else:
        raise FileNotFoundError(f"no folder of weights {spec.weights}, expected one as save_pretrained writes it")
    check_direction(model.config)
    for prepare in of_twins("PREPARE"):
        prepare(spec, model)
    return model


def model_arguments(spec: TrainSpec, implementation: str) -> dict[str, Any]:
    """What transformers is given beside a configuration."""
    dtype = precision.DTYPES[spec.model_precision]
    return {"dtype": dtype, "attn_implementation": implementation, **attention.experts_implementation(spec)}


def training_arguments(spec: TrainSpec, folder: Path, device: torch.device, steps: int) -> TrainingArguments:
    """The Trainer's arguments: its defaults, but for what the spec says and what would only add host work."""
    attention.found_settings()  # before anything is forced
    made = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=spec.micro_batch_size,
        gradient_accumulation_steps=spec.gradient_accumulation_steps,
        # Constant: a schedule over the number of steps would make what is learnt depend on how long one measures.
        lr_scheduler_type="constant",
        seed=spec.seed,
        use_cpu=device.type == "cpu",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        # The filter waits for the device at every step; the record holds every loss, and judges one that is not finite.
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        **dict(chain.from_iterable(given(spec, device).items() for given in of_twins("arguments"))),
    )
    parallelism.build_whole(spec)
    return made


def trainer_of(
    kind: Callable[..., T], spec: TrainSpec, model: PreTrainedModel, given: TrainingArguments, **more: Any
) -> T:
    """A Trainer of this ``kind``, with the optimizer, the TF32 and the fp8 that ``spec`` asks for."""
    made = kind(model=model, args=given, **more, **optimizer.chosen(spec, model, given))
    precision.force_tf32(spec, model.device)
    precision.gather_fp8(spec, model, made)
    parallelism.place_tokens(spec, made)
    return made


# Of what a configuration describes: what no step would do.
_NOT_OF_A_STEP = (
    NOT_WORK
    # Told by themselves.
    | {"auto_map", "quantization_config", "model_type", "text_config"}
    # How a file is stored and read.
    | {"torch_dtype", "dtype", "use_cache", "initializer_range", "attn_implementation"}
    # Older files say how text is generated, and for which tasks; layers for further tokens and experts are work.
    | ({*GenerationConfig().to_dict()} - {"use_mtp", "top_k"})
    | {"task_specific_params", "tokenizer_class", "prefix"}
)
_OF_OTHERS = ("_token_id", "_token_index", "_config")

# What all families share, beside the files of their own.
_SHARED = r"transformers\.(modeling_\w+|masking_utils|activations|cache_utils|loss\.loss_utils|integrations\.moe)"
_FURTHER, _MOST = re.compile(r"mtp|nextn"), 6


def unused_settings(config: Mapping[str, Any], model: PreTrainedModel) -> Iterator[str]:
    """A line for each thing that ``config``, as its file has it, asks for and ``model`` does not do."""
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
    if unused := sorted(_unused(config, model)):
        more = f" and {len(unused) - _MOST} more" if len(unused) > _MOST else ""
        yield f"its configuration has settings that {built} does not use: {', '.join(unused[:_MOST])}{more}"


def _unused(config: Mapping[str, Any], model: PreTrainedModel) -> Iterator[str]:
    """What the code of the model, of its configuration and of what all models share does not say the name of."""
    text, kind = config.get("text_config"), type(model.config)
    settings = {**config, **text} if isinstance(text, Mapping) else config
    if isinstance(text, Mapping) and kind.model_type != config.get("model_type"):
        settings = text  # the rest is of other parts
    modules = {type(module).__module__ for module in model.modules()}
    modules |= {name for name in list(sys.modules) if re.fullmatch(_SHARED, name)}
    sources = (_source(name) for name in modules if not name.startswith("torch."))
    words = {word for source in sources for word in re.findall(r"[A-Za-z_]\w+", source)}
    own = _source(kind.__module__)  # that computes with a name: a field that is declared alone has no effect
    has_further = any(_FURTHER.search(name) for name, _ in model.named_modules())
    for name, value in settings.items():
        # Of what is off, empty or another part's nothing is asked.
        if not value or name in _NOT_OF_A_STEP or name.endswith(_OF_OTHERS):
            continue
        names = {name, kind.attribute_map.get(name, name)} | {k for k, v in kind.attribute_map.items() if v == name}
        # Layers that predict further tokens are spoken of where text is generated; who has some names them so.
        is_further = _FURTHER.search(name) and not has_further
        any_of_them = "|".join(map(re.escape, names))
        computed = re.search(rf"(self\.|kwargs\.\w+\(\s*[\"\'])({any_of_them})\b", own)
        if is_further or not (computed or names & words):
            yield name


def _source(module: str) -> str:
    with suppress(OSError, TypeError, KeyError):
        return Path(inspect.getsourcefile(sys.modules[module]) or "").read_text(encoding="utf-8")
    return ""
