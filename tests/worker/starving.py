"""``python -m tests.worker.starving NAME...``: memory ends in many ways, each for real, in a process of its own.

Every line on its output is the JSON of one: what was raised, what the worker takes it for, and how the process ended.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import torch as safetensors
from torch.utils.data import DataLoader, Dataset

from pytest_llmperf.launch.outcome import want_of_memory
from pytest_llmperf.observe.vital_signs import Headroom, watched
from pytest_llmperf.records.failure import lack_of_memory
from pytest_llmperf.records.ranks import write_json

_MIB = 2**20
_LIMIT = 200 * _MIB


def python_objects() -> None:
    bytearray(300 * _MIB)


def numpy_array() -> None:
    np.ones(300 * _MIB, dtype=np.uint8)


def torch_tensor() -> None:
    torch.ones(300 * _MIB, dtype=torch.uint8)


def anonymous_map() -> None:
    mmap.mmap(-1, 300 * _MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def onednn_primitive() -> None:
    """Products of shapes that are new each time: their code has to be written, and there is no memory for it."""
    layers = [torch.nn.Linear(n, n, dtype=torch.bfloat16) for n in range(32, 768, 32)]
    inputs = [torch.ones(16, layer.in_features, dtype=torch.bfloat16, requires_grad=True) for layer in layers]
    with filled(_MIB):
        for layer, one in zip(layers, inputs, strict=True):
            layer(one).sum().backward()


def onednn_crash() -> None:
    """The same where oneDNN does not look whether it got that memory."""
    sides = [torch.ones(n, n, dtype=torch.bfloat16) for n in range(32, 1024, 32)]
    outs = [torch.empty_like(side) for side in sides]
    with filled(0):
        for side, out in zip(sides, outs, strict=True):
            torch.mm(side, side, out=out)


def new_thread() -> None:
    with filled(2 * _MIB):
        thread = threading.Thread(target=int)
        thread.start()


def gloo_device() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with filled(4 * _MIB):
        dist.init_process_group("gloo", rank=0, world_size=1)


def safetensors_file() -> None:
    with big_file() as path, address_space(50 * _MIB):
        safetensors.load_file(path)


def mapped_tensor() -> None:
    with big_file() as path, address_space(50 * _MIB):
        torch.from_file(str(path), size=300 * _MIB, dtype=torch.uint8)


def process_that_loads() -> None:
    with filled(60 * _MIB):
        list(DataLoader(Large(), num_workers=1))


def openmp_threads() -> None:
    """libgomp ends the process where a thread gets no stack."""
    numbers = torch.empty(32 * _MIB, dtype=torch.uint8)
    with filled(_MIB):
        torch.set_num_threads(32)
        numbers.fill_(1)


def cplusplus_new() -> None:
    """``std::bad_alloc`` that nobody catches."""
    new = ctypes.CDLL("libstdc++.so.6")._Znwm
    new.argtypes, new.restype = [ctypes.c_size_t], ctypes.c_void_p
    new(300 * _MIB)


def freed_before() -> None:
    """Large pieces with small ones between them; where the heap keeps what was freed, the limit counts it."""
    large, small = [torch.ones(8 * _MIB, dtype=torch.uint8)], []
    large.clear()
    for _ in range(15):
        large.append(torch.ones(8 * _MIB, dtype=torch.uint8))
        small.append(bytearray(70_000))
    large.clear()
    torch.ones(150 * _MIB, dtype=torch.uint8)


def another_error() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


def another_abort() -> None:
    os.abort()


def another_abort_at_the_limit() -> None:
    with filled(0):
        os.abort()


def another_error_at_the_limit() -> None:
    with filled(0):
        raise ValueError("what Python says is no lack of memory")


def unknown_error_at_the_limit() -> None:
    with filled(0):
        raise RuntimeError("primitive 17 has no implementation")


class Large(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(100 * _MIB, dtype=torch.uint8)


@contextmanager
def filled(left_bytes: int) -> Iterator[None]:
    """Take memory until about ``left_bytes`` of the limit are left, the heap's free lists with it."""
    kept: list[Any] = []
    # Small pieces that reach no system call are taken too, or what follows would be served from them.
    for size in (_MIB, 64 * 1024, 4096):
        while Headroom.look(HEADROOM).left_bytes > left_bytes:
            try:
                kept.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            except OSError:
                break
    time.sleep(0.1)  # a step takes as long
    yield


@contextmanager
def address_space(more_bytes: int) -> Iterator[None]:
    """Files that are mapped are no data: their limit is the address space."""
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more_bytes, resource.RLIM_INFINITY))
    yield


@contextmanager
def big_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.safetensors"
        header = json.dumps({"x": {"dtype": "U8", "shape": [300 * _MIB], "data_offsets": [0, 300 * _MIB]}}).encode()
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 300 * _MIB)
        yield path


WAYS: dict[str, Callable[[], None]] = {
    way.__name__: way
    for way in (
        python_objects,
        numpy_array,
        torch_tensor,
        anonymous_map,
        onednn_primitive,
        onednn_crash,
        new_thread,
        gloo_device,
        safetensors_file,
        mapped_tensor,
        process_that_loads,
        openmp_threads,
        cplusplus_new,
        freed_before,
        another_error,
        another_abort,
        another_abort_at_the_limit,
        another_error_at_the_limit,
        unknown_error_at_the_limit,
    )
}

HEADROOM = Headroom()


def _starve(way: Callable[[], None], folder: Path) -> dict[str, Any]:
    log = folder / "stderr.log"
    child = os.fork()
    if child == 0:
        _child(way, folder, log)
    _, status = os.waitpid(child, 0)
    name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""
    words = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = folder / "told.json"
    return {
        **(json.loads(told.read_text(encoding="utf-8")) if told.exists() else {"error": "", "lack": None}),
        "signal": name,
        "code": os.waitstatus_to_exitcode(status),
        "words": words[-3:],
        "want": want_of_memory(folder, 0, name, words, 0),
    }


def _child(way: Callable[[], None], folder: Path, log: Path) -> None:
    signal.alarm(60)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    with watched(HEADROOM, folder / "room-0.json", to_be_capped=True):
        HEADROOM.cap(torch.device("cpu"), _LIMIT)
        try:
            way()
        except BaseException as error:  # noqa: BLE001 - which one is the question
            with HEADROOM.lifted():
                lack = lack_of_memory(error, HEADROOM.after)
                write_json(folder / "told.json", {"error": f"{type(error).__name__}: {error}", "lack": lack})
    os._exit(0)


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps({"name": chosen, **_starve(WAYS[chosen], Path(place))}), flush=True)  # noqa: T201
