"""A Hugging Face Trainer with a loss of its own."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from sized import Clock, device, llama, options
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class Tokens(Dataset):
    def __init__(self, length: int, sequence_length: int, vocabulary_size: int) -> None:
        self.length, self.shape, self.vocabulary_size = length, (sequence_length,), vocabulary_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randint(self.vocabulary_size, self.shape, generator=generator)
        return {"input_ids": drawn, "labels": drawn}


class Smoothed(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.float(), labels, label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


class OwnClock(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.step()


def main() -> None:
    given = options()
    model = llama(given)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=given.steps,
        per_device_train_batch_size=given.micro_batch_size,
        bf16=True,
        use_cpu=device().type == "cpu",
        learning_rate=1e-4,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = Tokens(given.steps * given.micro_batch_size, given.sequence_length, model.config.vocab_size)
    Smoothed(model=model, args=arguments, train_dataset=data, callbacks=[OwnClock(Clock(given))]).train()


if __name__ == "__main__":
    main()
