"""A case's training as a script of its own: the same model, arguments and data, and nothing that watches it.

``torchrun --nproc-per-node 1 tools/bare_trainer.py model=llama-tiny`` trains the spec of these settings, or a stored
case by its id, for a few steps more than a launch takes. As ``perf.script("torchrun … tools/bare_trainer.py …")`` it
is watched from outside, and has the bytes, counts and tokens of the same spec's launch. ``--clock`` watches it with
nothing of this project: it prints the rate between the end of step 8 and that of the last one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, set_seed

from pytest_llmperf import TrainSpec
from pytest_llmperf.cli.asked_run import named
from pytest_llmperf.observe.device import own_device
from pytest_llmperf.worker.build import build_model, training_arguments
from pytest_llmperf.worker.recipes.huggingface.data import REAL_TOKENS, training_data
from pytest_llmperf.worker.settings.compilation import prepare_layers
from pytest_llmperf.worker.settings.precision import force_tf32

BASELINES = Path(__file__).parents[1] / "baselines"
WARMUP_STEPS = 8
# After those that are timed: a launch traces three and inspects one.
MORE_STEPS = 4


class PlainTrainer(Trainer):
    """Takes its samples in their order, as a launch does."""

    def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        inputs.pop(REAL_TOKENS, None)  # no input of the model's
        return super().training_step(model, inputs, *args, **kwargs)


class Stopwatch(TrainerCallback):
    """Wall time at the end of the warm-up and of the last step, with nothing left to do for the device."""

    def __init__(self, steps: int) -> None:
        self.steps, self.times = steps, dict[int, float]()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step in (WARMUP_STEPS, self.steps):
            torch.cuda.synchronize()
            self.times[state.global_step] = time.perf_counter()


def main(words: list[str]) -> None:
    spec = named([word for word in words if word != "--clock"], BASELINES, None)[0].spec
    assert isinstance(spec, TrainSpec)  # noqa: S101 - no script is trained by this one
    set_seed(spec.seed)
    steps, device = spec.steps + MORE_STEPS, own_device()
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(spec, Path(folder), device, steps)
        model = build_model(spec, spec.architecture.config, device)
        prepare_layers(spec, model)
        data = training_data(spec, steps, model.config.get_text_config().vocab_size)
        stopwatch = Stopwatch(steps)
        callbacks = [stopwatch] if "--clock" in words else []
        trainer = PlainTrainer(
            model=model, args=arguments, train_dataset=data.samples, data_collator=data.collator, callbacks=callbacks
        )
        force_tf32(spec, device)
        trainer.train()
    if callbacks:
        seconds = stopwatch.times[steps] - stopwatch.times[WARMUP_STEPS]
        tokens = (
            (steps - WARMUP_STEPS) * spec.micro_batch_size * spec.gradient_accumulation_steps * spec.sequence_length
        )
        peak = torch.cuda.max_memory_reserved() / 2**30
        print(f"bare trainer: {tokens / seconds:.0f} tokens/s, {peak:.2f} GiB reserved")


if __name__ == "__main__":
    main(sys.argv[1:])
