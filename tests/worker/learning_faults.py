"""Those of twenty faults that one inspected step tells of: where in the stack each is put, and what is said."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_llmperf import TrainSpec
from tests.worker.import_patch import as_on_gpus

SPEC = TrainSpec(
    model="llama-tiny",
    model_precision="fp32",
    mixed_precision="no",
    micro_batch_size=2,
    sequence_length=32,
    steps=5,
    min_steps=5,
    warmup_steps=1,
)
TWO = replace(SPEC, gpus=2)

TRAINER, ACCELERATOR = "transformers.trainer", "accelerate.accelerator"
LLAMA = "transformers.models.llama.modeling_llama"


@dataclass(frozen=True)
class Fault:
    """Its number in docs/explanation/learning.md, and how it is brought about."""

    number: int
    spec: TrainSpec
    module: str
    patch: str
    said: str


FAULTS = {
    "past the wrapper": Fault(
        1,
        TWO,
        TRAINER,
        """
    compute = module.Trainer.compute_loss
    def past(self, model, *args, **kwargs):
        return compute(self, model.module, *args, **kwargs)
    module.Trainer.compute_loss = past""",
        "ranks have different gradients of 20 of 20 tensors (model.embed_tokens.weight, ",
    ),
    "hooks lost": Fault(
        2,
        TWO,
        ACCELERATOR,
        """
    import torch
    prepare = module.Accelerator.prepare_model
    def cast_afterwards(self, model, *args, **kwargs):
        wrapped = prepare(self, model, *args, **kwargs)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        model.double().float().tie_weights()
        return wrapped
    module.Accelerator.prepare_model = cast_afterwards""",
        "ranks have different gradients of ",
    ),
    "left out on one rank": Fault(
        3,
        TWO,
        TRAINER,
        """
    import os
    create = module.Trainer.create_optimizer
    def without(self, *args, **kwargs):
        optimizer = create(self, *args, **kwargs)
        if os.environ["RANK"] == "1":
            del optimizer.param_groups[0]["params"][-2:]
        return optimizer
    module.Trainer.create_optimizer = without""",
        "ranks hold different weights of 2 of 20 tensors (",
    ),
    "another model's optimizer": Fault(
        4,
        SPEC,
        TRAINER,
        """
    import copy
    create = module.Trainer.create_optimizer
    def of_a_copy(self, *args, **kwargs):
        own, self.model = self.model, copy.deepcopy(self.model)
        try:
            return create(self, *args, **kwargs)
        finally:
            self.model = own
    module.Trainer.create_optimizer = of_a_copy""",
        "the optimizer does not hold 20 of 20 tensors (",
    ),
    "never zeroed": Fault(
        5,
        SPEC,
        "torch.nn.modules.module",
        """
    module.Module.zero_grad = lambda self, set_to_none=True: None""",
        "gradients of 20 tensors were not zero when a step began",
    ),
    "evaluation mode": Fault(
        8,
        SPEC,
        "torch.nn.modules.module",
        """
    train = module.Module.train
    module.Module.train = lambda self, mode=True: train(self, False)""",
        "some modules were in evaluation mode while it trained",
    ),
    "a changed copy": Fault(
        9,
        SPEC,
        TRAINER,
        """
    prepare = module.Trainer._prepare_inputs
    def flipped(self, inputs):
        inputs = prepare(self, inputs)
        inputs["input_ids"] = inputs["input_ids"].clone()
        inputs["input_ids"][0, 7] ^= 1
        return inputs
    module.Trainer._prepare_inputs = flipped""",
        "1 samples on the device are none of the data set",
    ),
    "labels shifted twice": Fault(
        11,
        SPEC,
        TRAINER,
        """
    prepare = module.Trainer._prepare_inputs
    def shifted(self, inputs):
        inputs = prepare(self, inputs)
        inputs["labels"] = inputs["labels"].roll(-1, 1)
        return inputs
    module.Trainer._prepare_inputs = shifted""",
        "labels are not the inputs, which the model's loss shifts itself",
    ),
    "tokens masked out of the loss": Fault(
        12,
        SPEC,
        TRAINER,
        """
    prepare = module.Trainer._prepare_inputs
    def masked(self, inputs):
        inputs = prepare(self, inputs)
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][:, 20:] = -100
        return inputs
    module.Trainer._prepare_inputs = masked""",
        "2 samples on the device are none of the data set",
    ),
    "no causal mask": Fault(
        13,
        SPEC,
        LLAMA,
        """
    attend = module.ALL_ATTENTION_FUNCTIONS["sdpa"]
    def everywhere(owner, query, key, value, attention_mask, **kwargs):
        kwargs["is_causal"] = False
        return attend(owner, query, key, value, None, **kwargs)
    module.ALL_ATTENTION_FUNCTIONS["sdpa"] = everywhere""",
        "the causal mask is lost",
    ),
    "a schedule for each micro-batch": Fault(
        16,
        replace(SPEC, gradient_accumulation_steps=2),
        TRAINER,
        """
    train = module.Trainer.training_step
    def stepped(self, *args, **kwargs):
        self.lr_scheduler.step()
        return train(self, *args, **kwargs)
    module.Trainer.training_step = stepped""",
        "the schedule made 27 steps in 9 of the optimizer",
    ),
    "a rate of its own": Fault(
        16,
        SPEC,
        TRAINER,
        """
    create = module.Trainer.create_scheduler
    def overwritten(self, *args, **kwargs):
        schedule = create(self, *args, **kwargs)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.1
        schedule.step = lambda *_: setattr(schedule, "last_epoch", schedule.last_epoch + 1)
        return schedule
    module.Trainer.create_scheduler = overwritten""",
        "the learning rate was 5e-06, its schedule says 5e-05",
    ),
    "the same samples": Fault(
        17,
        TWO,
        "accelerate.data_loader",
        """
    prepare = module.BatchSamplerShard.__init__
    def first(self, *args, **kwargs):
        prepare(self, *args, **kwargs)
        self.process_index = 0
    module.BatchSamplerShard.__init__ = first""",
        "rank 1 takes the samples of rank 0 in epoch 1 (random, seed 42)",
    ),
    "untied": Fault(
        19,
        SPEC,
        LLAMA,
        """
    import torch
    tie = module.LlamaForCausalLM.tie_weights
    def apart(self, *args, **kwargs):
        tie(self, *args, **kwargs)
        self.lm_head.weight = torch.nn.Parameter(self.lm_head.weight.detach().clone())
    module.LlamaForCausalLM.tie_weights = apart""",
        "the configuration has tie_word_embeddings=True, and the weights were not tied",
    ),
    "clipped by its own shard": Fault(
        20,
        replace(TWO, parallelism="fsdp"),
        TRAINER,
        f"""{as_on_gpus()}
    import torch, accelerate
    def of_its_own(self, parameters, max_norm, norm_type=2):
        gradients = [each.grad.to_local() for each in parameters if each.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients]))
        for each in gradients:
            each.mul_(min(1.0, 0.3 / float(norm)))
        return norm
    accelerate.Accelerator.clip_grad_norm_ = of_its_own""",
        "were multiplied by ",
    ),
    "not clipped": Fault(
        20,
        SPEC,
        ACCELERATOR,
        """
    clip = module.Accelerator.clip_grad_norm_
    module.Accelerator.clip_grad_norm_ = lambda self, parameters, max_norm, norm_type=2: clip(self, parameters, 1e9)""",
        "were multiplied by 1 when they were clipped to 1, expected 0.",
    ),
}

#: Its loss is right; the baseline of the same spec tells.
WRONG_GRADIENT = Fault(
    14,
    SPEC,
    LLAMA,
    """
    import torch
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return hidden.view_as(hidden)
        @staticmethod
        def backward(ctx, gradient):
            return 0.5 * gradient
    norm = module.LlamaRMSNorm.forward
    module.LlamaRMSNorm.forward = lambda self, hidden: norm(self, Half.apply(hidden))""",
    "the first gradient has norm ",
)
