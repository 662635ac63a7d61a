"""Faults that leave speed and memory as they are: where in the stack each is put, and what finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.worker.parity import AS_ON_GPUS, LLAMA


@dataclass(frozen=True)
class Fault:
    """One change of the stack."""

    module: str
    patch: str
    told: str
    """A part of the first line that tells of it."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Of the training that has it."""


_TRAINER = "transformers.trainer"

_IN_ATTENTION = """own = module.ALL_ATTENTION_FUNCTIONS['sdpa']
    def changed(layer, query, key, value, mask, **how):
        {change}
        return own(layer, query, key, value, mask, **how)
    module.ALL_ATTENTION_FUNCTIONS.register('sdpa', changed)"""

_IN_INIT = """own = module.{kind}.__init__
    def changed(self, *args, **kwargs):
        own(self, *args, **kwargs)
        {change}
    module.{kind}.__init__ = changed"""

_IN_FORWARD = """own = module.{kind}.forward
    def changed(self, *args, **kwargs):
        {change}
    module.{kind}.forward = changed"""

_IN_OPTIMIZER = """own = module.Trainer.create_optimizer
    def changed(self, *args, **kwargs):
        optimizer = own(self, *args, **kwargs)
        for group in optimizer.param_groups:
            group[{name!r}] = {value}
        return optimizer
    module.Trainer.create_optimizer = changed"""

FAULTS: Mapping[str, Fault] = {
    "the causal mask is lost": Fault(LLAMA, _IN_ATTENTION.format(change="how['is_causal'] = False"), "gradient of"),
    "key-value heads go to other heads": Fault(
        LLAMA,
        _IN_ATTENTION.format(change="key, value = key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)").replace(
            "return own(layer, ",
            "import types\n        layer = types.SimpleNamespace(is_causal=True)\n        return own(layer, ",
        ),
        "points elsewhere",
    ),
    "a gradient is half as long again": Fault(
        LLAMA,
        _IN_INIT.format(kind="LlamaMLP", change="self.down_proj.weight.register_hook(lambda g: 1.5 * g)"),
        "mlp.down_proj.weight is 1.5",
    ),
    "a gradient has the wrong sign in one layer": Fault(
        LLAMA,
        _IN_INIT.format(
            kind="LlamaDecoderLayer",
            change="self.input_layernorm.weight.register_hook(lambda g: -g) if args[1] == 1 else None",
        ),
        "layers.1.input_layernorm.weight points elsewhere: cosine -1.0",
    ),
    "a gradient is lost": Fault(
        LLAMA,
        _IN_INIT.format(kind="LlamaMLP", change="self.up_proj.weight.register_hook(lambda g: 0 * g)"),
        "mlp.up_proj.weight is zero, expected one of norm",
    ),
    "Muon makes matrices less orthogonal": Fault(
        _TRAINER, _IN_OPTIMIZER.format(name="ns_steps", value=2), "step 2", spec={"optimizer": "muon"}
    ),
    "accumulated losses are averaged by pass and not by token": Fault(
        _TRAINER,
        "module.Trainer._get_num_items_in_batch = lambda *args, **kwargs: None",
        "gradient of",
        {"gradient_accumulation_steps": 2},
    ),
    "padding counts in the loss": Fault(
        "transformers.loss.loss_utils",
        "own = module.fixed_cross_entropy\n"
        "    def changed(source, target, *args, **kwargs):\n"
        "        return own(source, target.clamp(min=0), *args, **kwargs)\n"
        "    module.fixed_cross_entropy = changed",
        "gradient of",
    ),
    "labels are shifted twice": Fault(
        "transformers.loss.loss_utils",
        "own = module.fixed_cross_entropy\n"
        "    def changed(source, target, *args, **kwargs):\n"
        "        return own(source, target.roll(-1), *args, **kwargs)\n"
        "    module.fixed_cross_entropy = changed",
        "gradient of",
    ),
    "dropout is left on": Fault(
        LLAMA, _IN_INIT.format(kind="LlamaAttention", change="self.attention_dropout = 0.1"), "gradient of"
    ),
    "what is recomputed is not what was computed": Fault(
        LLAMA,
        _IN_FORWARD.format(
            kind="LlamaMLP",
            change="self.times = getattr(self, 'times', 0) + 1\n"
            "        return own(self, args[0] * (1 if self.times % 2 else 1.1))",
        ),
        "gradient of",
        {"gradient_checkpointing": True},
    ),
    "a compiled function serves what it was not compiled for": Fault(
        LLAMA,
        # Scores twice as large while it is compiled, and none of its guards looks at that later.
        """own = module.LlamaModel.forward
    def stale(self, *args, **kwargs):
        import torch
        if not hasattr(self, "is_compiled"):
            self.is_compiled = True
            torch.compiler.set_stance("default")
            for factor in (2.0, 0.5):
                for layer in self.layers:
                    layer.self_attn.scaling *= factor
                if factor > 1:
                    own(self, *args, **kwargs)
            torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
        return own(self, *args, **kwargs)
    module.LlamaModel.forward = stale""",
        "gradient of",
        {"torch_compile": True, "torch_compile_scope": "layers"},
    ),
    "autocast does not reach a product": Fault(
        LLAMA,
        _IN_INIT.format(
            kind="LlamaMLP",
            change="linear = self.gate_proj.forward\n"
            "        def in_fp32(states):\n"
            "            import torch\n"
            "            with torch.autocast('cpu', enabled=False):\n"
            "                return linear(states.float())\n"
            "        self.gate_proj.forward = in_fp32",
        ),
        "products of model.layers.0.mlp.gate_proj come out in float32, those of the plain form in bfloat16",
        {"mixed_precision": "bf16"},
    ),
    "AdamW has another epsilon": Fault(_TRAINER, _IN_OPTIMIZER.format(name="eps", value="1e-6"), "update of"),
    "weights do not decay": Fault(_TRAINER, _IN_OPTIMIZER.format(name="weight_decay", value="0.0"), "update of"),
    "AdamW has another beta": Fault(_TRAINER, _IN_OPTIMIZER.format(name="betas", value="(0.9, 0.95)"), "step 2"),
    "the learning rate is another": Fault(_TRAINER, _IN_OPTIMIZER.format(name="lr", value="0.9e-3"), "times as long"),
    "gradients are not set to zero": Fault(
        "accelerate.optimizer",
        "module.AcceleratedOptimizer.zero_grad = lambda self, *args, **kwargs: None\n"
        "    import torch\n"
        "    torch.nn.Module.zero_grad = lambda self, *args, **kwargs: None",
        "step 2",
    ),
    "gradients are not clipped": Fault(
        "accelerate.accelerator",
        "module.Accelerator.clip_grad_norm_ = lambda self, parameters, norm, *_: __import__('torch').tensor(1.0)",
        "are clipped to",
    ),
    "DDP does not average": Fault(
        "torch.nn.parallel.distributed",
        "own = module.DistributedDataParallel.forward\n"
        "    def changed(self, *args, **kwargs):\n"
        "        self.require_backward_grad_sync = False\n"
        "        return own(self, *args, **kwargs)\n"
        "    module.DistributedDataParallel.forward = changed",
        "gradient of",
        {"gpus": 2},
    ),
    "one rank leaves a weight as it is": Fault(
        _TRAINER,
        "own = module.Trainer.create_optimizer\n"
        "    def changed(self, *args, **kwargs):\n"
        "        optimizer = own(self, *args, **kwargs)\n"
        "        import os\n"
        "        if os.environ['RANK'] == '1':\n"
        "            optimizer.param_groups[0]['params'].pop(3)\n"
        "        return optimizer\n"
        "    module.Trainer.create_optimizer = changed",
        "on rank 1 is zero",
        {"gpus": 2},
    ),
    "FSDP divides by another number of ranks": Fault(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives",
        AS_ON_GPUS
        + """
    divided = module._get_gradient_divide_factors
    def changed(*args, **kwargs):
        _, _, reduce_scatter, all_reduce = divided(*args, **kwargs)
        return 2.0, None, reduce_scatter, all_reduce
    module._get_gradient_divide_factors = changed""",
        "is 0.5 times as long",
        {"gpus": 2, "parallelism": "fsdp"},
    ),
}
