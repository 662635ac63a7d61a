"""The cluster as this job holds it, and how steps start on its nodes.

Its nodes are asked what they are, once, by a step of their own: ``python -m …cluster`` prints a line of JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pytest_llmperf.launch.device import PASSED_ON, RECORD, RECORDING, VISIBLE, Gpu
from pytest_llmperf.launch.machine import Machine, find_machine
from pytest_llmperf.launch.process import package_path, start
from pytest_llmperf.launch.scratch import SCRATCH
from pytest_llmperf.launch.site import SlurmOptions, listed
from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.slurm.controller import Allocation, AllocationError, NoNodeAnswersError, place
from pytest_llmperf.launch.slurm.step_outcome import word
from pytest_llmperf.support import codec
from pytest_llmperf.support.formats import GIB
from pytest_llmperf.support.redaction import is_secret

#: Begins the answer, among whatever a prolog or a module prints.
MARK = "llmperf-node "
_PROBE_SECONDS = 180.0
# The caller's, whose values a container may replace with its own.
_PASSED_ON = (*PASSED_ON, "LLMPERF_", "GLOO_", "OMP_", "TORCH_", "PYTORCH_", "TRITON_", "UCX_", "FI_")
_PORTS = range(20000, 32000)  # below the ports that Linux hands out by itself


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


def node_name() -> str:
    """SLURM's name of this node."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def switch() -> str:
    """Where in the network this node hangs; empty without a topology plugin."""
    return os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


def find_facts() -> NodeFacts:
    """Ask this node; raises as ``find_machine``."""
    machine, granted = find_machine(), os.environ.get("SLURM_GPUS_ON_NODE", "")
    return NodeFacts(
        node=node_name(),
        host=platform.node(),
        gpus=machine.gpus,
        granted_gpus=int(granted) if granted.isdigit() else 0,
        cpu_name=machine.cpu_name,
        cores=os.cpu_count() or 0,
        switch=switch(),
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes of one allocation, of which those that answered are known."""

    allocation: Allocation
    nodes: tuple[NodeFacts, ...]
    lost: tuple[str, ...] = ()

    @property
    def machine(self) -> Machine:
        """All of it as one machine: its GPUs in the order of the nodes, and as many cores as it has tasks. A node that
        did not answer counts, as one like the others: a case that needs it has to say that it is lost."""
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
        return self._least(self.allocation.tasks_per_node)

    @property
    def cpus_per_node(self) -> int:
        return self._least(self.allocation.cpus_per_node)

    def _least(self, per_node: Sequence[int]) -> int:
        return min(per_node[self.allocation.nodes.index(node.node)] for node in self.nodes)

    def check(self, *, on_cpu: bool) -> None:
        """Raise AllocationError where the nodes differ, or one shows fewer GPUs than the job has there."""
        job = f"SLURM job {self.allocation.job_id}"
        for node in self.nodes:
            if len(node.gpus) < node.granted_gpus and not on_cpu:
                raise AllocationError(
                    f"{job}: node {node.node} shows {len(node.gpus)} GPU(s) where SLURM gave {node.granted_gpus}; "
                    f"look at nvidia-smi there, or leave it out with sbatch --exclude={node.node}"
                )
            if node.gpus and not node.granted_gpus and not on_cpu and controller.has_gpus_to_give(node.node):
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


def find_cluster(options: SlurmOptions) -> Cluster:
    """The allocation around this process, its nodes asked; AllocationError, in one line, where none serves."""
    if shutil.which("srun") is None:
        raise AllocationError(
            "srun is not on PATH here; inside a container it has to be bound in, else start pytest on the node itself, "
            "or use --perf-launcher local"
        )
    allocation = Allocation.from_variables(os.environ)
    output, trouble = _ask(allocation.nodes, options)
    try:  # whatever else was printed, also on their lines
        found = [codec.read(NodeFacts, json.JSONDecoder().raw_decode(said)[0]) for said in output.split(MARK)[1:]]
    except (ValueError, TypeError, KeyError) as error:
        raise AllocationError(f"SLURM job {allocation.job_id}: a node's answer makes no sense ({error})") from None
    answers = {facts.node: facts for facts in found}
    if not (nodes := tuple(answers[name] for name in allocation.nodes if name in answers)):
        python = options.python or sys.executable
        raise NoNodeAnswersError(
            f"SLURM job {allocation.job_id}: no node answered a step that asked what it is ({trouble}); "
            f"try by hand: srun --overlap {shlex.join([*options.srun, *options.wrapped([python, '-V'], {})])}"
        )
    lost = tuple(name for name in allocation.nodes if name not in answers)
    return Cluster(allocation=allocation, nodes=nodes, lost=lost)


def passed_on(inherited: dict[str, str]) -> dict[str, str]:
    """The caller's variables that are said again on the nodes, inside a container too."""
    ours = {name: value for name, value in inherited.items() if name.startswith(_PASSED_ON) and name != VISIBLE}
    return {name: value for name, value in ours.items() if not is_secret(name, value)}


def answer(nodes: Sequence[str], options: SlurmOptions) -> bool:
    """Whether all these nodes start what they are asked to."""
    return _ask(nodes, options)[0].count(MARK) == len(nodes)


def _ask(nodes: Sequence[str], options: SlurmOptions) -> tuple[str, str]:
    """What the nodes print, and srun's last word."""
    asked = [options.python or sys.executable, "-m", "pytest_llmperf.launch.slurm.cluster"]
    words = "--input=none", "--cpus-per-task=1", "--export=ALL"
    command = controller.step_words(nodes, "llmperf-facts", *words, *options.srun)
    try:
        done = controller.run_step([*command, *options.wrapped(asked, {"PYTHONPATH": package_path()})], _PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"nothing within {_PROBE_SECONDS:.0f} s"
    except OSError as error:
        return "", str(error)
    return done.stdout, word(done.stderr.splitlines()) or f"srun ended with {done.returncode}"


@dataclass(frozen=True, kw_only=True)
class Srun:
    cluster: Cluster
    options: SlurmOptions
    on_cpu: bool

    @property
    def per_node(self) -> int:
        return self.cluster.tasks_per_node if self.on_cpu else self.cluster.gpus_per_node

    def placed(self, num_ranks: int, num_nodes: int) -> int | None:
        """On how many nodes they spread evenly; ``None`` where so many do not hold them."""
        return place(num_ranks, self.per_node, num_nodes)

    def python(self, asked: str = sys.executable) -> str:
        """The Python on the nodes, where ``asked`` is wanted."""
        return self.options.python if asked == sys.executable and self.options.python else asked

    def start(  # noqa: PLR0913 - what a step is
        self,
        name: str,
        nodes: Sequence[str],
        command: Sequence[str],
        *options: str,
        worker: Mapping[str, str],
        gpus_per_node: int,
        log: Path,
        record: str = "",
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` once on each of ``nodes``, with the job's CPUs there, as a ``worker``; raises OSError."""
        gres = ["--gres=none"] if self.on_cpu else [f"--gres=gpu:{gpus_per_node}"]
        if not any(node.granted_gpus for node in self.cluster.nodes):
            gres = []  # SLURM gives whole nodes here, and knows nothing of GPUs
        words = f"--cpus-per-task={self.cluster.cpus_per_node}", "--export=ALL", *options, *gres, *self.options.srun
        srun = controller.step_words(nodes, name, *words, cpu_bind=self.options.cpu_bind)
        environment = controller.step_environment(worker)
        # Said past any container: what of the worker's was set by us, and what changes speed of the caller's.
        own = {name: value for name, value in worker.items() if os.environ.get(name) != value}
        variables = {**passed_on(dict(os.environ)), **own}
        if not self.on_cpu:
            for found in (environment, variables):
                found.pop(VISIBLE, None)  # SLURM sets it, on each node its own
            variables = {**RECORDING, **({RECORD: record} if record else {}), **variables}
        if self.options.scratch:
            variables[SCRATCH] = self.options.scratch
        return start([*srun, *self.options.wrapped(command, variables)], environment=environment, log=log, stdin=stdin)


def endpoint(first: NodeFacts, folder: Path) -> str:
    """Where the nodes meet: on the first one, at a port of this launch's own, seen free if that node is this one."""
    start = zlib.crc32(str(folder).encode()) % len(_PORTS)
    candidates = [_PORTS[(start + step) % len(_PORTS)] for step in range(50)]
    is_here = first.host.split(".")[0] == socket.gethostname().split(".")[0]
    port = next((port for port in candidates if not is_here or _is_free(port)), candidates[0])
    return f"{controller.address(first.node)}:{port}"


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        return True
    return False


if __name__ == "__main__":
    # In one piece: several nodes write to the same pipe.
    os.write(sys.stdout.fileno(), f"{MARK}{json.dumps(asdict(find_facts()))}\n".encode())
