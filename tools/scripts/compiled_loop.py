"""A plain loop, each layer compiled by itself."""

from __future__ import annotations

import torch
from sized import Clock, device, llama, options, tokens


def main() -> None:
    given = options()
    model, clock = llama(given), Clock(given)
    for layer in model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(given.steps):
        ids = tokens(given, model)
        with torch.autocast(device().type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step()


if __name__ == "__main__":
    main()
