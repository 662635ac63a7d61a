"""Faults that are none of the twenty, made by somebody who had only the tree; they passed the inspected step once.

``said`` is what tells of each now; nothing of the last one does in one launch.
"""

from __future__ import annotations

from dataclasses import replace

from tests.worker.learning_faults import LLAMA, SPEC, TRAINER, Fault

_OPTIMIZER = "accelerate.optimizer"

_IN_GROUPS = """
    create = module.Trainer.create_optimizer
    def changed(self, *args, **kwargs):
        optimizer = create(self, *args, **kwargs)
        for group in optimizer.param_groups:
            group.update({settings})
        return optimizer
    module.Trainer.create_optimizer = changed"""

_IN_STEP = """
    step = module.AcceleratedOptimizer.step
    def changed(self, *args, **kwargs):
        self.times = getattr(self, "times", 0) + 1
        {change}
    module.AcceleratedOptimizer.step = changed"""

_IN_INPUTS = """
    prepare = module.Trainer._prepare_inputs
    def changed(self, inputs):
        inputs, self.times = prepare(self, inputs), getattr(self, "times", 0) + 1
        {change}
        return dict(self.kept)
    module.Trainer._prepare_inputs = changed"""


def _of_settings(settings: str, said: str) -> Fault:
    return Fault(0, SPEC, TRAINER, _IN_GROUPS.format(settings=settings), said)


ASKED = ", AdamW (rate 5e-05, betas 0.9 and 0.999, epsilon 1e-08, weight decay 0) changes it by "

OWN_FAULTS = {
    "every second step skipped": Fault(
        0,
        SPEC,
        _OPTIMIZER,
        _IN_STEP.format(change="return step(self, *args, **kwargs) if self.times % 2 else None"),
        "the optimizer has counted 5 steps of 20 of 20 tensors (",
    ),
    "betas swapped": _of_settings("betas=(0.999, 0.9)", ASKED),
    "epsilon 1e-3": _of_settings("eps=1e-3", ASKED),
    "weight decay 1.0": _of_settings("weight_decay=1.0", ASKED),
    "ascends": _of_settings("maximize=True", ASKED),
    "beta2 0.95": _of_settings("betas=(0.9, 0.95)", ASKED),
    "a second group at a tenth of the rate": Fault(
        0,
        SPEC,
        TRAINER,
        """
    create = module.Trainer.create_optimizer
    def slower(self, *args, **kwargs):
        optimizer = create(self, *args, **kwargs)
        optimizer.param_groups[1]["lr"] *= 0.1
        return optimizer
    module.Trainer.create_optimizer = slower""",
        "the learning rate was 5e-06 to 5e-05, its schedule says 5e-05",
    ),
    "one tensor never stepped after the first step": Fault(
        0,
        SPEC,
        _OPTIMIZER,
        _IN_STEP.format(
            change="if self.times > 1:\n"
            "            self.optimizer.param_groups[0]['params'][3].grad = None\n"
            "        return step(self, *args, **kwargs)"
        ),
        "the optimizer has counted 1 to 9 steps of 1 of 20 tensors (",
    ),
    "always the first batch": Fault(
        0,
        SPEC,
        TRAINER,
        _IN_INPUTS.format(change="self.kept = self.kept if self.times > 1 else inputs"),
        "2 samples of step 9 are another step's in the order of the data set",
    ),
    "not shuffled": Fault(
        0,
        SPEC,
        TRAINER,
        """
    from torch.utils.data import SequentialSampler
    module.Trainer._get_train_sampler = lambda self, *_: SequentialSampler(self.train_dataset)""",
        "samples are not shuffled: 20 of 20 come in the order of the data set in epoch 1 (random, seed 42)",
    ),
    "each batch twice": Fault(
        0,
        SPEC,
        "torch.utils.data.sampler",
        """
    def twice(self):
        return iter([at // 4 * 2 + at % 2 for at in range(len(self.data_source))])
    module.SequentialSampler.__iter__ = twice""",
        "2 samples of step 9 are another step's in the order of the data set",
    ),
    "only the last of accumulated passes counts": Fault(
        0,
        replace(SPEC, gradient_accumulation_steps=2),
        TRAINER,
        """
    train = module.Trainer.training_step
    def alone(self, model, *args, **kwargs):
        model.zero_grad()
        return train(self, model, *args, **kwargs)
    module.Trainer.training_step = alone""",
        "gradients of 20 tensors were lost from one accumulated pass to the next",
    ),
    "one gradient halved": Fault(
        0,
        SPEC,
        LLAMA,
        """
    make = module.LlamaMLP.__init__
    def halved(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.down_proj.weight.register_hook(lambda gradient: 0.5 * gradient)
    module.LlamaMLP.__init__ = halved""",
        "",
    ),
}

#: Those that only the real stack shows: what an optimizer does with other settings is seen without a launch.
IN_A_LAUNCH = {
    name: OWN_FAULTS[name]
    for name in (
        "every second step skipped",
        "a second group at a tenth of the rate",
        "always the first batch",
        "not shuffled",
        "only the last of accumulated passes counts",
    )
}
