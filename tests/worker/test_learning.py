"""Faults that leave speed and memory as they are, put into the real stack: what one inspected step says of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.evidence.learning_checks import changed_gradients, notes, unlearnt
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.records.launch import Launch
from tests.worker.import_patch import as_on_gpus, in_the_rank
from tests.worker.launching import launched

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

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
    """A number of the reference's twenty, and how it is brought about."""

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
        self.optimizer.param_groups[0]["lr"] *= 0.1
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
        "2 samples of one step were read more than once",
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


def faulty(fault: Fault, folder: Path) -> Launch:
    return launched(fault.spec, folder / "run", variables=in_the_rank(folder, fault.module, fault.patch))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    launch = faulty(fault, tmp_path)
    assert launch.learning, launch.learning.none
    lines = list(unlearnt(fault.spec, launch))
    assert any(line.startswith(fault.said) or fault.said in line for line in lines), lines
    assert set(lines) <= set(troubles(fault.spec, launch))


SOUND = {
    "alone": SPEC,
    "16 bits": replace(SPEC, model_precision="bf16"),
    "autocast": replace(SPEC, mixed_precision="bf16"),
    "accumulated": replace(SPEC, gradient_accumulation_steps=3),
    "ddp": replace(TWO, gradient_accumulation_steps=2),
    "wide": replace(SPEC, micro_batch_size=4),
    "fsdp": replace(TWO, parallelism="fsdp"),
    "recomputed": replace(SPEC, gradient_checkpointing=True, attention="eager"),
    "dropout": replace(SPEC, model="opt-tiny"),
    "another optimizer": replace(SPEC, optimizer="adafactor"),
    "fused": replace(SPEC, optimizer="adamw_torch_fused"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    folder = tmp_path_factory.mktemp("sound")

    def one(name: str, spec: TrainSpec) -> Launch:
        below = folder / name.replace(" ", "-")
        below.mkdir()
        variables = in_the_rank(below, TRAINER, as_on_gpus()) if spec.parallelism != "ddp" else {}
        return launched(spec, below / "run", variables=variables)

    return {name: one(name, spec) for name, spec in SOUND.items()}


@pytest.mark.parametrize("name", SOUND)
def test_what_learns_is_not_doubted(sound: dict[str, Launch], name: str) -> None:
    launch = sound[name]
    assert launch.learning, launch.learning.none
    assert troubles(SOUND[name], launch) == ()
    assert launch.learning.tensors >= 20
    assert launch.learning.gradient_norm > 0
    assert len(launch.gradient_norms) == 4
    assert Launch.from_dict(launch.to_dict()).learning == launch.learning
    assert not list(changed_gradients([launch], [launch]))
    assert 0 < launch.phases["inspection"] < 1


def test_updates_that_16_bits_lose_are_told_and_are_no_fault(sound: dict[str, Launch]) -> None:
    (line,) = notes([sound["16 bits"]])
    assert line.startswith("in 5 of 20 tensors no update of 9 steps was as large as the last of their 16 bits")
    assert not list(notes([sound["alone"]]))


def test_norms_and_clipping_are_of_the_whole_gradient_however_it_is_sharded(sound: dict[str, Launch]) -> None:
    # Four sequences a step each: two of two ranks, or of two shards, or two passes of two.
    norms = [sound[name].learning.gradient_norm for name in ("fsdp", "wide")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert sound["fsdp"].gradient_norms == pytest.approx(sound["wide"].gradient_norms, rel=1e-4)


WRONG_GRADIENT = """
    import torch
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return hidden.view_as(hidden)
        @staticmethod
        def backward(ctx, gradient):
            return 0.5 * gradient
    norm = module.LlamaRMSNorm.forward
    module.LlamaRMSNorm.forward = lambda self, hidden: norm(self, Half.apply(hidden))"""


def test_a_kernel_whose_gradient_alone_is_wrong_is_told_by_the_baselines_first_norm(
    tmp_path: Path, sound: dict[str, Launch]
) -> None:
    launch = faulty(Fault(14, SPEC, LLAMA, WRONG_GRADIENT, ""), tmp_path)
    assert launch.losses[0] == sound["alone"].losses[0]
    assert troubles(SPEC, launch) == ()
    (line,) = changed_gradients([launch], [sound["alone"]])
    assert line.startswith("the first gradient has norm ")
    assert line.endswith("gradients are not computed as they were")


FAILS = """
    from pytest_llmperf.worker.learning import inspection
    def fails(*_):
        raise RuntimeError("no such luck")
    module.samples.row_digests = fails"""


def test_what_cannot_be_inspected_costs_nothing_else(tmp_path: Path, sound: dict[str, Launch]) -> None:
    launch = faulty(Fault(0, SPEC, "pytest_llmperf.worker.learning.inspection", FAILS, ""), tmp_path)
    assert launch.learning.none == "RuntimeError: no such luck"
    assert launch.losses == sound["alone"].losses
    assert launch.trace
    assert list(notes([launch])) == ["whether it learns was not looked at: RuntimeError: no such luck"]
    assert troubles(SPEC, launch) == ()


def test_no_gradients_make_adams_update_larger_than_its_bound() -> None:
    torch = pytest.importorskip("torch")
    from pytest_llmperf.worker.learning.inspection import adam_bound  # noqa: PLC0415 - needs torch

    for steps in (1, 2, 12, 400):
        # Those that reach it: each as large as its share of the first average is beside that of the second.
        worst = torch.tensor([(0.9 / 0.999) ** (steps - 1 - step) for step in range(steps)], dtype=torch.float64)
        drawn = torch.randn(steps, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(steps))
        weight = torch.nn.Parameter(torch.zeros(201, dtype=torch.float64))
        before, adam = weight.detach(), torch.optim.Adam([weight], lr=1.0, eps=0.0)
        for gradient in torch.cat([worst[:, None], drawn], dim=1):
            before = weight.detach().clone()
            weight.grad = gradient.clone()
            adam.step()
        updates = (weight.detach() - before).abs()
        assert float(updates[0]) == pytest.approx(adam_bound(0.9, 0.999, steps), rel=1e-6)
        assert float(updates.max()) <= adam_bound(0.9, 0.999, steps) * (1 + 1e-9)
