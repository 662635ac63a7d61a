"""What a step of data-parallel training takes at any number of GPUs: compute, and what is seen of the all-reduce.

Weak scaling under DDP: each GPU has the same work at every width, and each step ends with one all-reduce of all
gradients, bucket by bucket, mostly hidden behind the backward pass. Pure. Seconds and bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from statistics import NormalDist

from pytest_llmperf.spec.models import Geometry

#: NCCL's two algorithms, or whichever of them is faster at a width, as NCCL itself chooses.
ALGORITHMS = ("auto", "ring", "tree")

#: DDP's ``bucket_cap_mb``: each bucket is an all-reduce of its own, and pays its latency.
BUCKET_BYTES = 25 * 2**20

# Seconds of one hop inside a node and between nodes: NCCL's own constants for its Simple protocol (src/graph/tuning.cc,
# hwLat of NVLink and of the network; the tree's hold a chunk's transfer).
_HOPS = {"ring": (3.4e-6, 9.6e-6), "tree": (28e-6, 50e-6)}

# Of a training step's arithmetic the backward pass is two thirds: behind it an all-reduce can hide.
_BACKWARD = 2 / 3


def num_weights(geometry: Geometry) -> int:
    """Parameters of the matrices, input and output embeddings being one: within 0.4 % for Llama 3.2 1B and OPT 1.3B."""
    hidden, attention = geometry.hidden_size, geometry.num_heads * geometry.head_size
    projections = 2 * hidden * (attention + geometry.num_key_value_heads * geometry.head_size)
    feed_forward = geometry.num_feed_forward_matrices * hidden * geometry.feed_forward_size
    return geometry.num_layers * (projections + feed_forward) + geometry.vocabulary_size * hidden


@dataclass(frozen=True)
class Workload:
    """What is trained, and on what: everything that is known and not fitted."""

    tokens_per_step_per_gpu: int
    gradient_bytes: float
    """Of one all-reduce of everything: parameters times the bytes of a gradient."""
    gpus_per_node: int
    algorithm: str = "auto"

    @property
    def buckets(self) -> int:
        return max(1, math.ceil(self.gradient_bytes / BUCKET_BYTES))


@dataclass(frozen=True)
class Coefficients:
    """What is fitted; all above 0."""

    compute_seconds: float
    """One step of one GPU, without any communication."""
    overhead_share: float
    """What DDP costs from two GPUs on whatever their number, as a share of the compute: bucket copies, lost kernels."""
    exposed_share: float
    """The part of an all-reduce that does not hide behind the backward pass, though it would fit."""
    intra_node_bandwidth: float
    """Bus bandwidth in bytes/s, as nccl-tests counts it."""
    inter_node_bandwidth: float
    """The same between nodes: what all network cards of one node carry in one direction."""
    latency_factor: float
    """Of NCCL's constants."""
    straggling_share: float
    """How far ranks scatter (standard deviation), as a share of the compute: every step waits for the slowest."""


NAMES = tuple(one.name for one in fields(Coefficients))


def all_reduce_seconds(gpus: int, algorithm: str, workload: Workload, known: Coefficients) -> float:
    """All buckets of one step, one after the other, by latency and bandwidth (as NCCL's ``ncclTopoTuneModel``).

    Ring: ``2(n-1)/n * V/B`` and ``2(n-m)`` hops inside nodes and ``2(m-1)`` between ``m`` of them. Tree: ``2 * V/B``
    and ``2(n/m-1)`` hops inside and ``2*log2(m)`` between. ``B`` is the slower of the two tiers that are used.
    """
    if gpus == 1:
        return 0.0
    nodes = math.ceil(gpus / workload.gpus_per_node)
    within, between = _HOPS[algorithm]
    if algorithm == "ring":
        crossings, hops, hops_between = 2 * (gpus - 1) / gpus, 2.0 * (gpus - nodes), 2.0 * (nodes - 1)
    else:
        crossings, hops, hops_between = 2.0, 2 * (gpus / nodes - 1), 2 * math.log2(nodes)
    bandwidth = known.intra_node_bandwidth
    if nodes > 1:
        bandwidth = min(bandwidth, known.inter_node_bandwidth)
    latency = known.latency_factor * (hops * within + hops_between * between)
    return crossings * workload.gradient_bytes / bandwidth + workload.buckets * latency


def chosen_algorithm(gpus: int, workload: Workload, known: Coefficients) -> str:
    """``ring`` or ``tree``."""
    if workload.algorithm != "auto":
        return workload.algorithm
    return min(_HOPS, key=lambda algorithm: all_reduce_seconds(gpus, algorithm, workload, known))


def exposed_seconds(gpus: int, workload: Workload, known: Coefficients) -> float:
    """What a step loses to communication: a share of the all-reduce, and all of it that outlasts the backward pass."""
    if gpus == 1:
        return 0.0
    whole = all_reduce_seconds(gpus, chosen_algorithm(gpus, workload, known), workload, known)
    seen = max(min(known.exposed_share, 1.0) * whole, whole - _BACKWARD * known.compute_seconds)
    return known.overhead_share * known.compute_seconds + seen


def step_seconds(gpus: int, workload: Workload, known: Coefficients) -> float:
    """Compute, exposed communication, and the wait for the slowest rank: the expected maximum of ``gpus`` normals."""
    # Blom's approximation.
    slowest = NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))
    waiting = known.straggling_share * known.compute_seconds * slowest
    return known.compute_seconds + exposed_seconds(gpus, workload, known) + waiting
