"""Trainings by frameworks, of a tiny Llama, one by each name: ``python frameworks.py NAME``."""

# ruff: noqa: PLC0415 - each of them needs its own
# mypy: disable-error-code="import-not-found,misc"

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from clock import Clock

STEPS, WORDS, ROWS, LENGTH = 40, 128, 4, 16


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, **sizes))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{n}": n for n in range(4, WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def text(number: int, length: int) -> str:
    return " ".join(f"w{4 + (number * 7 + place) % (WORDS - 4)}" for place in range(length))


def texts(rows: int = STEPS * ROWS * 2) -> Any:
    """Of unlike lengths."""
    from datasets import Dataset

    return Dataset.from_dict({"text": [text(number, 6 + number % 9) for number in range(rows)]})


def ids(rows: int = STEPS * ROWS * 2) -> Any:
    from datasets import Dataset

    made = torch.randint(4, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return Dataset.from_dict({"input_ids": made, "labels": made})


def heard(trainer: Any, clock: Clock) -> Any:
    """With a callback of the user's: each step's end, and what their training steps said and were given."""
    from transformers import TrainerCallback

    train, passes = trainer.training_step, list[tuple[float, int]]()

    def training_step(model: Any, inputs: Any, *others: Any) -> Any:
        tokens = sum(value.numel() for name, value in inputs.items() if name.endswith("input_ids"))
        loss = train(model, inputs, *others)
        passes.append((float(loss), tokens))
        return loss

    class Heard(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step(sum(loss for loss, _ in passes), sum(tokens for _, tokens in passes))
            passes.clear()

    trainer.training_step = training_step
    trainer.add_callback(Heard())
    return trainer


def given(**more: Any) -> dict[str, Any]:
    """Of any trainer's arguments."""
    usual = {"output_dir": "out", "max_steps": STEPS, "per_device_train_batch_size": ROWS, "use_cpu": True}
    return usual | {"logging_steps": 5, "report_to": [], "save_strategy": "no", "disable_tqdm": True} | more


def trainer(clock: Clock) -> None:
    """A subclass with a loss and a collator of its own, which accumulates, evaluates and saves."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            found = model(**inputs)
            loss = found.loss + 1e-3 * found.logits.square().mean()
            return (loss, found) if return_outputs else loss

    arguments = given(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=4) | {"save_strategy": "steps"}
    arguments = TrainingArguments(**arguments | {"save_steps": 6, "eval_on_start": True})
    it = Own(model(), arguments, train_dataset=ids(), eval_dataset=ids(8), data_collator=default_data_collator)
    heard(it, clock).train()
    assert list(Path("out").glob("checkpoint-*"))


def accelerated(clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    rows = [torch.randint(WORDS, (LENGTH,)) for _ in range(STEPS * ROWS * 2)]
    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS)
    trained, optimizer, loader, schedule = accelerator.prepare(trained, optimizer, loader, schedule)
    losses = []
    for batch in loader:
        with accelerator.accumulate(trained):
            loss = trained(input_ids=batch, labels=batch).loss
            losses.append(loss.detach() / 2)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            clock.step(sum(losses), 2 * ROWS * LENGTH)
            losses.clear()


def sft(clock: Clock, **more: Any) -> None:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**given(**{"max_length": LENGTH, **more}), bf16=False)
    it = SFTTrainer(model(), config, train_dataset=texts(1500), processing_class=tokenizer())
    heard(it, clock).train()


def sft_padded(clock: Clock) -> None:
    sft(clock)


def sft_packed(clock: Clock) -> None:
    sft(clock, packing=True, packing_strategy="wrapped", gradient_accumulation_steps=2)


def sft_padding_free(clock: Clock) -> None:
    sft(clock, padding_free=True, max_length=None)


def dpo(clock: Clock) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = range(STEPS * ROWS)
    data = {name: [text(n + extra, 3 + n % 5) for n in rows] for name, extra in (("prompt", 0), ("chosen", 9))}
    data["rejected"] = [text(n + 30, 4) for n in rows]
    for saved in (model(), tokenizer()):  # it reads its reference from there
        saved.save_pretrained("model")
    config = DPOConfig(**given(max_length=LENGTH), bf16=False)
    it = DPOTrainer("model", None, config, train_dataset=Dataset.from_dict(data), processing_class=tokenizer())
    heard(it, clock).train()


def lora(clock: Clock) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    trained = get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    it = Trainer(trained, TrainingArguments(**given(gradient_checkpointing=True)), train_dataset=ids())
    heard(it, clock).train()


def lightning(clock: Clock, **more: Any) -> None:
    import lightning as L  # noqa: N812

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, _: int) -> Any:
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            self.log("validation", self.model(input_ids=batch, labels=batch).loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, _: Any, batch: torch.Tensor, index: int) -> None:
            each = more.get("accumulate_grad_batches", 1)
            if index % each == each - 1:
                clock.step(sum(self.losses[-each:]) / each, each * batch.numel())

    rows = [torch.randint(WORDS, (LENGTH,)) for _ in range(STEPS * ROWS)]
    loaders = [torch.utils.data.DataLoader(rows[:number], batch_size=ROWS) for number in (len(rows), 8)]
    usual = {"max_steps": STEPS, "accelerator": "cpu", "enable_progress_bar": False, "val_check_interval": 5}
    L.Trainer(**usual | {"logger": False, "enable_model_summary": False} | more).fit(Module(), *loaders)


def lightning_accumulating(clock: Clock) -> None:
    lightning(clock, accumulate_grad_batches=2, precision="bf16-mixed", val_check_interval=8)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.randint(WORDS, (LENGTH,))


def zero(clock: Clock, stage: int, **more: Any) -> None:
    import deepspeed

    trained = model()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, **more},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=trained, model_parameters=trained.parameters(), config=config)
    for _ in range(STEPS):
        losses = []
        for _ in range(2):
            batch = torch.randint(WORDS, (ROWS, LENGTH))
            loss = engine(input_ids=batch, labels=batch).loss
            losses.append(loss.detach().float() / 2)
            engine.backward(loss)
            engine.step()
        clock.step(sum(losses), 2 * ROWS * LENGTH)


def zero1(clock: Clock) -> None:
    zero(clock, 1)


def zero2(clock: Clock) -> None:
    zero(clock, 2)


def zero3(clock: Clock) -> None:
    zero(clock, 3)


def titan(clock: Clock) -> None:
    """torchtitan's own trainer, on a CPU that it is told is a device as any other."""
    for name in ("reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cpu, name, lambda: None)
    torch.cpu.get_device_name = lambda _: "CPU"
    torch.cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=2**33)
    torch.cpu.memory_stats = lambda _: {}
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import utils
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    class Loader:
        def __init__(self, **_: Any) -> None:
            pass

        def __iter__(self) -> Any:
            while True:
                made = torch.randint(WORDS, (ROWS, LENGTH + 1))
                yield {"input": made[:, :-1]}, made[:, 1:]

    class Timed(Trainer):
        def forward_backward_step(self, **given: Any) -> Any:
            loss = super().forward_backward_step(**given)
            passes.append(loss.detach())
            return loss

        def train_step(self, *given: Any) -> None:
            super().train_step(*given)
            clock.step(sum(passes), len(passes) * ROWS * LENGTH)
            passes.clear()

    utils.set_pg_timeouts = lambda **_: None  # by a barrier of devices that have numbers
    passes: list[torch.Tensor] = []
    sizes = TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=WORDS)
    usual = train_spec.get_train_spec("llama3")
    made = replace(usual, model_args={"tiny": sizes}, build_tokenizer_fn=None, build_dataloader_fn=Loader)
    train_spec.register_train_spec("tiny", made)
    training = {"steps": STEPS, "local_batch_size": ROWS, "global_batch_size": 2 * ROWS, "seq_len": LENGTH}
    words = [f"--training.{name}={value}" for name, value in training.items()]
    Timed(ConfigManager().parse_args(["--model.name=tiny", "--model.flavor=tiny", *words])).train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Clock())
