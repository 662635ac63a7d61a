"""What is said when memory ends, and by what is left when it is believed."""

from __future__ import annotations

import json

import pytest

from pytest_llmperf.records.failure import Room, of_a_peer, said
from pytest_llmperf.support import codec
from tests.golden import Golden

MIB = 2**20

PLAINLY = [
    # As the allocator and cuBLAS said it on an H200; the others as their sources and their users' reports have it.
    "CUDA out of memory. Tried to allocate 20.00 MiB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuSPARSE error: CUSPARSE_STATUS_ALLOC_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "CURAND_STATUS_ALLOCATION_FAILED",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8388608 bytes. Error code 12",
    "Unable to allocate 300. MiB for an array with shape (314572800,) and data type uint8",
    "unable to mmap 314572800 bytes from file <x.safetensors>: Cannot allocate memory (12)",
    "Cannot allocate memory (os error 12)",
    "libcudnn_engines.so.9: failed to map segment from shared object: Cannot allocate memory",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "memory allocation of 4294967296 bytes failed",
    "libgomp: Out of memory allocating 262144 bytes",
    "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.",
    "cannot allocate memory for thread-local data: ABORT",
    "Caught MemoryError in DataLoader worker process 0.",
    "Caught _ArrayMemoryError in DataLoader worker process 0.",
]

PERHAPS = [
    "could not create a primitive",
    "could not create a primitive descriptor for a matmul primitive",
    "could not execute a primitive",
    "Resource temporarily unavailable",
    "can't start new thread",
    "libgomp: Thread creation failed: Resource temporarily unavailable",
    "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2",
    "OMP: Error #34: System unable to allocate necessary resources for OMP thread:",
    "terminate called without an active exception",
    "libfoo.so: failed to map segment from shared object",
    "DataLoader worker (pid 71) is killed by signal: Killed.",
    "DataLoader worker (pid(s) 71, 72) exited unexpectedly",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR",
    "cuSPARSE error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    "GET was unable to find an engine to execute this computation",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nFailed to CUDA calloc async 24 bytes",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nFailed to CUDA malloc 4194304 bytes",
]

SOMETHING_ELSE = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: too many resources requested for launch",
    "out of resource: shared memory, Required: 232448, Hardware limit: 166912. Reducing block sizes may help.",
    "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 147456 Hardware limit:101376",
    "libgomp.so.1: cannot allocate memory in static TLS block",
    "Call to ibv_reg_mr failed with error Cannot allocate memory",
    "Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: No space left on device (28)",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)",
    "No space left on device",
    "",
]


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        *((words, "plainly") for words in PLAINLY),
        *((words, "perhaps") for words in PERHAPS),
        *((words, "") for words in SOMETHING_ELSE),
    ],
)
def test_whose_words_say_that_memory_ended(words: str, meaning: str) -> None:
    assert said(words) == meaning


@pytest.mark.parametrize(
    ("room", "tight", "full"),
    [
        (Room("its limit", 160 * MIB, 41 * MIB), False, False),
        (Room("its limit", 160 * MIB, 39 * MIB), True, False),
        (Room("its limit", 160 * MIB, 9 * MIB), True, True),
        (Room("the GPU", 100 * MIB, 3 * MIB), False, False),
        (Room("the GPU", 100 * MIB, 1 * MIB), True, False),
        (Room("the GPU", 100 * MIB, 1 * MIB, retries=1), True, True),
        (Room("the GPU", 100 * MIB, 50 * MIB, retries=1), True, False),
        (Room("the GPU", 100 * MIB, 50 * MIB, refused=1), True, True),
        (Room("the host", 100 * MIB, 3 * MIB), False, False),
        (Room("the host", 100 * MIB, 1 * MIB), True, True),
    ],
)
def test_how_little_is_believed(room: Room, tight: bool, full: bool) -> None:
    assert (room.is_tight, room.is_full) == (tight, full)
    assert codec.read(Room, json.loads(json.dumps(codec.plain(room)))) == room


@pytest.mark.parametrize(
    "words",
    [
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2893",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
        "NCCL error: remote process exited or there was a network error. ncclRemoteError: A call failed possibly",
        "Broken pipe",
    ],
)
def test_a_peer_that_has_gone_is_no_lack_of_memory(words: str) -> None:
    assert of_a_peer(words)
    assert said(words) == ""


def test_it_is_told_with_its_figures(golden: Golden) -> None:
    golden(str(Room("its limit", 150 * MIB, 2 * MIB)))
    told = "1.5 of 140.0 GiB of the GPU were left, and allocations were refused: 2"
    assert str(Room("the GPU", 140 * 2**30, 3 * 2**29, refused=2)) == told


@pytest.mark.parametrize("values", [{}, {"of": "a card", "limit_bytes": 1, "left_bytes": 1}, {"of": "the host"}])
def test_what_is_no_room_is_refused(values: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        codec.read(Room, values)
