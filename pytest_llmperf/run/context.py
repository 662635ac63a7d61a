"""Context: what one run has to run with: settings, hardware, its SLURM job, the folder of its launches.

What costs time is found on first use. Nothing here knows who asked for the run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_llmperf.launch.slurm.allocation import job_key, uses_slurm
from pytest_llmperf.records.calibration import OF_THE_RUN, UNKEPT
from pytest_llmperf.run.errors import RunEndedError, UsageError
from pytest_llmperf.run.folders import new_run_folder
from pytest_llmperf.run.revision import Revision, find_revision
from pytest_llmperf.run.settings import Settings

if TYPE_CHECKING:
    from pytest_llmperf.judge.baseline import Baseline
    from pytest_llmperf.judge.gpu_effects.knowledge import Knowledge
    from pytest_llmperf.judge.noise import Experience
    from pytest_llmperf.judge.stats import Rule
    from pytest_llmperf.launch.machine import Gpu, Machine
    from pytest_llmperf.launch.slurm.cluster import Cluster
    from pytest_llmperf.launch.slurm.launcher import SlurmLauncher
    from pytest_llmperf.launch.slurm.srun import Srun
    from pytest_llmperf.launch.static_steps import StaticSteps
    from pytest_llmperf.records.launch import Launch
    from pytest_llmperf.run.model_flops import ModelFlops
    from pytest_llmperf.run.result_cache import ResultCache
    from pytest_llmperf.run.slurm_job import AllNodesLostError, Job
    from pytest_llmperf.run.small_trainings import SmallTrainings
    from pytest_llmperf.run.warm_starts import WarmStarts
    from pytest_llmperf.settings.train_spec import TrainSpec

#: The run ended before its end and can go on: time limit, preemption, scancel, a lost node. Shells take 75 for
#: "try again later".
UNFINISHED = 75
#: The GPU-hours are used up: another start would change nothing.
OVER_BUDGET = 76

# GPUs that a run which launches nothing may use, where nobody says how many: more than any case asks for.
_ANY = 1_000_000

# A launch that no time is left for is ended at once, and as any other that took too long.
_LEAST_SECONDS = 0.1


class Context:
    """One process's part of a run."""

    def __init__(
        self,
        settings: Settings,
        *,
        rootdir: Path,
        arguments: Sequence[str] = (),
        shared_gpus: Sequence[str] = (),
        is_worker: bool = False,
    ) -> None:
        """``arguments`` tell one run of a SLURM job from its others.

        ``is_worker``: other processes share the run, and ``shared_gpus``, by uuid, where not all are the run's.
        """
        self.settings, self.rootdir, self.arguments = settings, rootdir, tuple(arguments)
        self.shared_gpus, self.is_worker = tuple(shared_gpus), is_worker
        self.notes: list[str] = []
        self.num_gates = 1
        self.has_floors = False
        """Whether a case may be held by its efficiency over the launches of another."""
        self._launcher: SlurmLauncher | None = None
        self._all_lost: AllNodesLostError | None = None
        self._is_charged = False
        self._knowledge: tuple[int, Knowledge] | None = None
        """What is known once so many launches were judged."""
        self._has_told_unkept = False
        self.until = math.inf
        """By when everything has to be over, by ``time.monotonic()``: what runs then is ended."""
        self.unfinished = ""
        """What ended this run before its end."""
        self.ends_with = 0
        """The exit code for that, where none that the run has anyway tells enough."""

    @cached_property
    def result_cache(self) -> ResultCache:
        from pytest_llmperf.run.result_cache import ResultCache

        return ResultCache()

    @cached_property
    def small_trainings(self) -> SmallTrainings:
        from pytest_llmperf.run.small_trainings import SmallTrainings

        return SmallTrainings()

    @cached_property
    def model_flops(self) -> ModelFlops:
        from pytest_llmperf.run.model_flops import ModelFlops

        return ModelFlops()

    @cached_property
    def experience(self) -> Experience:
        """What all baselines of this machine kind show; read once, before anything of this run is recorded."""
        from pytest_llmperf.judge.noise import Experience
        from pytest_llmperf.judge.policy import Policy

        policy = Policy.for_cpu() if self.on_cpu else Policy.for_gpu()
        return Experience.of(self.stored_launches, policy.noise)

    @cached_property
    def stored_baselines(self) -> Sequence[Baseline]:
        """All of this machine kind, as they were when the first was asked for."""
        from pytest_llmperf.judge.store import BaselineStore

        return BaselineStore(self.settings.baselines).baselines(self.machine_kind)

    @cached_property
    def stored_launches(self) -> Sequence[Sequence[Launch]]:
        """Of each of them."""
        return [baseline.launches for baseline in self.stored_baselines]

    @cached_property
    def knowledge_stored(self) -> Knowledge | None:
        """What they show of its GPUs; ``None``: too little to tell GPUs and cases apart, or it is a CPU."""
        from pytest_llmperf.judge.gpu_effects.knowledge import Knowledge

        return None if self.on_cpu or self.settings.against else Knowledge.of(self.stored_launches)

    @property
    def knowledge(self) -> Knowledge | None:
        """The same with what this run has seen so far."""
        stored, launches = self.knowledge_stored, self.result_cache.launches
        if stored is None:
            return None
        if self._knowledge is None or len(launches) != self._knowledge[0]:
            self._knowledge = len(launches), stored.with_seen(launches)
        return self._knowledge[1]

    @cached_property
    def revision(self) -> Revision:
        """Of the tree under rootdir; asked for only where something is recorded."""
        return find_revision(self.rootdir, self.settings.baselines)

    @property
    def rule(self) -> Rule:
        """How strict this run's verdicts are."""
        from pytest_llmperf.judge.stats import Rule

        return Rule.allowing(self.settings.alarms_a_month, self.num_gates, self.settings.max_launches)

    @cached_property
    def cluster(self) -> Cluster | None:
        """The SLURM job whose nodes the launches go to; ``None``: they stay on this machine.

        Raises:
            UsageError: there is none, or no figure may come from it.
            RunEndedError: all of its nodes are lost, and this run may go on in another start.
        """
        settings = self.settings
        if not uses_slurm(settings.launcher, os.environ):
            return None
        from pytest_llmperf.run.slurm_job import AllNodesLostError, hold

        try:
            if self._all_lost is not None:
                raise self._all_lost  # asked again, they would take as long
            cluster = hold(settings.launcher, settings.slurm, settings.gpus)
        except AllNodesLostError as error:
            self._all_lost = error
            if settings.resume and not self.is_worker:  # an exit of xdist's worker is a crash
                raise RunEndedError(str(error), UNFINISHED) from None
            raise UsageError(f"--perf-launcher {settings.launcher}: {error}") from None
        return cluster

    def begin(self, specs: Iterable[TrainSpec] = ()) -> None:
        """There are cases: from here on GPU-hours count, and imports run beside what comes before the first launch, as
        does what is to be known of ``specs`` by then.

        Raises:
            UsageError: see ``cluster`` and ``machine``.
            RunEndedError: see ``cluster``.
        """
        self.check_interpreter()
        if self.settings.static:
            return
        self.charge()
        self.warm_starts.prepare()
        if not (self.is_worker or self.settings.dry_run or self.settings.update == "prune"):  # each worker has its own
            self._prepare_flops(specs)

    def check_interpreter(self) -> None:
        """Where nothing is launched, this Python has what trains.

        Raises:
            UsageError: it has not.
        """
        if not self.settings.static:
            return
        from pytest_llmperf.launch.memory_estimate import PredictionError

        try:
            self.static_steps.check()
        except PredictionError as error:
            raise UsageError(str(error)) from None

    def settle(self, *specs: TrainSpec) -> None:
        """Nothing that may disturb a launch of ``specs``, or make it wait with hardware in its hands, is left to do."""
        self._prepare_flops(specs)
        self.model_flops.settle()

    def _prepare_flops(self, specs: Iterable[TrainSpec]) -> None:
        if not self.on_cpu:
            self.model_flops.prepare(specs, self.machine.gpus[0].name)

    def charge(self) -> None:
        """Let the SLURM job count the GPUs that it holds from now on; on this machine nothing is counted.

        Raises:
            UsageError: see ``cluster``.
            RunEndedError: see ``cluster``.
        """
        if not self._is_charged and self.cluster is not None and self.job is not None:
            self.job.holds(len(self.cluster.machine.gpus))
            self._is_charged = True

    @cached_property
    def job(self) -> Job | None:
        """The SLURM job that launches this run, through its requeues.

        Raises:
            UsageError: there is none, and an option is about it.
        """
        settings = self.settings
        if uses_slurm(settings.launcher, os.environ) and job_key(os.environ):
            from pytest_llmperf.run.slurm_job import Job

            return Job(self.rootdir / ".llmperf", os.environ, self.arguments, resume=settings.resume)
        if settings.resume or (settings.budget_gpu_hours is not None and not settings.dry_run):
            option = "--perf-resume" if settings.resume else "--perf-budget"
            others = "leave it out, or use sbatch"
            if not settings.resume:
                others += ", or add --perf-dry-run, which launches nothing and tells what the run would cost"
            raise UsageError(f"{option}: not in a SLURM job that launches by srun; {others}")
        return None

    @property
    def in_job(self) -> bool:
        """Whether this is a SLURM job's run, also one whose launches stay on its first node: another start can go on.

        Raises:
            UsageError: see ``job``.
        """
        return self.job is not None or bool(job_key(os.environ))

    @property
    def machine(self) -> Machine:
        """Found on first use: a run without a perf test never asks the driver.

        Raises:
            UsageError: fewer GPUs than ``--gpus`` asks for: a nightly job must not go green on a dead GPU. A dry
                run, which never does, goes on.
        """
        return self._found[0]

    @property
    def told(self) -> list[str]:
        """What a reader of the run should know: what was assumed of the machine, where it was asked for, and notes."""
        assumed = self._found[1] if "_found" in self.__dict__ else ""
        return [*filter(None, [assumed]), *self.notes]

    @cached_property
    def _found(self) -> tuple[Machine, str]:
        """The machine, and a line about what of it is assumed."""
        from pytest_llmperf.run.hardware import found

        return found(self.settings, None if self.settings.static else self.cluster)

    def launcher(self, say: Callable[[str], None]) -> SlurmLauncher | None:
        """What launches in the SLURM job, one for the whole run, which remembers its nodes; ``None``: no such job."""
        if self._launcher is None and self.srun is not None and self.job is not None:
            budget, servers = self.settings.budget_gpu_hours, self.warm_starts.on_nodes
            self._launcher = self.job.launcher(self.srun, servers, budget_gpu_hours=budget, say=say)
        return self._launcher

    @cached_property
    def srun(self) -> Srun | None:
        """How steps of the SLURM job start; ``None``: no such job."""
        if self.cluster is None:
            return None
        from pytest_llmperf.launch.slurm.srun import Srun

        return Srun(cluster=self.cluster, options=self.settings.slurm, on_cpu=self.on_cpu)

    @cached_property
    def warm_starts(self) -> WarmStarts:
        """What its launches begin from."""
        from pytest_llmperf.run.warm_starts import WarmStarts

        return WarmStarts(self)

    @cached_property
    def static_steps(self) -> StaticSteps:
        """What fake tensors tell of specs."""
        from pytest_llmperf.launch.static_steps import StaticSteps

        return StaticSteps()

    def close(self) -> None:
        """End what this run keeps beside its launches."""
        if "warm_starts" in self.__dict__:  # else no launch was ever prepared
            self.warm_starts.close()
        if "static_steps" in self.__dict__:
            self.static_steps.close()
        if "model_flops" in self.__dict__:
            self.model_flops.close()

    @property
    def num_gpus(self) -> int:
        """GPUs this run may use; 0 is the CPU."""
        asked = self.settings.gpus
        if self.settings.static:
            return _ANY if asked is None else asked
        return len(self.machine.gpus) if asked is None else min(asked, len(self.machine.gpus))

    @cached_property
    def chosen(self) -> list[str]:
        """By uuid, what the workers of a parallel run share where it may use fewer GPUs than there are; else none."""
        asked = self.settings.gpus
        if self.cluster is not None or not asked or asked >= len(self.machine.gpus):
            return []
        from pytest_llmperf.launch.leases import undisturbed_first

        return [gpu.uuid for gpu in undisturbed_first(self.machine.gpus)[:asked]]

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those of which launches may lease; one process alone takes whichever are free, and never more than asked."""
        return tuple(gpu for gpu in self.machine.gpus if not self.shared_gpus or gpu.uuid in self.shared_gpus)

    def beside(self) -> Context:
        """The same run, for launches at the same time as this one's: with servers of its own, and this one's folder."""
        other = Context(
            self.settings,
            rootdir=self.rootdir,
            arguments=self.arguments,
            shared_gpus=self.shared_gpus,
            is_worker=self.is_worker,
        )
        other.until = self.until
        other.__dict__ |= {"run_folder": self.run_folder, "_found": self._found}
        return other

    @property
    def launch_seconds(self) -> float:
        """What a launch may take that begins now."""
        return max(_LEAST_SECONDS, min(self.settings.timeout_seconds, self.until - time.monotonic()))

    @property
    def memory_bytes(self) -> int:
        """What each rank may hold; 0: whatever the CPU's host has."""
        if self.settings.memory_limit_bytes or self.on_cpu:
            return self.settings.memory_limit_bytes
        return min(gpu.memory_bytes for gpu in self.machine.gpus)

    @property
    def on_cpu(self) -> bool:
        return self.num_gpus == 0

    @property
    def machine_kind(self) -> str:
        """What keys a baseline together with the digest. A limit of memory makes another machine of it."""
        from pytest_llmperf.run.hardware import kind

        return kind(self.settings, self.machine, on_cpu=self.on_cpu)

    def machine_document(self) -> dict[str, Any]:
        """What ``--perf-json`` says of where the run was."""
        gpus = () if self.settings.static else self.machine.gpus[: self.num_gpus]
        return {
            "kind": self.machine_kind,
            "cores": self.machine.cores,
            "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes, "uuid": gpu.uuid} for gpu in gpus],
        }

    def calibrations_unkept(self) -> str:
        """Why calibrations cannot be kept from run to run, the first time that this is asked for since; else empty."""
        if self._has_told_unkept:
            return ""
        try:
            why = (self.run_folder / OF_THE_RUN / UNKEPT).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""
        self._has_told_unkept = True
        return (
            f"calibrations of GPUs cannot be kept in {why}; each run makes its own, some seconds for each GPU "
            "(LLMPERF_CACHE_DIR names another cache)"
        )

    @cached_property
    def run_folder(self) -> Path:
        """Where this run keeps its launches' logs and records: ``.llmperf/`` under rootdir, or a temporary folder."""
        job = job_key(os.environ) if self.cluster else None
        return new_run_folder(self.rootdir / ".llmperf", job)
