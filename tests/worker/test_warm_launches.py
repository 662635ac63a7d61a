"""Warm launches under the real torchrun: what they share with cold ones, and what becomes of them when things break."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.exact import changes
from pytest_llmperf.launch import fork_servers
from pytest_llmperf.launch.fork_servers import ServerPool
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest, WarmStart
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support import codec
from tests.waiting import until
from tests.worker import launching
from tests.worker.conftest import ColdPair
from tests.worker.import_patch import LIGHT_TOO, after_import
from tests.worker.launching import ENDLESS
from tests.worker.user import LIGHT_PATH, REPOSITORY

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

SPEC = TrainSpec(model="llama-tiny", micro_batch_size=2, sequence_length=32, steps=5, min_steps=5, warmup_steps=1)


@dataclass
class Warm:
    """A run that launches warm where it can, and what it was told where it could not."""

    folder: Path
    said: list[str] = field(default_factory=list)
    is_required: bool = False
    shared: tuple[ServerPool, Path] | None = None
    """Another run's servers, and where their logs are; it has its own otherwise."""
    pool: ServerPool = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        home = Path(tempfile.mkdtemp(dir=self.folder))
        self.pool, self._home = self.shared or (ServerPool(lambda: home), home)
        self._warm = WarmStart(self.pool, self.said.append, is_required=self.is_required)

    def launch(
        self,
        spec: TrainSpec = SPEC,
        watch: Callable[[Progress], None] = lambda _: None,
        limit: float = 240.0,
        *,
        start: str = "warm",
    ) -> Any:
        self._count += 1
        request = LaunchRequest(
            spec=spec,
            folder=self.run,
            gpus=(),
            timeout_seconds=limit,
            warm=self._warm if start == "warm" else None,
        )
        return LocalLauncher().launch(request, watch)

    @property
    def run(self) -> Path:
        """The folder of the last launch."""
        return self.folder / f"run-{self._count}"

    @property
    def num_servers(self) -> int:
        """So many were started until now."""
        return len([*self._home.glob("fork-server-*")])

    @property
    def server(self) -> psutil.Process:
        """The one that is alive."""
        (found,) = self.pool._servers.values()
        return psutil.Process(found.pid)

    @property
    def branch(self) -> psutil.Process:
        """Of that server the one that forks the launches."""
        (found,) = self.server.children()
        return found


@pytest.fixture
def shared(tmp_path: Path) -> Warm:
    """For tests that leave the server as it was."""
    return Warm(tmp_path, shared=launching.shared_pool())


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Warm]:
    """For those that do not: servers of their own, and ranks that train a small network with plain PyTorch."""
    monkeypatch.setenv("PYTHONPATH", LIGHT_PATH)
    own = Warm(tmp_path)
    yield own
    own.pool.close()
    assert survivors(tmp_path) == []


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("**/rank-*.pid")]


def survivors(folder: Path) -> list[psutil.Process]:
    """Ranks of launches in ``folder``, and fork servers of this process but the shared ones."""
    found, shared = [], launching.shared_processes()
    for process in psutil.process_iter():
        try:
            is_server = "pytest_llmperf.worker.warm.fork_server" in process.cmdline()
            # Other tests on this host have servers too; leases are this session's own.
            is_ours = is_server and process.environ().get("LLMPERF_LEASE_DIR") == os.environ["LLMPERF_LEASE_DIR"]
            is_ours = is_ours and process.pid not in shared
            if (process.pid in pids(folder) or is_ours) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def once(act: Callable[[], object]) -> Callable[[Progress], None]:
    """Act as soon as the ranks train."""
    done: list[object] = []

    def watch(progress: Progress) -> None:
        if progress.step > 0 and not done:
            done.append(act())

    return watch


# A rank that writes down what it has been given, and trains nothing.
LOOKS = """
import gc, json, os, psutil, signal, sys, threading
from pathlib import Path
import pytest_llmperf.worker.__main__ as worker
import pytest_llmperf.worker.imports as imports
{more}

def main(folder):
    import random, numpy, torch
    drawn = [random.random(), float(numpy.random.rand()), torch.initial_seed()]
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    files = [str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink() and int(p.name) > 2]
    words = dict(
        environment=dict(os.environ), drawn=drawn, files=files, threads=len(os.listdir("/proc/self/task")),
        signals=[int(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)],
        leads=os.getsid(0) == os.getpid(), arguments=sys.argv, num_threads=torch.get_num_threads(),
        of_files=psutil.Process().memory_info().shared, cuda=torch.cuda.is_initialized(),
        frozen=gc.get_freeze_count(), looked_at=len(imports.LOOKED_AT),
    )
    os.environ["LEFT_BEHIND"] = "by a rank"
    (folder / f"seen-{{os.environ['RANK']}}.json").write_text(json.dumps(words))

worker.main = main
"""


def look(folder: Path, monkeypatch: pytest.MonkeyPatch, *, more: str = "") -> None:
    """Let servers that start from now on fork ranks that only look."""
    home = folder / "site"
    home.mkdir(exist_ok=True)
    (home / "sitecustomize.py").write_text(LOOKS.format(more=more))
    monkeypatch.setenv("PYTHONPATH", f"{home}:{REPOSITORY}")


# For servers whose ranks only look: a second of imports each, and not six.
LITTLE = f"""
{LIGHT_TOO}
import pytest_llmperf.worker.imports as preload
preload.EVERY_RANK = ("torch.distributed.run", "pytest_llmperf.worker.__main__")
preload.import_needs = lambda needs: None
"""


def seen(folder: Path, rank: int = 0) -> Any:
    return json.loads((folder / f"seen-{rank}.json").read_text())


class TestTheSame:
    def test_a_warm_launch_trains_as_a_cold_one(self, shared: Warm, cold_pair: ColdPair) -> None:
        spec, cold = cold_pair.spec, cold_pair.record
        first, second = shared.launch(spec), shared.launch(spec)
        assert (cold.evidence["start"], first.evidence["start"], second.evidence["start"]) == ("cold", "warm", "warm")
        for launch in (first, second):
            assert launch.losses == cold.losses
            assert launch.tokens_per_step == cold.tokens_per_step
            assert {**launch.evidence, "start": "cold"} == cold.evidence
            assert launch.environment == cold.environment
            # What the canary has freed is given back before the training or after it, warm and cold.
            assert launch.peak_reserved_bytes == pytest.approx(cold.peak_reserved_bytes, rel=0.1, abs=16 * 2**20)
            assert changes([launch], [cold]) == ()
            assert launch.differences(cold) == ()

    @pytest.mark.wide
    def test_the_phases_of_both_add_up_to_what_a_stopwatch_says(self, shared: Warm, cold_pair: ColdPair) -> None:
        shared.launch()  # the server has imported what it needs
        began = time.monotonic()
        warm = shared.launch(cold_pair.spec)
        cold = cold_pair.record, cold_pair.seconds
        for start, (launch, seconds), most in (("cold", cold, 60.0), ("warm", (warm, time.monotonic() - began), 0.1)):
            phases, steps = launch.phases, launch.ranks[0].step_seconds
            assert list(phases) == ["start", "imports", "model", "first_step", "steps", "trace", "inspection", "end"]
            assert min(phases.values()) >= 0
            assert sum(phases.values()) == pytest.approx(launch.wall_seconds, abs=0.002)
            assert sum(phases.values()) == pytest.approx(seconds, abs=0.3)
            assert phases["imports"] < most, "a warm rank has imported everything"
            assert phases["first_step"] == pytest.approx(steps[0], abs=0.002)
            assert sum(steps[1:]) <= phases["steps"] + 0.002 < sum(steps[1:]) + 0.5
            assert phases["model"] > 0
            assert launch.evidence["start"] == start

    @pytest.mark.wide
    def test_a_family_that_another_launch_imported_is_not_in_the_record(
        self, shared: Warm, cold_pair: ColdPair
    ) -> None:
        other = TrainSpec(**{**SPEC.to_dict(), "model": "opt-tiny"})
        shared.launch(other)
        assert shared.launch().evidence["setup"]["sources"] == cold_pair.record.evidence["setup"]["sources"]

    def test_a_rank_that_hangs_is_named_with_its_stack(self, shared: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLMPERF_INJECT", "hang=3 rank=1")
        before = shared.num_servers
        failure = shared.launch(ENDLESS, limit=12.0)
        assert (failure.kind, failure.rank) == ("timeout", 1)
        assert re.search(r"step 3 of 100000: rank 1 in _hang \(training\.py:\d+\); rank 0 in ", failure.message)
        assert failure.tail[0].endswith(" in _hang")
        assert len([*shared.run.glob("trace-rank-?")]) == 2, "torch's flight recorder, of gloo too"
        assert pids_alive(shared.run) == []
        assert shared.num_servers == max(before, 1), "what a rank looks at when it needs it starts no other server"

    def test_a_record_of_before_has_no_start_and_is_no_change(self, shared: Warm) -> None:
        now = shared.launch()
        assert isinstance(now, Launch)
        evidence = {name: value for name, value in now.evidence.items() if name != "start"}
        before = codec.read(Launch, {**codec.plain(now), "evidence": evidence})
        assert changes([now], [before]) == ()
        assert changes([before], [now]) == ()


# What a rank does in place of hanging.
ENDS = """
    import os, sys
    def end():
        if sys._getframe(1).f_locals["step"] == 3:
            os._exit(0)
        raise RuntimeError("no such luck")
    module._hang = end"""


class TestKilled:
    def test_a_rank(self, shared: Warm) -> None:
        kill = once(lambda: os.kill(int((shared.run / "rank-1.pid").read_text()), signal.SIGKILL))
        failure = shared.launch(ENDLESS, kill)
        assert (failure.kind, failure.rank) == ("killed", 1)
        assert "rank 1 was ended by SIGKILL" in failure.message
        assert pids_alive(shared.run) == []
        assert shared.launch().evidence["start"] == "warm"

    def test_torchruns_agent(self, shared: Warm) -> None:
        def agent() -> psutil.Process:
            found = psutil.Process(int((shared.run / "rank-0.pid").read_text())).parent()
            assert found is not None
            return found

        failure = shared.launch(ENDLESS, once(lambda: agent().kill()))
        assert failure.kind == "killed"
        assert "torchrun was ended by SIGKILL" in failure.message
        assert pids_alive(shared.run) == []
        assert shared.launch().evidence["start"] == "warm"

    @pytest.fixture(scope="class")
    def ending(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
        """Launches of one server whose ranks, where they were to hang, end with 0 in step 3 and fail later."""
        folder = tmp_path_factory.mktemp("ending")
        ends = after_import("pytest_llmperf.observe.training", ENDS)
        (folder / "sitecustomize.py").write_text(ends + LIGHT_TOO)
        warm = Warm(folder)
        yield warm
        warm.pool.close()

    @pytest.mark.wide
    def test_ranks_that_end_themselves_with_0_are_told_as_in_a_cold_launch(
        self, ending: Warm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", f"{ending.folder}:{REPOSITORY}")
        monkeypatch.setenv("LLMPERF_INJECT", "hang=3")
        spec = TrainSpec(**{**SPEC.to_dict(), "gpus": 2})
        told = []
        for start in ("cold", "warm"):
            failure = ending.launch(spec, limit=60.0, start=start)
            assert failure.message.startswith("the ranks ended well and left no usable launch.json")
            told.append((failure.kind, failure.rank, failure.message.replace(ending.run.name, "run")))
        assert told[0] == told[1]
        assert ending.said == []
        monkeypatch.delenv("LLMPERF_INJECT")
        assert ending.launch(spec).evidence["start"] == "warm"
        assert ending.num_servers == 1

    def test_a_failure_is_told_in_the_same_words_as_in_a_cold_launch(
        self, ending: Warm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", f"{ending.folder}:{REPOSITORY}")
        monkeypatch.setenv("LLMPERF_INJECT", "hang=4")
        cold = ending.launch(limit=60.0, start="cold")
        words = next((ending.run / "logs").glob("**/0/stderr.log")).read_text().splitlines()[-1]
        assert words.endswith("RuntimeError: no such luck")
        warm = ending.launch(limit=60.0)
        assert isinstance(warm, Failure)
        assert (warm.kind, warm.rank, warm.message) == (cold.kind, cold.rank, cold.message)
        assert warm.message == "rank 0: RuntimeError: no such luck"
        assert warm.tail[-1] == cold.tail[-1]
        assert words in next((ending.run / "logs").glob("**/0/stderr.log")).read_text()
        assert "Root Cause (first observed failure)" in (ending.run / "torchrun.log").read_text()

    def test_ctrl_c_ends_the_launch_and_the_next_is_warm(self, shared: Warm) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            shared.launch(ENDLESS, once(interrupt))
        assert pids_alive(shared.run) == []
        assert shared.launch().evidence["start"] == "warm"


class TestFresh:
    @pytest.fixture(scope="class")
    def looking(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
        """Launches of one server, whose ranks only look; an import of all of them sets a variable."""
        with pytest.MonkeyPatch.context() as patch:
            folder = tmp_path_factory.mktemp("looking")
            patch.delenv(
                "TORCHINDUCTOR_CACHE_DIR", raising=False
            )  # torch sets it in whoever compiles, as tests here do
            sets = "import os; os.environ['SET_BY'] = module.__name__"
            look(folder, patch, more=after_import("pytest_llmperf.worker.recipes.huggingface.trainer", sets))
            patch.setenv("OMP_NUM_THREADS", "2")
            warm = Warm(folder)
            yield warm
            warm.pool.close()

    def test_a_rank_begins_as_a_fresh_process(self, looking: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
        runs = []
        for inject in ("slow=0.1", ""):
            monkeypatch.setenv("LLMPERF_INJECT", inject)
            looking.launch(TrainSpec(**{**SPEC.to_dict(), "gpus": 2}))
            runs += [seen(looking.run, rank) for rank in (0, 1)]
        assert looking.said == []
        assert looking.num_servers == 1
        assert [run["environment"]["LLMPERF_INJECT"] for run in runs] == ["slow=0.1", "slow=0.1", "", ""]
        assert [run["environment"]["RANK"] for run in runs] == ["0", "1", "0", "1"]
        variables = {
            "OMP_NUM_THREADS": "2",
            "WORLD_SIZE": "2",
            "SET_BY": "pytest_llmperf.worker.recipes.huggingface.trainer",
        }
        for run in runs:
            assert variables.items() <= run["environment"].items()
            own = run["environment"]["TORCHINDUCTOR_CACHE_DIR"], run["environment"]["TMPDIR"]
            assert all(f"/llmperf-{os.getuid()}/" in path for path in own), "not what torch set at its import"
            assert {"OPENBLAS_NUM_THREADS", "LEFT_BEHIND"}.isdisjoint(run["environment"])
            assert not [link for link in run["files"] if "socket" in link], "none of its server's or of torchrun's"
            assert run["threads"] == 1
            assert run["num_threads"] == 2
            assert run["frozen"] > 100_000, "what its server imported is not looked through"
            assert run["looked_at"] > 1000, "which files are patched is its server's to find out"
            assert run["leads"], "a session of its own"
            assert run["of_files"] > 0.9 * looking.server.memory_info().shared, "what imports have read of files"
            assert not run["cuda"]
            assert run["signals"] == [signal.SIG_DFL] * 3
        for drawn in (0, 1):
            assert len({run["drawn"][drawn] for run in runs}) == 4, "nobody draws what another drew"
        assert {run["drawn"][2] for run in runs} == {67280421310721}, "torch's own seed, as in every process"

    def test_launches_of_one_server_leave_nothing_behind(self, looking: Warm) -> None:
        looking.launch()
        processes = [psutil.Process(), looking.server, looking.branch]
        before = [(one.num_fds(), one.num_threads()) for one in processes]
        for _ in range(7):
            looking.launch()
            assert seen(looking.run)["threads"] == 1
        assert [(one.num_fds(), one.num_threads()) for one in processes] == before
        assert looking.server.children(recursive=True) == [looking.branch], "no agent, no rank, no zombie"
        assert looking.num_servers == 1


# A rank that says how much its garbage collector leaves out while it works.
FROZEN = """
    def run(request, *given, own=module.run):
        import gc
        (request.folder / "frozen").write_text(str(gc.get_freeze_count()))
        own(request, *given)
    module.run = run"""


def test_a_rank_at_work_does_not_look_through_what_its_server_imported(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = after_import("pytest_llmperf.worker.rank_job", FROZEN)
    (warm.folder / "sitecustomize.py").write_text(LIGHT_TOO + patch)
    monkeypatch.setenv("PYTHONPATH", f"{warm.folder}:{REPOSITORY}")
    assert isinstance(warm.launch(), Launch)
    assert int((warm.run / "frozen").read_text()) > 50_000


class TestStale:
    @pytest.mark.wide
    def test_another_environment_variable_has_another_server(
        self, warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        look(tmp_path, monkeypatch, more=LITTLE)
        for value, servers in (("1", 1), ("1", 1), ("2", 2), ("1", 2), ("3", 3), ("2", 4)):
            monkeypatch.setenv("READ_AT_IMPORT", value)
            warm.launch()
            assert seen(warm.run)["environment"]["READ_AT_IMPORT"] == value
            assert warm.num_servers == servers
        alive = {child.pid for child in psutil.Process().children() if "fork_server" in " ".join(child.cmdline())}
        assert len(alive - launching.shared_processes()) == 2, "the one that was used longest ago is gone"

    def test_a_changed_source_file_of_the_users_has_another_server(
        self, warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        look(tmp_path, monkeypatch, more=f"{LITTLE}import users_model; os.environ['VERSION'] = users_model.VERSION")
        model = tmp_path / "site" / "users_model.py"
        for number, version in enumerate(["one", "two"]):
            model.write_text(f"VERSION = {version!r}\n")
            os.utime(model, (number, number))  # in whole seconds, as a file system may count and as .pyc files do
            for _ in range(2):
                warm.launch()
                assert seen(warm.run)["environment"]["VERSION"] == version
        assert warm.num_servers == 2


class TestCold:
    @pytest.mark.wide
    def test_a_module_that_starts_a_thread_at_import_is_named(
        self, warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        poller = """
import threading

def poll():
    threading.Event().wait()

threading.Thread(target=poll, name="poller", daemon=True).start()
"""
        (tmp_path / "users_poller.py").write_text(poller)
        needed = (
            "module.EVERY_RANK = ('torch.distributed.run', 'pytest_llmperf.worker.__main__')\n"
            "    module.import_needs = lambda _: __import__('users_poller')"  # as a model's own code might
        )
        patch = after_import("pytest_llmperf.worker.imports", needed)
        (tmp_path / "sitecustomize.py").write_text(LIGHT_TOO + patch)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
        assert warm.launch().evidence["start"] == "cold"
        assert warm.said == [
            "launches begin cold: a thread was started (poller, of users_poller), by importing users_poller"
        ]

    def test_where_it_must_be_warm_and_cannot_it_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
        look(tmp_path, monkeypatch, more=LITTLE + thread)
        warm = Warm(tmp_path, is_required=True)
        failure = warm.launch()
        warm.pool.close()
        assert isinstance(failure, Failure)
        assert failure.kind == "never-started"
        assert failure.message.startswith("--perf-start warm: it can only begin cold: a thread was started (Thread-1")

    @pytest.mark.wide
    def test_an_import_that_hangs_is_ended_and_the_launch_is_cold(
        self, warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hangs = "import time; time.sleep(1000 if 'fork_server' in ' '.join(sys.orig_argv) else 0)"
        (tmp_path / "sitecustomize.py").write_text(f"import sys\n{hangs}\n{LIGHT_TOO}")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
        monkeypatch.setattr(fork_servers, "_IMPORT_SECONDS", 1.0)
        assert warm.launch().evidence["start"] == "cold"
        assert warm.said == ["launches begin cold: its fork server imported for more than 1 s"]


class TestKilledServer:
    def test_the_server_during_a_launch_and_between_two(self, warm: Warm) -> None:
        failure = warm.launch(ENDLESS, once(lambda: os.kill(warm.branch.pid, signal.SIGKILL)))
        assert failure.kind == "killed"
        assert "torchrun, whose fork server died, was ended by SIGTERM" in failure.message
        assert pids_alive(warm.run) == []
        assert warm.launch().evidence["start"] == "cold"
        warm.server.kill()
        assert warm.launch(TrainSpec(**{**SPEC.to_dict(), "model": "opt-tiny"})).evidence["start"] == "cold"
        assert warm.said == ["launches begin cold: its fork server died"]

    @pytest.mark.wide
    def test_one_that_is_stopped_is_ended_and_begins_nothing_later(
        self, warm: Warm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warm.launch()
        processes = [warm.branch, warm.server]
        monkeypatch.setattr(fork_servers, "_FORK_SECONDS", 1.0)
        monkeypatch.setattr(fork_servers, "_END_SECONDS", 1.0)
        for process in processes:
            process.suspend()
        assert warm.launch().evidence["start"] == "cold"
        assert warm.said == ["launches begin cold: its fork server forked for more than 1 s"]
        assert not any(is_alive(process) for process in processes)

    def test_one_that_is_stopped_does_not_outlive_the_run(self, warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
        warm.launch()
        processes = [warm.branch, warm.server]
        monkeypatch.setattr(fork_servers, "_END_SECONDS", 1.0)
        for process in processes:
            process.suspend()
        warm.pool.close()
        # A busy machine takes its time to end what was killed.
        until(lambda: not any(is_alive(process) for process in processes))

    @pytest.mark.parametrize("when", ["training", "importing"])
    def test_whoever_launched(self, warm: Warm, tmp_path: Path, when: str) -> None:
        script = f"""
from pathlib import Path
from tests.worker.launching import ENDLESS
from tests.worker.test_warm_launches import Warm
Warm(Path({str(tmp_path / "its")!r})).launch(ENDLESS)
"""
        (tmp_path / "its").mkdir()
        process = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY)
        try:
            begun = (lambda: len(pids(tmp_path)) == 2) if when == "training" else (lambda: servers(process))
            until(lambda: process.poll() or begun(), 120)
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
        until(lambda: not survivors(tmp_path), otherwise=lambda: survivors(tmp_path))


def servers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_alive(folder: Path) -> list[int]:
    found = pids(folder)
    assert found
    return [pid for pid in found if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
