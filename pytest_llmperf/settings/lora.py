"""LoRA: adapters that are trained in the place of a model's weights, which may be kept in four bits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_llmperf.settings.models import slugged
from pytest_llmperf.settings.setting import Evidence, Package, Setting, TrainSpec, claimed, equal
from pytest_llmperf.support.user_input import hint

#: As they are, or quantised by bitsandbytes: QLoRA's NormalFloat (Dettmers et al. 2023), its scales quantised too.
BASES = ("as_is", "nf4")
#: PEFT's word for every linear layer but the vocabulary's.
ALL_LINEAR = "all-linear"
# Layers beside those of each block that can have adapters, as families call them.
_OF_THE_VOCABULARY = ("lm_head", "embed_tokens", "embed_positions", "embed_in", "embed_out", "wte", "wpe")
_SWITCHED = ("lora_base", "lora_rank", "lora_targets", "lora_dropout")

_PEFT = Package("peft", "PEFT", "'pytest-llmperf[lora]'")
_BITSANDBYTES = Package("bitsandbytes", "bitsandbytes", "'pytest-llmperf[lora]' bitsandbytes", preload="nf4")


def targets(spec: TrainSpec) -> str | list[str]:
    """As PEFT takes them."""
    return ALL_LINEAR if spec.lora_targets == ALL_LINEAR else spec.lora_targets.split("+")


def unmade_flops_per_token(spec: TrainSpec) -> float | None:
    """FLOPs of a full training that this one does not need: the gradients of the matrices, which do not change. Those
    of the adapters, under a hundredth, are left out. ``None``: of a family whose arithmetic only a count can tell."""
    geometry = spec.architecture.geometry if spec.lora else None
    if spec.lora and geometry is None:
        return None
    return 0.0 if geometry is None else 2.0 * geometry.weights


def adapted_layers(spec: TrainSpec) -> list[tuple[str, int, int]]:
    """Those of one layer of the model that have adapters, if it has some: name, width and output of each."""
    all_of_them = spec.architecture.linear_layers() if spec.lora else []
    return [each for each in all_of_them if spec.lora_targets == ALL_LINEAR or each[0] in targets(spec)]


def trained_weights(spec: TrainSpec) -> int | None:
    """How many there are, adapters' alone where it has some; ``None``: the configuration does not say."""
    if (sizes := spec.architecture.sizes) is None:
        return None
    if not spec.lora:
        return sizes.weights
    of_a_layer = sum(width + output for _, width, output in adapted_layers(spec))
    others = len({*_OF_THE_VOCABULARY}.intersection(targets(spec))) * (sizes.hidden_size + sizes.vocabulary_size)
    return spec.lora_rank * (sizes.num_layers * of_a_layer + others)


def _problems(spec: TrainSpec) -> Iterator[str]:
    if not re.fullmatch(r"\w+(\+\w+)*|all-linear", spec.lora_targets):
        yield (
            f"TrainSpec: lora_targets={spec.lora_targets!r}: expected {ALL_LINEAR}, or names of linear layers, e.g. "
            "q_proj+v_proj"
        )
    if not 0 <= spec.lora_dropout < 1:
        yield f"TrainSpec: lora_dropout={spec.lora_dropout} must be at least 0 and below 1"


def _clash(spec: TrainSpec) -> str | None:
    if not spec.lora:
        return None
    if spec.architecture.has_known_layers and (line := _not_of_the_model(spec)):
        return line
    if spec.fp8 != "no":
        return f"fp8={spec.fp8!r} converts layers whose weights are trained, and LoRA's are not; use fp8='no'"
    if spec.lora_base == "nf4" and spec.parallelism != "ddp":
        return f"weights in four bits are not sharded: use parallelism='ddp', or lora_base={BASES[0]!r}"
    return None


def _not_of_the_model(spec: TrainSpec) -> str | None:
    """What is asked for that no layer of a known family can have."""
    known = [name for name, *_ in spec.architecture.linear_layers()]
    for name in () if spec.lora_targets == ALL_LINEAR else targets(spec):
        if name not in (*known, *_OF_THE_VOCABULARY):
            family, names = spec.architecture.model_type, ", ".join(dict.fromkeys(known))
            return f"lora_targets: {family} has no linear layer {name!r}{hint(name, known)}; use some of {names}"
    most = max((min(width, output) for _, width, output in adapted_layers(spec)), default=spec.lora_rank)
    if spec.lora_rank > most:
        return f"lora_rank={spec.lora_rank} is more than the rank of any layer that it adapts; use {most} at most"
    return None


@dataclass(frozen=True)
class LoraEvidence:
    lora: Mapping[str, Any] | None = None
    """``targets`` (names of the layers that have one), ``left`` (how many linear layers have none), ``rank``,
    ``dropout``, ``base``, and how many parameters are trained in all and in adapters; of none nothing is told."""


def _active(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = claimed(evidence.lora.lora, "lora") if spec.lora else evidence.lora.lora or {}
    if not spec.lora:
        return f"lora was not asked for, and {', '.join(seen['targets'])} have adapters" if seen else None
    if "rank" not in seen:
        return "asked for lora, no layer has an adapter"
    return equal("trained parameters, the adapters'", seen["adapters"], seen["trained"])


def _targets(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = evidence.lora.lora or {}
    if "rank" not in seen or not spec.lora:
        return None
    if spec.lora_targets == ALL_LINEAR:
        return equal("lora_targets", ALL_LINEAR, ALL_LINEAR if not seen["left"] else f"all but {seen['left']} layers")
    return equal("lora_targets", sorted(spec.lora_targets.split("+")), sorted(seen["targets"]))


def _same(name: str) -> Any:
    def check(spec: TrainSpec, evidence: Evidence) -> str | None:
        seen = evidence.lora.lora or {}
        return equal(f"lora_{name}", getattr(spec, f"lora_{name}"), seen[name]) if name in seen and spec.lora else None

    return check


SETTING = Setting(
    name="lora",
    fields=("lora", *_SWITCHED),
    values={"lora_base": BASES},
    least={"lora_rank": 1},
    in_id={
        "lora": "lora",
        "lora_base": "{}",
        "lora_rank": "r{}",
        "lora_targets": lambda spec: "" if spec.lora_targets == ALL_LINEAR else slugged(spec.lora_targets, ""),
        "lora_dropout": "dropout{}",
    },
    problems=_problems,
    switch="lora",
    switched=_SWITCHED,
    clash=_clash,
    needs=lambda spec: _BITSANDBYTES if spec.lora_base == "nf4" else _PEFT if spec.lora else None,
    # Its updates are its own; what is drawn anew, as weights of a small training are, is nothing that was quantised.
    small=lambda _: {"lora_base": BASES[0], "lora_dropout": 0.0},
    evidence=LoraEvidence,
    checks={
        "lora": _active,
        "lora_targets": _targets,
        "lora_base": _same("base"),
        "lora_rank": _same("rank"),
        "lora_dropout": _same("dropout"),
    },
)
