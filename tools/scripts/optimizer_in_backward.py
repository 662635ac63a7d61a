"""A loop in bf16 whose optimizers, one for each parameter, step inside the backward pass."""

from __future__ import annotations

import torch
from sized import Clock, llama, options, tokens


def main() -> None:
    given = options()
    model, clock = llama(given, torch.bfloat16), Clock(given)
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-4, fused=True) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad(set_to_none=True)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(given.steps):
        ids = tokens(given, model)
        model(input_ids=ids, labels=ids).loss.backward()
        clock.step()


if __name__ == "__main__":
    main()
