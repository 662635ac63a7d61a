"""What these scripts share: sizes by arguments, a Llama of random weights, random tokens, and a clock of the script's
own. Nothing of this project is in them."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

#: Hidden, layers, heads, heads of keys, intermediate, vocabulary; the sequence and the micro-batch where none is told.
SIZES = {
    "tiny": (32, 2, 4, 2, 64, 128, 16, 2),
    "700m": (2048, 8, 32, 8, 8192, 128256, 1024, 7),
    "1b": (2048, 16, 32, 8, 8192, 128256, 1024, 7),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro-batch-size", type=int, default=0)
    parser.add_argument("--sequence-length", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--report", type=int, default=0, help="after this step: print how long each one took")
    given = parser.parse_args()
    *_, sequence, batch = SIZES[given.size]
    given.sequence_length, given.micro_batch_size = given.sequence_length or sequence, given.micro_batch_size or batch
    return given


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def llama(given: argparse.Namespace, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    hidden, layers, heads, key_heads, intermediate, vocabulary, *_ = SIZES[given.size]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=given.layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with device():
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def tokens(given: argparse.Namespace, model: Any) -> torch.Tensor:
    shape = (given.micro_batch_size, given.sequence_length)
    return torch.randint(model.config.vocab_size, shape, device=device())


class Clock:
    """Where each step ends, on the GPU without a wait; printed at one step, after which waiting does no harm."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._report, self._ends = given.report, [self._now()]

    def step(self) -> None:
        self._ends.append(self._now())
        if len(self._ends) != self._report + 1 or int(os.environ.get("RANK", "0")):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for before, after in zip(self._ends, self._ends[1:], strict=False):
            seconds = before.elapsed_time(after) / 1000 if torch.cuda.is_available() else after - before
            print(f"llmperf-own {seconds:.9f}", flush=True)

    def _now(self) -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
