"""A launch as it is asked for: what to train, on what and for how long; its files, command and environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from pytest_llmperf.launch.device import VISIBLE, Gpu, shown
from pytest_llmperf.launch.fork_servers import ColdStartError, ForkedAgent, LaunchOrder, ServerKey, ServerPool, needs
from pytest_llmperf.launch.process import home_of_package, python_path
from pytest_llmperf.launch.watch import Former, Meter
from pytest_llmperf.records.calibration import OF_THE_RUN, UNKEPT
from pytest_llmperf.records.failure import COMPARING, FAILED, STEPS, Failure
from pytest_llmperf.records.launch import SOAK_FILE
from pytest_llmperf.records.ranks import Asked
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec, lacks_rows
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import cache_folder, text_of, write_text

# What an enclosing launch, torchrun or scheduler step set for its own ranks.
_NOT_INHERITED = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE GROUP_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT LLMPERF_LAUNCHER_BOOT".split()
)
#: ``python -m torch.distributed.run``: what follows are torchrun's words.
BEFORE_WORDS = 3
#: Why a launch could not be started, where that is no failure of what it runs.
REFUSALS = (ColdStartError, OSError)

# More threads than cores slow a CPU run down; on a GPU the host needs few. A script keeps its own number.
_OURS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, kw_only=True)
class LaunchRequest(Asked):
    spec: Spec
    folder: Path
    """Made by the launcher; holds request, logs and records."""
    gpus: tuple[Gpu, ...]
    """Leased for this launch; empty is the CPU."""
    timeout_seconds: float
    root: Path = Path()
    """The run's, beside which a script's folder is named."""
    tree: Path | None = None
    """That folder as it was at another revision, in whose place a script runs."""
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    soak_seconds: float = 0.0
    """For how long it takes steps, until it is ended; 0: it takes those of its spec."""
    calibrations: Path | None = None
    """Where the GPUs' calibrations are kept; ``None``: none is asked for."""
    meter: Meter = field(default_factory=Meter, compare=False)
    """Counts while processes of this launch run, and apart from that while it waits for hardware."""
    warm: WarmStart | None = field(default=None, compare=False)
    """``None``: it begins cold."""
    former: Former | None = field(default=None, compare=False)
    """Behind whose end it may begin, and which it becomes; ``None``: it overlaps with none."""

    def calibrating(self) -> LaunchRequest:
        return replace(self, calibrations=cache_folder("calibrations"))

    @property
    def takes(self) -> str:
        """What its seconds are of, where no record of it tells."""
        return COMPARING if self.parity else STEPS if self.soak_seconds else FAILED


@dataclass(frozen=True)
class WarmStart:
    """From where a launch may begin warm, and what becomes of one that cannot."""

    servers: ServerPool | None
    """This machine's; ``None`` where a site has others on its nodes."""
    say: Callable[[str], None]
    """Told why a launch begins cold, once for each reason."""
    is_required: bool = False
    said: set[str] = field(default_factory=set, compare=False)

    def agent(
        self, request: LaunchRequest, environment: Mapping[str, str], waiting: Callable[[], object]
    ) -> ForkedAgent | None:
        """This machine's torchrun, begun warm; ``None`` where it has to begin cold. Raises as ``cold``, and OSError."""
        spec = request.spec
        if self.servers is None or not isinstance(spec, TrainSpec):
            return None
        key = server_key(request.python, os.environ, on_gpu=bool(request.gpus), variables=request.variables)
        words, log = torchrun_command(request)[BEFORE_WORDS:], request.folder / "torchrun.log"
        order = LaunchOrder(torchrun=words, environment=environment, needs=needs(spec), log=log)
        try:
            return self.servers.launch(key, order, waiting)
        except ColdStartError as error:
            self.cold(str(error))
            return None

    def cold(self, why: str) -> None:
        """Say why a launch has to begin cold; ColdStartError where it must not."""
        if self.is_required:
            raise ColdStartError(f"--perf-start warm: it can only begin cold: {why}")
        self.tell(why)

    def tell(self, why: str) -> None:
        if why not in self.said:
            self.said.add(why)
            self.say(f"launches begin cold: {why}")


def refused_early(spec: Spec) -> Failure | None:
    """The failure of what is known to be refused by its ranks, before anything is launched."""
    why = lacks_rows(spec) if isinstance(spec, TrainSpec) else ""
    return Failure(kind="refused", message=why, tail=(), folder="") if why else None


def torchrun_command(request: LaunchRequest) -> list[str]:
    """torchrun on one machine: a rendezvous of its own on a free port, each rank's output in its own file."""
    return torchrun_words(request, ["--standalone", "--nnodes=1"], request.spec.gpus, "logs")


def torchrun_words(request: LaunchRequest, meeting: Sequence[str], ranks: int, logs: str) -> list[str]:
    """torchrun with so many ``ranks`` here, which meets its like by the options ``meeting``; ``logs``: a folder."""
    return [
        *(request.python, "-m", "torch.distributed.run", *meeting),
        *(f"--nproc-per-node={ranks}", "--max-restarts=0"),
        *(f"--log-dir={request.folder / logs}", "--redirects=3"),
        *("-m", "pytest_llmperf.worker", str(request.folder)),
    ]


def server_key(
    python: str, inherited: Mapping[str, str], *, on_gpu: bool, variables: Mapping[str, str] | None = None
) -> ServerKey:
    folder = os.getcwd()  # noqa: PTH109 - a string is wanted
    return ServerKey.for_rank(python, lasting_environment(inherited, variables or {}), folder, on_gpu=on_gpu)


def worker_environment(request: LaunchRequest, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of torchrun and its ranks: what was inherited, and what this launch fixes."""
    environment = lasting_environment(inherited, request.variables, {} if request.spec.is_script else _OURS)
    # An uninstalled checkout works too. Another Python finds this package and nothing else of ours beside it. What the
    # user put on the path is no part of either environment: a fault that hides there must not hit one side alone.
    home = home_of_package(request.python, request.folder)
    visible = shown(request.gpus, by_index=request.spec.reads_gpu_numbers)
    return {**environment, **visible, **request.variables, **python_path(home, environment)}


def lasting_environment(
    inherited: Mapping[str, str], variables: Mapping[str, str], defaults: Mapping[str, str] = _OURS
) -> dict[str, str]:
    """What is the same for all launches with these ``variables``, whatever their hardware and folder."""
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith("TORCHELASTIC_")
    }
    environment.pop(VISIBLE, None)
    environment["PYTHONUNBUFFERED"] = "1"
    return {**defaults, **environment, **variables}


def write_request(request: LaunchRequest) -> None:
    """Make the run folder and leave in it what the worker needs."""
    request.folder.mkdir(parents=True)
    spec = request.spec
    content = {
        "spec": spec.to_dict(),
        "model_config": dict(spec.architecture.config) if isinstance(spec, TrainSpec) else {},
        "calibrations": str(request.calibrations or ""),
        **{one.name: codec.plain(getattr(request, one.name)) for one in fields(Asked)},
    }
    if spec.is_script:
        content["root"] = str(request.tree or request.root)
    write_text(request.folder / "request.json", json.dumps(content, indent=1), lasts=False)
    if request.soak_seconds:
        write_text(request.folder / SOAK_FILE, json.dumps(request.soak_seconds), lasts=False)


def unkept_calibrations(run: Path) -> str:
    """Where calibrations of a run in this folder could not be kept, and why; empty where they could."""
    return text_of(run / OF_THE_RUN / UNKEPT).strip()
