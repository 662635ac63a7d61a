"""A loop around accelerate, with gradient accumulation and a learning-rate schedule: `accelerate launch train.py`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

STEPS, LENGTH = 1000, 64


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, STEPS)
    rows = TensorDataset(torch.randint(1000, (8000, LENGTH)))
    loader = DataLoader(rows, batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    step = 0
    while step < STEPS:
        for (ids,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step >= STEPS:
                break
    accelerator.wait_for_everyone()
    accelerator.save_model(model, "model")


if __name__ == "__main__":
    main()
