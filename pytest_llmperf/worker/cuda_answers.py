"""What libraries ask CUDA while they are imported, answered without it: who initialises CUDA cannot fork ranks.

A short-lived process (``python -m pytest_llmperf.worker.cuda_answers``) asks CUDA what there is. While its answers are
given in the place of torch's, torch's functions stay the objects that they are and only their code is another: whoever
takes one by its name meanwhile has torch's own when that is put back.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

# Importing torch from a network's file system, and a driver that wakes up.
_ASK_SECONDS = 300.0

# Source: cuda.h, CUresult.
_NOT_INITIALIZED = 3

_PLAIN: tuple[type, ...] = (str, bool, int, float)


class NoAnswersError(RuntimeError):
    """CUDA cannot be asked, or not be answered for."""


class CudaAnswers:
    """The answers, and where they are given."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self._snapshot = snapshot

    @classmethod
    def ask(cls) -> Callable[[], CudaAnswers | None]:
        """Begin to ask for those of this environment; what is returned waits for them.

        That returns ``None`` where no GPU is to be seen, and nothing needs an answer, and raises ``NoAnswersError``
        where there may be one, and it cannot be asked.
        """
        if not sees_gpus():
            return lambda: None
        command = [sys.executable, "-m", __spec__.name]
        asked = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

        def answered() -> CudaAnswers:
            try:
                said, _ = asked.communicate(timeout=_ASK_SECONDS)
                return cls(json.loads(said.splitlines()[-1]))
            except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
                asked.kill()
                asked.wait()
                raise NoAnswersError(f"CUDA did not tell what GPUs there are ({error})") from error

        return answered

    @contextmanager
    def given(self) -> Iterator[None]:
        """While this lasts.

        Raises:
            NoAnswersError: this torch's functions are none that could be answered for.
        """
        import torch  # noqa: PLC0415 - this module is imported before torch may be

        asked = {name: getattr(torch.cuda, name) for name in _STAND_INS}
        own = {name: getattr(function, "__code__", None) for name, function in asked.items()}
        _current.append(self)
        try:
            for name, function in asked.items():
                try:
                    function.__code__ = _STAND_INS[name].__code__
                except (AttributeError, ValueError) as error:  # a wrapper, or a closure
                    raise NoAnswersError(f"torch.cuda.{name} cannot be answered for ({error})") from error
            yield
        finally:
            _current.pop()
            for name, function in asked.items():
                if own[name] is not None:
                    function.__code__ = own[name]
            # What is kept of answers belongs to this process, and not to a rank that sees one of these GPUs.
            torch.cuda._cached_device_count = None  # noqa: SLF001 - set by torch, and cleared nowhere

    @property
    def num_devices(self) -> int:
        return len(self._snapshot["devices"])

    def properties(self, device: Any = None) -> Any:
        """Of ``device`` as torch takes it: an index, a name, an object that has an index, or nothing."""
        if isinstance(device, str):
            device = int(device.partition(":")[2] or 0)
        index = getattr(device, "index", getattr(device, "idx", device))
        return SimpleNamespace(**self._snapshot["devices"][0 if index is None else index])


_current: list[CudaAnswers] = []


def answers() -> CudaAnswers:
    """Those that are given now."""
    return _current[-1]


# They run with torch's globals, so that each finds this module by itself; the names of arguments are torch's.
def _is_available() -> Any:
    from pytest_llmperf.worker.cuda_answers import answers  # noqa: PLC0415

    return answers().num_devices > 0


def _device_count() -> Any:
    from pytest_llmperf.worker.cuda_answers import answers  # noqa: PLC0415

    return answers().num_devices


def _current_device() -> Any:
    return 0


def _get_device_properties(device: Any = None) -> Any:
    from pytest_llmperf.worker.cuda_answers import answers  # noqa: PLC0415

    return answers().properties(device)


def _get_device_name(device: Any = None) -> Any:
    from pytest_llmperf.worker.cuda_answers import answers  # noqa: PLC0415

    return answers().properties(device).name


def _get_device_capability(device: Any = None) -> Any:
    from pytest_llmperf.worker.cuda_answers import answers  # noqa: PLC0415

    found = answers().properties(device)
    return found.major, found.minor


_STAND_INS: Mapping[str, FunctionType] = {
    "is_available": _is_available,  # type: ignore[dict-item]
    "device_count": _device_count,  # type: ignore[dict-item]
    "current_device": _current_device,  # type: ignore[dict-item]
    "get_device_properties": _get_device_properties,  # type: ignore[dict-item]
    "get_device_name": _get_device_name,  # type: ignore[dict-item]
    "get_device_capability": _get_device_capability,  # type: ignore[dict-item]
}


def sees_gpus() -> bool:
    """Whether a process of this environment may find one."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and _driver() is not None


def is_initialised() -> bool:
    """Whether anybody has initialised CUDA in this process, by the driver's own word."""
    driver = _driver()
    if driver is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _snapshot() -> dict[str, Any]:
    import torch  # noqa: PLC0415

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        named = {name: getattr(found, name, None) for name in dir(found) if not name.startswith("_")}
        values = {name: value for name, value in named.items() if isinstance(value, _PLAIN)}
        major, minor = torch.cuda.get_device_capability(index)
        devices.append({**values, "name": torch.cuda.get_device_name(index), "major": major, "minor": minor})
    return {"devices": devices}


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(_snapshot())}\n")
