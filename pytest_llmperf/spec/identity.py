"""Identity of a TrainSpec: an id for people, a digest for files, and the same of the search for its largest batch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_llmperf.spec.train_spec import TrainSpec


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
