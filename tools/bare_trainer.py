"""A plain Trainer script at rung 15.9's settings, with nothing of this project in it: our overhead is held against it.

Run it under torchrun on the machine that ran the rung: ``torchrun --nproc-per-node 1 tools/bare_trainer.py``. It
prints the steady rate: tokens over the wall time between the end of step 8 and the end of the last one, the device
drained at both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

WARMUP_STEPS = 8
CONFIG = Path(__file__).parent.parent / "pytest_llmperf" / "settings" / "configs" / "llama-3.2-1b.json"


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, drawn when asked for."""

    def __init__(self, length: int, sequence_length: int, vocabulary_size: int) -> None:
        self.length, self.shape, self.vocabulary_size = length, (sequence_length,), vocabulary_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, _index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(self.vocabulary_size, self.shape)
        return {"input_ids": tokens, "labels": tokens}


class Stopwatch(TrainerCallback):
    """Wall time at the end of the warm-up and of the last step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.times = steps, dict[int, float]()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step in (WARMUP_STEPS, self.steps):
            torch.cuda.synchronize()
            self.times[state.global_step] = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro-batch-size", type=int, default=37)
    parser.add_argument("--sequence-length", type=int, default=1024)
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch_size,
        bf16=True,
        tf32=False,
        optim="adamw_torch",
        use_liger_kernel=True,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    config = AutoConfig.from_pretrained(CONFIG)
    config.use_cache = False
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    stopwatch = Stopwatch(options.steps)
    data = Tokens(options.steps * options.micro_batch_size, options.sequence_length, config.vocab_size)
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[stopwatch]).train()
    seconds = stopwatch.times[options.steps] - stopwatch.times[WARMUP_STEPS]
    tokens = (options.steps - WARMUP_STEPS) * options.micro_batch_size * options.sequence_length
    print(f"bare trainer: {tokens / seconds:.0f} tokens/s, {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB reserved")


if __name__ == "__main__":
    main()
