"""Ids and digests: by these a stored baseline is found, so none may move."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from perf_tests.gains import GAINS, specs_of
from pytest_llmperf import TrainSpec
from tests.frozen.house import small
from tests.golden import Golden

REPOSITORY = Path(__file__).parents[2]
SUITE = ("capacity", "families", "gains", "ladder", "optimisations", "parity", "real_data", "scaling")

_BASE = TrainSpec(model="llama-3.2-1b", liger=True, micro_batch_size=8)
_TINY = TrainSpec(model="llama-tiny", sequence_length=64)
_TEXT = replace(_TINY, data="text")
#: Of the documentation, and each setting by itself.
OTHERS = (
    TrainSpec(model="llama-3.2-1b"),
    _BASE,
    replace(_BASE, micro_batch_size=48),
    replace(_BASE, sequence_length=8192, gradient_checkpointing=True),
    replace(_TEXT, steps=100, min_steps=100),
    replace(_TEXT, model_precision="fp32", mixed_precision="no", rows="padded_in_loss", sequence_length=512),
    *(replace(_BASE, attention=value) for value in ("eager", "flash_attention_2", "flex_attention")),
    *(replace(_BASE, sdpa_backend=value) for value in ("flash", "cudnn", "math")),
    *(replace(_BASE, optimizer=value) for value in ("adamw_torch_fused", "adamw_torch_8bit", "adafactor", "sgd")),
    replace(_BASE, mixed_precision="no"),
    replace(_BASE, model_precision="fp32", mixed_precision="fp16"),
    *(replace(_BASE, mixed_precision="no", gpus=8, parallelism=value) for value in ("ddp", "fsdp", "fsdp_hybrid")),
    replace(_BASE, model_precision="fp32", tf32=True),
    replace(_BASE, liger_kernels="rms_norm+swiglu"),
    replace(_BASE, gradient_accumulation_steps=4),
    replace(_BASE, liger=False, gradient_checkpointing=True, checkpointing_policy="selective"),
    replace(_BASE, torch_compile=True, torch_compile_mode="max-autotune"),
    replace(_BASE, torch_compile=True, torch_compile_scope="layers", fp8="rowwise"),
    replace(_BASE, seed=7, steps=90, min_steps=20, warmup_steps=6),
    replace(_BASE, throughput_tolerance=0.05, memory_tolerance=0.1),
    *(replace(_TEXT, rows=value) for value in ("packed", "padded", "padded_in_loss")),
    replace(_TEXT, split="train[:50%]"),
)


def test_ids_and_digests_stay(golden: Golden) -> None:
    found = [spec for name in SUITE for spec in specs_in(vars(import_module(f"perf_tests.{name}")))]
    found += [spec for gain in GAINS if gain.cpu_bounds is not None for spec in specs_of(gain, cpu=True)]
    golden.check("specs.txt", "\n".join(sorted({line(spec) for spec in (*found, *OTHERS)})))


@pytest.mark.parametrize("path", sorted((REPOSITORY / "baselines").rglob("*.json")), ids=lambda path: path.stem)
def test_what_is_stored_has_the_digest_of_its_settings(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    spec = TrainSpec.from_dict(document["spec"])
    own = (spec.capacity_id, spec.capacity_digest) if path.parent.name == "capacity" else (spec.id, spec.digest)
    assert own == (document["id"], document["digest"])
    assert TrainSpec.from_dict(spec.to_dict()) == spec


def specs_in(value: Any) -> Iterator[TrainSpec]:
    """All that are in it, however deep."""
    if isinstance(value, TrainSpec):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from specs_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from specs_in(each) if not str(name).startswith("__") else ()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from specs_in(each)


def line(spec: TrainSpec) -> str:
    less = small(spec)
    usual = TrainSpec(model=spec.model).to_dict()
    settings = {name: value for name, value in spec.to_dict().items() if name == "model" or value != usual[name]}
    return " ".join(
        [
            spec.id,
            spec.digest,
            spec.capacity_digest,
            "small",
            less.id,
            less.digest,
            json.dumps(settings, sort_keys=True),
        ]
    )
