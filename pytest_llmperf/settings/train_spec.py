"""TrainSpec: one training configuration, validated when it is made, with an id for people and a digest for identity."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

from pytest_llmperf.settings import arguments, lora, models, registry
from pytest_llmperf.settings.data import PADDED, TextFiles, TokenizerFiles, lacks_rows, resolve_text, resolve_tokenizer
from pytest_llmperf.settings.liger import hub_kernels, lacks_kernels
from pytest_llmperf.settings.parallelism import data_ranks, on_fewer, zero_stage
from pytest_llmperf.settings.precision import precision_fields, precision_of
from pytest_llmperf.settings.setting import SpecError, is_refusal
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support.files import hashed, of_files
from pytest_llmperf.support.user_input import hint

__all__ = ["SpecError", "TrainSpec", "known_failure", "lacks_rows", "precision_fields"]
# For what the fixture has one word.
_PRECISION = "model_precision, mixed_precision and tf32"
# A field that says how long to measure, not what work is done.
_HOW = {"work": False}
# A field that came after the first stored baselines: at its default it is no part of the digest.
_LATER = {"later": True}

# Fields of before that are gone, with their defaults; and what transformers calls what three of them said.
_GONE: Mapping[str, Any] = {
    "tokenise": "ahead",
    "data_workers": 0,
    "data_prefetch": None,
    "data_pinned": True,
    "save_checkpoint": False,
}
_OF_A_LOADER = {"data_workers": "num_workers", "data_prefetch": "prefetch_factor", "data_pinned": "pin_memory"}

_T = TypeVar("_T")
# For pytest: a refusal is about the caller's line. Of the whole module, since the `__init__` that dataclass writes has
# no other place for it; a defect of ours still shows its frames.
__tracebackhide__ = is_refusal


@dataclass(frozen=True, kw_only=True)
class TrainSpec(Spec):
    """One training configuration; ``SpecError``: a value that cannot work, before anything is launched, in one line."""

    model: str
    """A built-in name, the path of a Hugging Face configuration, or a cached hub name."""
    gpus: int = 1
    """World size: GPUs, or gloo ranks on the CPU."""
    micro_batch_size: int = 1
    """Sequences per rank and forward pass."""
    sequence_length: int = 1024
    """Tokens per sequence."""
    model_precision: str = "bf16"
    """Type of the weights (and so of gradients and optimizer states)."""
    mixed_precision: str = "bf16"
    """Autocast type, or ``no``."""
    tf32: bool = False
    """Whether fp32 matrix products may use TF32; forced to what it says."""
    attention: str = "sdpa"
    """``attn_implementation`` of transformers."""
    sdpa_backend: str = field(default="auto", metadata=_LATER)
    """The kernel that ``sdpa`` must use, as ``torch.nn.attention.SDPBackend`` calls it; ``auto``: PyTorch's choice."""
    experts: str = field(default="auto", metadata=_LATER)
    """``experts_implementation`` of transformers, for a mixture of experts; ``auto``: its own choice."""
    liger: bool = False
    """Liger kernels through ``TrainingArguments(use_liger_kernel=True)``."""
    liger_kernels: str = field(default="all", metadata=_LATER)
    """Which of them, by Liger's words joined by ``+``; ``all``: what Liger switches on for the model by itself."""
    hub_kernels: str | Mapping[str, Any] = field(default="", metadata=_LATER)
    """Layers that are computed by kernels of local folders: ``{"RMSNorm": "FOLDER:LAYER"}``; kept as JSON text. Their
    identity is the kernel's name, not where it is."""
    loss: str = field(default="model", metadata=_LATER)
    """The ``model``'s own, over all logits at once; ``chunked`` or ``cut``, which never hold them all."""
    lora: bool = field(default=False, metadata=_LATER)
    """PEFT's adapters are trained, in the spec's precision, and the model's weights stay as they are."""
    lora_base: str = field(default="as_is", metadata=_LATER)
    """How the linear layers' weights are kept: ``as_is``, or in four bits, ``nf4``, by bitsandbytes."""
    lora_rank: int = field(default=16, metadata=_LATER)
    lora_targets: str = field(default="all-linear", metadata=_LATER)
    """The layers that have adapters, by their own names joined by ``+``; ``all-linear``: all but the vocabulary's."""
    lora_dropout: float = field(default=0.0, metadata=_LATER)
    torch_compile: bool = False
    torch_compile_mode: str = field(default="default", metadata=_LATER)
    """``mode`` of ``torch.compile``."""
    torch_compile_scope: str = field(default="model", metadata=_LATER)
    """What is compiled: the whole ``model``, or each of its repeated ``layers`` by itself."""
    fp8: str = field(default="no", metadata=_LATER)
    """torchao's float8 recipe for the linear layers (all but the last, the vocabulary's), or ``no``."""
    optimizer: str = "adamw_torch"
    """transformers' name."""
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    """Activation recomputation in the backward pass."""
    checkpointing_policy: str = field(default="full", metadata=_LATER)
    """What is recomputed: ``full`` layers, or, ``selective``, all but matrix products and attention."""
    offloading: str = field(default="no", metadata=_LATER)
    """Whether ``activations`` wait for the backward pass in the host's memory."""
    parallelism: str = "ddp"
    """``ddp``, or FSDP2 through accelerate: ``fsdp`` (over all ranks), ``fsdp_hybrid`` (replicas of shards);
    or ``tensor``: all ranks share each sequence."""
    data: str = "random"
    """``random`` tokens, or a ``text``."""
    text: str | None = field(default=None, metadata=_LATER)
    """A folder of parquet or ``.txt``, one such file, or the name of a cached dataset; left out: the one shipped here.
    Its identity is what it says, not where it is."""
    split: str = field(default="train", metadata=_LATER)
    """Which rows of it, as ``datasets`` has it: ``train``, ``train[:10%]``."""
    tokenizer: str | None = field(default=None, metadata=_LATER)
    """A folder as ``save_pretrained`` writes it, or a ``tokenizer.json``; left out: a token for each byte."""
    rows: str = field(default="packed", metadata=_LATER)
    """How it becomes rows of ``sequence_length``: ``packed`` or ``packed_apart``, or a text a row: ``padded``,
    ``padded_in_loss`` or ``padding_free``."""
    weights: str | None = None
    """A local folder of pretrained weights; random ones otherwise (speed does not depend on them)."""
    seed: int = 42
    training_arguments: str | Mapping[str, Any] = field(default="", metadata=_LATER)
    """What has no field here, for transformers' ``TrainingArguments``: ``{"adam_beta2": 0.95}``; kept as JSON text."""
    model_kwargs: str | Mapping[str, Any] = field(default="", metadata=_LATER)
    """What the model's configuration says otherwise than its file: ``{"num_hidden_layers": 8}``; kept as JSON text."""
    steps: int = field(default=60, metadata=_HOW)
    """Optimizer steps of one launch at most, the first one included."""
    min_steps: int = field(default=16, metadata=_HOW)
    """Steps of one launch at least; from there on it ends as soon as its median step time is known well enough. Left
    out, it is no more than ``steps``."""
    warmup_steps: int = field(default=4, metadata=_HOW)
    """Steps left out of the steady rate at least, the first one included; the steady state may begin later."""
    throughput_tolerance: float | None = field(default=None, metadata=_HOW)
    """Fraction by which this case may slow down; the run's own tolerance where ``None``."""
    memory_tolerance: float | None = field(default=None, metadata=_HOW)
    """Fraction by which this case's peak memory may grow; the run's own tolerance where ``None``."""

    _needs = ("model", "llama-3.2-1b")
    _no_field = MappingProxyType(
        {
            "precision": f", which is the fixture's word for three of its fields: {_PRECISION}",
            "tokenise": ": tokens are made ahead of all training",
            "save_checkpoint": ": a measured training saves nothing",
            **{name: f": say training_arguments={{'dataloader_{own}': …}}" for name, own in _OF_A_LOADER.items()},
        }
    )

    def __post_init__(self) -> None:
        for name in arguments.MAPPINGS:
            object.__setattr__(self, name, arguments.canonical(name, getattr(self, name)))
        for problem in chain(_type_problems(self), registry.value_problems(self)):  # the first alone
            raise SpecError(problem)
        for clash in registry.clashes(self):
            raise SpecError(f"{self.id}: {clash}", is_clash=True)

    @property
    def architecture(self) -> models.Model:
        model = _resolved("", models.resolve, self.model)
        changes = arguments.values(self, "model_kwargs")
        return _resolved("TrainSpec: model_kwargs: ", models.changed, model, changes) if changes else model

    @property
    def text_files(self) -> TextFiles:
        """What ``data="text"`` reads; SpecError: there is no such text, or no such split of it."""
        return _resolved("TrainSpec: ", resolve_text, self.text, self.split)

    @property
    def tokenizer_files(self) -> TokenizerFiles:
        """By what ``data="text"`` is made tokens; SpecError: there is no such tokenizer."""
        return _resolved("TrainSpec: ", resolve_tokenizer, self.tokenizer)

    @property
    def has_padding(self) -> bool:
        """Whether its rows are filled up, and come with a mask."""
        return self.data == "text" and self.rows in PADDED

    @property
    def precision(self) -> str:
        """The one word for precision; a combination without a word of its own is spelled out."""
        return precision_of(self)

    @property
    def id(self) -> str:
        """The model, and every setting that is on."""
        parts = [self.architecture.slug, *registry.words_in_id(self), f"gpus{self.gpus}"]
        return "-".join(part for part in parts if part)

    @property
    def digest(self) -> str:
        # The model, a text and its tokenizer enter by what they say, a hub kernel by its name, weights by whether there
        # are any. A field added later stays out while it has its default: digests stored before keep their meaning.
        work = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.metadata != _HOW and not (f.metadata == _LATER and getattr(self, f.name) == f.default)
        }
        work |= {"model": self.architecture.fingerprint, "weights": self.weights is not None}
        if self.hub_kernels:
            work["hub_kernels"] = {name: str(kernel) for name, kernel in hub_kernels(self).items()}
        if self.data == "text":
            work |= {"text": self.text_files.fingerprint, "tokenizer": self.tokenizer_files.fingerprint}
        return hashed(json.dumps(work, sort_keys=True, separators=(",", ":")))

    @property
    def capacity_id(self) -> str:
        return re.sub(r"-mbs\d+-", "-maxmbs-", self.id, count=1)

    @property
    def compute_precision(self) -> str:
        """The type of the matrix products, which decides the peak: one of the precisions, or ``fp8`` or ``tf32``."""
        if self.fp8 != "no":
            return "fp8"
        if self.mixed_precision != "no":
            return self.mixed_precision
        return "tf32" if self.tf32 and self.model_precision == "fp32" else self.model_precision

    @property
    def unmade_flops_per_token(self) -> float | None:
        """FLOPs of a full training that this one does not need; ``None``: not known."""
        return lora.unmade_flops_per_token(self)

    @property
    def content(self) -> str:
        folders = [kernel.folder.absolute() for kernel in hub_kernels(self).values()]
        files = [(str(path), path) for folder in folders for path in sorted(folder.rglob("*.py"))]
        return f"{self.digest}-{of_files(files)}" if files else self.digest

    @property
    def compiles(self) -> bool:
        """Whether its first step compiles kernels, by Inductor or Triton, unless their caches have them."""
        return self.torch_compile or self.liger or bool(self.hub_kernels) or self.attention == "flex_attention"

    @property
    def reads_gpu_numbers(self) -> bool:
        return zero_stage(self) > 0  # DeepSpeed

    @property
    def sequences_per_step(self) -> int:
        """Global batch, in sequences."""
        return self.micro_batch_size * self.gradient_accumulation_steps * data_ranks(self)

    @property
    def slug(self) -> str:
        return self.architecture.slug

    def narrower(self) -> Iterator[Spec]:
        return (spec for gpus in range(1, self.gpus) if (spec := on_fewer(self, gpus)) is not None)

    @property
    def passes_per_step(self) -> int:
        return self.gradient_accumulation_steps

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSpec:
        """The spec with these fields; SpecError: an unknown one (with the nearest known one), or an invalid value. What
        files of before say of fields that are gone is left out where it was the default."""
        return cls(**{name: value for name, value in values.items() if _GONE.get(name, _GONE) != value})


def _resolved(prefix: str, resolve: Callable[..., _T], *names: Any) -> _T:
    try:
        return resolve(*names)
    except ValueError as error:
        raise SpecError(f"{prefix}{error}") from None


_TYPES: Mapping[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,), "str": (str,), "float": (float, int)}


def _type_problems(spec: TrainSpec) -> Iterator[str]:
    for each in fields(spec):
        value, expected = getattr(spec, each.name), str(each.type)
        if value is None and expected.endswith(" | None"):
            continue
        # bool is an int to Python, and never one to a user.
        fits = isinstance(value, _TYPES[expected.partition(" | ")[0]])
        if not fits or (expected != "bool" and isinstance(value, bool)):
            yield f"TrainSpec: {each.name}={value!r} must be {expected}, not {type(value).__name__}"


def known_failure(spec: TrainSpec) -> str | None:
    """A line about what fails with today's versions: it is launched all the same, and its failure says so."""
    if spec.liger and spec.torch_compile and spec.torch_compile_scope == "model":
        versions = "torch 2.11, triton 3.6 and liger-kernel 0.8.5"
        return f"known: Liger under torch.compile fails with {versions} (at micro-batch 37; at 1 it trained)"
    if spec.liger and lacks_kernels(spec):
        return f"the installed Liger has no kernels for {spec.architecture.config['model_type']}"
    return None


# Faults put into a training on purpose and by a known amount: "slow=0.03 rank=1 hold=268435456" makes every step of
# rank 1 (without rank: of all) 3 % longer and keeps 256 MiB; "attention=eager" trains with another value than was asked
# for; "hang=5" never comes back from step 5. The launch's evidence tells of it, and such a launch is never stored.

#: The environment variable that asks for them.
INJECT = "LLMPERF_INJECT"


@dataclass(frozen=True)
class Injection:
    slow: float = 0.0
    """Share of the step time, added to each step."""
    hold: int = 0
    """Bytes."""
    hang: int = 0
    """The step at whose end the rank stays for good; 0: none."""
    rank: int | None = None
    """The one rank that does all this; ``None`` is every rank."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the spec to train with instead of what was asked for."""

    @classmethod
    def from_environment(cls, num_ranks: int = 0) -> Injection:
        """As the variable says, for ``num_ranks`` ranks (0: unknown); a ``ValueError`` where it says what cannot be."""
        text = os.environ.get(INJECT, "")
        try:
            values = dict(word.split("=", 1) for word in text.split())
            rank = values.pop("rank", None)
            found = cls(
                slow=float(values.pop("slow", 0)),
                hold=int(values.pop("hold", 0)),
                hang=int(values.pop("hang", 0)),
                rank=None if rank is None else int(rank),
                settings={name: _value(text) for name, text in values.items()},
            )
        except ValueError as error:
            raise ValueError(
                f"{INJECT}={text!r}: expected slow=SHARE hold=BYTES hang=STEP rank=RANK SETTING=VALUE ({error})"
            ) from error
        if problem := found.problem(num_ranks):
            raise ValueError(f"{INJECT}={text!r}: {problem}")
        return found

    def problem(self, num_ranks: int) -> str | None:
        """Why this cannot be done by ``num_ranks`` ranks (0: as many as need be), or ``None``."""
        if not 0 <= self.slow < math.inf:  # also true of NaN
            return f"slow={self.slow:g} must be a share of the step time, e.g. slow=0.03 for 3 %"
        if self.hold < 0:
            return f"hold={self.hold} must be a number of bytes"
        if self.hang < 0:
            return f"hang={self.hang} must be a step, e.g. hang=5"
        words, settings = ("slow", "hold", "hang", "rank"), [setting.name for setting in fields(TrainSpec)]
        for name in self.settings:
            if name not in settings:
                return f"{name}= is neither one of {', '.join(words)} nor a setting{hint(name, [*words, *settings])}"
        if self.rank is not None and not 0 <= self.rank < (num_ranks or math.inf):
            ranks = f", 0 to {num_ranks - 1}" if num_ranks else ""
            return f"rank={self.rank} must be one of this launch's ranks{ranks}"
        return None

    def mutated(self, spec: TrainSpec, rank: int) -> TrainSpec:
        """``spec`` as ``rank`` is to train it; a ``ValueError`` where that cannot be."""
        if not self.settings or self.rank not in (None, rank):
            return spec
        try:
            return TrainSpec.from_dict({**spec.to_dict(), **self.settings})
        except SpecError as error:
            raise ValueError(f"{INJECT}={os.environ.get(INJECT, '')!r}: {error}") from error

    def concerns(self, rank: int) -> bool:
        return bool(self.slow or self.hold or self.hang) and self.rank in (None, rank)


def _value(text: str) -> Any:
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
