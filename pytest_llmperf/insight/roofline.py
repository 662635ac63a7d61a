"""Roofline: the least time of a step whose operators are known by arithmetic and by bytes. Pure.

Each operator takes as long as its arithmetic at the chip's peak, or as its bytes at the memory's, whichever is longer
(Williams, Waterman and Patterson 2009); the host needs some microseconds to start each. No step is as fast: what is
compared is one configuration with another.
"""

from __future__ import annotations

from collections.abc import Mapping

# Seconds that PyTorch's host takes for an operator, its Python included; to an order of magnitude.
_HOST_SECONDS = 8e-6

#: Of a chip that is not known: as many bytes for an operation as Hopper moves.
UNKNOWN_PEAK, UNKNOWN_BANDWIDTH = 1e15, 4.8e12


def least_seconds(
    calls: Mapping[str, int],
    flops: Mapping[str, int],
    traffic: Mapping[str, int],
    *,
    peak: float | None,
    bandwidth: float | None,
) -> float:
    """Of a step: ``calls``, FLOPs and bytes by operator, on a chip of ``peak`` FLOP/s and ``bandwidth`` bytes/s."""
    peak, bandwidth = peak or UNKNOWN_PEAK, bandwidth or UNKNOWN_BANDWIDTH
    names = {*flops, *traffic}
    device = sum(max(flops.get(name, 0) / peak, traffic.get(name, 0) / bandwidth) for name in names)
    return max(device, sum(calls.values()) * _HOST_SECONDS)
