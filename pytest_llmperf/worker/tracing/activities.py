"""Activities: what the profiler saw, as plain data. The only place that knows how PyTorch's profiler words it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pytest_llmperf.records.trace import Kind


class Work(NamedTuple):
    """What a device did; on the CPU an operator. Times in nanoseconds since 1970."""

    kind: Kind
    name: str
    start: int
    end: int
    correlation: int
    """Of the call that asked for it; of an operator its thread."""


class Call(NamedTuple):
    """What the host asked of CUDA."""

    name: str
    start: int
    end: int
    correlation: int


class Activities(NamedTuple):
    """Of the traced steps, and somewhat around them."""

    work: list[Work]
    calls: list[Call]


# As CUPTI's activities and NCCL's kernels are named.
_KINDS: tuple[tuple[str, Kind], ...] = (("Memcpy", "copy"), ("Memset", "fill"), ("nccl", "collective"))
# Of a host's operators: what asks for a tensor's content, as a device would be waited for, and what copies.
_HOST_KINDS: Mapping[str, Kind] = {"aten::_local_scalar_dense": "wait", "aten::copy_": "copy"}
_CUDA_CALL = re.compile(r"cu(da)?[A-Z]")


def read(events: Iterable[Any], *, on_host: bool) -> Activities:
    """What ``events`` of a Kineto result are: a host's operators, or a device's work and what was asked of CUDA."""
    found = Activities([], [])
    for event in events:
        name, start = event.name(), event.start_ns()
        end = start + event.duration_ns()
        is_device = event.device_type().name != "CPU"
        if on_host:
            if not is_device and not event.is_user_annotation() and "::" in name:
                kind = _HOST_KINDS.get(name, "operator")
                found.work.append(Work(kind, name, start, end, event.start_thread_id()))
        elif is_device:
            if not event.is_user_annotation():
                found.work.append(Work(_kind(name), name, start, end, event.correlation_id()))
        elif _CUDA_CALL.match(name):
            found.calls.append(Call(name, start, end, event.correlation_id()))
    return found


def _kind(name: str) -> Kind:
    return next((kind for word, kind in _KINDS if name.startswith(word)), "kernel")
