"""Lost nodes: those of a job that start nothing any more, whatever SLURM still calls them.

A node that fails is given up after ``SlurmdTimeout``, five minutes as SLURM comes. Until then it looks as it did.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from pytest_llmperf.launch.slurm import controller, node_failures

# srun tells of a node whose slurmd is gone after 11 s; of one that hangs, never.
_ASK_SECONDS = 90.0
_STEP = "llmperf-alive"


def unreachable(nodes: Sequence[str]) -> tuple[str, ...]:
    """Those of ``nodes`` that fail at a step which needs nothing: no container, no Python, no shared folder.

    A node that starts it is as good as another start of the job would find it.
    """
    states = controller.node_states(nodes) if nodes else {}
    gone = {node for node in nodes if node_failures.is_gone(states.get(node, ""))}
    asked = [node for node in nodes if node not in gone]  # for a step with one that is down, srun would wait
    silent = _silent(asked)
    return tuple(node for node in nodes if node in gone or node in silent)


def _silent(nodes: Sequence[str]) -> set[str]:
    if not nodes:
        return set()
    size = len(nodes)
    command = [
        *("srun", f"--nodes={size}", f"--ntasks={size}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"),
        *("--overlap", "--input=none", f"--job-name={_STEP}", "--cpu-bind=none", "--kill-on-bad-exit=0"),
        *("printenv", "SLURMD_NODENAME"),
    ]
    try:
        done = controller.run_step(command, _ASK_SECONDS)
    except subprocess.TimeoutExpired as error:
        controller.cancel_step(os.environ.get("SLURM_JOB_ID", ""), _STEP)
        return {*nodes} - {*(error.stdout or b"").decode(errors="replace").split()}
    except OSError:
        return set()  # nobody could be asked
    return node_failures.failed_nodes(done.stderr)
