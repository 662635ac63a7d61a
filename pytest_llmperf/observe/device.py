"""A rank's GPU as torch and NVML have it: the one file of those that observe a training that names CUDA.

Another vendor's is a second file with the same names. On the CPU each of them says what the host is."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from statistics import fmean
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from pytest_llmperf.observe.measurement import Clock, Memory
from pytest_llmperf.records.calibration import CLOCK_REASONS, THROTTLES
from pytest_llmperf.records.failure import Room
from pytest_llmperf.records.trace import Kind

# How Kineto and CUPTI word what the profiler saw: the device's work that is no kernel, the calls of the host.
WORK_KINDS: tuple[tuple[str, Kind], ...] = (("Memcpy", "copy"), ("Memset", "fill"), ("nccl", "collective"))
CALLS = re.compile(r"cu(da)?[A-Z]")
#: Calls in which the host waits for its device, and those that take memory from it or give it back.
WAITS = re.compile(r"cu(da)?(Device|Stream|Event|Ctx)Synchronize\w*$|cuda(Memcpy|Memset)$")
ALLOCATIONS = re.compile(r"cuda(Malloc|Free|Host)\w*$|cuMem(Alloc|Free|Host|Map|Unmap|Create|Release)\w*$")
#: How exchanges of a CPU's ranks are called there.
HOST_EXCHANGES = "gloo:"
#: Calls that leave work for the device.
LAUNCHES = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)")

_CUDA = torch.backends.cuda

# Kernels of PyTorch's attention, and how its functions call them.
_SDPA = {"flash": "flash", "efficient": "mem_efficient", "math": "math", "cudnn": "cudnn"}

#: Each with the switch that allows it.
SDPA_SWITCHES: Mapping[str, Callable[[bool], None]] = {
    name: getattr(_CUDA, f"enable_{own}_sdp") for name, own in _SDPA.items()
}


def sdpa_kernels() -> list[str]:
    """Those that PyTorch's attention may choose from."""
    return [name for name, own in _SDPA.items() if getattr(_CUDA, f"{own}_sdp_enabled")()]


def own_device() -> torch.device:
    """This rank's: its GPU, which is made the current one, or the CPU."""
    if not has_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


#: Whose ``synchronize`` waits, beside what PyTorch warns of in these words.
WAITING: tuple[Any, ...] = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
_WAIT_WARNING = "called a synchronizing CUDA operation"


@contextmanager
def heard_of_waits(hear: Callable[[], None]) -> Iterator[None]:
    """``hear`` is called, where it happens, of each operation that waits for the device and of which PyTorch knows."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.showwarning = lambda message, *args, **kwargs: (
            hear() if _WAIT_WARNING in str(message) else show(message, *args, **kwargs)
        )
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it does not see all
        warnings.filterwarnings("always", message=_WAIT_WARNING)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def has_gpu() -> bool:
    return torch.cuda.is_available()


def collectives(device: torch.device) -> str:
    return "nccl" if is_gpu(device) else "gloo"


def barrier_devices(device: torch.device) -> list[int] | None:
    """This rank's device as ``dist.barrier`` wants it."""
    return [torch.cuda.current_device()] if is_gpu(device) else None


def collectives_record(backend: str) -> str:
    """The function of torch's ``_distributed_c10d`` that gives the record of recent exchanges; NCCL has its own."""
    return "_dump_nccl_trace" if backend == "nccl" else "_dump_fr_trace"


def profiled(device: torch.device) -> ProfilerActivity:
    """The activity in which a profiler sees the work."""
    return ProfilerActivity.CUDA if is_gpu(device) else ProfilerActivity.CPU


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def gpu_uuid(device: torch.device) -> str:
    """Without its prefix ``GPU-``."""
    return str(torch.cuda.get_device_properties(device).uuid)


def versions() -> dict[str, str]:
    """Versions that torch was built with; empty where it is built for no GPU."""
    if not torch.version.cuda:
        return {}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"cuda": torch.version.cuda, "nccl": nccl, "cudnn": str(torch.backends.cudnn.version())}


def product_versions() -> dict[str, str]:
    """Versions that a matrix product depends on, beside torch's, as far as they are known."""
    cublas = ""
    for name in ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu11"):
        with suppress(metadata.PackageNotFoundError):
            cublas = cublas or metadata.version(name)
    known = {"cuda": torch.version.cuda, "cublas": cublas, "driver": driver()}
    return {name: str(version) for name, version in known.items() if version}


def driver() -> str:
    """Version of the GPU's driver; ``unknown`` where it cannot be asked."""
    with _initialised() as nvml:
        return str((nvml and _asked(nvml, "nvmlSystemGetDriverVersion")) or "unknown")


def memory_bytes(device: torch.device) -> int:
    """All that the GPU has, as NVML counts, by which machine kinds are named; torch is told less."""
    with _initialised() as nvml:
        handle = nvml and _asked(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{gpu_uuid(device)}")
        memory = handle and _asked(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return int(memory.total if memory else torch.cuda.get_device_properties(device).total_memory)


def wait(device: torch.device) -> None:
    """Until all work that was issued has ended."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def give_back(device: torch.device) -> None:
    """Let the allocator keep nothing: a training's peak is its own, and it finds the device as if nothing had been."""
    if is_gpu(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def room(device: torch.device | None = None) -> Room:
    """The memory left, of the current GPU if none is named, and how often its allocator was short; or RuntimeError."""
    free, total = torch.cuda.mem_get_info(device)
    counts = torch.cuda.memory_stats(device)
    return Room("the GPU", total, free, counts.get("num_alloc_retries", 0), counts.get("num_ooms", 0))


def allow_share(device: torch.device, share: float) -> None:
    torch.cuda.set_per_process_memory_fraction(share, device)


def available_bytes(device: torch.device) -> float:
    """Bytes that this rank may still take of the GPU: its limit is a share, of which some may be taken."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_reserved(device)
    return min(free, allowed)


def allow_tf32(allowed: bool) -> None:
    """In fp32 products and convolutions."""
    _CUDA.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def matmul_precision() -> str:
    """The precision of products in fp32; who has set it by PyTorch's new names is refused an answer by the old one."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(_CUDA.matmul.fp32_precision)


def reduced_precision_reduction() -> str:
    """Whether products in bf16 may be summed in bf16."""
    return str(_CUDA.matmul.allow_bf16_reduced_precision_reduction)


@contextmanager
def without_tf32() -> Iterator[None]:
    """fp32 products are fp32 inside, and what they were after it."""
    products = _CUDA.matmul
    precision = getattr(products, "fp32_precision", None)  # since torch 2.9
    try:
        allowed = products.allow_tf32
    except RuntimeError:  # it was set in the newer way alone, and the older one must not be asked
        allowed = False
    products.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32 = allowed
        if precision is not None:
            products.fp32_precision = precision


def clock_of(device: torch.device) -> Clock:
    """Whose instants are in the order of the device's work."""
    return GpuClock() if is_gpu(device) else Clock()


def memory_of(device: torch.device, since: int | None = None) -> Memory:
    """Which counts from now on; ``since`` so many bytes were resident: from then on, and no peak is forgotten."""
    return GpuMemory(device, forgets=since is None) if is_gpu(device) else Memory(since)


class GpuClock(Clock):
    """CUDA events on the current stream: what the GPU did, whatever the host did meanwhile."""

    def instant(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, instant: torch.cuda.Event) -> bool:
        return instant.query()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000

    def wait(self) -> None:
        torch.cuda.synchronize()

    def cores(self) -> tuple[float, ...]:
        """A host runs ahead of its GPU: what its threads wait says nothing of the work."""
        return ()


class GpuMemory(Memory):
    loss_bytes = 512

    def __init__(self, device: torch.device, *, forgets: bool = True) -> None:
        """``forgets``: peaks count from now on, also for whoever else asks."""
        self._device = device
        if forgets:
            torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        return torch.cuda.memory_reserved()

    def allocated(self) -> int:
        # ``memory_allocated`` sorts all of the allocator's counters first, which takes the host five times as long.
        return int(torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"])

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While it is entered, allocations have a pool of their own, and leave no gaps among the training's. Expandable
        segments have no gaps, and may know no pools."""
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if "expandable_segments:True" in settings.replace(" ", ""):
            yield
            return
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(), self._device):
            yield

    def peaks(self) -> tuple[int, int]:
        # Also in another thread, of which the first GPU is the current one.
        return torch.cuda.max_memory_reserved(self._device), torch.cuda.max_memory_allocated(self._device)


_SM_CLOCK, _GPU_TEMPERATURE = 1, 0  # NVML's numbers for them


@dataclass(frozen=True)
class Look:
    """One look at the GPU; ``None`` is what it did not tell."""

    clock_mhz: float | None
    milliwatts: float | None
    temperature: float | None
    reasons: int | None
    num_foreign: int


class GpuSensors:
    """One GPU's; every look is kept."""

    def __init__(self, nvml: Any, device: torch.device) -> None:
        self._nvml = nvml
        self._handle = _asked(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{gpu_uuid(device)}") if nvml else None
        self.looks: list[Look] = []

    @property
    def power_limit_watts(self) -> float:
        return (self._of("nvmlDeviceGetEnforcedPowerLimit") or 0) / 1000

    def look(self) -> None:
        if self._handle is None:
            return
        reasons = self._of("nvmlDeviceGetCurrentClocksEventReasons")
        # Its name before driver 535.
        reasons = self._of("nvmlDeviceGetCurrentClocksThrottleReasons") if reasons is None else reasons
        running = self._of("nvmlDeviceGetComputeRunningProcesses") or []
        others = [process for process in running if process.pid != os.getpid()]
        self.looks.append(
            Look(
                clock_mhz=self._of("nvmlDeviceGetClockInfo", _SM_CLOCK),
                milliwatts=self._of("nvmlDeviceGetPowerUsage"),
                temperature=self._of("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
                reasons=reasons,
                # A container may show this process under its pid of the host: then one stranger is ourselves.
                num_foreign=len(others) if len(others) < len(running) else max(0, len(others) - 1),
            )
        )

    def _of(self, name: str, *arguments: Any) -> Any:
        return None if self._handle is None else _asked(self._nvml, name, self._handle, *arguments)


@contextmanager
def sensors(device: torch.device) -> Iterator[GpuSensors]:
    """Those of ``device``; they tell nothing of a CPU, and where there is no package, no library or no driver."""
    with _initialised() if is_gpu(device) else nullcontext() as nvml:
        yield GpuSensors(nvml, device)


@contextmanager
def _initialised() -> Iterator[Any]:
    try:
        import pynvml as nvml  # noqa: PLC0415 - another environment may have the training's own packages alone

        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no library, no driver
        nvml = None
    try:
        yield nvml
    finally:
        if nvml:
            nvml.nvmlShutdown()


def _asked(nvml: Any, name: str, *arguments: Any) -> Any:
    """NVML's answer, or ``None``: a container, a virtual GPU or an old driver may not tell everything."""
    try:
        return getattr(nvml, name)(*arguments)
    except (AttributeError, ValueError, nvml.NVMLError):
        return None


def mean(values: Sequence[float | None]) -> float:
    """Their mean without ``None``; 0, which is unknown, where all are."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else 0.0


def disturbances(looks: Sequence[Look]) -> list[str]:
    """A line for each thing that makes figures of that time the room's, the board's or a neighbour's."""
    lines = []
    if most := max((look.num_foreign for look in looks), default=0):
        lines.append(f"{most} other process(es) on the GPU")
    bits = 0
    for look in looks:
        bits |= look.reasons or 0
    reasons = [name for bit, name in CLOCK_REASONS.items() if bits & bit and name in THROTTLES]
    return lines + [f"clocks were lowered by {name}" for name in reasons]
