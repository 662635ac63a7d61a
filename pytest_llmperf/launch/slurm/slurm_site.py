"""SlurmSite: the nodes of the SLURM job around this process, on which srun starts torchrun for each launch."""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import NoReturn

from pytest_llmperf.launch import outcome, process
from pytest_llmperf.launch import request as requests
from pytest_llmperf.launch.machine import Machine, lease_nodes
from pytest_llmperf.launch.request import LaunchRequest, WarmStart
from pytest_llmperf.launch.script import ScriptLaunch, announced
from pytest_llmperf.launch.site import AllNodesLostError, OutOfTimeError, Say, Site, SiteError, Wanted, Watch, listed
from pytest_llmperf.launch.slurm import controller
from pytest_llmperf.launch.slurm.cluster import Cluster, NodeFacts, Srun, answer, endpoint, find_cluster
from pytest_llmperf.launch.slurm.node_servers import NodeServers
from pytest_llmperf.launch.slurm.step_outcome import Aftermath, Outcome, gather, unreachable
from pytest_llmperf.launch.watch import ProgressReader, with_phases
from pytest_llmperf.records.failure import Failure

# Until all nodes have met: imports from a shared file system may take minutes on the first of many.
_JOIN_SECONDS = 300
# The nodes time out by themselves and leave word of it; srun is ended only when they do not.
_BEYOND_SECONDS = 90.0
# A controller that is started anew answers within seconds, one that reads a large state within minutes.
_CONTROLLER_SECONDS, _ASK_AGAIN_SECONDS = 120.0, 2.0
# For reaping, judging and writing before the job's time is over.
_MARGIN_SECONDS = 30.0
# How long a launch is taken to last before one was seen.
_UNKNOWN_SECONDS = 60.0


class SlurmLauncher:
    def __init__(self, srun: Srun, *, say: Say, servers: NodeServers | None = None) -> None:
        """``servers`` are what launches may begin warm from."""
        self._srun, self._cluster, self._say, self._servers = srun, srun.cluster, say, servers
        self._job = srun.cluster.allocation.job_id
        self._restarts = controller.restarts(self._job)
        self._lost: dict[str, str] = {}
        self._gone: set[str] = set()
        self._said: set[str] = set()
        self._walls: dict[str, float] = {}

    def launch(self, request: LaunchRequest, watch: Watch) -> Outcome:
        """See ``Site``. A launch that its nodes broke is tried again on others; its failure names those lost."""
        first = self._attempt(request, watch)
        if isinstance(first, Aftermath) and self._was_refused(first):
            # A controller that restarts refuses what it would start a moment later.
            self._say(f"{request.spec.id}: srun started nothing ({first.said}); tried once more")
            request = replace(request, folder=request.folder.with_name(f"{request.folder.name}-refused"))
            first = self._attempt(request, watch)
            if isinstance(first, Aftermath) and self._was_refused(first):
                message = f"srun started nothing, though {listed(tuple(first.lost))} would: {first.said}"
                return replace(first.failure, kind="never-started", message=message)
        if not isinstance(first, Aftermath):
            return first
        self._lost |= first.lost
        if self._srun.placed(request.spec.gpus, len(self._left)) is None:
            return self._for_want_of_nodes(first.failure, request)
        self._say(f"{request.spec.id}: {first.failure.message}; tried once more without {listed(tuple(first.lost))}")
        second = self._attempt(replace(request, folder=request.folder.with_name(f"{request.folder.name}-again")), watch)
        if isinstance(second, Aftermath):
            self._lost |= second.lost
            return self._for_want_of_nodes(second.failure, request)
        return second

    def _was_refused(self, aftermath: Aftermath) -> bool:
        """Whether not the nodes but SLURM broke a launch that nobody began."""
        if not aftermath.nobody_began:
            return False
        deadline = time.monotonic() + _CONTROLLER_SECONDS
        while controller.restarts(self._job) is None and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_SECONDS)
        return answer(tuple(aftermath.lost), self._srun.options)

    def _for_want_of_nodes(self, failure: Failure, request: LaunchRequest) -> Failure:
        """``failure`` with the nodes that are lost to the job, where all of its nodes would have been enough."""
        all_nodes = self._cluster.allocation.nodes
        if self._srun.placed(request.spec.gpus, len(all_nodes)) is None:
            return failure
        missing = [name for name in all_nodes if name in self._cluster.lost or name in self._lost]
        self._gone |= {*unreachable([name for name in missing if name not in self._gone])}  # each costs time once
        return replace(failure, lost_nodes=tuple(name for name in missing if name in self._gone))

    @property
    def _left(self) -> list[str]:
        return [node.node for node in self._cluster.nodes if node.node not in self._lost]

    def _attempt(self, request: LaunchRequest, watch: Watch) -> Outcome | Aftermath:
        if (num_nodes := self._srun.placed(request.spec.gpus, len(self._left))) is None:
            unit, gone = "task(s)" if self._srun.on_cpu else "GPU(s)", [*self._cluster.lost, *self._lost]
            why = (
                f"needs {request.spec.gpus} {unit}, the same number on each node; SLURM job {self._job} "
                f"has {len(self._left)} node(s) with {self._srun.per_node} each"
                + (f" left ({listed(gone)} failed)" if gone else "")
            )
            return self._for_want_of_nodes(outcome.refused(request.folder, SiteError(why)), request)
        if request.spec.is_script and num_nodes > 1:
            why = (
                f"needs {num_nodes} nodes: a script's own command starts its ranks on one node, which has "
                f"{self._srun.per_node} here; train it with gpus={self._srun.per_node}"
            )
            return outcome.refused(request.folder, SiteError(why))
        try:
            with ExitStack() as stack:
                with request.meter.waiting():
                    lease = lease_nodes(num_nodes, self._cluster.allocation.key, self._left, self._say)
                    held = stack.enter_context(lease)
                nodes = tuple(node for node in self._cluster.nodes if node.node in held)
                stack.enter_context(announced(request, self._say, self._said))
                return self._run(request, nodes, request.spec.gpus // num_nodes, watch)
        except requests.REFUSALS as error:
            return outcome.refused(request.folder, error)

    def _run(
        self, request: LaunchRequest, nodes: Sequence[NodeFacts], per_node: int, watch: Watch
    ) -> Outcome | Aftermath:
        remaining = self._remaining(request)
        folder, names = request.folder, [node.node for node in nodes]
        step = f"llmperf-{zlib.crc32(str(folder).encode()):08x}"
        progress = ProgressReader(folder / "progress.json", watch)
        requests.write_request(request)
        if script := ScriptLaunch.of(request):
            script.leave()
        ended, offer = None, list[str]()
        try:
            with process.lifeline(folder) as line, request.meter.running() as lap:
                seconds = min(request.timeout_seconds, remaining)
                if self._servers is not None and not script:
                    begun = time.monotonic()
                    offer = self._servers.offer(request, names, self._left)
                    seconds = max(1.0, seconds - (time.monotonic() - begun))
                worker = requests.worker_environment(request, os.environ) | line
                agent = self._agent(request, nodes, per_node, offer, seconds)
                if script:
                    agent[agent.index("--") + 1 :] = script.command
                begin = partial(self._srun.start, step, names, agent, "--input=none", "--wait=60", worker=worker)
                record, log = str(folder / "trace-rank-"), folder / "srun.log"
                ended = process.watch(
                    partial(begin, gpus_per_node=per_node, log=log, record=record),
                    timeout_seconds=seconds + _BEYOND_SECONDS,
                    poll=progress.poll,
                )
        finally:
            if ended is None or ended.timed_out:  # srun was ended, and perhaps too abruptly to end its step
                controller.cancel_step(self._job, step)
        result = gather(folder, request.spec, names, ended, progress.last)
        if offer and self._servers is not None:
            self._servers.note_end(request, names)
        timed_out = isinstance(result, Failure) and result.kind == "timeout"
        if timed_out and remaining < request.timeout_seconds and ended.seconds >= seconds:  # else it made no step
            raise self._out_of_time(f"{request.spec.id} was ended")
        if isinstance(result, Failure | Aftermath):
            return result
        self._walls[request.spec.digest] = ended.seconds
        timed = with_phases(result, lap, progress.read())
        return replace(timed, evidence={**result.evidence, **places(nodes, per_node)})

    def _agent(
        self, request: LaunchRequest, nodes: Sequence[NodeFacts], per_node: int, offer: Sequence[str], seconds: float
    ) -> list[str]:
        """What each node runs: its agent, with torchrun's words."""
        python, folder = self._srun.python(request.python), request.folder
        meeting = ["--standalone", "--nnodes=1"]
        if len(nodes) > 1:
            meeting = [
                *(f"--nnodes={len(nodes)}", f"--rdzv-conf=join_timeout={_JOIN_SECONDS}"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint(nodes[0], folder)}", f"--rdzv-id={folder.name}"),
            ]
        return [
            *(python, "-m", "pytest_llmperf.launch.slurm.node", "agent", str(folder), str(math.ceil(seconds))),
            *offer,
            "--",
            # ``@node@`` becomes the node's name.
            *requests.torchrun_words(replace(request, python=python), meeting, per_node, "logs/@node@"),
        ]

    def _remaining(self, request: LaunchRequest) -> float:
        """Seconds that this launch may take; OutOfTimeError where it needs more, or the job is another start's."""
        restarts = controller.restarts(self._job)
        if None not in (restarts, self._restarts) and restarts != self._restarts:
            # SLURM gave this node up, though it works: what it started now would run beside the new start's launches.
            what = f"{request.spec.id} was not started: SLURM job {self._job} has begun anew, without this node"
            raise OutOfTimeError(what)
        remaining = (controller.end_time(self._job) or math.inf) - time.time() - _MARGIN_SECONDS
        usual = max(self._walls.values(), default=_UNKNOWN_SECONDS)
        needed = request.soak_seconds or self._walls.get(request.spec.digest, usual)
        if remaining < min(needed, request.timeout_seconds):
            raise self._out_of_time(f"{request.spec.id} was not started: it needs about {needed:.0f} s")
        return remaining

    def _out_of_time(self, what: str) -> OutOfTimeError:
        left = max(0.0, (controller.end_time(self._job) or time.time()) - time.time())
        return OutOfTimeError(f"{what}, and SLURM job {self._job} reaches its time limit in {left:.0f} s")


def places(nodes: Sequence[NodeFacts], per_node: int) -> dict[str, str]:
    """Where a launch ran, for its record: a difference may explain another speed."""
    switches = sorted({node.switch for node in nodes if node.switch})
    found = {"slurm_nodes": " ".join(node.node for node in nodes), "ranks_per_node": str(per_node)}
    return found | ({"slurm_switches": " ".join(switches)} if switches else {})


class SlurmSite(Site):
    is_here = False
    for_more = "ask sbatch for more with --nodes and --gres"

    def __init__(self, wanted: Wanted, variables: Mapping[str, str]) -> None:
        self._wanted = wanted
        self.key = controller.job_key(variables)
        self._all_lost: AllNodesLostError | None = None
        self._launcher: SlurmLauncher | None = None
        self._said: set[str] = set()

    @cached_property
    def cluster(self) -> Cluster:
        """The allocation, found fit; raises as ``Site.machine``."""
        if self._all_lost is not None:
            raise self._all_lost  # asked again, they would take as long
        try:
            cluster = find_cluster(self._wanted.slurm)
        except controller.NoNodeAnswersError:
            nodes = controller.Allocation.from_variables(os.environ).nodes
            if unreachable(nodes) != nodes:
                raise
            self._all_lost = AllNodesLostError(f"node {listed(nodes)} failed, and the job has no other")
            raise self._all_lost from None
        cluster.check(on_cpu=self._wanted.gpus == 0)
        return cluster

    @property
    def where(self) -> str:
        return f"in SLURM job {self.cluster.allocation.job_id}"

    def machine(self) -> Machine:
        return self.cluster.machine

    @cached_property
    def _srun(self) -> Srun:
        on_cpu = self._wanted.gpus == 0 or not self.cluster.machine.gpus
        return Srun(cluster=self.cluster, options=self._wanted.slurm, on_cpu=on_cpu)

    @cached_property
    def _servers(self) -> NodeServers | None:
        return None if self._wanted.start == "cold" else NodeServers(self._srun, self._wanted.folder)

    def prepare(self, pythons: Sequence[str], *, on_cpu: bool) -> None:  # noqa: ARG002 - a node has one for itself
        if self._servers is not None:
            self._servers.prepare()

    def warm_start(self, say: Say) -> WarmStart | None:
        start = self._wanted.start
        return None if start == "cold" else WarmStart(None, say, is_required=start == "warm", said=self._said)

    @contextmanager
    def lease(self, *_: object, **__: object) -> Iterator[tuple[()]]:
        yield ()  # each launch leases its nodes

    def launch(self, request: LaunchRequest, watch: Watch, say: Say) -> Outcome:
        if self._launcher is None:  # one for the whole run, which remembers its nodes
            for node in self.cluster.lost:
                say(f"node {node} did not answer and is left out")
            self._launcher = SlurmLauncher(self._srun, say=say, servers=self._servers)
        return self._launcher.launch(request, watch)

    def training_errors(self, *_: object, **__: object) -> NoReturn:
        raise SiteError("this is launched on this machine alone")

    def close(self) -> None:
        servers = self.__dict__.get("_servers")  # asked for only where it was
        if servers is not None:
            servers.close()
