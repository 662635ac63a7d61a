"""A plain loop with one fault, told by ``FAULT`` and in no word of the command: ``KIND``, ``KIND=NUMBER``.

Under torchrun it is DDP. ``slow=3`` computes for 3 % of a step more; ``late=3`` does from the ``FAULT_AFTER``th
second on. ``item=30`` waits so often a step; ``gather=32`` gathers the output layer so often. ``leak`` keeps a tensor
of 1 MiB a step, ``files`` opens one a step, and ``stall`` sleeps 0.3 s each 60 steps. ``eager`` has attention by hand
and ``float32`` leaves bf16, as lost fusions do.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from sized import Clock, device, llama, options, tokens
from torch.nn.parallel import DistributedDataParallel

KIND, _, SIZE = os.environ.get("FAULT", "").partition("=")
SIZE_OF_FAULT = float(SIZE or 0)
AFTER_SECONDS = float(os.environ.get("FAULT_AFTER", "0"))
_CYCLES, _MARKS = 20_000_000, 5

kept: list[Any] = []


class MoreWork:
    """A kernel more in each step, for no time at all or for a share of what the first steps took."""

    def __init__(self) -> None:
        self._begun, self._cycles, self._wanted = time.monotonic(), 1, 0
        self._marks: list[torch.cuda.Event] = []

    def step(self) -> None:
        if not torch.cuda.is_available():
            return
        if KIND in {"slow", "late"} and len(self._marks) < _MARKS:
            self._calibrate()
        late = KIND == "slow" or time.monotonic() - self._begun > AFTER_SECONDS
        torch.cuda._sleep(max(1, self._wanted if late else 1))  # noqa: SLF001 - torch has no other kernel that only takes time

    def _calibrate(self) -> None:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        self._marks.append(mark)
        if len(self._marks) == _MARKS:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(_CYCLES)  # noqa: SLF001
            end.record()
            torch.cuda.synchronize()
            step = self._marks[2].elapsed_time(self._marks[4]) / 2
            self._wanted = int(_CYCLES * step * SIZE_OF_FAULT / 100 / begin.elapsed_time(end))


def attend(_module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_: Any) -> Any:
    """Attention of three products and a softmax, as nobody fuses it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length = query.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    weights = (query @ key.transpose(2, 3) * scaling).masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def break_it(step: int, model: Any, loss: torch.Tensor) -> None:
    """What the fault does within a step."""
    if KIND == "item":
        for _ in range(int(SIZE_OF_FAULT)):
            loss.item()
    elif KIND == "gather" and dist.is_initialized():
        weight = model.get_output_embeddings().weight.detach().to(torch.bfloat16)
        parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
        for _ in range(int(SIZE_OF_FAULT)):
            dist.all_gather(parts, weight)
    elif KIND == "leak":
        kept.append(torch.zeros(2**18, device=loss.device))
    elif KIND == "files":
        kept.append(open(os.devnull))  # noqa: SIM115, PTH123 - nobody closes it
    elif KIND == "stall" and step % 60 == 0:
        time.sleep(0.3)


def main() -> None:
    if not torch.cuda.is_available() and KIND in {"slow", "late"}:
        sys.exit(f"{KIND} needs a GPU")
    given = options()
    if "RANK" in os.environ:
        device()
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    plain, clock, work = llama(given), Clock(given), MoreWork()
    if KIND == "eager":
        from transformers import AttentionInterface  # noqa: PLC0415 - the fault's alone

        AttentionInterface.register("by_hand", attend)
        plain.set_attn_implementation("by_hand")
    model = DistributedDataParallel(plain) if dist.is_initialized() else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step in range(1, given.steps + 1):
        ids = tokens(given, plain)
        with torch.autocast(device().type, torch.bfloat16, enabled=KIND != "float32"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        break_it(step, plain, loss)
        work.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
