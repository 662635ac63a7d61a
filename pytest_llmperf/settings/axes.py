"""The axes of a model of which nobody has said what may change: what makes training faster and not different."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_llmperf.settings.checks import (
    ATTENTIONS,
    COMPILE_MODES,
    COMPILE_SCOPES,
    FP8_RECIPES,
    LIGER_KERNELS,
    PRECISIONS,
    RUNNABLE_OPTIMIZERS,
    SDPA_BACKENDS,
)
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec, precision_fields
from pytest_llmperf.support.suggestions import hint

# Axis: one decision about a training, and the choices that there are.


@dataclass(frozen=True)
class Choice:
    """What one choice sets."""

    name: str
    """For people, beside the axis' name."""
    fields: tuple[tuple[str, Any], ...]
    """Of a TrainSpec."""

    @classmethod
    def of(cls, name: str, **fields: Any) -> Choice:
        """It sets ``fields``."""
        return cls(name, tuple(fields.items()))

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether a spec with these ``values`` has made this choice."""
        return all(values.get(name) == value for name, value in self.fields)


@dataclass(frozen=True)
class Axis:
    """One decision."""

    name: str
    choices: tuple[Choice, ...]

    @classmethod
    def over(cls, field: str, values: Iterable[Any]) -> Axis:
        """Of one ``field`` of a TrainSpec."""
        return cls(field, tuple(Choice(_word(value), ((field, value),)) for value in values))

    @property
    def fields(self) -> frozenset[str]:
        """What its choices set."""
        return frozenset(name for choice in self.choices for name, _ in choice.fields)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


#: What ``allowed`` may name: of these trainings none need learn as the others do.
ALLOWED = (*PRECISIONS, "fp8", *RUNNABLE_OPTIMIZERS)

# Powers of two, and what lies in the middle of two of them.
_SIZES = tuple(sorted({1, *(2**power for power in range(1, 10)), *(3 * 2**power for power in range(8))}))

_AXIS_OF_SIZE = "micro-batch"

# Of PyTorch's kernels for attention the one without a fused kernel is eager's double.
_FUSED = tuple(backend for backend in SDPA_BACKENDS if backend not in ("auto", "math"))

# Liger's kernels by what a family's feed-forward layers are made of, as its own patches have them; of the two losses
# the fused one, which takes the place of the other.
_GATED_BY_SILU = (
    "llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe olmo2 phi3 granite smollm3 glm4 internlm3".split()
)
_GATED_BY_GELU = "gemma gemma2 gemma3_text".split()
_EVERYWHERE = ("rope", "rms_norm")
#: Of the two losses that Liger has, the one that saves the most memory.
LOSS = "fused_linear_cross_entropy"


def default_axes(
    base: TrainSpec,
    *,
    on_cpu: bool,
    fixed: Iterable[str] = (),
    allowed: Iterable[str] = (),
    global_batch: int | None = None,
) -> tuple[Axis, ...]:
    """What may change of ``base`` on ``base.gpus`` GPUs.

    ``fixed``: fields that stay as they are, with all that is decided together with them. ``allowed``: trainings beside
    its own, by the words of ``ALLOWED``. ``global_batch``: sequences of all ranks for one step, by accumulation; left
    out, a step may have as many as fit.

    Raises:
        SpecError: an unknown word in ``allowed``, or a global batch that these GPUs cannot share.
    """
    words = tuple(dict.fromkeys(allowed))
    for word in words:
        if word not in ALLOWED:
            raise SpecError(f"allowed {word!r}{hint(word, ALLOWED)}; known: precisions, fp8 and names of optimizers")
    kept = frozenset(fixed)
    axes = (
        _precisions(base, words),
        Axis("attention", tuple(_attentions(on_cpu=on_cpu))),
        Axis("liger", () if on_cpu else tuple(_liger(base))),
        Axis("compile", tuple(_compilations())),
        _optimizers(base, words),
        Axis("checkpointing", tuple(_checkpointing())),
        Axis("parallelism", tuple(_parallelisms(base, on_cpu=on_cpu))),
        _sizes(base, global_batch, is_fixed="micro_batch_size" in kept),
    )
    return tuple(
        axis for axis in axes if (len(axis.choices) > 1 and not axis.fields & kept) or _is_batch(axis, global_batch)
    )


def _is_batch(axis: Axis, global_batch: int | None) -> bool:
    """One that has to be decided even where there is one choice: accumulation makes up for what a micro-batch lacks."""
    return axis.name == _AXIS_OF_SIZE and global_batch is not None


def _precisions(base: TrainSpec, words: Iterable[str]) -> Axis:
    own = {name: getattr(base, name) for name in ("model_precision", "mixed_precision", "tf32")}
    choices = [Choice.of(base.precision, **own, fp8=base.fp8)]
    for word in words:
        if word in PRECISIONS and word != base.precision:
            choices.append(Choice.of(word, **precision_fields(word), fp8="no"))
        if word == "fp8":
            recipes = [recipe for recipe in FP8_RECIPES if recipe not in ("no", base.fp8)]
            choices += [Choice.of(f"fp8 {recipe}", **own, fp8=recipe) for recipe in recipes]
    return Axis("precision", tuple(choices))


def _attentions(*, on_cpu: bool) -> Iterator[Choice]:
    for attention in ATTENTIONS:
        if on_cpu and attention not in ("eager", "sdpa"):
            continue
        yield Choice.of(attention, attention=attention, sdpa_backend="auto")
        if attention == "sdpa" and not on_cpu:
            yield from (Choice.of(f"sdpa {one}", attention=attention, sdpa_backend=one) for one in _FUSED)


def _liger(base: TrainSpec) -> Iterator[Choice]:
    """Off, all of them, all but each one, and the loss alone, which saves the most memory."""
    yield Choice.of("off", liger=False, liger_kernels="all")
    yield Choice.of("all", liger=True, liger_kernels="all")
    kernels = liger_kernels(base)
    for without in kernels:
        chosen = "+".join(kernel for kernel in kernels if kernel != without)
        yield Choice.of(f"without {without}", liger=True, liger_kernels=chosen)
    if kernels:
        yield Choice.of(f"{LOSS} alone", liger=True, liger_kernels=LOSS)


def liger_kernels(spec: TrainSpec) -> tuple[str, ...]:
    """Those that ``liger_kernels="all"`` stands for, in Liger's order; none where that is not known of the family."""
    family = spec.architecture.config["model_type"]
    gate = "swiglu" if family in _GATED_BY_SILU else "geglu" if family in _GATED_BY_GELU else ""
    chosen = {*_EVERYWHERE, gate, LOSS} if gate else set[str]()
    return tuple(kernel for kernel in LIGER_KERNELS if kernel in chosen)


def _compilations() -> Iterator[Choice]:
    yield Choice.of("no", torch_compile=False, torch_compile_scope="model", torch_compile_mode="default")
    for mode in COMPILE_MODES:
        for scope in reversed(COMPILE_SCOPES):
            name = scope if mode == "default" else f"{scope} {mode}"
            yield Choice.of(name, torch_compile=True, torch_compile_scope=scope, torch_compile_mode=mode)


def _optimizers(base: TrainSpec, words: Iterable[str]) -> Axis:
    same = [base.optimizer]
    if base.optimizer in ("adamw_torch", "adamw_torch_fused"):
        same = ["adamw_torch", "adamw_torch_fused"]
    more = [word for word in words if word in RUNNABLE_OPTIMIZERS and word not in same]
    return Axis.over("optimizer", [*same, *more])


def _checkpointing() -> Iterator[Choice]:
    yield Choice.of("none", gradient_checkpointing=False, checkpointing_policy="full")
    for policy in ("selective", "full"):
        yield Choice.of(policy, gradient_checkpointing=True, checkpointing_policy=policy)


def _parallelisms(base: TrainSpec, *, on_cpu: bool) -> Iterator[Choice]:
    for parallelism in ("ddp",) if on_cpu or base.gpus == 1 else ("ddp", "fsdp", "fsdp_hybrid"):
        try:
            replace(base, parallelism=parallelism, model_precision="fp32", mixed_precision="bf16")
        except SpecError:  # more GPUs than there are
            continue
        yield Choice.of(parallelism, parallelism=parallelism)


def _sizes(base: TrainSpec, global_batch: int | None, *, is_fixed: bool) -> Axis:
    """Micro-batches, with the accumulation that a fixed global batch asks for."""
    if global_batch is None:
        sizes = sorted({*_SIZES, base.micro_batch_size})
        return Axis(_AXIS_OF_SIZE, tuple(Choice.of(str(size), micro_batch_size=size) for size in sizes))
    each, rest = divmod(global_batch, base.gpus)
    if rest or not each:
        raise SpecError(f"a global batch of {global_batch} sequences cannot be shared by {base.gpus} GPUs alike")
    wanted = [base.micro_batch_size] if is_fixed else range(1, each + 1)
    choices = [
        Choice.of(str(size), micro_batch_size=size, gradient_accumulation_steps=each // size)
        for size in wanted
        if each % size == 0
    ]
    if not choices:
        raise SpecError(
            f"a global batch of {global_batch} sequences on {base.gpus} GPU(s) is no multiple of the micro-batch "
            f"{base.micro_batch_size}"
        )
    return Axis(_AXIS_OF_SIZE, tuple(choices))


# Traits: of a spec what may make it fast, one by one, as a model of many configurations counts them.


#: The one trait that is a number, and its measure.
SIZE = "micro_batch_size"

# How long to measure says nothing, and what goes along with another trait nothing new.
_NO_TRAIT = frozenset(
    "model steps min_steps warmup_steps throughput_tolerance memory_tolerance gradient_accumulation_steps liger "
    "liger_kernels".split()
)


def traits(specs: Sequence[TrainSpec]) -> tuple[Mapping[str, Any], ...]:
    """Of each spec its traits; only those in which ``specs`` differ. Liger's kernels are one trait each."""
    found = [_traits(spec) for spec in specs]
    varying = [name for name in found[0] if len({str(one[name]) for one in found}) > 1] if found else []
    return tuple({name: one[name] for name in varying} for one in found)


def _traits(spec: TrainSpec) -> dict[str, Any]:
    values = {name: value for name, value in spec.to_dict().items() if name not in _NO_TRAIT}
    kernels = spec.liger_kernels.split("+") if spec.liger_kernels != "all" else liger_kernels(spec)
    values["liger"] = spec.liger
    return values | {f"liger {name}": spec.liger and name in kernels for name in LIGER_KERNELS}


# Recipes: choices that do well together wherever they were tried, which a search tries before it knows anything.


_FUSED_STEP: Mapping[str, Any] = {"optimizer": "adamw_torch_fused"}
_ALL_KERNELS: Mapping[str, Any] = {"liger": True, "liger_kernels": "all"}
_LOSS_ALONE: Mapping[str, Any] = {"liger": True, "liger_kernels": LOSS}
_LAYERS: Mapping[str, Any] = {
    "torch_compile": True,
    "torch_compile_scope": "layers",
    "torch_compile_mode": "default",
}


def recipes(base: TrainSpec) -> tuple[Mapping[str, Any], ...]:
    """Of a model like ``base``'s: fields of a TrainSpec."""
    if not liger_kernels(base):
        return ({**_LAYERS, **_FUSED_STEP},)
    return ({**_ALL_KERNELS, **_FUSED_STEP}, {**_LAYERS, **_LOSS_ALONE, **_FUSED_STEP})


def followed(recipe: Mapping[str, Any], axes: Sequence[Axis], first: Sequence[Choice]) -> tuple[Choice, ...]:
    """Of each axis the choice that ``recipe`` makes; where it makes none that there is, what ``first`` has."""
    return tuple(next(_agreeing(recipe, axis), own) for axis, own in zip(axes, first, strict=True))


def _agreeing(recipe: Mapping[str, Any], axis: Axis) -> Iterator[Choice]:
    for choice in axis.choices:
        told = [recipe[name] == value for name, value in choice.fields if name in recipe]
        if told and all(told):
            yield choice
