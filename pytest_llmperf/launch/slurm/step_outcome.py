"""What became of a launch on several nodes: whose word is missing decides, logs are only quoted.

The shared file system may show files late, some only after the folder was listed anew: what must come is waited for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_llmperf.launch import outcome
from pytest_llmperf.launch.health import sum_of_known
from pytest_llmperf.launch.process import Ended
from pytest_llmperf.launch.slurm import controller, node_failures
from pytest_llmperf.launch.slurm.allocation import listed
from pytest_llmperf.launch.slurm.node_agent import UNWRITABLE
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Health, Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.redaction import without_secrets

# What was written must come: attributes may be cached for a minute. What may never have been written gets less.
LATE_SECONDS = 90.0
_LAST_WORDS_SECONDS = 10.0
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Aftermath:
    """A launch that its nodes broke, not its work."""

    failure: Failure
    lost: Mapping[str, str]
    """Nodes that broke it, and what each did."""
    nobody_began: bool
    """Whether none of the launch's nodes did."""

    @property
    def said(self) -> str:
        """srun's last word."""
        return node_failures.word(self.failure.tail) or "it did not say why"


def gather(
    folder: Path, spec: TrainSpec, nodes: Sequence[str], ended: Ended, progress: Progress
) -> Launch | Failure | Aftermath:
    """The launch in ``folder``, or why there is none."""
    clean = ended.returncode == 0 and not ended.timed_out
    wait_for(
        lambda: (
            all((folder / f"node-{node}.end.json").exists() for node in nodes)
            and (not clean or (folder / "launch.json").exists())
        ),
        folder,
        LATE_SECONDS if clean else _LAST_WORDS_SECONDS,
    )
    ends = {node: end for node in nodes if (end := _read(folder / f"node-{node}.end.json"))}
    _join_logs(folder, nodes)
    timed_out = ended.timed_out or any(end["timed_out"] for end in ends.values())
    health = worst(Health(**end["health"]) for end in ends.values())
    where = next((f" on node {node}" for node, end in ends.items() if end["returncode"] == ended.returncode), "")
    result = outcome.read(folder, spec, replace(ended, timed_out=timed_out, where=where), progress)
    result = replace(result, health=health)
    if isinstance(result, Launch):
        is_warm = [end.get("start") for end in ends.values()] == ["warm"] * len(nodes)
        return replace(result, evidence={**result.evidence, "start": "warm" if is_warm else "cold"})
    if clean:
        message = f"{result.message} within {LATE_SECONDS:.0f} s; all nodes must share the file system of its folder"
        return replace(result, message=message)
    if timed_out:
        return replace(result, message=result.message + _silent(nodes, ends))
    return _broken(folder, nodes, ends, result, ended.returncode)


def _broken(
    folder: Path, nodes: Sequence[str], ends: Mapping[str, Any], failure: Failure, returncode: int
) -> Failure | Aftermath:
    """Whether the nodes or their work broke the launch."""
    log = _text(folder / "srun.log")
    if failure.kind == "unwritable":
        return failure  # a node that cannot leave its word looks like one that went silent
    if f"exit code {UNWRITABLE}" in f"{log}\nexit code {returncode}":
        message = f"{folder} could not be written to on a node; {failure.message}"
        return replace(failure, kind="unwritable", message=message, tail=_last_lines(log))
    lost = _lost(folder, nodes, ends, log)
    if lost:
        failure = replace(failure, kind="node-failure", message="; ".join([*lost.values()][:4]), tail=_last_lines(log))
        nobody_began = not any((folder / f"node-{node}.json").exists() for node in nodes)
        return Aftermath(failure, lost, nobody_began)
    return _reworded(folder, failure, ends, nodes)


def cold_starts(folder: Path, nodes: Sequence[str]) -> dict[str, str]:
    """Nodes that began cold where they were to begin warm, and why."""
    ends = {node: _read(folder / f"node-{node}.end.json") for node in nodes}
    return {node: str(end["cold_because"]) for node, end in ends.items() if end.get("cold_because")}


def has_lost_server(folder: Path, nodes: Sequence[str]) -> bool:
    """Whether a node had its fork server no more, before the launch or in it."""
    ends = [_read(folder / f"node-{node}.end.json") for node in nodes]
    return any(end.get("is_server_gone") or end.get("lost_server") for end in ends)


def wait_for(seen: Callable[[], bool], folder: Path, seconds: float) -> bool:
    """Wait until ``seen``; whether it was."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            list(folder.iterdir())  # makes a network's file system ask its server again
        if seen():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)


def worst(healths: Any) -> Health:
    """Of several nodes: everybody's strangers and watts, the worst of the rest."""
    found = list(healths)
    if not found:
        return Health()
    reasons = {name for health in found for name in health.clock_reasons}
    clocks = [health.sm_clock_mhz for health in found if health.sm_clock_mhz]
    limits = [health.power_limit_watts for health in found if health.power_limit_watts]
    return Health(
        foreign_processes=tuple(line for health in found for line in health.foreign_processes),
        clock_reasons={name: max(health.clock_reasons.get(name, 0.0) for health in found) for name in sorted(reasons)},
        sm_clock_mhz=min(clocks, default=0.0),
        temperature_celsius=max(health.temperature_celsius for health in found),
        power_watts=sum_of_known([health.power_watts for health in found]),
        power_limit_watts=min(limits, default=0.0),
        memory_errors=sum(health.memory_errors for health in found),
    )


def _lost(folder: Path, nodes: Sequence[str], ends: Mapping[str, Any], log: str) -> dict[str, str]:
    """Nodes that broke the launch, each with what is told of it; none where all left their last words."""
    silent = [node for node in nodes if node not in ends]
    if not silent and node_failures.failed_nodes(log).isdisjoint(nodes):
        return {}
    states = controller.node_states(nodes)
    told = {}
    for node in node_failures.broken(nodes, silent, states, log):
        what = "went silent" if (folder / f"node-{node}.json").exists() else "did not begin"
        what = what if node in silent else "was given up"
        told[node] = f"node {node} {what}" + (f" (SLURM: {states[node]})" if states.get(node) else "")
    return told


def _reworded(folder: Path, failure: Failure, ends: Mapping[str, Any], nodes: Sequence[str]) -> Failure:
    errors = [str(end["error"]) for end in ends.values() if end.get("error")]
    if errors:
        return replace(failure, kind="never-started", message=errors[0])
    deserted = [node for node, end in ends.items() if end.get("lost_server")]
    if deserted:  # the others' ranks only tell that their peers are gone
        message = f"the fork server of node {listed(deserted)} died, and torchrun there was ended with it"
        return replace(failure, kind="killed", message=message)
    if all(end["signalled"] for end in ends.values()):
        message = "SLURM ended the step (scancel, preemption or the time limit)"
        return replace(failure, kind="killed", message=message)
    if len(nodes) > 1 and not any(folder.glob("rank-*.pid")):
        message = (
            f"no rank began: {listed(nodes)} did not meet; can they reach the first one's address and port, "
            "and is NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME) the right network?"
        )
        return replace(failure, kind="rendezvous", message=message)
    return failure


def _silent(nodes: Sequence[str], ends: Mapping[str, Any]) -> str:
    silent = [node for node in nodes if node not in ends]
    return f"; no word from {listed(silent)}" if silent and len(silent) < len(nodes) else ""


def _join_logs(folder: Path, nodes: Sequence[str]) -> None:
    """What torchrun said on each node in one file, the name by which ``outcome`` knows it."""
    parts = [folder / "srun.log", *(folder / f"torchrun-{node}.log" for node in nodes)]
    with suppress(OSError), (folder / "torchrun.log").open("wb") as joined:
        for part in parts:
            if part.exists():
                joined.write(part.read_bytes())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _last_lines(log: str) -> tuple[str, ...]:
    lines = map(without_secrets, log.splitlines())  # what is cut is no longer known for a secret
    return tuple("".join(c for c in line if c.isprintable())[:160] for line in lines if line.strip())[-6:]


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
