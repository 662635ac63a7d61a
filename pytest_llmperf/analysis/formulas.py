"""What a training step needs of a GPU's memory: the prediction's parts; chip use, cost, and time at scale. Pure."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trace import StaticStep
from pytest_llmperf.settings.parallelism import data_ranks, zero_stage
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import shipped

#: In the order in which they are told.
PARTS: Mapping[str, str] = dict(shipped(__file__, "parts.ini")["parts"])


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank at its peak, by part."""

    parts: Mapping[str, int]

    @property
    def peak_allocated_bytes(self) -> int:
        return sum(self.parts.values())

    def error(self, launch: Launch) -> float:
        """Of the prediction, as a fraction of what ``launch`` took at most on its worst rank."""
        return self.peak_allocated_bytes / launch.peak_allocated_bytes - 1


#: Whose predictions are held against measured ones.
_PROVEN = frozenset({"gemma3_text", "gpt2", "llama", "mistral", "mixtral", "opt", "qwen3"})
_FUSED = "is counted as any fused attention: its inputs, its output and a number a row"


def caveats(spec: TrainSpec) -> list[str]:
    """What is not modelled of ``spec``, or not proven, a line each."""
    sharding = "DeepSpeed" if zero_stage(spec) else "FSDP"
    counted = "DDP's buckets" if spec.parallelism == "ddp" else f"{sharding}'s buffers"
    found = {
        "torch_compile is not modelled: this is without it, and compiled kernels usually keep less": spec.torch_compile,
        f"{spec.attention} {_FUSED}": spec.attention.startswith("flash_attention"),
        f"flex_attention {_FUSED}, without its mask of blocks": spec.attention == "flex_attention",
        "fp16 is counted as bf16, without the scaler of its loss": "fp16"
        in (spec.model_precision, spec.mixed_precision),
        f"of several GPUs only {counted} are counted: NCCL takes more, outside the allocator": spec.gpus > 1,
        "fsdp_hybrid is counted on one node, where half of the GPUs hold the shards": spec.parallelism == "fsdp_hybrid",
        f"{spec.architecture.model_type} is not among the families that are held against measurements: "
        f"{', '.join(sorted(_PROVEN))}": spec.architecture.model_type not in _PROVEN,
    }
    return [line for line, holds in found.items() if holds]


def newest_on_a_gpu(launches: Sequence[Launch]) -> Launch | None:
    """The launch that a prediction can be held against: on the CPU no allocator counts."""
    on_a_gpu = (launch for launch in launches if launch.seen.run.is_on_gpu)
    return max(on_a_gpu, key=lambda launch: launch.started_at, default=None)


# How well a chip is used: its peak rate and the model FLOPs utilisation (MFU).

_TERA = 1e12

# Dense (not sparse) peak rates in TFLOP/s by compute precision, and of the memory in TB/s: of several sizes of one
# product the fastest, since it serves as a bound. Ordered: the first whose words are all in the device's name counts,
# so that a special product comes before its family. A rate that is not certain is left out: of the NVL boards
# publications disagree (one card or a pair), and no peak is better than a wrong one.
_PEAKS = tuple(
    (frozenset(row["words"].split()), {name: float(rate) for name, rate in row.items() if rate and name != "words"})
    for row in csv.DictReader(Path(__file__).with_name("peaks.csv").read_text(encoding="utf-8").splitlines())
)
#: Their names, as a person may write them.
CHIPS = ["-".join(sorted(words)) for words, _ in _PEAKS]


def peak_flops(gpu_name: str, compute_precision: str) -> float | None:
    """The chip's dense peak in FLOP/s for ``fp8``, ``bf16``, ``fp16``, ``tf32`` or ``fp32``; ``None``: not known.
    ``gpu_name`` is NVML's: ``NVIDIA H200``. A MIG slice has no peak here: it is a part of the chip it is named after.
    Source: NVIDIA's product datasheets, whose rates with sparsity are twice these."""
    # Whole words: "RTX A1000" holds "A100" and is another chip.
    words = set(re.split(r"[^a-z0-9.]+", gpu_name.lower()))
    if "mig" in words:
        return None
    for product, peaks in _PEAKS:
        if product <= words:
            tera = peaks.get(compute_precision)
            return None if tera is None else tera * _TERA
    return None


def peak_bandwidth(gpu_name: str) -> float | None:
    """The peak rate of the chip's memory, in bytes/s; ``None`` where it is not known. Source: the same datasheets."""
    return peak_flops(gpu_name, "memory")


def least_traffic(num_parameters: int, bytes_per_weight: int) -> int:
    """Bytes that one training step of a dense model must move through memory, whatever the caches do. Each weight is
    read in the forward and in the backward pass, its gradient is written, and it is written anew. A step that is faster
    than this at the memory's peak rate did not do the work."""
    return 4 * num_parameters * bytes_per_weight


def mfu(tokens_per_second_per_gpu: float, flops_per_token: float, peak: float) -> float:
    """Model FLOPs utilisation, a fraction: useful training FLOPs over the chip's peak (Chowdhery et al. 2022)."""
    return tokens_per_second_per_gpu * flops_per_token / peak


# Cost: in money, by the GPU-hour in any one currency, and in energy.


@dataclass(frozen=True)
class Price:
    """Of a GPU-hour."""

    gpu_hour: float
    currency: str


def tokens_per_price(rate: float, price: float) -> float:
    """Tokens for one unit of money, at ``rate`` tokens/s per GPU and ``price`` of a GPU-hour."""
    return rate * 3600 / price


def price_per_million(rate: float, price: float) -> float:
    return 1e6 / tokens_per_price(rate, price)


def joules_per_token(power_watts: float, tokens_per_second: float) -> float:
    """Of all GPUs together: their power over their rate."""
    return power_watts / tokens_per_second


# Time at scale: a range between what fewer ranks took and that with all that more of them exchange, none of it hidden.

# GPUs of one host differ by so much (sd, eight H200), and all wait for the slowest. Work of 524 ms on one H200 took 541
# ms on four, beside the exchanges.
_GPU_SD, _BESIDE = 0.006, 541 / 524 - 1


@dataclass(frozen=True)
class Measured:
    """What is known of the ranks of one training on one machine kind."""

    step_seconds: Mapping[int, tuple[float, float]]
    """By how many ranks: the least and the most that launches took."""
    ranks_per_node: int
    on_a_node: float | None = None
    """Bytes a second of a GPU to the others, as all-reduce's bus bandwidth; the least that was measured."""
    between_nodes: float | None = None

    def step_range(
        self, spec: TrainSpec, step: StaticStep, of: Callable[[TrainSpec], object]
    ) -> tuple[float, float] | None:
        """The least and most that a ``step`` of ``spec`` takes, by the widest measured that is no wider; ``None`` where
        none was, or no rate of the links. ``of`` tells that one's step: its exchanges over these links are counted."""
        ranks = spec.gpus
        least = 1 if data_ranks(spec) > 1 else ranks  # of more that share a sequence each has less to do
        base = max((known for known in self.step_seconds if least <= known <= ranks), default=None)
        more = self._exchange_seconds(ranks, step)
        if base is None or more is None:
            return None
        low, high = self.step_seconds[base]
        if base > 1 and (base <= self.ranks_per_node) == (ranks <= self.ranks_per_node):
            before = of(replace(spec, gpus=base))
            more -= (self._exchange_seconds(base, before) or 0.0) if isinstance(before, StaticStep) else 0.0
        waits = _GPU_SD * (_largest_of(ranks) - _largest_of(base)) + (_BESIDE if base == 1 < ranks else 0.0)
        return low, high * (1 + waits) + max(0.0, more)

    def _exchange_seconds(self, ranks: int, step: StaticStep) -> float | None:
        """Of all exchanges of one step, one after the other."""
        nodes, seconds = max(1, ranks // self.ranks_per_node), 0.0
        for name, (_, size) in step.exchanges.items():
            kind, _, dimension = name.partition(" of ")
            # Of a hybrid mesh replicas are on different nodes, and shards on one.
            of_shards = "shard" in dimension
            number = ranks // nodes if of_shards else nodes if "replicate" in dimension and nodes > 1 else ranks
            rate = self.on_a_node if nodes == 1 or of_shards else self.between_nodes
            if rate is None:
                return None
            times = {"all_reduce": 2 * (number - 1) / number, "broadcast": 1.0}
            seconds += times.get(kind, (number - 1) / number) * size / rate
        return seconds


def _largest_of(number: int) -> float:
    """The expected largest of so many standard normal deviates (Blom 1958)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
