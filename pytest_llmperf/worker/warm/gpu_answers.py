"""What libraries ask CUDA while they are imported, answered without it: who initialises CUDA cannot fork ranks.

A short-lived process (``python -m pytest_llmperf.worker.warm.gpu_answers``) asks the driver what there is. Meanwhile
torch's functions stay the objects they are with other code: whoever takes one by its name has torch's own later."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from pytest_llmperf.support.files import shipped

# A driver that wakes up, on a host of many GPUs.
_ASK_SECONDS = 120.0

#: Why a process must not be forked.
INITIALISED = "CUDA was initialised"

# Source: cuda.h, CUresult.
_NOT_INITIALIZED = 3

#: What torch's properties tell of each GPU, by torch's names.
Devices = Sequence[Mapping[str, Any]]


class NoAnswersError(RuntimeError):
    """CUDA cannot be asked, or not be answered for."""


def ask() -> Devices | None:
    """The GPUs of this environment; ``None`` where none is to be seen. If it cannot be asked: ``NoAnswersError``."""
    if not sees_gpus():
        return None
    command = [sys.executable, "-m", __spec__.name]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_ASK_SECONDS, check=True)
        devices: Devices = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        raise NoAnswersError(f"the driver did not tell what GPUs there are ({error})") from error
    return devices


_given: list[Devices] = []


@contextmanager
def given(devices: Devices) -> Iterator[None]:
    """While this lasts, torch answers by ``devices``; a ``NoAnswersError`` where its functions are wrapped."""
    import torch  # noqa: PLC0415 - this module is imported before torch may be

    asked = {stand_in: getattr(torch.cuda, stand_in.__name__) for stand_in in _STAND_INS}
    own = {function: getattr(function, "__code__", None) for function in asked.values()}
    _given.append(devices)
    try:
        for stand_in, function in asked.items():
            try:
                function.__code__ = stand_in.__code__
            except (AttributeError, ValueError) as error:  # a wrapper, or a closure
                raise NoAnswersError(f"torch.cuda.{stand_in.__name__} cannot be answered for ({error})") from error
        yield
    finally:
        _given.pop()
        for function, code in own.items():
            if code is not None:
                function.__code__ = code
        # What is kept of answers belongs to this process, and not to a rank that sees one of these GPUs.
        torch.cuda._cached_device_count = None  # noqa: SLF001 - set by torch, and cleared nowhere


def properties(device: Any = None) -> Any:
    """Answer for ``device`` as torch takes it: an index, a name, an object that has an index, or nothing."""
    if isinstance(device, str):
        device = int(device.partition(":")[2] or 0)
    index = getattr(device, "index", getattr(device, "idx", device))
    return SimpleNamespace(**_given[-1][0 if index is None else index])


# They run with torch's globals, where each finds the others, and this module by itself; arguments have torch's names.
def is_available() -> Any:
    return device_count() > 0


def device_count() -> Any:
    from pytest_llmperf.worker.warm.gpu_answers import _given  # noqa: PLC0415

    return len(_given[-1])


def current_device() -> Any:
    return 0


def get_device_properties(device: Any = None) -> Any:
    from pytest_llmperf.worker.warm.gpu_answers import properties  # noqa: PLC0415

    return properties(device)


def get_device_name(device: Any = None) -> Any:
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> Any:
    return get_device_properties(device).major, get_device_properties(device).minor


_STAND_INS: Sequence[Any] = (
    *(is_available, device_count, current_device),
    *(get_device_properties, get_device_name, get_device_capability),
)


def sees_gpus() -> bool:
    """Whether a process of this environment may find one."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and _driver() is not None


def is_initialised() -> bool:
    """Whether anybody has initialised CUDA in this process, by the driver's own word or by torch's."""
    if sees_gpus() and _driver().cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED:
        return True
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return hasattr(cuda, "is_initialized") and cuda.is_initialized()  # it has none while torch itself is imported


@contextmanager
def no_gpus() -> Iterator[None]:
    """torchrun asks whether there are GPUs, for ``--numa-binding`` alone: that would initialise CUDA in this parent."""
    import torch  # noqa: PLC0415 - as above

    own = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = own


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def snapshot(driver: Any) -> Devices:
    """Ask ``driver`` about each. No context is made: to NVML nothing runs there."""

    def tell(function: str, *arguments: Any) -> None:
        code = getattr(driver, function)(*arguments)
        if code != 0:
            raise OSError(f"{function}: CUDA's error {code}")

    count, devices = ctypes.c_int(), []
    if driver.cuInit(0) == 0:  # else there is no device, or none that works
        tell("cuDeviceGetCount", ctypes.byref(count))
    for index in range(count.value):
        device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
        tell("cuDeviceGet", ctypes.byref(device), index)
        tell("cuDeviceGetName", name, len(name), device)
        tell("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        found = {"name": name.value.decode(), "gcnArchName": name.value.decode(), "total_memory": memory.value}
        for attribute, number in _ATTRIBUTES.items():
            value = ctypes.c_int()
            if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:  # an old driver knows not all
                found[attribute] = value.value
        devices.append(found)
    return devices


_ATTRIBUTES = {name: int(number) for name, number in shipped(__file__, "attributes.ini")["cuda.h"].items()}

if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(snapshot(_driver()))}\n")
