"""TrainSpec: one training configuration, validated when it is made, with an id for people and a digest for identity."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any

from pytest_llmperf.settings import checks, models, text_files
from pytest_llmperf.settings import checks as values
from pytest_llmperf.settings import text_files as tokenizer_files
from pytest_llmperf.settings.checks import (
    ATTENTIONS,
    MIXED_PRECISIONS,
    MODEL_PRECISIONS,
    OPTIMIZERS,
    PRECISIONS,
    UNSUPPORTED_OPTIMIZERS,
)
from pytest_llmperf.settings.text_files import TextFiles, TokenizerFiles
from pytest_llmperf.support.suggestions import hint

# Identity of a TrainSpec: an id for people, a digest for files, and the same of the search for its largest batch.


def id_of(spec: TrainSpec) -> str:
    """The model, and every setting that is on."""
    defaults = {f.name: f.default for f in fields(spec)}

    def differs(name: str) -> bool:
        return bool(getattr(spec, name) != defaults[name])

    parts = [
        spec.architecture.slug,
        spec.precision,
        f"fp8-{spec.fp8}" if differs("fp8") else "",
        spec.attention,
        spec.sdpa_backend if differs("sdpa_backend") else "",
        "liger" if spec.liger else "",
        spec.liger_kernels if differs("liger_kernels") else "",
        "compile" if spec.torch_compile else "",
        spec.torch_compile_scope if differs("torch_compile_scope") else "",
        spec.torch_compile_mode if differs("torch_compile_mode") else "",
        "checkpointing" if spec.gradient_checkpointing else "",
        spec.checkpointing_policy if differs("checkpointing_policy") else "",
        spec.optimizer if differs("optimizer") else "",
        f"seq{spec.sequence_length}" if differs("sequence_length") else "",
        f"mbs{spec.micro_batch_size}",
        f"accum{spec.gradient_accumulation_steps}" if differs("gradient_accumulation_steps") else "",
        *(f.metadata["in_id"].format(_in_words(spec, f.name)) for f in fields(spec) if _tells(f) and differs(f.name)),
        f"gpus{spec.gpus}",
    ]
    return "-".join(part for part in parts if part)


def _in_words(spec: TrainSpec, name: str) -> object:
    """The value of a field; of one that names files, what these are called and say."""
    if name == "text":
        return spec.text_files.slug
    if name == "split":
        return spec.text_files.split.slug
    return spec.tokenizer_files.slug if name == "tokenizer" else getattr(spec, name)


def _tells(f: Field[Any]) -> bool:
    return "in_id" in f.metadata


def digest_of(spec: TrainSpec) -> str:
    """16 hex digits, the same on every Python, machine and path.

    The model enters by what its configuration says, a text and its tokenizer by what they say, weights by whether there
    are any, and fields that only say how long to measure do not enter. A field added later stays out while it has its
    default, so that digests stored before keep their meaning.
    """

    def enters(name: str, default: object, about: Mapping[Any, Any]) -> bool:
        return about.get("work", True) and not (about.get("later") and getattr(spec, name) == default)

    work = {f.name: getattr(spec, f.name) for f in fields(spec) if enters(f.name, f.default, f.metadata)}
    work["model"] = spec.architecture.fingerprint
    work["weights"] = spec.weights is not None
    if spec.data == "text":
        work |= {"text": spec.text_files.fingerprint, "tokenizer": spec.tokenizer_files.fingerprint}
    return _hashed(json.dumps(work, sort_keys=True, separators=(",", ":")))


def capacity_id_of(spec: TrainSpec) -> str:
    """Its id without the micro-batch size, of which the largest is sought."""
    return re.sub(r"-mbs\d+-", "-maxmbs-", id_of(spec), count=1)


def capacity_digest_of(spec: TrainSpec) -> str:
    """The same whatever micro-batch size the search begins at."""
    return _hashed(f"capacity {digest_of(replace(spec, micro_batch_size=1))}")


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# A field that says how long to measure, not what work is done.
_HOW = {"work": False}

# A field that came after the first stored baselines: at its default it is no part of the digest.
_LATER = {"later": True}


def _in_id(words: str) -> dict[str, str]:
    """Of a field that an id tells, as ``words`` with its value, where it is not at its default; in the fields' order.

    The fields before ``parallelism`` have their places in ``identity.id_of``, older than this.
    """
    return {"in_id": words}


class SpecError(ValueError):
    """A training configuration that cannot be, in one line."""


def _is_refusal(caught: Any) -> bool:
    return caught is not None and caught.errisinstance(SpecError)


# For pytest: a refusal is about the caller's line. Of the whole module, since the `__init__` that dataclass writes has
# no other place for it; a defect of ours still shows its frames.
__tracebackhide__ = _is_refusal


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """One training configuration.

    Raises:
        SpecError: a value that cannot work, before anything is launched, in one line.
    """

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
    liger: bool = False
    """Liger kernels through ``TrainingArguments(use_liger_kernel=True)``."""
    liger_kernels: str = field(default="all", metadata=_LATER)
    """Which of them, by Liger's words joined by ``+``; ``all``: what Liger switches on for the model by itself."""
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
    parallelism: str = field(default="ddp", metadata=_in_id("{}"))
    """``ddp``, or FSDP2 through accelerate: ``fsdp`` (over all ranks), ``fsdp_hybrid`` (replicas of shards)."""
    data: str = field(default="random", metadata=_in_id("{}"))
    """``random`` tokens, or a ``text``."""
    text: str | None = field(default=None, metadata={**_LATER, **_in_id("{}")})
    """A folder of parquet or ``.txt``, one such file, or the name of a cached dataset; left out: the one shipped here.

    Its identity is what it says, not where it is."""
    split: str = field(default="train", metadata={**_LATER, **_in_id("{}")})
    """Which rows of it, as ``datasets`` has it: ``train``, ``train[:10%]``."""
    tokenizer: str | None = field(default=None, metadata={**_LATER, **_in_id("{}")})
    """A folder as ``save_pretrained`` writes it, or a ``tokenizer.json``; left out: a token for each byte."""
    rows: str = field(default="packed", metadata={**_LATER, **_in_id("{}")})
    """How it becomes rows of ``sequence_length``: ``packed``, or a text a row, ``padded`` or ``padded_in_loss``."""
    tokenise: str = field(default="ahead", metadata={**_LATER, **_in_id("{}")})
    """When it is made tokens: ``ahead`` of all training, or each row ``on_the_fly``, by the process that fetches it."""
    data_workers: int = field(default=0, metadata={**_LATER, **_in_id("workers{}")})
    """Processes of each rank that fetch its batches; 0: the rank does, between two steps."""
    data_prefetch: int | None = field(default=None, metadata={**_LATER, **_in_id("prefetch{}")})
    """Batches that each worker keeps ready; left out: PyTorch's choice, which is 2."""
    data_pinned: bool = field(default=True, metadata={**_LATER, **_in_id("unpinned")})
    """Whether batches are copied to a GPU from pinned memory; a CPU has nothing to copy."""
    weights: str | None = field(default=None, metadata=_in_id("pretrained"))
    """A local folder of pretrained weights; random ones otherwise (speed does not depend on them)."""
    seed: int = field(default=42, metadata=_in_id("seed{}"))
    save_checkpoint: bool = field(default=False, metadata={**_LATER, **_in_id("saves")})
    """Whether the Trainer saves once, all that it would resume from, after the timed steps."""
    steps: int = field(default=60, metadata=_HOW)
    """Optimizer steps of one launch at most, the first one included."""
    min_steps: int = field(default=16, metadata=_HOW)
    """Steps of one launch at least; from there on it ends as soon as its median step time is known well enough.

    Left out, it is no more than ``steps``.
    """
    warmup_steps: int = field(default=4, metadata=_HOW)
    """Steps left out of the steady rate at least, the first one included; the steady state may begin later."""
    throughput_tolerance: float | None = field(default=None, metadata=_HOW)
    """Fraction by which this case may slow down; the run's own tolerance where ``None``."""
    memory_tolerance: float | None = field(default=None, metadata=_HOW)
    """Fraction by which this case's peak memory may grow; the run's own tolerance where ``None``."""

    def __new__(cls, *args: Any, **given: Any) -> TrainSpec:  # noqa: PYI034 - typing has no Self before Python 3.11
        # Here, because dataclass' own __init__ answers an unknown field with a TypeError that knows no nearest one.
        if args:
            raise SpecError(f"TrainSpec takes its fields by name, e.g. model={args[0]!r}")
        _check_fields(given)
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"model": self.model}  # pickle and copy go through __new__ too, and set the fields afterwards

    def __post_init__(self) -> None:
        problem = next(values.problems(self), None)
        if problem is None and (line := checks.problem(self)) is not None:
            problem = f"{self.id}: {line}"
        if problem is not None:
            raise SpecError(problem)

    @property
    def architecture(self) -> models.Model:
        try:
            return models.resolve(self.model)
        except ValueError as error:
            raise SpecError(str(error)) from None

    @property
    def text_files(self) -> TextFiles:
        """What ``data="text"`` reads.

        Raises:
            SpecError: there is no such text, or no such split of it.
        """
        try:
            return text_files.resolve_text(self.text, self.split)
        except ValueError as error:
            raise SpecError(f"TrainSpec: {error}") from None

    @property
    def tokenizer_files(self) -> TokenizerFiles:
        """By what ``data="text"`` is made tokens.

        Raises:
            SpecError: there is no such tokenizer.
        """
        try:
            return tokenizer_files.resolve_tokenizer(self.tokenizer)
        except ValueError as error:
            raise SpecError(f"TrainSpec: {error}") from None

    @property
    def has_padding(self) -> bool:
        """Whether its rows are filled up, and come with a mask."""
        return self.data == "text" and self.rows != "packed"

    @property
    def precision(self) -> str:
        """The one word for precision; a combination without a word of its own is spelled out."""
        triple = (self.model_precision, self.mixed_precision, self.tf32)
        for word, known in PRECISIONS.items():
            if known == triple:
                return word
        return f"{self.model_precision}-amp-{self.mixed_precision}" + ("-tf32" if self.tf32 else "")

    @property
    def id(self) -> str:
        """For people and ``-k``: the model, and every setting that is on."""
        return id_of(self)

    @property
    def digest(self) -> str:
        """Identity of the work: the same on every Python, machine and path; 16 hex digits."""
        return digest_of(self)

    @property
    def capacity_id(self) -> str:
        """For people: every setting that is on but the micro-batch size, of which the largest is sought."""
        return capacity_id_of(self)

    @property
    def capacity_digest(self) -> str:
        """Identity of the search for the largest micro-batch, whatever size it begins at."""
        return capacity_digest_of(self)

    @property
    def compute_precision(self) -> str:
        """The type of the matrix products, which decides the peak: one of the precisions, or ``fp8`` or ``tf32``."""
        if self.fp8 != "no":
            return "fp8"
        if self.mixed_precision != "no":
            return self.mixed_precision
        if self.model_precision != "fp32":
            return self.model_precision
        return "tf32" if self.tf32 else "fp32"

    @property
    def compiles(self) -> bool:
        """Whether its first step compiles kernels, by Inductor or Triton, unless their caches have them."""
        return self.torch_compile or self.liger or self.attention == "flex_attention"

    @property
    def sequences_per_step(self) -> int:
        """Global batch, in sequences."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.gpus

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSpec:
        """The spec with these fields.

        Raises:
            SpecError: an unknown field (with the nearest known one) or an invalid value.
        """
        return cls(**values)


def precision_fields(word: object) -> dict[str, Any]:
    """The three fields of a TrainSpec that a ``word`` of ``PRECISIONS`` stands for.

    Raises:
        SpecError: no such word.
    """
    if not isinstance(word, str) or word not in PRECISIONS:  # a test may be parametrized with a list
        known = tuple(PRECISIONS)
        raise SpecError(f"unknown precision {word!r}{hint(str(word), known)}; known: {', '.join(known)}")
    return dict(zip(("model_precision", "mixed_precision", "tf32"), PRECISIONS[word], strict=True))


def _check_fields(values: Mapping[str, Any]) -> None:
    known = tuple(f.name for f in fields(TrainSpec))
    for name in values:
        if name == "precision":
            raise SpecError(
                "TrainSpec has no field 'precision', which is the fixture's word for three of its fields: "
                "model_precision, mixed_precision and tf32"
            )
        if name not in known:
            raise SpecError(f"TrainSpec has no field {name!r}{hint(name, known)}")
    if "model" not in values:
        raise SpecError("TrainSpec needs a model, e.g. model='llama-3.2-1b'")


__all__ = [
    "ATTENTIONS",
    "MIXED_PRECISIONS",
    "MODEL_PRECISIONS",
    "OPTIMIZERS",
    "PRECISIONS",
    "UNSUPPORTED_OPTIMIZERS",
    "SpecError",
    "TrainSpec",
    "precision_fields",
]


# What is known to fail with today's versions: it is launched all the same, and its failure says so.


def known_failure(spec: TrainSpec) -> str | None:
    """A line about this spec's known failure, or ``None``."""
    if spec.liger and spec.torch_compile and spec.torch_compile_scope == "model":
        return (
            "known: Liger under torch.compile fails with torch 2.11, triton 3.6 and liger-kernel 0.8.5 (seen at "
            "micro-batch 37: Triton's CompilationError \"'float' object has no attribute 'to'\", and an illegal memory "
            "access; at micro-batch 1 it trained)"
        )
    return None
