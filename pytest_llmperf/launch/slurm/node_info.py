"""What one node of an allocation offers, printed as a line of JSON by ``python -m …node_info``."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pytest_llmperf.launch.machine import Gpu, find_machine
from pytest_llmperf.support.units import GIB

#: Begins the answer, among whatever a prolog or a module prints.
MARK = "llmperf-node "


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One node, as a step of the job finds it."""

    node: str
    """SLURM's name."""
    host: str
    gpus: tuple[Gpu, ...]
    granted_gpus: int
    """What SLURM says that the job has there; 0 where it does not say."""
    cpu_name: str
    cores: int = 0
    """All its logical ones, those that other jobs have too."""
    switch: str = ""
    """Its place in the network, by ``SLURM_TOPOLOGY_ADDR``, without the node itself."""

    @property
    def kind(self) -> str:
        """What must be the same on every node of a launch."""
        if not self.gpus:
            return f"{self.cpu_name}, {self.cores} cores"
        names = sorted({f"{gpu.name} {gpu.memory_bytes / GIB:.0f} GiB" for gpu in self.gpus})
        return f"{len(self.gpus)} × {' and '.join(names)}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NodeFacts:
        return cls(**{**values, "gpus": tuple(Gpu(**gpu) for gpu in values["gpus"])})


def node_name() -> str:
    """SLURM's name of this node."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def switch() -> str:
    """Where in the network this node hangs; empty without a topology plugin."""
    return os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


def find_facts() -> NodeFacts:
    """Of this node.

    Raises:
        ValueError: see ``find_machine``.
    """
    machine = find_machine()
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return NodeFacts(
        node=node_name(),
        host=platform.node(),
        gpus=machine.gpus,
        granted_gpus=int(granted) if granted.isdigit() else 0,
        cpu_name=machine.cpu_name,
        cores=os.cpu_count() or 0,
        switch=switch(),
    )


def parse(output: str) -> list[NodeFacts]:
    """The nodes that answered; whatever else was printed is passed over, also on their lines.

    Raises:
        ValueError: an answer is cut off.
    """
    decoder = json.JSONDecoder()
    return [NodeFacts.from_dict(decoder.raw_decode(answer)[0]) for answer in output.split(MARK)[1:]]


if __name__ == "__main__":
    # In one piece: several nodes write to the same pipe.
    os.write(sys.stdout.fileno(), f"{MARK}{json.dumps(asdict(find_facts()))}\n".encode())
