"""A spec made small, and its plainest form: what parity trains in their place. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pytest_llmperf.settings.train_spec import SpecError, TrainSpec

#: Sequences of a step, whoever shares them, and steps.
SEQUENCES, STEPS = 8, 2

#: Tokens of a sequence at most: more than a block of 128, and no whole number of these.
LONGEST = 192

# Ranks that are enough to share, and to have shards with replicas.
_RANKS: Mapping[str, int] = {"ddp": 2, "fsdp": 2, "fsdp_hybrid": 4}
_PASSES = 2

_NEAREST = 16

# The next ones are taken too, and numpy knows none from 2**32 on.
_LAST_SEED = 2**32 - 64


def small(spec: TrainSpec) -> TrainSpec:
    """``spec`` with a step of ``SEQUENCES`` short sequences, on as few ranks as show that they share it."""
    ranks = min(spec.gpus, _RANKS[spec.parallelism])
    passes = min(spec.gradient_accumulation_steps, _PASSES)
    return replace(
        spec,
        gpus=ranks,
        gradient_accumulation_steps=passes,
        micro_batch_size=SEQUENCES // (ranks * passes),
        sequence_length=_length(spec),
        data="random",
        text=None,
        split="train",
        tokenizer=None,
        rows="packed",
        tokenise="ahead",
        data_workers=0,
        data_prefetch=None,
        data_pinned=True,
        weights=None,
        save_checkpoint=False,
        seed=min(spec.seed, _LAST_SEED),
        steps=STEPS,
        min_steps=STEPS,
        warmup_steps=1,
        throughput_tolerance=None,
        memory_tolerance=None,
    )


def _length(spec: TrainSpec) -> int:
    length = min(spec.sequence_length, LONGEST)
    return length if spec.fp8 == "no" else max(_NEAREST, length // _NEAREST * _NEAREST)


def plainest(spec: TrainSpec) -> TrainSpec:
    """The same small training with nothing that makes it fast: what is left decides what is learnt."""
    known = true_optimizer(spec)
    return replace(
        small(spec),
        gpus=1,
        parallelism="ddp",
        optimizer=known if known and not keeps_states_short(spec) else spec.optimizer,
        gradient_accumulation_steps=1,
        micro_batch_size=SEQUENCES,
        attention="eager",
        sdpa_backend="auto",
        liger=False,
        liger_kernels="all",
        torch_compile=False,
        torch_compile_mode="default",
        torch_compile_scope="model",
        gradient_checkpointing=False,
        checkpointing_policy="full",
    )


def in_pieces(plain: TrainSpec) -> TrainSpec:
    """The plain form with each step in several passes: another order of the same sums."""
    passes = SEQUENCES // _PASSES
    return replace(plain, gradient_accumulation_steps=passes, micro_batch_size=_PASSES)


def in_fp32(spec: TrainSpec) -> TrainSpec:
    """``spec`` in fp32, where rounding hides least; attention by a kernel that has fp32 where its own has none."""
    no_fp32 = spec.attention == "flash_attention_2"
    return replace(
        spec,
        model_precision="fp32",
        mixed_precision="no",
        tf32=False,
        fp8="no",
        attention="sdpa" if no_fp32 else spec.attention,
        sdpa_backend="auto" if spec.sdpa_backend in ("flash", "cudnn") else spec.sdpa_backend,
    )


def is_gathered(spec: TrainSpec) -> bool:
    """Whether it computes with 16-bit copies of fp32 weights, as FSDP does, and not under autocast."""
    return spec.parallelism != "ddp" and spec.mixed_precision != "no"


_ADAMW = "adamw_torch"
_TRUE_OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("sgd", "adagrad", "adafactor", "rmsprop"), ""),
    **dict.fromkeys(
        "adamw_torch adamw_torch_fused adamw_torch_8bit adamw_torch_4bit adamw_bnb_8bit adamw_8bit paged_adamw_32bit "
        "paged_adamw_8bit".split(),
        _ADAMW,
    ),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), "rmsprop"),
}


def true_optimizer(spec: TrainSpec) -> str:
    """PyTorch's own form of its optimizer, for any type of weights; empty: there is none, and updates are unknown."""
    found = _TRUE_OPTIMIZERS.get(spec.optimizer)
    return spec.optimizer if found == "" else found or ""


def keeps_states_short(spec: TrainSpec) -> bool:
    """Whether the optimizer rounds its states to few bits, once they have made their first update."""
    return spec.optimizer.endswith(("8bit", "4bit"))


# Widths: which specs are one training on other numbers of GPUs. Pure.


def is_narrower(narrow: TrainSpec, wide: TrainSpec) -> bool:
    """Whether ``narrow`` is the training of ``wide``, with the same work for each GPU, on fewer of them."""
    if narrow.gpus >= wide.gpus:
        return False
    # One GPU has nothing to share: DDP's figure serves every parallelism.
    parallelism = "ddp" if narrow.gpus == 1 else wide.parallelism
    try:
        return replace(wide, gpus=narrow.gpus, parallelism=parallelism).digest == narrow.digest
    except SpecError:  # a parallelism that takes more GPUs than these
        return False


def narrower(wide: TrainSpec) -> Iterator[TrainSpec]:
    """Every spec that is narrower than ``wide``, from one GPU on."""
    for gpus in range(1, wide.gpus):
        for parallelism in dict.fromkeys([wide.parallelism, *(["ddp"] if gpus == 1 else [])]):
            try:
                yield replace(wide, gpus=gpus, parallelism=parallelism)
            except SpecError:  # a parallelism that takes more GPUs than these
                continue
