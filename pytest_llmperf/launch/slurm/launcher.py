"""One launch inside a SLURM allocation: srun starts torchrun on as many nodes as the case needs, and waits."""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from pytest_llmperf.launch import process
from pytest_llmperf.launch.disk_space import means_no_room
from pytest_llmperf.launch.leases import lease_nodes
from pytest_llmperf.launch.local import (
    LaunchRequest,
    lifeline,
    torchrun_command,
    with_phases,
    worker_environment,
    write_request,
)
from pytest_llmperf.launch.progress_reader import ProgressReader
from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.slurm.allocation import Placement, listed, place
from pytest_llmperf.launch.slurm.cluster import Cluster, answer, passed_on
from pytest_llmperf.launch.slurm.lost_nodes import unreachable
from pytest_llmperf.launch.slurm.node_agent import SCRATCH
from pytest_llmperf.launch.slurm.node_info import NodeFacts
from pytest_llmperf.launch.slurm.rendezvous import endpoint
from pytest_llmperf.launch.slurm.site_options import SlurmOptions
from pytest_llmperf.launch.slurm.step_outcome import Aftermath, gather
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch

# Until all nodes have met: imports from a shared file system may take minutes on the first of many.
_JOIN_SECONDS = 300
# The nodes time out by themselves and leave word of it; srun is ended only when they do not.
_BEYOND_SECONDS = 90.0
# Left for reaping, judging and writing when the job's time is over.
_MARGIN_SECONDS = 30.0
# What a launch is taken to need before one was seen.
_UNKNOWN_SECONDS = 60.0


class OutOfTimeError(Exception):
    """The job's time, or its budget, is over: what is not launched yet must wait for another."""

    def __init__(self, message: str, *, over_budget: bool) -> None:
        super().__init__(message)
        self.over_budget = over_budget
        """Whether another start of the job would change nothing."""


@dataclass(frozen=True)
class _Step:
    """One srun: where, and how the ranks spread."""

    nodes: tuple[NodeFacts, ...]
    placement: Placement
    endpoint: str
    seconds: float
    name: str


class SlurmLauncher:
    """Launches on the nodes of one allocation."""

    def __init__(
        self,
        cluster: Cluster,
        options: SlurmOptions,
        *,
        on_cpu: bool,
        say: Callable[[str], None],
        budget_ends: float | None = None,
    ) -> None:
        self._cluster, self._options, self._on_cpu, self._say = cluster, options, on_cpu, say
        self._budget_ends = budget_ends
        self._restarts = controller.restarts(cluster.allocation.job_id)
        self._lost: dict[str, str] = {}
        self._gone: set[str] = set()
        self._walls: dict[str, float] = {}

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        """See ``Launcher``. A launch that its nodes broke is tried once more on others, where there are any.

        A failure names the nodes that are lost to the job where the case could run with them.

        Raises:
            OutOfTimeError: the job ends too soon.
        """
        first = self._attempt(request, watch)
        if not isinstance(first, Aftermath):
            return first
        if first.nobody_began and answer(tuple(first.lost), self._options):
            # Not the nodes: srun refused what this launch asked for.
            message = f"srun started nothing, though {listed(tuple(first.lost))} would: {first.said}"
            return replace(first.failure, kind="never-started", message=message)
        self._lost |= first.lost
        names = listed(tuple(first.lost))
        if self._placement(request) is None:
            return self._for_want_of_nodes(first.failure, request)
        self._say(f"{request.spec.id}: {first.failure.message}; tried once more without {names}")
        again = replace(request, folder=request.folder.with_name(f"{request.folder.name}-again"))
        second = self._attempt(again, watch)
        if isinstance(second, Aftermath):
            self._lost |= second.lost
            return self._for_want_of_nodes(second.failure, request)
        return second

    def _for_want_of_nodes(self, failure: Failure, request: LaunchRequest) -> Failure:
        """``failure`` with the nodes that are lost to the job, where all of its nodes would have been enough."""
        all_nodes = self._cluster.allocation.nodes
        if place(request.spec.gpus, self._per_node, len(all_nodes)) is None:
            return failure
        missing = [name for name in all_nodes if name in self._cluster.lost or name in self._lost]
        self._gone |= {*unreachable([name for name in missing if name not in self._gone])}  # each costs time once
        return replace(failure, lost_nodes=tuple(name for name in missing if name in self._gone))

    def _attempt(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure | Aftermath:
        placement = self._placement(request)
        if placement is None:
            return self._for_want_of_nodes(_refused(request, self._what_is_left(request)), request)
        names = [node.node for node in self._cluster.nodes if node.node not in self._lost]
        try:
            with ExitStack() as stack:
                with request.meter.waiting():
                    lease = lease_nodes(placement.num_nodes, self._cluster.allocation.key, names, self._say)
                    held = stack.enter_context(lease)
                nodes = tuple(node for node in self._cluster.nodes if node.node in held)
                return self._run(request, nodes, placement, watch)
        except OSError as error:
            refused = _refused(request, f"the launch could not be started ({error})")
            return replace(refused, kind="unwritable") if means_no_room(error) else refused

    def _run(
        self,
        request: LaunchRequest,
        nodes: tuple[NodeFacts, ...],
        placement: Placement,
        watch: Callable[[Progress], None],
    ) -> Launch | Failure | Aftermath:
        remaining = self._remaining(request)
        folder = request.folder
        step = _Step(
            nodes=nodes,
            placement=placement,
            endpoint=endpoint(nodes[0], folder),
            seconds=min(request.timeout_seconds, remaining),
            name=f"llmperf-{zlib.crc32(str(folder).encode()):08x}",
        )
        progress = ProgressReader(folder / "progress.json", watch)
        write_request(request)
        ended = None
        try:
            with lifeline(folder) as line, request.meter.running() as lap:
                command, environment = self._command(request, step, line), self._environment(request)
                ended = process.watch(
                    lambda: process.start(command, environment=environment, log=folder / "srun.log"),
                    timeout_seconds=step.seconds + _BEYOND_SECONDS,
                    pid_files=lambda: (),  # of ranks on other hosts
                    poll=progress.poll,
                )
        finally:
            if ended is None or ended.timed_out:  # srun was ended, and perhaps too abruptly to end its step
                controller.cancel_step(self._cluster.allocation.job_id, step.name)
        result = gather(folder, request.spec, [node.node for node in nodes], ended, progress.last)
        timed_out = isinstance(result, Failure) and result.kind == "timeout"
        if timed_out and step.seconds < request.timeout_seconds:
            raise self._out_of_time(f"{request.spec.id} was ended")
        if not isinstance(result, Launch):
            return result
        self._walls[request.spec.digest] = ended.seconds
        timed = with_phases(result, lap, progress.read())
        return replace(timed, evidence={**result.evidence, **places(nodes, placement)})

    def _placement(self, request: LaunchRequest) -> Placement | None:
        left = len(self._cluster.nodes) - len(self._lost)
        return place(request.spec.gpus, self._per_node, left)

    @property
    def _per_node(self) -> int:
        return self._cluster.tasks_per_node if self._on_cpu else self._cluster.gpus_per_node

    def _what_is_left(self, request: LaunchRequest) -> str:
        unit = "task(s)" if self._on_cpu else "GPU(s)"
        left = len(self._cluster.nodes) - len(self._lost)
        gone = [*self._cluster.lost, *self._lost]
        return (
            f"needs {request.spec.gpus} {unit}, the same number on each node; SLURM job "
            f"{self._cluster.allocation.job_id} has {left} node(s) with {self._per_node} each"
            + (f" left ({listed(gone)} failed)" if gone else "")
        )

    def _remaining(self, request: LaunchRequest) -> float:
        """Seconds that this launch may take.

        Raises:
            OutOfTimeError: fewer than it is expected to need, or the job is another start's.
        """
        job = self._cluster.allocation.job_id
        restarts = controller.restarts(job)
        if None not in (restarts, self._restarts) and restarts != self._restarts:
            # SLURM gave this node up, though it works: what it started now would run beside the new start's launches.
            what = f"{request.spec.id} was not started: SLURM job {job} has begun anew, without this node"
            raise OutOfTimeError(what, over_budget=False)
        ends = [end for end in (controller.end_time(job), self._budget_ends) if end]
        remaining = min(ends, default=float("inf")) - time.time() - _MARGIN_SECONDS
        needed = self._walls.get(request.spec.digest, max(self._walls.values(), default=_UNKNOWN_SECONDS))
        if remaining < min(needed, request.timeout_seconds):
            raise self._out_of_time(f"{request.spec.id} was not started: it needs about {needed:.0f} s")
        return remaining

    def _out_of_time(self, what: str) -> OutOfTimeError:
        job = self._cluster.allocation.job_id
        end = controller.end_time(job)
        if self._budget_ends is not None and (end is None or self._budget_ends < end):
            return OutOfTimeError(f"{what}, and the GPU-hours of SLURM job {job} are used up", over_budget=True)
        left = max(0.0, (end or time.time()) - time.time())
        return OutOfTimeError(f"{what}, and SLURM job {job} reaches its time limit in {left:.0f} s", over_budget=False)

    def _command(self, request: LaunchRequest, step: _Step, line: Mapping[str, str]) -> list[str]:
        python = self._options.python if request.python == sys.executable and self._options.python else request.python
        variables = self._variables(request, line)
        torchrun = torchrun_words(replace(request, python=python), step.placement, step.endpoint)
        agent = [
            python,
            "-m",
            "pytest_llmperf.launch.slurm.node_agent",
            str(request.folder),
            f"{step.seconds:.0f}",
            "--",
        ]
        return [
            *srun_words(step.placement, [node.node for node in step.nodes], self._cluster.cpus_per_node, self._options),
            *self._generic_resources(step.placement),
            f"--job-name={step.name}",
            *self._options.srun,
            *self._options.wrapped([*agent, *torchrun], variables),
        ]

    def _generic_resources(self, placement: Placement) -> list[str]:
        if not any(node.granted_gpus for node in self._cluster.nodes):
            return []  # SLURM gives whole nodes here, and knows nothing of GPUs
        return ["--gres=none"] if self._on_cpu else [f"--gres=gpu:{placement.ranks_per_node}"]

    def _environment(self, request: LaunchRequest) -> dict[str, str]:
        environment = controller.step_environment(worker_environment(request, os.environ))
        if not self._on_cpu:
            environment.pop("CUDA_VISIBLE_DEVICES", None)
        return environment

    def _variables(self, request: LaunchRequest, line: Mapping[str, str]) -> dict[str, str]:
        """What the launch sets, and what changes speed of the caller's; said past any container."""
        environment = worker_environment(request, os.environ)
        own = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        found = {**passed_on(dict(os.environ)), **own, **line}
        if not self._on_cpu:
            found.pop("CUDA_VISIBLE_DEVICES", None)  # SLURM sets it, on each node its own
            # Where NCCL keeps what it was doing, for a rank that hangs.
            found.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
            found.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            found.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(request.folder / "trace-rank-"))
        if self._options.scratch:
            found[SCRATCH] = self._options.scratch
        return found


def srun_words(placement: Placement, nodes: Sequence[str], cpus: int, options: SlurmOptions) -> list[str]:
    """srun with one task on each of ``nodes``, which has all the CPUs that the job has there."""
    return [
        *("srun", f"--nodes={placement.num_nodes}", f"--ntasks={placement.num_nodes}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(nodes)}", f"--cpus-per-task={cpus}", f"--cpu-bind={options.cpu_bind}"),
        # The lease keeps launches apart. SLURM would let none start on nodes of a step that lost another node, for
        # minutes: to it that step still holds them.
        "--overlap",
        # A node that fails must not take the others' last words with it.
        *("--export=ALL", "--input=none", "--kill-on-bad-exit=0", "--wait=60"),
    ]


def torchrun_words(request: LaunchRequest, placement: Placement, where: str) -> list[str]:
    """torchrun as each node starts it; one node needs no meeting place. ``@node@`` becomes the node's name."""
    folder = request.folder
    if placement.num_nodes == 1:
        return [word.replace(f"{folder}/logs", f"{folder}/logs/@node@") for word in torchrun_command(request)]
    return [
        *(request.python, "-m", "torch.distributed.run", f"--nnodes={placement.num_nodes}"),
        *(f"--nproc-per-node={placement.ranks_per_node}", "--max-restarts=0"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={where}", f"--rdzv-id={folder.name}"),
        f"--rdzv-conf=join_timeout={_JOIN_SECONDS}",
        *(f"--log-dir={folder}/logs/@node@", "--redirects=3"),
        *("-m", "pytest_llmperf.worker", str(folder)),
    ]


def places(nodes: Sequence[NodeFacts], placement: Placement) -> dict[str, str]:
    """Where a launch ran, for its record, and how it began: a difference may explain another speed."""
    switches = sorted({node.switch for node in nodes if node.switch})
    names = " ".join(node.node for node in nodes)
    found = {"slurm_nodes": names, "ranks_per_node": str(placement.ranks_per_node), "start": "cold"}
    return found | ({"slurm_switches": " ".join(switches)} if switches else {})


def _refused(request: LaunchRequest, message: str) -> Failure:
    return Failure(kind="never-started", message=message, tail=(), folder=str(request.folder))
