"""The cluster as this job holds it: its nodes are asked what they are, once, by a step of their own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.launch.local import package_path
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.slurm.allocation import Allocation, AllocationError, NoNodeAnswersError, listed
from pytest_llmperf.launch.slurm.controller import has_gpus_to_give, run_step
from pytest_llmperf.launch.slurm.node_failures import word
from pytest_llmperf.launch.slurm.node_info import MARK, NodeFacts, parse
from pytest_llmperf.launch.slurm.site_options import SlurmOptions
from pytest_llmperf.support.redaction import is_secret

_PROBE_SECONDS = 180.0

# The caller's, whose values a container may replace with its own.
_PASSED_ON = ("LLMPERF_", "NCCL_", "GLOO_", "OMP_", "TORCH_", "PYTORCH_", "TRITON_", "CUDA_", "UCX_", "FI_")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes of one allocation, of which those that answered are known."""

    allocation: Allocation
    nodes: tuple[NodeFacts, ...]
    lost: tuple[str, ...] = ()
    """Nodes of the allocation that did not answer."""

    @property
    def machine(self) -> Machine:
        """All of it as one machine: its GPUs in the order of the nodes, and as many cores as it has tasks.

        A node that did not answer counts, as one like the others: a case that needs it has to say that it is lost.
        """
        first, answered = self.nodes[0], {node.node: node.gpus for node in self.nodes}
        unseen = tuple(replace(gpu, uuid="") for gpu in first.gpus)
        gpus = [gpu for name in self.allocation.nodes for gpu in answered.get(name, unseen)]
        return Machine(
            gpus=tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus)),
            cpu_name=first.cpu_name,
            cores=self.tasks_per_node * len(self.allocation.nodes),
            node_cores=first.cores,
        )

    @property
    def gpus_per_node(self) -> int:
        return len(self.nodes[0].gpus)

    @property
    def tasks_per_node(self) -> int:
        return min(self._of(node)[0] for node in self.nodes)

    @property
    def cpus_per_node(self) -> int:
        return min(self._of(node)[1] for node in self.nodes)

    def check(self, *, on_cpu: bool) -> None:
        """Refuse what no figure may come from.

        Raises:
            AllocationError: the nodes differ, or a node shows fewer GPUs than the job has there.
        """
        job = f"SLURM job {self.allocation.job_id}"
        for node in self.nodes:
            if len(node.gpus) < node.granted_gpus and not on_cpu:
                raise AllocationError(
                    f"{job}: node {node.node} shows {len(node.gpus)} GPU(s) where SLURM gave {node.granted_gpus}; "
                    f"look at nvidia-smi there, or leave it out with sbatch --exclude={node.node}"
                )
            if node.gpus and not node.granted_gpus and not on_cpu and has_gpus_to_give(node.node):
                raise AllocationError(
                    f"{job} was given no GPU, though node {node.node} shows {len(node.gpus)}: they may be another "
                    f"job's; ask for them with sbatch --gres=gpu:{len(node.gpus)}, or use the CPU with --gpus 0"
                )
        kinds = {kind: [n.node for n in self.nodes if n.kind == kind] for kind in (n.kind for n in self.nodes)}
        if len(kinds) > 1:
            told = "; ".join(f"{listed(names)}: {kind}" for kind, names in kinds.items())
            raise AllocationError(
                f"{job} holds nodes of different kinds ({told}), whose figures must not mix; "
                "ask for one kind with sbatch --constraint, --gres=gpu:TYPE:N or --exclude"
            )

    def _of(self, node: NodeFacts) -> tuple[int, int]:
        at = self.allocation.nodes.index(node.node)
        return self.allocation.tasks_per_node[at], self.allocation.cpus_per_node[at]


def find_cluster(options: SlurmOptions) -> Cluster:
    """The allocation around this process, its nodes asked.

    Raises:
        AllocationError: there is none, srun is missing, or no node answers; in one line.
    """
    if shutil.which("srun") is None:
        raise AllocationError(
            "srun is not on PATH here; inside a container it has to be bound in, else start pytest on the node itself, "
            "or use --perf-launcher local"
        )
    allocation = Allocation.of(os.environ)
    output, trouble = _ask(allocation.nodes, options)
    try:
        answers = {facts.node: facts for facts in parse(output)}
    except (ValueError, TypeError, KeyError) as error:
        raise AllocationError(f"SLURM job {allocation.job_id}: a node's answer makes no sense ({error})") from None
    nodes = tuple(answers[name] for name in allocation.nodes if name in answers)
    if not nodes:
        raise NoNodeAnswersError(
            f"SLURM job {allocation.job_id}: no node answered a step that asked what it is ({trouble}); "
            f"try by hand: srun --overlap {shlex.join([*options.srun, *options.wrapped([_python(options), '-V'], {})])}"
        )
    return Cluster(
        allocation=allocation,
        nodes=nodes,
        lost=tuple(name for name in allocation.nodes if name not in answers),
    )


def passed_on(inherited: dict[str, str]) -> dict[str, str]:
    """The caller's variables that are said again on the nodes, inside a container too."""
    return {
        name: value
        for name, value in inherited.items()
        if name.startswith(_PASSED_ON) and not is_secret(name, value) and name != "CUDA_VISIBLE_DEVICES"
    }


def answer(nodes: Sequence[str], options: SlurmOptions) -> bool:
    """Whether all these nodes start what they are asked to."""
    return _ask(nodes, options)[0].count(MARK) == len(nodes)


def _ask(nodes: Sequence[str], options: SlurmOptions) -> tuple[str, str]:
    """What the nodes print, and srun's last word."""
    size = len(nodes)
    command = [
        *("srun", f"--nodes={size}", f"--ntasks={size}", "--ntasks-per-node=1", "--cpus-per-task=1"),
        f"--nodelist={','.join(nodes)}",
        # Beside any step that runs already: each process of a parallel pytest asks.
        *("--overlap", "--export=ALL", "--input=none", "--job-name=llmperf-facts", "--cpu-bind=none"),
        *("--kill-on-bad-exit=0", *options.srun),
        *options.wrapped(
            [_python(options), "-m", "pytest_llmperf.launch.slurm.node_info"], {"PYTHONPATH": package_path()}
        ),
    ]
    try:
        done = run_step(command, _PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"nothing within {_PROBE_SECONDS:.0f} s"
    except OSError as error:
        return "", str(error)
    return done.stdout, word(done.stderr.splitlines()) or f"srun ended with {done.returncode}"


def _python(options: SlurmOptions) -> str:
    return options.python or sys.executable
