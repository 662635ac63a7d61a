"""TRL's DPO of the sized Llama beside a reference; with ``FAULT=item`` its loss is asked for in each step."""

# ruff: noqa: S106 - words of a tokenizer, no secrets

from __future__ import annotations

import os
import tempfile
from typing import Any

from datasets import Dataset
from sized import device, llama, options
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

WORDS = 120


def tokenizer() -> Any:
    """One word a token."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def pairs(rows: int, length: int) -> Dataset:
    """A prompt and two answers, of unlike lengths."""

    def text(number: int, words: int) -> str:
        return " ".join(f"w{(number * 7 + place) % WORDS}" for place in range(words))

    found: dict[str, list[str]] = {"prompt": [], "chosen": [], "rejected": []}
    for number in range(rows):
        found["prompt"].append(text(number, length // 4))
        found["chosen"].append(text(number + 9, length // 2 - number % 5))
        found["rejected"].append(text(number + 30, length // 2 - number % 3))
    return Dataset.from_dict(found)


class Watched(DPOTrainer):
    """With a fault of its own."""

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        found = super().compute_loss(*given, **named)
        if os.environ.get("FAULT") == "item":
            (found[0] if isinstance(found, tuple) else found).item()
        return found


def main() -> None:
    given, words = options(), tokenizer()
    rows = given.steps * given.micro_batch_size
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder,
            max_steps=given.steps,
            per_device_train_batch_size=given.micro_batch_size,
            max_length=given.sequence_length,
            use_cpu=device().type == "cpu",
            bf16=device().type == "cuda",
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = pairs(rows, given.sequence_length)
        Watched(llama(given), llama(given), arguments, train_dataset=data, processing_class=words).train()


if __name__ == "__main__":
    main()
