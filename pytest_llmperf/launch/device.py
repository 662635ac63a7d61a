"""The GPUs of this host as NVML has them: the one file of those that launch that names CUDA, NCCL or NVML.

Another vendor's is a second file with the same names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from pytest_llmperf.support.formats import GIB

#: Says which GPUs a process sees, by index or uuid.
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU: Mapping[str, str] = {VISIBLE: ""}

#: What SLURM may set of a step's GPUs: each of its steps has them by names of its own.
OF_A_STEP = (VISIBLE, "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

#: Begin the names of variables that change what a GPU's libraries do; those that a node of a job needs said again.
PREFIXES = ("CUDA_", "CUBLAS_", "NCCL_")
PASSED_ON = ("CUDA_", "NCCL_")

#: Tell exchanges between hosts which network is theirs.
NETWORK = "NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME)"

#: Let torch ask NVML and not CUDA whether there are GPUs, in a process that is to be forked.
ASK_WITHOUT_A_CONTEXT: Mapping[str, str] = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

#: Let NCCL remember what it was doing, for a rank that hangs; the file that it then writes is named by ``RECORD``.
RECORDING: Mapping[str, str] = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
RECORD = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"

#: Where somebody looks who misses a GPU.
LOOK_AT = f"nvidia-smi and {VISIBLE}"
# Of a power limit's default: one that differs by less changes nothing that could be measured.
_LOWERED = 0.98
# What a killed process takes to give a GPU back, at most, and how often that is looked at.
_LEFT_SECONDS, _POLL_SECONDS = 10.0, 0.05
# Of a process that has not begun to train: its context and what libraries take with it.
_CONTEXT_BYTES = 3 * GIB


@dataclass(frozen=True)
class Gpu:
    index: int
    """NVML's, which is the PCI order."""
    uuid: str
    name: str
    memory_bytes: int
    power_limit_watts: int = 0
    """Where somebody has set less than the chip's own default; 0: that default, or nobody tells."""


#: One of which nothing is known, and on which nothing can run; no case is too large for it.
UNKNOWN = Gpu(index=-1, uuid="", name="unknown", memory_bytes=2**60)


def visible_gpus() -> tuple[Gpu, ...]:
    """Those that this process may use; raises as ``select``."""
    with session() as nvml:
        if nvml is None:
            return ()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            gpus = []
            for index, handle in enumerate(handles):
                uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
                size = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
                gpus.append(Gpu(index, uuid, name, size, _lowered_limit(nvml, handle)))
        except nvml.NVMLError:
            return ()
    return select(gpus, os.environ.get(VISIBLE))


def select(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; ``None`` leaves all. As CUDA does: indices or UUIDs
    (also abbreviated), and the list ends at the first entry that names no GPU. ValueError: one names a MIG slice."""
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG"):
            raise ValueError(f"{VISIBLE}={visible}: MIG slices are not supported; name whole GPUs")
        if entry.isdigit():
            found = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            found = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple(chosen)


def shown(gpus: Sequence[Gpu], *, by_index: bool = False) -> dict[str, str]:
    """The variables that show a process ``gpus`` alone; DeepSpeed and others read no UUID."""
    if not by_index:
        return {VISIBLE: ",".join(gpu.uuid for gpu in gpus)}
    return {VISIBLE: ",".join(str(gpu.index) for gpu in gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def foreign_processes(gpus: Sequence[Gpu], own: AbstractSet[int] = frozenset()) -> tuple[str, ...]:
    """Compute processes on these GPUs, one line each, but a launch's ``own``, which began behind the end of another."""
    with sensors(gpus) as known:
        return tuple(line for one in known for line in (one.others(own) if own else one.processes().values()))


def wait_until_left(gpus: Sequence[Gpu], pids: set[int]) -> None:
    """Wait until none of ``pids``, which were killed, holds memory of these GPUs: a zombie's threads may."""
    deadline = time.monotonic() + _LEFT_SECONDS
    with sensors(gpus) as known:
        while any(pids & one.processes().keys() for one in known) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def has_room(gpus: Sequence[Gpu]) -> bool:
    """Whether a context fits beside what they hold."""
    with sensors(gpus) as known:
        return len(known) == len(gpus) and all(one.free_bytes() > _CONTEXT_BYTES for one in known)


def driver_version() -> str:
    """The GPUs' driver; empty where it cannot be asked."""
    with session() as nvml:
        try:
            return "" if nvml is None else str(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError:
            return ""


@dataclass(frozen=True)
class Sample:
    """One look at one GPU; ``None`` is what it did not tell."""

    time: float
    """Seconds since 1970, the clock that the ranks tell their end by."""
    reasons: int | None
    """Why its clocks are lower than they could be: bits, as ``records.launch`` names them."""
    clock_mhz: float | None
    temperature: float | None
    joules: float | None
    """Since the driver was loaded."""


class Sensors:
    """What one GPU tells while something runs on it; a container, a virtual GPU or an old driver may not tell all."""

    def __init__(self, nvml: Any, gpu: Gpu) -> None:
        self._nvml, self.gpu = nvml, gpu
        self._handle = self._ask("nvmlDeviceGetHandleByUUID", gpu.uuid)
        self.is_known = self._handle is not None
        """Whether it can be asked at all."""

    def sample(self) -> Sample:
        millijoules = self._of("nvmlDeviceGetTotalEnergyConsumption")
        reasons = self._of("nvmlDeviceGetCurrentClocksEventReasons")
        # Its name before driver 535.
        reasons = self._of("nvmlDeviceGetCurrentClocksThrottleReasons") if reasons is None else reasons
        return Sample(
            time=time.time(),
            reasons=None if reasons is None else int(reasons),
            clock_mhz=self._of("nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
            temperature=self._of("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
            joules=None if millijoules is None else millijoules / 1000,
        )

    def power_limit_watts(self) -> float | None:
        """The one in force."""
        limit = self._of("nvmlDeviceGetEnforcedPowerLimit")
        return None if limit is None else limit / 1000

    def free_bytes(self) -> int:
        memory = self._of("nvmlDeviceGetMemoryInfo")
        return int(memory.free) if memory else 0

    def memory_errors(self) -> tuple[int | None, ...]:
        """Uncorrected ECC errors since boot, and rows remapped or about to be for such errors; ``None``: not told."""
        uncorrected = self._of("nvmlDeviceGetTotalEccErrors", 1, 0)  # uncorrected, volatile
        _, *rows = self._of("nvmlDeviceGetRemappedRows") or (None, None, None, None)
        return uncorrected, *rows

    def processes(self) -> dict[int, str]:
        """Compute processes on it, by pid, a line for people each: where, who and how much it holds."""
        lines = {}
        for process in self._of("nvmlDeviceGetComputeRunningProcesses") or []:
            size = f" holds {process.usedGpuMemory / GIB:.1f} GiB" if process.usedGpuMemory else ""
            try:
                name = str(psutil.Process(process.pid).name())
            except psutil.Error:
                name = "not visible from here"
            lines[process.pid] = f"GPU {self.gpu.index}: pid {process.pid} ({name}){size}"
        return lines

    def others(self, own: AbstractSet[int]) -> list[str]:
        """The lines of those that are none of ``own``."""
        running = self.processes()
        others = [line for pid, line in running.items() if pid not in own]
        # A container may show its own ranks under pids of the host: then one stranger is our rank.
        return others if len(others) < len(running) or len(others) > 1 else []

    def _of(self, name: str, *arguments: Any) -> Any:
        return None if self._handle is None else self._ask(name, self._handle, *arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments)
        except (AttributeError, ValueError):
            return None
        except Exception as error:
            if type(error).__name__.startswith("NVMLError"):  # the package gives each code a class of its own
                return None
            raise


@contextmanager
def sensors(gpus: Sequence[Gpu]) -> Iterator[tuple[Sensors, ...]]:
    """Those of ``gpus`` that can be asked."""
    if not gpus:
        yield ()
        return
    with session() as nvml:
        yield tuple(one for one in (Sensors(nvml, gpu) for gpu in gpus) if one.is_known)


@contextmanager
def session() -> Iterator[Any]:
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


def _lowered_limit(nvml: Any, handle: Any) -> int:
    try:
        # What somebody has set: what is enforced may be less for reasons that come and go.
        limit = nvml.nvmlDeviceGetPowerManagementLimit(handle)
        default = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
    except nvml.NVMLError:  # a chip, or a container's driver, that does not tell
        return 0
    return round(limit / 1000) if limit < _LOWERED * default else 0
