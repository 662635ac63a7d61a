"""One launch on this machine: torchrun, cold or warm, its run folder, and what became of it."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pytest_llmperf.launch import hang_report, outcome, process
from pytest_llmperf.launch.disk_space import means_no_room
from pytest_llmperf.launch.forked_agent import ColdStartError, ForkedAgent, LaunchOrder
from pytest_llmperf.launch.health import HealthWatch
from pytest_llmperf.launch.machine import Gpu
from pytest_llmperf.launch.progress_reader import ProgressReader
from pytest_llmperf.launch.scratch import scratch
from pytest_llmperf.launch.server_pool import ServerKey, ServerPool
from pytest_llmperf.launch.stopwatch import Lap, Meter
from pytest_llmperf.records.batch_size_search import Search
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Health, Launch
from pytest_llmperf.records.launch_end import PassingRanges
from pytest_llmperf.records.parity_order import ParityOrder
from pytest_llmperf.records.phases import phases_of
from pytest_llmperf.records.training_errors import TrainingErrors
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.boot_id import boot_id
from pytest_llmperf.support.files import write_text

_PACKAGE = Path(__file__).parents[1]
_PACKAGE_PARENT = _PACKAGE.parent
#: In a launch's folder, where another Python than this one finds this package.
OTHER_PATH = "path"

# What an enclosing launch, torchrun or scheduler step set for its own ranks.
_NOT_INHERITED = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE GROUP_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT LLMPERF_LAUNCHER_BOOT".split()
)


@dataclass(frozen=True)
class WarmStart:
    """From what a launch may begin warm, and what becomes of one that cannot."""

    servers: ServerPool
    say: Callable[[str], None]
    """Told why a launch begins cold, once for each reason."""
    is_required: bool = False
    """Whether a launch that cannot begin warm fails."""
    said: set[str] = field(default_factory=set, compare=False)

    def tell(self, why: str) -> None:
        """Say why a launch begins cold."""
        if why not in self.said:
            self.said.add(why)
            self.say(f"launches begin cold: {why}")

    def cold(self, why: str) -> None:
        """A launch has to begin cold.

        Raises:
            ColdStartError: it must not.
        """
        if self.is_required:
            raise ColdStartError(f"--perf-start warm: it can only begin cold: {why}")
        self.tell(why)


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What to launch, on what, and where to leave its files."""

    spec: TrainSpec
    folder: Path
    """Made by the launcher; holds request, logs and records."""
    gpus: tuple[Gpu, ...]
    """Leased for this launch; empty is the CPU."""
    timeout_seconds: float
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for this launch alone."""
    memory_limit_bytes: int = 0
    """What each rank may hold, where that is less than the card's."""
    search: Search | None = None
    """For ``sizes``: where the search for the largest micro-batch stands."""
    passing: PassingRanges | None = None
    """With which step times it passes, so that it may end; ``None``: its median has to be known."""
    all_steps: bool = False
    """Whether it takes all its steps, whatever is known before."""
    trace: bool = True
    """Whether a few steps are traced after those that are timed."""
    inspect: bool = True
    """Whether one step more is looked at in full, for whether training learns."""
    calibrations: Path | None = None
    """Where the GPUs' calibrations are kept; ``None``: none is asked for."""
    parity: ParityOrder | None = None
    """For ``training_errors``: which small trainings to make."""
    meter: Meter = field(default_factory=Meter, compare=False)
    """Counts while processes of this launch run, and apart from that while it waits for hardware."""
    warm: WarmStart | None = field(default=None, compare=False)
    """``None``: it begins cold."""


class Launcher(Protocol):
    """Starts a launch and waits for it."""

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        """The record, or why there is none; ``watch`` is told of progress while it runs."""


def package_path() -> str:
    """What ``PYTHONPATH`` needs so that another process finds this package."""
    return str(_PACKAGE_PARENT)


#: ``python -m torch.distributed.run``: what follows are torchrun's words.
BEFORE_WORDS = 3


def torchrun_command(request: LaunchRequest) -> list[str]:
    """torchrun on one machine: a rendezvous of its own on a free port, each rank's output in its own file."""
    return [
        *(request.python, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"),
        *(f"--nproc-per-node={request.spec.gpus}", "--max-restarts=0"),
        *(f"--log-dir={request.folder / 'logs'}", "--redirects=3"),
        *("-m", "pytest_llmperf.worker", str(request.folder)),
    ]


class LocalLauncher:
    """Launches on this machine."""

    def __init__(self, command: Callable[[LaunchRequest], list[str]] = torchrun_command) -> None:
        self._command = command

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        """See ``Launcher``; whatever happens, no process of the launch is alive afterwards."""
        run = self._run(request, watch)
        if isinstance(run, Failure):
            return run
        result = outcome.read(request.folder, request.spec, run.ended, run.progress)
        if isinstance(result, Failure):
            return replace(result, health=run.health)
        timed = with_phases(result, run.lap, run.progress)
        return replace(timed, health=run.health, evidence={**result.evidence, "start": run.start})

    def sizes(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> list[outcome.Tried] | Failure:
        """The micro-batch sizes that one process tried as ``request.search`` asks, or why it told of none."""
        run = self._run(request, watch)
        return run if isinstance(run, Failure) else outcome.read_sizes(request.folder, run.ended, run.progress)

    def training_errors(
        self, request: LaunchRequest, watch: Callable[[Progress], None]
    ) -> list[TrainingErrors] | Failure:
        """What the small trainings that ``request.parity`` asks for did, or why nothing is known of them."""
        run = self._run(request, watch)
        if isinstance(run, Failure):
            return run
        errors = outcome.read_training_errors(request.folder, run.ended, run.progress)
        return replace(errors, health=run.health) if isinstance(errors, Failure) else errors

    def _run(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> _Run | Failure:
        folder = request.folder
        progress = ProgressReader(folder / "progress.json", watch)
        try:
            write_request(request)
            with scratch() as place, lifeline(folder) as line, request.meter.running() as lap:
                asked = worker_environment(request, os.environ)
                environment = {**asked, **place.variables, **request.variables, **line}
                with HealthWatch(request.gpus, lambda: folder.glob("rank-*.pid")) as watched:
                    agent = _forked(request, environment, progress.poll)
                    ended = process.watch(
                        lambda: agent or self._started(request, environment),
                        timeout_seconds=request.timeout_seconds,
                        pid_files=lambda: folder.glob("rank-*.pid"),
                        poll=lambda: watched.look(progress.poll()),
                        at_timeout=lambda torchrun: hang_report.ask(folder, torchrun),
                    )
                    watched.look(progress.read())
                    if agent and agent.lost_server:
                        ended = replace(ended, where=", whose fork server died,")
                    health = watched.health()
                place.is_whole = ended.returncode == 0
            return _Run(ended, lap, health, progress.last, "warm" if agent else "cold")
        except ColdStartError as error:
            return Failure(kind="never-started", message=str(error), tail=(), folder=str(folder))
        except OSError as error:
            kind = "unwritable" if means_no_room(error) else "never-started"
            message = f"the launch could not be started ({error})"
            return Failure(kind=kind, message=message, tail=(), folder=str(folder))

    def _started(self, request: LaunchRequest, environment: Mapping[str, str]) -> process.Started:
        return process.start(self._command(request), environment=environment, log=request.folder / "torchrun.log")


@dataclass(frozen=True)
class _Run:
    """A torchrun that was started and has ended, well or not."""

    ended: process.Ended
    lap: Lap
    health: Health
    progress: Progress
    start: str
    """``warm`` or ``cold``."""


def with_phases(launch: Launch, lap: Lap, progress: Progress) -> Launch:
    """``launch`` as its launcher timed it, and where in that time its rank 0 said it was."""
    first_step_seconds = launch.ranks[0].step_seconds[0]
    phases = phases_of(lap.began, lap.seconds, progress.reached, first_step_seconds)
    return replace(launch, wall_seconds=round(lap.seconds, 3), phases=phases)


def _forked(
    request: LaunchRequest, environment: Mapping[str, str], waiting: Callable[[], object]
) -> ForkedAgent | None:
    """The launch's torchrun, begun warm; ``None`` where it has to begin cold.

    Raises:
        ColdStartError: it has to, and must not.
        OSError: its log cannot be written.
    """
    if request.warm is None:
        return None
    order = LaunchOrder(
        torchrun=torchrun_command(request)[BEFORE_WORDS:],
        environment=environment,
        needs=needs(request.spec),
        log=request.folder / "torchrun.log",
    )
    try:
        key = server_key(request.python, os.environ, on_gpu=bool(request.gpus), variables=request.variables)
        return request.warm.servers.launch(key, order, waiting)
    except ColdStartError as error:
        request.warm.cold(str(error))
        return None


def needs(spec: TrainSpec) -> tuple[str, ...]:
    """What ``spec`` makes a rank import beyond what all import."""
    wanted = {
        "liger": spec.liger,
        "fp8": spec.fp8 != "no",
        "flash_attention_2": spec.attention == "flash_attention_2",
        "text": spec.data == "text",
    }
    return (f"family:{spec.architecture.config['model_type']}", *(name for name in wanted if wanted[name]))


def server_key(
    python: str, inherited: Mapping[str, str], *, on_gpu: bool, variables: Mapping[str, str] | None = None
) -> ServerKey:
    """Of the server from which a launch of this process may begin."""
    folder = os.getcwd()  # noqa: PTH109 - a string is wanted
    return ServerKey.of(python, lasting_environment(inherited, variables or {}), folder, on_gpu=on_gpu)


def server_pool(folder: Callable[[], Path], marks: Mapping[str, str] | None = None) -> ServerPool:
    """One for a run; ``folder`` is made when the first server starts. See ``ServerPool`` for ``marks``."""
    return ServerPool(folder, _home, marks)


def _home(python: str, folder: Path) -> str:
    """What ``PYTHONPATH`` needs first so that ``python`` finds this package, and nothing else of ours beside it."""
    if python == sys.executable:
        return package_path()
    place = folder / OTHER_PATH
    if not place.exists():
        place.mkdir()
        (place / _PACKAGE.name).symlink_to(_PACKAGE)
    return str(place)


@contextmanager
def lifeline(folder: Path) -> Iterator[dict[str, str]]:
    """Hold a lock while the launch runs; yields the variables that make the ranks watch it.

    The system lets go of it however this process ends. A pid would say less: before the ranks look, it may be gone,
    and a pid that is not there may as well be one of another container.
    """
    with (folder / "launcher.lock").open("wb") as file:
        variables = {"LLMPERF_LAUNCHER_BOOT": boot_id()}
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks: the ranks watch torchrun alone, as without an id
            variables = {}
        yield variables


def worker_environment(request: LaunchRequest, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of torchrun and its ranks: what was inherited, and what this launch fixes."""
    environment = lasting_environment(inherited, request.variables)
    # An uninstalled checkout works too. Another Python finds this package and nothing else of ours beside it. What the
    # user put on the path is no part of either environment: a fault that hides there must not hit one side alone.
    home = _PACKAGE_PARENT if request.python == sys.executable else request.folder / OTHER_PATH
    python_path = [str(home), *filter(None, [environment.get("PYTHONPATH")])]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in request.gpus)}
    return visible | environment | {"PYTHONPATH": os.pathsep.join(python_path)}


def lasting_environment(inherited: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """What of it is the same for all launches with these ``variables``, whatever their hardware and folder."""
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith("TORCHELASTIC_")
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment["PYTHONUNBUFFERED"] = "1"
    # More threads than cores slow a CPU run down by themselves; on a GPU the host needs few.
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    return environment | dict(variables)


def write_request(request: LaunchRequest) -> None:
    """Make the run folder and leave in it what the worker needs."""
    request.folder.mkdir(parents=True)
    _home(request.python, request.folder)
    spec = request.spec
    content = {
        "spec": spec.to_dict(),
        "model_config": dict(spec.architecture.config),
        "memory_limit_bytes": request.memory_limit_bytes,
        "search": request.search and request.search.to_dict(),
        "passing": request.passing and request.passing.to_dict(),
        "all_steps": request.all_steps,
        "trace": request.trace,
        "inspect": request.inspect,
        "calibrations": str(request.calibrations or ""),
        "parity": request.parity and request.parity.to_dict(),
    }
    write_text(request.folder / "request.json", json.dumps(content, indent=1), lasts=False)
