"""A `transformers.Trainer` with its own loss and collator: `python train.py`, or under torchrun."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Rows(Dataset[list[int]]):
    """Token ids of unequal length."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(16, 64, (number,), generator=generator).tolist()
        self._rows = [torch.randint(3, 1000, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> list[int]:
        return self._rows[index]


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """To the longest of the batch."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class OwnLoss(Trainer):  # type: ignore[misc]
    """Label smoothing, and a weight that favours late tokens."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        each = cross_entropy(logits, targets, ignore_index=-100, label_smoothing=0.1, reduction="none")
        weights = torch.linspace(0.5, 1.5, labels.shape[1] - 1, device=each.device).repeat(labels.shape[0])
        loss = (each * weights).sum() / (targets != -100).sum()
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes))
    arguments = TrainingArguments(
        output_dir="checkpoints",
        max_steps=1000,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=500,
        logging_steps=50,
        report_to=[],
    )
    OwnLoss(model=model, args=arguments, train_dataset=Rows(4000), data_collator=padded).train()


if __name__ == "__main__":
    main()
