"""A device's rates at work that depends on nothing under test, before the training begins.

The canary takes a tenth of a second in each launch: a chip that is slow at a plain matrix product explains a slow step.
A calibration is long enough to tell two GPUs apart, and serves for a day. Nothing of either is left to the training:
not its memory, not its random numbers, not how fp32 products are rounded."""

from __future__ import annotations

import math
import operator
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.observe.environment import device_name
from pytest_llmperf.observe.vital_signs import Heartbeat
from pytest_llmperf.records import calibration
from pytest_llmperf.records.calibration import ALL_REDUCE, BF16_PRODUCT, COPY, FP32_PRODUCT, Calibration
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import boot_id, write_text

_BATCHES, _WARM_BATCHES = 3, 1

#: One repetition; it holds what it works on.
Work = Callable[[], object]


def hardware_rates(device: torch.device, calibrations: str, run: Path, beat: Heartbeat) -> dict[str, Any]:
    """A rank's ``canary``, and its ``calibration`` where a folder of these is named; ``run``: the run's own."""
    canary = run_canary(device)
    if not calibrations:
        return {"canary": canary}
    found = calibrated(device, Path(calibrations), lambda: beat.enter("calibrating"), run / calibration.OF_THE_RUN)
    beat.enter("assembling")
    return {"canary": canary, "calibration": found}


def run_canary(device: torch.device) -> dict[str, float]:
    """Rates of this rank: matrix product in FLOP/s, copy in bytes/s, and all-reduce in bytes/s where there are peers. A
    copied byte counts twice, read and written; all-reduce by its bus bandwidth, 2·(n-1)/n of its bytes."""
    on_gpu, ranks = gpu.is_gpu(device), _world_size()
    size, elements, repeats = (8192, 2**28, 10) if on_gpu else (512, 2**21, 5)
    dtype, num_bytes = torch.bfloat16 if on_gpu else torch.float32, 4 * elements
    product = _product(torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    rates = {"matmul_flops": 2 * size**3 / _seconds(product, device, repeats)}
    del product
    rates["copy_bytes_per_second"] = 2 * num_bytes / _seconds(_copy(elements, device), device, repeats)
    if ranks > 1:
        seconds = _seconds(_exchange(elements // 4, device), device, repeats)
        rates["all_reduce_bytes_per_second"] = 2 * (ranks - 1) / ranks * num_bytes / 4 / seconds
    gpu.give_back(device)
    return {name: round(rate, -6) for name, rate in rates.items()}


def slowest(by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each rate of the rank where it was lowest: the job moves at its pace."""
    return {name: min(rates[name] for rates in by_rank) for name in by_rank[0]}


def _seconds(work: Work, device: torch.device, repeats: int) -> float:
    """One repetition takes: the median of a few batches, after one that warms up."""
    batches = []
    for _ in range(_WARM_BATCHES + _BATCHES):
        gpu.wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        gpu.wait(device)
        batches.append((time.perf_counter() - start) / repeats)
    return median(batches[_WARM_BATCHES:])


@dataclass(frozen=True)
class _Kept:
    calibration: Calibration
    boot: str
    """The host's, when it was made."""


def _usable(path: Path, boot: str, power_limit_watts: float, versions: Mapping[str, str]) -> Calibration | None:
    """Return what ``path`` holds if made on this UTC day under the same start of the host, limit and versions."""
    kept = codec.load(_Kept, path)
    if kept is None or kept.boot != boot:
        return None
    made = kept.calibration
    is_of_today = made.made_at[:10] == time.strftime("%Y-%m-%d", time.gmtime())
    is_the_same = made.power_limit_watts == power_limit_watts and made.versions == dict(versions)
    return made if is_of_today and is_the_same else None


#: Halves of a steady part that differ by more are not steady.
UNSTEADY = 0.005

# Of batches that are not over yet, so many are queued beyond the one that is waited for: the GPU never idles.
_AHEAD = 2
# Queues are looked at this often, by a host that has nothing else to do.
_POLL_SECONDS = 0.002
# What is not steady has the clocks of the work before it: once more costs less than a calibration that is not kept.
_ATTEMPTS = 2
# Repetitions that say how many make a batch.
_TRIALS = 3
# For two copied tensors, and as much again for what the libraries take.
_ROOM_BYTES = 4 * 2**30
_SEED = 20


@dataclass(frozen=True)
class _Sizes:
    """The work on one kind of device; ``copied`` and ``exchanged`` are elements of fp32."""

    matrix: int
    copied: int
    exchanged: int
    batch_seconds: float
    lengths: Mapping[str, tuple[float, float]]
    """How long a work is repeated, in seconds: until it is warm, and steady."""


_GPU = _Sizes(
    matrix=8192,
    copied=2**28,
    exchanged=2**24,
    batch_seconds=0.1,
    lengths={
        # The power limit's control needs a second to settle; four more are four periods of its swing.
        BF16_PRODUCT: (1.0, 4.0),
        FP32_PRODUCT: (0.3, 0.7),
        COPY: (0.2, 0.3),
        ALL_REDUCE: (0.1, 0.5),
    },
)
# Small, and smaller than what the canary takes, so that the process holds no more than it did.
_CPU = _Sizes(
    matrix=128,
    copied=2**18,
    exchanged=2**16,
    batch_seconds=0.01,
    lengths=dict.fromkeys((BF16_PRODUCT, FP32_PRODUCT, COPY, ALL_REDUCE), (0.02, 0.08)),
)


def calibrated(
    device: torch.device, folder: Path, begin: Callable[[], None] = lambda: None, of_run: Path | None = None
) -> Calibration | None:
    """The calibration of ``device`` of this UTC day, kept in ``folder``; made now, by all ranks, if one has none.
    ``begin`` is called before. One that has a trouble is not kept; if the folder cannot be written it is kept in
    ``of_run``, for this run's launches. ``None``: the device has no room for it, which says nothing of a training."""
    file = f"{_name(device)}.json"
    paths = [each / file for each in (folder, of_run) if each is not None]
    with gpu.sensors(device) as sensed:
        limit = sensed.power_limit_watts
    versions, boot = _versions(device), boot_id()
    found = next(filter(None, (_usable(path, boot, limit, versions) for path in paths)), None)
    # All or none: an exchange needs all, and GPUs that work side by side are calibrated side by side.
    is_needed = _of_all(float(found is None), device) > 0
    if found is not None and not is_needed:
        return found
    begin()
    if gpu.is_gpu(device) and not _has_room(device):
        return None
    made = calibrate(device)
    why = "" if made.trouble else codec.keep(paths[0], _Kept(made, boot))
    # Where not even the run's folder can be written the launch's own record cannot be, which says so itself.
    if why and of_run is not None and not codec.keep(of_run / file, _Kept(made, boot)):
        with suppress(OSError):
            write_text(of_run / calibration.UNKEPT, f"{folder}: {why}\n", lasts=False)
    return made


def _has_room(device: torch.device) -> bool:
    """On the devices of all ranks: one that waits for an exchange with one that has none would wait for ever."""
    return not _of_all(float(gpu.available_bytes(device) < _ROOM_BYTES), device)


def calibrate(device: torch.device) -> Calibration:
    """Measure what ``device`` gives now, in seconds on a GPU, tenths of one on a CPU; all ranks call it together."""
    made_at = time.strftime(calibration.TIME_FORMAT, time.gmtime())
    sizes = _GPU if gpu.is_gpu(device) else _CPU
    random = torch.Generator(device)  # its own: the training's numbers are those that it would have had
    random.manual_seed(_SEED)
    steady: dict[str, Sequence[float]] = {}
    with gpu.sensors(device) as sensed:

        def measure(name: str, make: Callable[[], Work]) -> None:
            numbers, seen = random.get_state(), len(sensed.looks)
            for _ in range(_ATTEMPTS):
                # As if the one before had not been: its factors, and nothing of what was seen of it.
                random.set_state(numbers)
                del sensed.looks[seen:]
                steady[name] = _steady(make, device, sizes, name, sensed)
                if not _of_all(len(unsteady(_judged({name: steady[name]}, device))), device):
                    return

        def product(dtype: torch.dtype) -> Work:
            # Random, since a product of ones takes less power, and the power limit is what tells two GPUs apart.
            shape = (sizes.matrix, sizes.matrix)
            return _product(torch.randn(shape, generator=random, device=device, dtype=dtype) for _ in range(2))

        measure(BF16_PRODUCT, lambda: product(torch.bfloat16))
        loaded = tuple(sensed.looks)
        with gpu.without_tf32():
            measure(FP32_PRODUCT, lambda: product(torch.float32))
        measure(COPY, lambda: _copy(sizes.copied, device))
        if _world_size() > 1:
            measure(ALL_REDUCE, lambda: _exchange(sizes.exchanged, device))
        limit, looks = sensed.power_limit_watts, tuple(sensed.looks)
    return Calibration(
        made_at=made_at,
        seconds={name: fmean(times) for name, times in steady.items()},
        versions=_versions(device),
        sm_clock_mhz=round(gpu.mean([look.clock_mhz for look in loaded]), 1),
        power_watts=round(gpu.mean([look.milliwatts for look in loaded]) / 1000, 1),
        temperature_celsius=max((look.temperature or 0.0 for look in loaded), default=0.0),
        power_limit_watts=limit,
        trouble="; ".join([*gpu.disturbances(looks), *unsteady(_judged(steady, device))]),
        procedure=calibration.PROCEDURE,
    )


def _judged(steady: Mapping[str, Sequence[float]], device: torch.device) -> Mapping[str, Sequence[float]]:
    """The work that has to be steady: a CPU's times are noise, and an exchange waits for others."""
    return {name: times for name, times in steady.items() if gpu.is_gpu(device) and name != ALL_REDUCE}


def unsteady(steady: Mapping[str, Sequence[float]]) -> list[str]:
    """A line for each work whose batches, in their order, were of another speed in one half than in the other."""
    lines = []
    for name, times in steady.items():
        first, second = times[: len(times) // 2], times[len(times) // 2 :]
        apart = abs(math.log(_tapered_mean(second) / _tapered_mean(first))) if first else 0.0
        if apart > UNSTEADY:
            lines.append(f"{name} was not steady: its halves are {apart * 100:.1f} % apart")
    return lines


def _tapered_mean(times: Sequence[float]) -> float:
    """Their mean with the least weight at both ends: a swing that is cut within a period is no drift. With equal
    weights, halves of products at the power limit were 1.0 % apart where the whole repeated to 0.2 %; so 0.4 %."""
    weights = [math.sin(math.pi * (number + 0.5) / len(times)) ** 2 for number in range(len(times))]
    return sum(map(operator.mul, times, weights)) / sum(weights)


def _steady(
    make: Callable[[], Work], device: torch.device, sizes: _Sizes, name: str, sensed: gpu.GpuSensors
) -> list[float]:
    """Seconds of one repetition in each batch of the steady part; what the work has held is freed."""
    clock = gpu.clock_of(device)
    work = make()
    work()
    clock.wait()
    start = clock.instant()
    for _ in range(_TRIALS):
        work()
    end = clock.instant()
    clock.wait()
    once = _of_all(clock.between(start, end), device) / _TRIALS  # ranks that exchange must do so equally often
    repeats = max(1, round(sizes.batch_seconds / once))
    num_warm, num_steady = (math.ceil(seconds / (repeats * once)) for seconds in sizes.lengths[name])

    marks = [clock.instant()]
    for number in range(1, num_warm + num_steady + 1):
        for _ in range(repeats):
            work()
        marks.append(clock.instant())
        over = number - _AHEAD
        while over > 0 and not clock.has_passed(marks[over]):
            time.sleep(_POLL_SECONDS)
        if over > num_warm:
            sensed.look()  # while the next batches run
    clock.wait()
    times = [clock.between(a, b) / repeats for a, b in zip(marks[num_warm:], marks[num_warm + 1 :], strict=False)]
    del work
    gpu.give_back(device)
    return times


def _product(factors: Iterable[torch.Tensor]) -> Work:
    a, b = factors
    out = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=out)


def _copy(elements: int, device: torch.device) -> Work:
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _exchange(elements: int, device: torch.device) -> Work:
    values = torch.zeros(elements, device=device)  # a sum of zeros never overflows
    return lambda: dist.all_reduce(values)


def _world_size() -> int:
    return int(dist.get_world_size()) if dist.is_initialized() else 1


def _of_all(value: float, device: torch.device) -> float:
    if _world_size() == 1:
        return value
    largest = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest.item())


def _name(device: torch.device) -> str:
    """Name the device, and how many work beside it: each width has its own exchange, power and air."""
    ranks = _world_size()
    if gpu.is_gpu(device):
        name = gpu.gpu_uuid(device)
    else:
        # Ranks share the CPU, and each has its own calibration.
        rank = f" rank {dist.get_rank()}" if ranks > 1 else ""
        name = re.sub(r"[^a-z0-9]+", "-", f"{platform.node()} {device_name(device)}{rank}".lower()).strip("-")
    return name if ranks == 1 else f"{name}-of-{ranks}"


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    return versions | gpu.product_versions() if gpu.is_gpu(device) else versions
