"""A small Llama trained by its formulas, beside the truth of a launch.

Nothing of transformers computes here, and no optimizer or loss of PyTorch's: attention, norms, rotation, the loss over
shifted labels, clipping and AdamW are written out, in double precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pytest_llmperf.settings.models import resolve, small_config
from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.recipes.huggingface.parity import Truth
from pytest_llmperf.worker.recipes.huggingface.small_trainer import UnevenRows, set_initial_weights

SEED, LENGTH, ROWS, STEPS = 42, 32, 8, 2
RATE, DECAY, CLIP, BETA1, BETA2, EPSILON = 1e-3, 0.1, 0.1, 0.9, 0.999, 1e-8
CONFIG = small_config(resolve("llama-tiny").config)
SIZE, HEADS, GROUPS = CONFIG["head_dim"], CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]

Weights = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt()


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Each pair of coordinates, half a head apart, turned by its position times its frequency."""
    frequencies = CONFIG["rope_theta"] ** -(torch.arange(0, SIZE, 2).double() / SIZE)
    angles = torch.arange(x.shape[-2]).double()[:, None] * frequencies
    a, b = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attention(x: torch.Tensor, weights: Weights, at: str) -> torch.Tensor:
    rows, length, _ = x.shape
    q, k, v = (x @ weights[f"{at}.{name}_proj.weight"].T for name in "qkv")
    out = []
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        query = rotated(q[..., head * SIZE : (head + 1) * SIZE])
        key = rotated(k[..., group * SIZE : (group + 1) * SIZE])
        scores = query @ key.transpose(1, 2) / SIZE**0.5
        seen = torch.arange(length)[:, None] >= torch.arange(length)
        powers = torch.where(seen, (scores - scores.max()).exp(), 0.0)
        out.append(powers / powers.sum(-1, keepdim=True) @ v[..., group * SIZE : (group + 1) * SIZE])
    return torch.cat(out, -1).reshape(rows, length, -1) @ weights[f"{at}.o_proj.weight"].T


def loss(weights: Weights, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = x + attention(norm(x, weights[f"{at}.input_layernorm.weight"]), weights, f"{at}.self_attn")
        y = norm(x, weights[f"{at}.post_attention_layernorm.weight"])
        gate = y @ weights[f"{at}.mlp.gate_proj.weight"].T
        up = y @ weights[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * up) @ weights[f"{at}.mlp.down_proj.weight"].T
    logits = norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(tokens)):
        for position in range(LENGTH - 1):
            expected = int(labels[row, position + 1])
            if expected >= 0:
                here = logits[row, position]
                total = total + here.exp().sum().log() - here[expected]
                counted += 1
    return total / counted


def compared(folder: Path) -> dict[str, Any]:
    """Of the truth in ``folder``, by step, the relative error of its loss and the largest one of its gradients."""
    model = AutoModelForCausalLM.from_config(hf_config_of(CONFIG), dtype=torch.float32)
    set_initial_weights(model, SEED)
    weights = {name: one.detach().double().requires_grad_() for name, one in model.named_parameters()}
    rows = UnevenRows(length=ROWS * STEPS, sequence_length=LENGTH, vocabulary_size=CONFIG["vocab_size"], seed=SEED)
    truth = Truth.load(folder / f"truth-{SEED}.pt")
    means = {name: torch.zeros_like(one) for name, one in weights.items()}
    squares = {name: torch.zeros_like(one) for name, one in weights.items()}
    losses, gradients = [], []
    for step in range(1, STEPS + 1):
        batch = [rows[index] for index in range((step - 1) * ROWS, step * ROWS)]
        value = loss(weights, *(torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels")))
        found = dict(zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True))
        true = truth.gradients[step - 1]
        losses.append(abs(truth.losses[step - 1] / float(value.detach()) - 1))
        gradients.append(max(float((true[name] - one).norm() / one.norm()) for name, one in found.items()))
        length = sum(float(one.pow(2).sum()) for one in found.values()) ** 0.5
        for name, gradient in found.items():
            clipped = gradient * min(1.0, CLIP / (length + 1e-6))
            means[name] = BETA1 * means[name] + (1 - BETA1) * clipped
            squares[name] = BETA2 * squares[name] + (1 - BETA2) * clipped**2
            mean, square = means[name] / (1 - BETA1**step), squares[name] / (1 - BETA2**step)
            decay = 0.0 if "norm" in name else DECAY
            old = weights[name].detach()
            weights[name] = (old - RATE * (mean / (square.sqrt() + EPSILON) + decay * old)).requires_grad_()
    same = sorted(weights) == sorted(truth.gradients[0])
    return {"losses": losses, "gradients": gradients, "names": same}
