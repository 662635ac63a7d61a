"""Shortage: how a lack of memory is known, by what is said when it ends and by what was left then. Pure.

Allocators, drivers and libraries each have words of their own. Some mean it and nothing else. Others only hint at it:
they are said of a lack of memory and of other things too, so they count where little was left, and nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Said = Literal["plainly", "perhaps", ""]

# Of memory in words, and of something else: static TLS is a table of the loader's, what InfiniBand cannot register is
# locked memory, Triton's resource is a multiprocessor's shared memory, and /dev/shm is a file system.
_SOMETHING_ELSE = (
    r"cannot allocate memory in static tls block",
    r"ibv_\w+ failed[^\n]*",
    r"[^\n]*out of resource[^\n]*",
    r"[^\n]*insufficient shared memory[^\n]*",
)

_PLAINLY = (
    # Allocators: CUDA's, HIP's, XPU's and MPS's caching ones, torch's and numpy's of the CPU, C++'s, Rust's.
    r"out of memory",
    r"can't allocate memory",
    r"unable to allocate \S+ \S+ for an array",
    r"std::bad_alloc",
    r"memory allocation of \d+ bytes failed",
    # The C library and whoever passes on its errno, of mmap, fork and dlopen as well.
    r"cannot allocate memory",
    r"virtual memory exhausted",
    r"openblas error: memory allocation still failed",
    # The driver and CUDA's libraries.
    r"cuda_error_out_of_memory",
    r"cudaerrormemoryallocation",
    r"(?:cublas|cudnn|cusolver|cusparse)_status_alloc_failed",
    r"cudnn_status_internal_error_(?:host|device)_allocation_failed",
    r"curand_status_allocation_failed",
    r"cufft_alloc_failed",
    # Carried as text: out of a process that loads data, or out of a log.
    r"\b_?(?:array)?memoryerror\b",
)

_PERHAPS = (
    # oneDNN says no more when its code or its scratchpad found no memory.
    r"could not create a (?:primitive|memory)",
    r"could not execute a primitive",
    # A thread's stack found none, or there are too many threads.
    r"resource temporarily unavailable",
    r"can't start new thread",
    r"thread creation failed",
    r"pthread_create failed",
    r"unable to allocate necessary resources",
    r"terminate called without an active exception",
    # The loader could not map a library, or its folder forbids it.
    r"failed to map segment",
    r"dataloader worker \(pid.*?\) (?:is killed by signal: killed|exited unexpectedly)",
    # What a handle or a plan says on a GPU that is full, and on one that is broken.
    r"(?:cublas|cudnn|cusolver|cusparse)_status_(?:not_initialized|internal_error|execution_failed)",
    r"cusparse_status_insufficient_resources",
    r"cufft_internal_error",
    r"unable to find (?:an engine to execute|a valid cudnn algorithm)",
    # NCCL says that it got no memory, and not why: after an illegal access nobody gets any.
    r"failed to cuda \w*alloc",
)

_OF_A_PEER = r"connection|\bpeer\b|socket|broken pipe|ncclremoteerror|remote process|timed? ?out"


def said(words: str) -> Said:
    """Whether ``words`` say that memory ended."""
    text = re.sub("|".join(_SOMETHING_ELSE), "", words.lower())
    if re.search("|".join(_PLAINLY), text):
        return "plainly"
    return "perhaps" if re.search("|".join(_PERHAPS), text) else ""


def of_a_peer(words: str) -> bool:
    """Whether ``words`` are of another rank that has gone, which says nothing of this one's memory."""
    return re.search(_OF_A_PEER, words.lower()) is not None


# Of a rank's own limit: what failed is what did not fit any more, so a whole product's workspace may be left where a
# library only hints, and hardly a layer's where nothing was said. CUDA's libraries, NCCL's buffers among them, take
# less than this share of any card they run on.
_LITTLE = {"its limit": 1 / 4, "the GPU": 0.02, "the host": 0.02}
_NOTHING = {"its limit": 1 / 16, "the GPU": 0.02, "the host": 0.02}


@dataclass(frozen=True)
class Room:
    """The memory that is left to a rank."""

    of: Literal["its limit", "the GPU", "the host"]
    limit_bytes: int
    left_bytes: int
    retries: int = 0
    """Times that the GPU's allocator gave back what it had kept and asked again."""
    refused: int = 0
    """Times that it got nothing all the same."""

    @property
    def is_tight(self) -> bool:
        """Whether so little is left that a hint of a lack of memory is believed."""
        return self.is_full or self.retries > 0 or self.share < _LITTLE[self.of]

    @property
    def is_full(self) -> bool:
        """Whether so little is left that an error without a word of memory is taken for a lack of it.

        A GPU that its allocator has to itself is full as a matter of course: there it has to have been in need too.
        """
        in_need = self.of != "the GPU" or self.retries > 0
        return self.refused > 0 or (in_need and self.share < _NOTHING[self.of])

    @property
    def share(self) -> float:
        """The part of it that is left."""
        return self.left_bytes / self.limit_bytes if self.limit_bytes else 1.0

    def __str__(self) -> str:
        """``2.1 of 150.0 MiB of its limit were left``."""
        unit, name = (2**30, "GiB") if self.limit_bytes >= 2**30 else (2**20, "MiB")
        asked = f", and allocations were refused: {self.refused}" if self.refused else ""
        return f"{self.left_bytes / unit:.1f} of {self.limit_bytes / unit:.1f} {name} of {self.of} were left{asked}"
