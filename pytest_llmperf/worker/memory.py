"""The limit of memory: a lower one than the card's, and how running into it is told from other errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# NCCL's own buffers take less than this share of any card it runs on.
_FULL = 0.02


def cap(device: torch.device, limit_bytes: int) -> None:
    """Let this rank have no more memory than a card of ``limit_bytes`` would.

    On a GPU the allocator is told: what the driver and the libraries took before it is part of the card's. On the CPU
    the process may hold as much above what it holds now.

    Raises:
        ValueError: the card has less, or the limit is below what is held already.
    """
    if device.type == "cuda":
        import torch  # noqa: PLC0415 - whoever has a device has imported it; a rank without torch asks what failed

        free, total = torch.cuda.mem_get_info(device)
        left = limit_bytes - (total - free)
        if limit_bytes > total or left <= 0:
            raise ValueError(f"a limit of {limit_bytes} bytes: {total} there are, {total - free} are held already")
        torch.cuda.set_per_process_memory_fraction(left / total, device)
        return
    import resource  # noqa: PLC0415 - absent on Windows, where a GPU may be

    limit = _data_bytes() + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, in whoever's words."""
    # By name, since the import of torch itself may be what failed.
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    # The allocator says it one way; the driver, cuBLAS and the CPU each in their own.
    text = str(error).lower()
    said = any(words in text for words in ("out of memory", "cublas_status_alloc_failed", "can't allocate memory"))
    # NCCL says that it got no memory, and not why: after an illegal access nobody gets any.
    said = said or ("failed to cuda" in text and "alloc" in text and _gpu_is_full())
    return isinstance(error, RuntimeError) and said


def _gpu_is_full() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # the context is lost
        return False
    return bool(free < _FULL * total)


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
