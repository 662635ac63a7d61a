"""Which nodes broke a launch, by what srun printed and by what SLURM calls them. Pure.

When SLURM gives one node of a step up, it kills the ranks on the others at once: the node that went silent may be a
healthy one, and the broken one, where nobody can kill anything, may even have left its last word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from pytest_llmperf.launch.slurm.allocation import AllocationError, expand_nodes

_FAILED = re.compile(r"srun: error: .*(?:Node failure on|failed on node) ([^\s:]+)")
_TASK_ENDED = re.compile(r"srun: error: ([^\s:]+): tasks? [\d,-]+:")
# From here on srun ends what still runs.
_SRUN_ENDS = re.compile(r"First task exited|Terminat\w* StepId|Job step aborted|forcing job termination")

_GONE = re.compile(r"down|not_responding|\*|unknown")
# An administrator may have said so of a node that still works.
_LEAVING = re.compile(r"drain|fail")

# Ends what srun says, after what it means.
_NO_REASON = re.compile(r'srun: error: \S+: tasks? [\d,-]+: Exited with|Try "srun --help"')


def failed_nodes(log: str) -> set[str]:
    """Nodes that srun says have failed."""
    return _nodes(_FAILED.findall(log))


def ended_nodes(log: str) -> set[str]:
    """Nodes whose task srun says has ended badly."""
    return _nodes(_TASK_ENDED.findall(log))


def is_gone(state: str) -> bool:
    """Whether SLURM calls a node so that it cannot work."""
    return bool(_GONE.search(state))


def broken(nodes: Sequence[str], silent: Collection[str], states: Mapping[str, str], log: str) -> list[str]:
    """Those of a launch's ``nodes`` that broke it; ``silent`` left no last word, ``states`` are SLURM's."""
    failed = failed_nodes(log)
    gone = [
        node
        for node in nodes
        if node in failed or is_gone(states.get(node, "")) or (node in silent and _LEAVING.search(states.get(node, "")))
    ]
    ended_by_themselves = _nodes(_TASK_ENDED.findall(_SRUN_ENDS.split(log)[0])) & {*silent}
    return gone or [node for node in nodes if node in (ended_by_themselves or silent)]


def word(lines: Iterable[str]) -> str:
    """srun's last word that gives a reason; else its last; empty where it said nothing."""
    said = [line.strip() for line in lines if line.strip()]
    return ([line for line in said if not _NO_REASON.match(line)] or said or [""])[-1]


def _nodes(lists: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for text in lists:
        try:
            found |= {*expand_nodes(text)}
        except AllocationError:
            continue
    return found
