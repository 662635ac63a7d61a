"""A loop under FSDP2, in bf16 with fp32 weights: ``torchrun --nproc-per-node 2 tools/scripts/fsdp2.py``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sized import Clock, device, llama, options, tokens
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    given, on = options(), device()
    dist.init_process_group("nccl" if on.type == "cuda" else "gloo", device_id=on if on.type == "cuda" else None)
    model, clock = llama(given), Clock(given)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh(on.type, (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(dist.get_rank())
    for _ in range(given.steps):
        ids = tokens(given, model)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
