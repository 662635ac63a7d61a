"""Relevant differences: which of the things that are not as they were may have moved the parts of a step that moved.

By their names alone: a variable of NCCL's says something of exchanges, a file of Liger's of norms. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_llmperf.insight.tracing.kernel_categories import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    LOSS,
    MATRIX,
    NORM,
    OPTIMIZER,
)
from pytest_llmperf.insight.tracing.step_difference import DATA, HOST, StepDifference

# What each part may be moved by; a device and its clocks move all that it computes.
_OF_PART = {
    part: re.compile(words, re.IGNORECASE)
    for part, words in {
        MATRIX: r"tf32|cublas|cuda\b|fp8|dtype|precision|autocast|^torch\b|compile|^gpu\b|driver|power",
        ATTENTION: r"attention|sdp|flash|cudnn|^torch\b|transformers|config|^gpu\b|driver|power",
        NORM: r"liger|triton|transformers|compile|dropout|checkpointing|config",
        LOSS: r"liger|loss|triton|transformers|compile",
        OPTIMIZER: r"optim|foreach|fused|^torch\b|bitsandbytes|apex|accelerate",
        COMMUNICATION: r"nccl|slurm|ranks_per_node|ddp|fsdp|parallel|^gpu\b|driver|UCX|IB_",
        COPIES: r"autocast|dtype|precision|liger|transformers|accelerate|compile",
        ELEMENTWISE: r"liger|transformers|triton|compile|dropout|autocast|dtype|config|optim|foreach",
        HOST: r"launch_blocking|OMP_|MKL_|python|platform|alloc|compile|graph|TORCH_|debug|hook|callback",
        DATA: r"data|loader|worker|collat|OMP_|MKL_|python|platform|tokeniz",
    }.items()
}
# What makes the same work take longer; all else that differs changes what is done, or nothing.
_SLOWS_THE_SAME = re.compile(
    r"launch_blocking|OMP_|MKL_|KMP_|alloc|debug|trac|profil|monitor|dev_?mode|hook|callback|driver|power|^gpu\b|nccl"
    r"|slurm|ranks_per_node|data|loader|worker|collat|tf32|cpu|thread|sources|patched|\.pth$|preload|gc\b"
    r"|^(torch|cuda|cudnn|triton)\b|cublas",
    re.IGNORECASE,
)
# Less of what moved is no reason to look there.
_LEAST_SHARE = 0.1


def ranked(lines: Sequence[str], difference: StepDifference) -> tuple[str, ...]:
    """``lines``, each ``name: then -> now``, those of parts that moved most first; all others in their own order."""
    return tuple(sorted(lines, key=lambda line: -_weight(line, difference)))


def relevant(lines: Sequence[str], difference: StepDifference) -> tuple[str, ...]:
    """Those of ``lines`` that a part which moved may be moved by, best first."""
    return tuple(line for line in ranked(lines, difference) if _weight(line, difference) > 0)


def _weight(line: str, difference: StepDifference) -> float:
    name = line.partition(": ")[0]
    if difference.is_the_same_work and not _SLOWS_THE_SAME.search(name):
        return 0.0
    moves = {part.name: abs(part.change) for part in difference.parts}
    least = _LEAST_SHARE * max(moves.values(), default=0.0)
    return max((move for part, move in moves.items() if move > least and _OF_PART[part].search(name)), default=0.0)
