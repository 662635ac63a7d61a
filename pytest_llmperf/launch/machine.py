"""The hardware at hand, found without torch: GPUs by NVML, the CPU by the system."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pytest_llmperf.support.units import GIB


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    index: int
    """NVML's, which is the PCI order."""
    uuid: str
    name: str
    memory_bytes: int
    power_limit_watts: int = 0
    """Where somebody has set less than the chip's own default; 0: that default, or nobody tells."""


#: One of which nothing is known, and on which nothing can run; no case is too large for it.
UNKNOWN = Gpu(index=-1, uuid="", name="unknown", memory_bytes=2**60)


@dataclass(frozen=True)
class Machine:
    """What this process may use."""

    gpus: tuple[Gpu, ...]
    cpu_name: str
    cores: int
    """Logical cores this process may run on; in a SLURM job, ranks that it has room for."""
    node_cores: int = 0
    """All logical cores of a node, where a scheduler gives some of them; 0: those are all that is known."""

    @property
    def gpu_kind(self) -> str:
        """The machine kind of its GPUs, e.g. ``nvidia-h200-140gib``.

        Raises:
            ValueError: they are of several kinds, whose figures must not share a baseline.
        """
        kinds = sorted({_kind(gpu) for gpu in self.gpus})
        if len(kinds) > 1:
            raise ValueError(
                f"GPUs of different kinds are visible ({', '.join(kinds)}); choose with CUDA_VISIBLE_DEVICES"
            )
        return kinds[0]

    @property
    def cpu_kind(self) -> str:
        """The machine kind of its CPU, e.g. ``cpu-amd-epyc-2c``; of a node what it is, whatever a job has of it."""
        return f"cpu-{_slug(self.cpu_name)}-{self.node_cores or self.cores}c"


def find_machine() -> Machine:
    """The machine as this process sees it; ``CUDA_VISIBLE_DEVICES`` is honoured, no NVML means no GPU.

    Raises:
        ValueError: ``CUDA_VISIBLE_DEVICES`` names a MIG slice, which is not supported.
    """
    return Machine(gpus=_visible_gpus(), cpu_name=_cpu_name(), cores=len(os.sched_getaffinity(0)))


def foreign_processes(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Compute processes on these GPUs, on which nothing of ours runs yet; one line each."""
    lines = []
    with nvml_session() as nvml:
        if nvml is None:
            return ()
        for gpu in gpus:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except nvml.NVMLError:
                continue  # a driver that does not tell (a container's, a vGPU's)
            lines += [process_line(gpu, process) for process in running]
    return tuple(lines)


def process_line(gpu: Gpu, process: Any) -> str:
    """A compute process as NVML lists it, for people: where, who and how much it holds."""
    held = process.usedGpuMemory
    size = f" holds {held / GIB:.1f} GiB" if held else ""
    return f"GPU {gpu.index}: pid {process.pid} ({_process_name(process.pid)}){size}"


def _visible_gpus() -> tuple[Gpu, ...]:
    with nvml_session() as nvml:
        if nvml is None:
            return ()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            gpus = [
                Gpu(
                    index,
                    _text(nvml.nvmlDeviceGetUUID(handle)),
                    _text(nvml.nvmlDeviceGetName(handle)),
                    _memory(nvml, handle),
                    _lowered_limit(nvml, handle),
                )
                for index, handle in enumerate(handles)
            ]
        except nvml.NVMLError:
            return ()
    return select(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def select(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; ``None`` leaves all.

    As CUDA does: indices or UUIDs (also abbreviated), and the list ends at the first entry that names no GPU.

    Raises:
        ValueError: an entry names a MIG slice.
    """
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG"):
            raise ValueError(f"CUDA_VISIBLE_DEVICES={visible}: MIG slices are not supported; name whole GPUs")
        found = _named(gpus, entry)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return tuple(chosen)


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    matches = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


@contextmanager
def nvml_session() -> Iterator[Any]:
    """The NVML module, initialised, or ``None`` where there is no package, no library or no driver."""
    try:
        import pynvml as nvml  # noqa: PLC0415 - a CPU run may do without it
    except ImportError:
        yield None
        return
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _memory(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)


# Of the default: a limit that differs by less changes nothing that could be measured.
_LOWERED = 0.98


def _lowered_limit(nvml: Any, handle: Any) -> int:
    try:
        # What somebody has set: what is enforced may be less for reasons that come and go.
        limit = nvml.nvmlDeviceGetPowerManagementLimit(handle)
        default = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
    except nvml.NVMLError:  # a chip, or a container's driver, that does not tell
        return 0
    return round(limit / 1000) if limit < _LOWERED * default else 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # before nvidia-ml-py 12


def _process_name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "not visible from here"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _kind(gpu: Gpu) -> str:
    if gpu == UNKNOWN:
        return "unknown"
    # A lowered power limit makes another machine of it: most of training runs at that limit.
    lowered = f"-{gpu.power_limit_watts}w" if gpu.power_limit_watts else ""
    return f"{_slug(gpu.name)}-{round(gpu.memory_bytes / GIB)}gib{lowered}"


def driver_version() -> str:
    """Of the GPUs; empty where nobody tells."""
    with nvml_session() as nvml:
        if nvml is None:
            return ""
        try:
            return str(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError:
            return ""


def host_memory_bytes() -> int:
    """All that this host has."""
    return int(psutil.virtual_memory().total)


def _slug(name: str) -> str:
    plain = re.sub(r"\((r|tm)\)|@.*|\bcpu\b|\bprocessor\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"
