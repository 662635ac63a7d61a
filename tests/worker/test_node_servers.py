"""A job's nodes with their fork servers: real torchrun on both, on this one host, and an srun that is a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.exact import changes
from pytest_llmperf.launch.fork_servers import ServerPool
from pytest_llmperf.launch.request import LaunchRequest, WarmStart
from pytest_llmperf.launch.site import SlurmOptions
from pytest_llmperf.launch.slurm.cluster import Srun, find_cluster
from pytest_llmperf.launch.slurm.node_servers import NodeServers
from pytest_llmperf.launch.slurm.slurm_site import SlurmLauncher
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from tests.slurm.fakes import FakeSlurm
from tests.waiting import until
from tests.worker.conftest import ColdPair
from tests.worker.launching import ENDLESS
from tests.worker.user import LIGHT_PATH, REPOSITORY

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

SPEC = TrainSpec(model="llama-tiny", gpus=2, micro_batch_size=2, sequence_length=32, steps=5, min_steps=5)


@dataclass
class Job:
    """Two nodes, one rank each."""

    folder: Path
    said: list[str] = field(default_factory=list)
    is_required: bool = False
    _count: int = 0

    def __post_init__(self) -> None:
        options = SlurmOptions()
        srun = Srun(cluster=find_cluster(options), options=options, on_cpu=True)
        self.servers = NodeServers(srun, lambda: self.folder)
        self.launcher = SlurmLauncher(srun, say=self.said.append, servers=self.servers)
        pool = ServerPool(lambda: self.folder)
        self._warm = WarmStart(pool, self.said.append, is_required=self.is_required)

    def launch(
        self, spec: TrainSpec = SPEC, watch: Callable[[Progress], None] = lambda _: None, *, start: str = "warm"
    ) -> Launch | Failure:
        self._count += 1
        warm = self._warm if start == "warm" else None
        run = self.folder / f"run-{self._count}"
        request = LaunchRequest(spec=spec, folder=run, gpus=(), timeout_seconds=240, warm=warm)
        return self.launcher.launch(request, watch)

    @property
    def num_steps(self) -> int:
        """Each of them started servers on its nodes."""
        return len([*self.folder.glob("fork-servers-*")])

    def server(self, node: str) -> psutil.Process:
        (found,) = [process for process in servers(self.folder) if process.environ()["SLURMD_NODENAME"] == node]
        return found


def servers(folder: Path) -> list[psutil.Process]:
    """The nodes' own, of a job in ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_server = words[1:4] == ["-m", "pytest_llmperf.launch.slurm.node", "server"]
            if is_server and str(folder) in " ".join(words) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def _nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        FakeSlurm(tmp_path_factory.mktemp("slurm"), patch).allocate({"n1": {}, "n2": {}})
        yield


@contextmanager
def running(folder: Path) -> Iterator[Job]:
    job = Job(folder)
    yield job
    job.servers.close()
    until(lambda: not servers(folder))


@pytest.fixture
def full(_nodes: None, tmp_path: Path) -> Iterator[Job]:
    """One whose ranks train as users' do."""
    with running(tmp_path) as job:
        yield job


@pytest.fixture
def _light(_nodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that train a small network with plain PyTorch: how a server dies is no matter of what it has imported."""
    monkeypatch.setenv("PYTHONPATH", LIGHT_PATH)


@pytest.fixture
def own(_light: None, tmp_path: Path) -> Iterator[Job]:
    with running(tmp_path) as job:
        yield job


@pytest.fixture(scope="module")
def _shared(_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with running(tmp_path_factory.mktemp("job")) as job:
        yield job


@pytest.fixture
def job(_light: None, _shared: Job) -> Job:
    """For tests after which the next launch begins warm, from these servers or their successors."""
    _shared.said.clear()
    return _shared


@pytest.mark.wide
def test_launches_on_both_nodes_are_forked_and_are_what_a_cold_one_is(full: Job, cold_pair: ColdPair) -> None:
    job, cold = full, cold_pair.record
    warm = [job.launch(cold_pair.spec) for _ in range(2)]
    for launch in warm:
        assert isinstance(launch, Launch), launch
        assert launch.evidence["start"] == "warm"
        assert launch.losses == cold.losses
        # The path of these tests does not come to the nodes.
        assert [each for each in changes([launch], [cold]) if "sitecustomize" not in each] == []
    assert isinstance(warm[-1], Launch)
    assert warm[-1].wall_seconds < cold.wall_seconds  # the first also waits for the imports
    assert cold.evidence["start"] == "cold"
    assert job.said == []
    assert job.num_steps == 1


@pytest.mark.wide
def test_one_that_dies_ends_its_launch_and_the_next_has_others(job: Job) -> None:
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.step > 0 and not killed:
            process = job.server("n2")
            killed.append(process.pid)
            process.send_signal(signal.SIGKILL)

    job.launch()  # where an earlier test ended a server, on a busy machine its successor is late: one begins cold
    job.said.clear()
    failure = job.launch(ENDLESS, kill)
    if not killed:  # where nothing trained in time, on a machine that is busy, nobody has learnt anything
        failure = job.launch(ENDLESS, kill)
    assert killed
    assert isinstance(failure, Failure)
    assert failure.kind == "killed"
    assert failure.message.startswith("the fork server of node n2 died")
    launch = job.launch()
    assert isinstance(launch, Launch), launch
    assert launch.evidence["start"] == "warm"
    assert job.said == []


@pytest.mark.wide
def test_one_that_dies_between_launches_costs_one_its_warm_start(job: Job) -> None:
    alone = replace(SPEC, gpus=1)
    assert isinstance(job.launch(alone), Launch)
    process = job.server("n1")
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    starts = [
        launch.evidence["start"] for launch in (job.launch(alone), job.launch(alone)) if isinstance(launch, Launch)
    ]
    assert starts == ["cold", "warm"]
    (said,) = job.said
    assert said.startswith("launches begin cold: on node n1: its fork server is gone")


def test_where_none_can_begin_it_is_said_once_and_launches_are_cold(own: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own.servers, "_srun", NoModule(own.servers._srun))
    launches = [own.launch(replace(SPEC, gpus=1)) for _ in range(2)]
    assert [launch.evidence["start"] for launch in launches if isinstance(launch, Launch)] == ["cold", "cold"]
    (said,) = own.said
    assert said.startswith("launches begin cold: no fork server began on node n1")


class NoModule:
    """An srun whose nodes have a Python without this package."""

    def __init__(self, srun: Srun) -> None:
        self._srun = srun

    def __getattr__(self, name: str) -> object:
        return getattr(self._srun, name)

    def python(self) -> str:
        return "/bin/false"


@pytest.mark.usefixtures("own")
def test_none_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import time; from pathlib import Path; from tests.worker.test_node_servers import Job\n"
        f"job = Job(Path({str(tmp_path)!r}))\njob.servers.prepare()\ntime.sleep(1000)"
    )
    run = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY)
    try:
        until(lambda: len(servers(tmp_path)) == 2)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    until(lambda: not servers(tmp_path))
