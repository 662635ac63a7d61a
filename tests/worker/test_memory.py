"""Memory that ends: what is raised, what the rank takes it for, and what is told of one that could not say it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llmperf.observe.vital_signs import Headroom
from pytest_llmperf.records.failure import lack_of_memory
from tests.worker.user import REPOSITORY

torch = pytest.importorskip("torch")

RAISED = {
    # The way that memory ends, and what it is raised as.
    "python_objects": "MemoryError",
    "numpy_array": "MemoryError: Unable to allocate",
    "torch_tensor": "RuntimeError: [enforce fail at alloc_cpu.cpp",
    "anonymous_map": "OSError: [Errno 12] Cannot allocate memory",
    "safetensors_file": "",
    "mapped_tensor": "RuntimeError: unable to mmap",
    "process_that_loads": "RuntimeError: Caught RuntimeError in DataLoader worker",
}
AT_THE_LIMIT = {
    "new_thread": "RuntimeError: can't start new thread",
    "gloo_device": "RuntimeError: Resource temporarily unavailable",
    "unknown_error_at_the_limit": "RuntimeError: primitive 17 has no implementation",
}
DEATHS = {
    "openmp_threads": "",
    "cplusplus_new": "SIGABRT",
    "another_abort_at_the_limit": "SIGABRT",
}
ONEDNN = {"onednn_primitive", "onednn_crash"}
FREED = "freed_before"
OTHERS = {"another_error", "another_error_at_the_limit", "another_abort"}

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")


@pytest.fixture(scope="module")
def starved() -> dict[str, dict[str, Any]]:
    """How each way ended, each in a process of its own."""
    ways = sorted({*RAISED, *AT_THE_LIMIT, *DEATHS, *ONEDNN, *OTHERS, FREED})
    ended = subprocess.run(
        [sys.executable, "-m", "tests.worker.starving", *ways],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    )
    return {one["name"]: one for one in map(json.loads, ended.stdout.splitlines())}


@linux
@pytest.mark.slow
@pytest.mark.timeout(300)
class TestForReal:
    @pytest.mark.parametrize(("way", "words"), RAISED.items())
    def test_who_says_plainly_that_memory_ended_is_believed(
        self, starved: dict[str, dict[str, Any]], way: str, words: str
    ) -> None:
        assert starved[way]["error"].startswith(words)
        assert starved[way]["lack"] == "", starved[way]

    @pytest.mark.parametrize(("way", "words"), AT_THE_LIMIT.items())
    def test_an_error_without_those_words_is_judged_by_what_is_left(
        self, starved: dict[str, dict[str, Any]], way: str, words: str
    ) -> None:
        assert starved[way]["error"].startswith(words)
        assert "of its limit were left" in starved[way]["lack"], starved[way]

    @pytest.mark.parametrize(("way", "signal"), DEATHS.items())
    def test_a_rank_that_dies_of_it_is_told_from_what_it_left(
        self, starved: dict[str, dict[str, Any]], way: str, signal: str
    ) -> None:
        assert starved[way]["code"] != 0
        assert starved[way]["signal"] == signal
        assert starved[way]["want"], starved[way]

    @pytest.mark.parametrize("way", sorted(ONEDNN))
    def test_onednn_on_any_cpu(self, starved: dict[str, dict[str, Any]], way: str) -> None:
        """It "could not create a primitive" or trips over that by AVX-512; by less the allocator comes first."""
        one = starved[way]
        if not one["error"] and one["code"] == 0:
            pytest.skip("oneDNN writes no code for this CPU's products")
        assert one["lack"] is not None or one["want"], one

    def test_what_was_freed_counts_no_longer(self, starved: dict[str, dict[str, Any]]) -> None:
        assert (starved[FREED]["error"], starved[FREED]["code"]) == ("", 0)

    @pytest.mark.parametrize("way", sorted(OTHERS))
    def test_another_end_stays_another(self, starved: dict[str, dict[str, Any]], way: str) -> None:
        assert starved[way]["error"] or starved[way]["signal"]
        assert starved[way]["lack"] is None
        assert way != "another_abort" or starved[way]["want"] is None


def gpu_with(monkeypatch: pytest.MonkeyPatch, left: int | None, **counts: int) -> None:
    """A GPU of 140 GiB with ``left`` bytes; ``None``: its context is lost."""

    def mem_get_info(*_: object) -> tuple[int, int]:
        if left is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return left, 140 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: counts)


CALLOC = "ncclUnhandledCudaError: Call to CUDA function failed.\nFailed to CUDA calloc async 24 bytes"
HANDLE = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("words", "left", "counts", "lacked"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB", None, {}, True),
        (CALLOC, 2**20, {}, True),
        (CALLOC, 2**36, {}, False),
        (CALLOC, None, {}, False),
        (HANDLE, 2**20, {}, True),
        (HANDLE, 2**36, {"num_alloc_retries": 1}, True),
        (HANDLE, 2**36, {}, False),
        (HANDLE, None, {"num_alloc_retries": 1}, False),
        ("CUDA error: unknown error", 2**20, {}, False),
        ("CUDA error: unknown error", 2**20, {"num_alloc_retries": 1}, True),
        ("NCCL: remote process exited or there was a network error", 2**20, {"num_alloc_retries": 1}, False),
        ("CUDA error: unknown error", 2**36, {"num_ooms": 1}, True),
        ("CUDA error: unknown error", 2**36, {"num_alloc_retries": 1}, False),
        (ILLEGAL, None, {}, False),
        ("out of resource: shared memory, Required: 232448, Hardware limit: 166912", 2**36, {}, False),
    ],
)
def test_on_a_gpu_hints_count_where_it_is_full(
    monkeypatch: pytest.MonkeyPatch, words: str, left: int | None, counts: dict[str, int], lacked: bool
) -> None:
    gpu_with(monkeypatch, left, **counts)
    assert (lack_of_memory(RuntimeError(words), Headroom().after) is not None) is lacked


class OutOfMemoryError(RuntimeError):
    """As torch's, by name."""


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lacked"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("Allocation on device"), True),
        (OutOfMemoryError("out of resource: triton_mm Required: 147456 Hardware limit:101376"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (raised_from(RuntimeError("the engine failed"), MemoryError()), True),
        (raised_from(TypeError("no"), RuntimeError("CUDA out of memory")), True),
        (ValueError("attention 'out of memory' is unknown"), False),
        (KeyboardInterrupt("out of memory"), False),
    ],
)
def test_the_kind_of_an_error_counts_too(monkeypatch: pytest.MonkeyPatch, error: BaseException, lacked: bool) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Host", (), {"total": 100, "available": 50}))
    gpu_with(monkeypatch, 2**36)
    assert lack_of_memory(error, Headroom().after) == ("" if lacked else None)


@linux
@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_a_limit_that_somebody_else_set_is_one_too(limit: str) -> None:
    code = (
        "import resource; from pytest_llmperf.observe.vital_signs import Headroom, _held_bytes\n"
        f"half = _held_bytes()[{0 if limit == 'RLIMIT_AS' else 5}] * 2\n"
        f"resource.setrlimit(resource.{limit}, (half, half)); print(Headroom().look())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert ended.stdout.strip().endswith("MiB of its limit were left"), ended.stdout


def test_the_reason_says_what_it_was_taken_for_and_why(tmp_path: Path) -> None:
    from pytest_llmperf.records.ranks import write_failure  # noqa: PLC0415 - beside the one test of it

    write_failure(
        tmp_path, 0, RuntimeError("could not create a primitive"), "oom", "1.0 of 150.0 MiB of its limit were left"
    )
    reason = json.loads((tmp_path / "failure-0.json").read_text())
    assert (reason["kind"], reason["message"]) == (
        "oom",
        (
            "rank 0: RuntimeError: could not create a primitive; "
            "taken for a lack of memory: 1.0 of 150.0 MiB of its limit were left"
        ),
    )
