"""Site: where the launches of a run go. This machine (``local``) and a SLURM job's nodes (``slurm/``) are two."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pytest_llmperf.support.formats import first_n
from pytest_llmperf.support.redaction import is_secret

if TYPE_CHECKING:
    from pytest_llmperf.launch.device import Gpu
    from pytest_llmperf.launch.machine import Machine
    from pytest_llmperf.launch.request import LaunchRequest, WarmStart
    from pytest_llmperf.records.failure import Failure, Progress
    from pytest_llmperf.records.launch import Launch
    from pytest_llmperf.records.learning import TrainingErrors

Say: TypeAlias = Callable[[str], None]
Watch: TypeAlias = "Callable[[Progress], None]"


class SiteError(ValueError):
    """Nothing can be launched here, or no figure may come from here; in one line."""


class AllNodesLostError(SiteError):
    """Nothing of it starts any more: another start of the job gets others."""


class OutOfTimeError(Exception):
    """The site's time is over: what is not launched yet must wait for another start."""


def listed(names: Sequence[str]) -> str:
    """Names for a line, the first few of many."""
    return first_n(names, 4)


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What a site's ini file says about how a launch starts there."""

    prefix: tuple[str, ...] = ()
    """Goes before the command on each node: ``singularity exec --nv image.sif``."""
    modules: tuple[str, ...] = ()
    """``module load`` these on each node first."""
    srun: tuple[str, ...] = ()
    python: str = ""
    """The Python on the nodes; empty is the one that runs pytest."""
    scratch: str = ""
    """A folder that each node has for itself; empty is its ``TMPDIR``, else ``/tmp``."""
    cpu_bind: str = "none"
    """``--cpu-bind`` of srun: torchrun's ranks share a task, which may use all CPUs that the job has on the node."""

    def wrapped(self, command: Sequence[str], variables: dict[str, str]) -> list[str]:
        """``command`` as a node runs it: modules first, then the container, then the variables, inside of it. A command
        line is public (``ps``): secrets come by srun's own environment, or not at all."""
        said = [f"{name}={value}" for name, value in sorted(variables.items()) if not is_secret(name, value)]
        words = [*self.prefix, "env", *said, *command]
        if not self.modules:
            return words
        # `module` is a function of the login shell.
        return ["bash", "-lc", f'module load {shlex.join(self.modules)} && exec "$@"', "llmperf", *words]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    gpus: int | None
    """At most; 0 is the CPU, ``None``: all that there are."""
    start: str
    """``auto``, ``warm`` or ``cold``."""
    overlap: bool
    """Whether a launch may begin behind the end of the one before."""
    slurm: SlurmOptions
    folder: Callable[[], Path]
    """Where a run's files are; made when it is first asked for."""


class Site(Protocol):
    """The place of one run's launches."""

    is_here: bool
    """Whether it is this machine: here launches may run side by side, and compare small trainings."""
    key: str
    """Names the run's job through restarts; empty: the run ends for good."""
    for_more: str
    """What somebody does who needs more GPUs."""

    @property
    def where(self) -> str:
        """For a sentence: ``in SLURM job 7``."""

    def machine(self) -> Machine:
        """All of it as one machine; asked once. SiteError where it cannot serve, ValueError where its GPUs cannot."""

    def prepare(self, pythons: Sequence[str], *, on_cpu: bool) -> None:
        """Let servers begin their imports, so that they run beside what comes before the first launch."""

    def warm_start(self, say: Say) -> WarmStart | None:
        """How a launch begins warm; ``None``: it begins cold. ``say`` hears why, where it was to be warm."""

    def lease(
        self, num_gpus: int, gpus: Sequence[Gpu], say: Say, *, shared: bool, wait: Callable[[str], None]
    ) -> AbstractContextManager[tuple[Gpu, ...]]:
        """Hold so many of ``gpus``, none is the CPU; nothing where each launch finds its own. See ``machine``."""

    def launch(self, request: LaunchRequest, watch: Watch, say: Say) -> Launch | Failure:
        """The record, or why there is none; ``watch`` hears of progress. OutOfTimeError: too little time is left."""

    def training_errors(self, request: LaunchRequest, watch: Watch) -> list[TrainingErrors] | Failure:
        """What the small trainings of ``request.parity`` did; where the site ``is_here``."""

    def bad_ends(self) -> Sequence[str]:
        """Once the last launch is over: a line for each that left its record, and ended with an error after it."""
        return ()

    def close(self) -> None:
        """End what runs beside the launches."""
