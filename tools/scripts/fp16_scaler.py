"""A loop in fp16 with a GradScaler, which skips its first steps."""

from __future__ import annotations

import torch
from sized import Clock, device, llama, options, tokens


def main() -> None:
    given, on = options(), device().type
    model, clock = llama(given), Clock(given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(on, init_scale=2.0**24)
    for _ in range(given.steps):
        ids = tokens(given, model)
        with torch.autocast(on, torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        clock.step()


if __name__ == "__main__":
    main()
