"""Exchanges: what a rank exchanges with others in a step, by kind, dimension of the mesh, bytes, and line of Python.

PyTorch keeps a record of the recent ones, of every backend, for ranks that hang: kind, shapes, types, group, and the
frames of Python that asked. It is read after the traced steps, to which nothing is added.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_llmperf.observe.device import collectives_record
from pytest_llmperf.records.trace import TraceRow

# What PyTorch calls its types there.
_BITS = {"Byte": 8, "Char": 8, "Bool": 8, "Short": 16, "Half": 16, "BFloat16": 16, "Int": 32, "Float": 32}
_BITS |= {"Long": 64, "Double": 64, "ComplexFloat": 64, "ComplexDouble": 128}
_FLOAT8 = 8
# A file keeps so many lines.
_MOST = 20
# Groups that have no name of their own.
_UNNAMED = {"default_pg", "undefined", ""}
_NAMES = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_reduce_barrier": "barrier",
}
#: A line of a file that asked, from the innermost one outwards.
Frames = Iterable[tuple[str, int]]


class Exchanges(NamedTuple):
    """Of one step."""

    rows: tuple[TraceRow, ...] = ()
    """How many of each kind, and their bytes."""
    places: Mapping[str, float] = {}
    """By line, how many; the most frequent."""


def recorded(dist: Any) -> bytes:
    """PyTorch's record of exchanges, pickled; empty before the ranks have met."""
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return b""
    from torch._C import _distributed_c10d as c10d  # noqa: PLC0415 - torch is there by now

    return bytes(getattr(c10d, collectives_record(dist.get_backend()))())


def exchanges(record: bytes, ends: Sequence[int], place: Callable[[Frames], Sequence[str]]) -> Exchanges:
    """Return those of a step: the mean of the steps between ``ends``, in nanoseconds since 1970.

    Where the record does not reach back to the first one, or there is none, nothing is known: nothing is returned.
    """
    entries = pickle.loads(record)["entries"] if record else []  # noqa: S301 - this process wrote it
    ours = [entry for entry in entries if ends[0] < entry["time_created_ns"] <= ends[-1]]
    if not ours or (ours[0] is entries[0] and entries[0]["record_id"] > 0):
        return Exchanges()
    counts, sizes, places = Counter[str](), Counter[str](), Counter[str]()
    for entry in ours:
        name = _name(entry)
        counts[name] += 1
        sizes[name] += _bytes(entry)
        places.update(place((frame["filename"], frame["line"]) for frame in entry["frames"]))
    steps = len(ends) - 1
    rows = [TraceRow("exchange", name, count / steps, 0.0) for name, count in counts.items()]
    rows += [TraceRow("payload", name, size / steps, 0.0) for name, size in sizes.items() if size]
    return Exchanges(tuple(rows), {line: count / steps for line, count in places.most_common(_MOST)})


def _name(entry: Mapping[str, Any]) -> str:
    """``all_gather``, ``reduce_scatter of shard``: what it does, and in which dimension of the mesh."""
    kind = str(entry["profiling_name"]).partition(":")[2].split(" ")[0]
    kind = re.sub(r"^_|_base$|_tensor$|_coalesced$", "", kind)
    described = entry.get("process_group") or ("", "")
    group = "" if described[1] in _UNNAMED else str(described[1]).removeprefix("mesh_")
    return f"{_NAMES.get(kind, kind)}{group and f' of {group}'}"


def _bytes(entry: Mapping[str, Any]) -> int:
    """Of the whole: what is gathered, scattered or reduced, as one rank has it."""
    whole = [
        sum(math.prod(shape) * _bits(kind) // 8 for shape, kind in zip(entry[f"{side}_sizes"], kinds, strict=False))
        for side, kinds in (("input", entry["input_dtypes"]), ("output", entry["output_dtypes"]))
    ]
    return max(whole)


def _bits(dtype: str) -> int:
    return _BITS.get(dtype, _FLOAT8 if dtype.startswith("Float8") else 0)
