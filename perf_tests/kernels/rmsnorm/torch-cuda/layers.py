"""By two kernels of Triton, a row of the forward pass each, and so many rows of the backward pass as are fair."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def _forward(rows, weight, out, scales, size, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    own = tl.load(rows + row * size + columns, mask=inside, other=0.0)
    wide = own.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / size + epsilon)
    tl.store(scales + row, scale)
    # Rounded to the rows' type before the weights, as the layer that it replaces has it.
    of_one = (wide * scale).to(own.dtype).to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, (of_one * factors).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(rows, weight, scales, given, of_rows, of_weight, number, each, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros([BLOCK], tl.float32)
    for row in range(program * each, tl.minimum((program + 1) * each, number)):
        scale = tl.load(scales + row)
        of_one = tl.load(rows + row * size + columns, mask=inside, other=0.0).to(tl.float32) * scale
        gradient = tl.load(given + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        added += gradient * of_one
        through = gradient * factors
        shared = tl.sum(through * of_one, axis=0) / size
        own = scale * (through - of_one * shared)
        tl.store(of_rows + row * size + columns, own.to(of_rows.dtype.element_ty), mask=inside)
    tl.store(of_weight + program * size + columns, added, mask=inside)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        rows = hidden.contiguous().view(-1, hidden.shape[-1])
        out = torch.empty_like(rows, dtype=torch.promote_types(hidden.dtype, weight.dtype))
        scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        ctx.block = triton.next_power_of_2(rows.shape[1])
        ctx.warps = min(max(ctx.block // 256, 1), 16)
        _forward[(len(rows),)](rows, weight, out, scales, rows.shape[1], epsilon, BLOCK=ctx.block, num_warps=ctx.warps)
        ctx.save_for_backward(rows, weight, scales)
        return out.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weight, scales = ctx.saved_tensors
        number, size = rows.shape
        given, of_rows = gradients[0].contiguous(), torch.empty_like(rows)
        each = -(-number // (2 * torch.cuda.get_device_properties(rows.device).multi_processor_count))
        programs = -(-number // each)
        of_weight = torch.empty(programs, size, dtype=torch.float32, device=rows.device)
        _backward[(programs,)](
            rows, weight, scales, given, of_rows, of_weight, number, each, size, BLOCK=ctx.block, num_warps=ctx.warps
        )
        return of_rows.view(gradients[0].shape), of_weight.sum(0).to(weight.dtype), None


class LlamaRMSNorm(nn.Module):
    """Takes the place of transformers' class of this name, whose weights it reads."""

    has_backward = True
    can_torch_compile = False

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _Normalised.apply(hidden_states, self.weight, self.variance_epsilon)
