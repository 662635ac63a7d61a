"""What became of a launch on several nodes: whose word is missing decides, logs are only quoted.

The shared file system may show files late, some only after the folder was listed anew: what must come is waited for.
When SLURM gives one node of a step up, it kills the ranks on the others at once: the node that went silent may be a
healthy one, and the broken one, where nobody can kill anything, may even have left its last word."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from pytest_llmperf.launch import outcome
from pytest_llmperf.launch.device import NETWORK
from pytest_llmperf.launch.process import Ended
from pytest_llmperf.launch.scratch import UNWRITABLE
from pytest_llmperf.launch.site import listed
from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.watch import sum_of_known
from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.failure import SOAKED, Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.spec import Spec

_FAILED = re.compile(r"srun: error: .*(?:Node failure on|failed on node) ([^\s:]+)")
_TASK_ENDED = re.compile(r"srun: error: ([^\s:]+): tasks? [\d,-]+:")
# From here on srun ends what still runs.
_SRUN_ENDS = re.compile(r"First task exited|Terminat\w* StepId|Job step aborted|forcing job termination")

# How SLURM calls a node so that it cannot work.
_GONE = re.compile(r"down|not_responding|\*|unknown")
# An administrator may have said so of a node that still works.
_LEAVING = re.compile(r"drain|fail")

# Ends what srun says, after what it means.
_NO_REASON = re.compile(r'srun: error: \S+: tasks? [\d,-]+: Exited with|Try "srun --help"')
# srun tells of a node whose slurmd is gone after 11 s; of one that hangs, never.
_ASK_SECONDS = 90.0
_STEP = "llmperf-alive"
# What was written must come: attributes may be cached for a minute. What may never have been written gets less.
LATE_SECONDS = 90.0
_LAST_WORDS_SECONDS = 10.0
_POLL_SECONDS = 0.25


def failed_nodes(log: str) -> set[str]:
    return _nodes(_FAILED.findall(log))


def ended_nodes(log: str) -> set[str]:
    """Nodes whose task srun says has ended badly."""
    return _nodes(_TASK_ENDED.findall(log))


def broken(nodes: Sequence[str], silent: Collection[str], states: Mapping[str, str], log: str) -> list[str]:
    """Those of a launch's ``nodes`` that broke it; ``silent`` left no last word, ``states`` are SLURM's."""
    failed = failed_nodes(log)
    gone = [
        node
        for node in nodes
        if node in failed or _GONE.search(state := states.get(node, "")) or (node in silent and _LEAVING.search(state))
    ]
    ended_by_themselves = ended_nodes(_SRUN_ENDS.split(log)[0]) & {*silent}
    return gone or [node for node in nodes if node in (ended_by_themselves or silent)]


def word(lines: Iterable[str]) -> str:
    """srun's last word that gives a reason; else its last; empty where it said nothing."""
    said = [line.strip() for line in lines if line.strip()]
    return ([line for line in said if not _NO_REASON.match(line)] or said or [""])[-1]


def _nodes(lists: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for text in lists:
        with suppress(controller.AllocationError):
            found |= {*controller.expand_nodes(text)}
    return found


def unreachable(nodes: Sequence[str]) -> tuple[str, ...]:
    """Those of ``nodes`` that fail at a step which needs nothing: no container, no Python, no shared folder."""
    states = controller.node_states(nodes) if nodes else {}
    gone = {node for node in nodes if _GONE.search(states.get(node, ""))}
    asked = [node for node in nodes if node not in gone]  # for a step with one that is down, srun would wait
    command = [*controller.step_words(asked, _STEP, "--input=none"), "printenv", "SLURMD_NODENAME"]
    try:
        if asked:
            gone |= failed_nodes(controller.run_step(command, _ASK_SECONDS).stderr)
    except subprocess.TimeoutExpired as error:
        controller.cancel_step(os.environ.get("SLURM_JOB_ID", ""), _STEP)
        gone |= {*asked} - {*(error.stdout or b"").decode(errors="replace").split()}
    except OSError:
        pass  # nobody could be asked
    return tuple(node for node in nodes if node in gone)


@dataclass(frozen=True)
class Aftermath:
    """A launch that its nodes broke, not its work."""

    failure: Failure
    lost: Mapping[str, str]
    """Nodes that broke it, and what each did."""
    nobody_began: bool

    @property
    def said(self) -> str:
        return word(self.failure.tail) or "it did not say why"


#: What becomes of a launch that nodes did not break.
Outcome: TypeAlias = Launch | Failure


def gather(folder: Path, spec: Spec, nodes: Sequence[str], ended: Ended, progress: Progress) -> Outcome | Aftermath:
    clean = ended.returncode == 0 and not ended.timed_out
    words = [*(folder / f"node-{node}.end.json" for node in nodes), *([folder / "launch.json"] if clean else [])]
    wait_for(lambda: all(map(Path.exists, words)), folder, LATE_SECONDS if clean else _LAST_WORDS_SECONDS)
    ends = words_of(folder, nodes)
    # What torchrun said on each node in one file, the name by which ``outcome`` knows it.
    parts = [folder / "srun.log", *(folder / f"torchrun-{node}.log" for node in nodes)]
    with suppress(OSError), (folder / "torchrun.log").open("wb") as joined:
        joined.writelines(part.read_bytes() for part in parts if part.exists())
    timed_out = ended.timed_out or any(end["timed_out"] for end in ends.values())
    health = worst([Health(**end["health"]) for end in ends.values()])
    where = next((f" on node {node}" for node, end in ends.items() if end["returncode"] == ended.returncode), "")
    is_soaked = any(end.get("soaked") for end in ends.values())
    result = outcome.read(folder, spec, replace(ended, timed_out=timed_out, where=where, is_soaked=is_soaked), progress)
    result = replace(result, health=health)
    if isinstance(result, Failure) and result.kind == SOAKED:
        return result
    if isinstance(result, Launch):
        is_warm = [end.get("start") for end in ends.values()] == ["warm"] * len(nodes)
        return replace(result, evidence={**result.evidence, "start": "warm" if is_warm else "cold"})
    if clean:
        message = f"{result.message} within {LATE_SECONDS:.0f} s; all nodes must share the file system of its folder"
        return replace(result, message=message)
    if timed_out:
        silent = [node for node in nodes if node not in ends]
        but = f"; no word from {listed(silent)}" if silent and ends else ""
        return replace(result, message=result.message + but)
    return _broken(folder, nodes, ends, result, ended.returncode)


def _broken(
    folder: Path, nodes: Sequence[str], ends: Mapping[str, Any], failure: Failure, returncode: int
) -> Failure | Aftermath:
    log = "\n".join(outcome.lines_of(folder / "srun.log"))
    tail = outcome.tidy(log.splitlines())[-6:]
    if failure.kind == "unwritable":
        return failure  # a node that cannot leave its word looks like one that went silent
    if f"exit code {UNWRITABLE}" in f"{log}\nexit code {returncode}":
        message = f"{folder} could not be written to on a node; {failure.message}"
        return replace(failure, kind="unwritable", message=message, tail=tail)
    if lost := _lost(folder, nodes, ends, log):
        failure = replace(failure, kind="node-failure", message="; ".join([*lost.values()][:4]), tail=tail)
        return Aftermath(failure, lost, not any((folder / f"node-{node}.json").exists() for node in nodes))
    kind, message = failure.kind, failure.message
    deserted = [node for node, end in ends.items() if end.get("lost_server")]
    if errors := [str(end["error"]) for end in ends.values() if end.get("error")]:
        kind, message = "never-started", errors[0]
    elif deserted:  # the others' ranks only tell that their peers are gone
        kind = "killed"
        message = f"the fork server of node {listed(deserted)} died, and torchrun there was ended with it"
    elif all(end["signalled"] for end in ends.values()):
        kind, message = "killed", "SLURM ended the step (scancel, preemption or the time limit)"
    elif len(nodes) > 1 and not any(folder.glob("rank-*.pid")):
        kind = "rendezvous"
        message = (
            f"no rank began: {listed(nodes)} did not meet; can they reach the first one's address and port, "
            f"and is {NETWORK} the right network?"
        )
    return replace(failure, kind=kind, message=message)


def words_of(folder: Path, nodes: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for node in nodes:
        with suppress(OSError, ValueError):
            values = json.loads((folder / f"node-{node}.end.json").read_text(encoding="utf-8"))
            if values and isinstance(values, dict):
                found[node] = values
    return found


def wait_for(seen: Callable[[], bool], folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            list(folder.iterdir())  # makes a network's file system ask its server again
        if seen() or time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def worst(found: Sequence[Health]) -> Health:
    """One health of several nodes: everybody's strangers and watts, the worst of the rest."""
    if not found:
        return Health()
    reasons = {name for health in found for name in health.clock_reasons}
    limits = [health.power_limit_watts for health in found if health.power_limit_watts]
    return Health(
        foreign_processes=tuple(line for health in found for line in health.foreign_processes),
        clock_reasons={name: max(health.clock_reasons.get(name, 0.0) for health in found) for name in sorted(reasons)},
        sm_clock_mhz=min((health.sm_clock_mhz for health in found if health.sm_clock_mhz), default=0.0),
        temperature_celsius=max(health.temperature_celsius for health in found),
        power_watts=sum_of_known([health.power_watts for health in found]),
        power_limit_watts=min(limits, default=0.0),
        memory_errors=sum(health.memory_errors for health in found),
    )


def _lost(folder: Path, nodes: Sequence[str], ends: Mapping[str, Any], log: str) -> dict[str, str]:
    """Nodes that broke the launch, each with what is known of it; none where all left their last words."""
    silent = [node for node in nodes if node not in ends]
    if not silent and failed_nodes(log).isdisjoint(nodes):
        return {}
    states = controller.node_states(nodes)
    found = {}
    for node in broken(nodes, silent, states, log):
        what = "went silent" if (folder / f"node-{node}.json").exists() else "did not begin"
        what = what if node in silent else "was given up"
        found[node] = f"node {node} {what}" + (f" (SLURM: {states[node]})" if states.get(node) else "")
    return found
