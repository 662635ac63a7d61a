"""Training: what of a spec decides what is learnt, apart from how fast it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_llmperf.spec.train_spec import TrainSpec


def training_of(spec: TrainSpec) -> str:
    """``bf16, adamw_torch, 1024 tokens``: specs of one model with the same words may stand in for one another.

    Kernels, compilation, recomputation and sharding compute the same numbers but for rounding. Another precision,
    optimizer or length need not learn alike, and only whoever trains can say whether that is allowed. The batch is not
    among the words: it grows with every GPU.
    """
    words = [
        spec.precision,
        "" if spec.fp8 == "no" else f"fp8 {spec.fp8}",
        _mathematics(spec.optimizer),
        f"{spec.sequence_length} tokens",
        *_data(spec),
        "pretrained" if spec.weights else "",
    ]
    return ", ".join(filter(None, words))


def _data(spec: TrainSpec) -> tuple[str, ...]:
    """What is read, and how: another text, tokenizer or padding is another training."""
    if spec.data == "random":
        return ()
    text, tokenizer = spec.text_files, spec.tokenizer_files
    return (f"text {text.slug}".rstrip(), text.split.words, f"{tokenizer.slug} tokens", f"{spec.rows} rows")


# Other names of the same arithmetic: bitsandbytes says how wide its states are, and 32 bits are what others have.
_SAME: Mapping[str, str] = {
    "adamw_32bit": "adamw_torch",
    "adamw_bnb_8bit": "adamw_8bit",
    "rmsprop_bnb": "rmsprop",
    "rmsprop_bnb_32bit": "rmsprop",
}


def _mathematics(optimizer: str) -> str:
    """transformers' name without where its states are and in how many kernels it steps."""
    plain = optimizer.removeprefix("paged_").removesuffix("_fused")
    return _SAME.get(plain, plain)
