"""Warm starts without torch: messages, imports that are watched, answers in CUDA's place, servers that are kept."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pytest_llmperf.launch import fork_servers as pool_module
from pytest_llmperf.launch.fork_servers import ColdStartError, LaunchOrder, ServerKey, ServerPool
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.request import server_key
from pytest_llmperf.launch.slurm import slurm_site
from pytest_llmperf.run.options import Settings
from pytest_llmperf.run.run import Run
from pytest_llmperf.support.interpreter import Channel, ChannelClosedError
from pytest_llmperf.worker.warm import gpu_answers
from pytest_llmperf.worker.warm.fork_server import ImportWatch
from pytest_llmperf.worker.warm.gpu_answers import NoAnswersError
from tests.golden import Golden


class TestChannel:
    @pytest.fixture
    def ends(self) -> Iterator[tuple[Channel, Channel]]:
        here, there = map(Channel, socket.socketpair())
        yield here, there
        here.close()
        there.close()

    def test_a_message_of_any_length_arrives_whole(self, ends: tuple[Channel, Channel]) -> None:
        here, there = ends
        content = {"environment": {f"NAME_{number}": "x" * 1000 for number in range(1000)}}
        sender = threading.Thread(target=here.send, args=(content,))  # more than a socket holds
        sender.start()
        message = there.receive()
        sender.join()
        assert message is not None
        assert (message.content, message.files) == (content, ())

    def test_an_open_file_comes_with_it(self, ends: tuple[Channel, Channel], tmp_path: Path) -> None:
        here, there = ends
        with (tmp_path / "log").open("w") as log:
            here.send({}, [log.fileno()])
        message = there.receive()
        assert message is not None
        with os.fdopen(message.files[0], "w") as log:
            log.write("theirs")
        assert (tmp_path / "log").read_text() == "theirs"

    def test_no_message_is_none_and_nobody_there_is_an_error(self, ends: tuple[Channel, Channel]) -> None:
        here, there = ends
        assert here.receive(0.01) is None
        there.close()
        with pytest.raises(ChannelClosedError):
            here.receive(0.01)
        with pytest.raises(ChannelClosedError):
            here.send({})

    def test_half_a_message_is_none(self, ends: tuple[Channel, Channel]) -> None:
        here, there = ends
        os.write(there.fileno(), b"\0\0")
        there.close()
        with pytest.raises(ChannelClosedError):
            here.receive()


class TestImportWatch:
    @pytest.fixture
    def modules(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        before = {*sys.modules}
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "outer_module.py").write_text("import inner_module\n")
        (tmp_path / "inner_module.py").write_text("import threading; threading.unfit = True\n")
        (tmp_path / "later_module.py").write_text("")
        yield tmp_path
        for name in {*sys.modules} - before:
            del sys.modules[name]
        vars(threading).pop("unfit", None)

    def test_the_innermost_module_is_named(self, modules: Path) -> None:
        watch = ImportWatch(lambda: hasattr(threading, "unfit"))
        with watch.watching():
            importlib.import_module("outer_module")
            importlib.import_module("later_module")
        assert watch.culprit == "inner_module"

    def test_what_has_ended_again_is_nobodys(self, modules: Path) -> None:
        watch = ImportWatch(lambda: hasattr(threading, "unfit"))
        with watch.watching():
            importlib.import_module("outer_module")
            del threading.unfit  # type: ignore[attr-defined]
            importlib.import_module("later_module")
        assert watch.culprit == ""

    def test_what_was_there_before_is_nobodys(self, modules: Path) -> None:
        watch = ImportWatch(lambda: hasattr(threading, "unfit"))
        importlib.import_module("inner_module")
        with watch.watching():
            importlib.import_module("later_module")
        assert watch.culprit == ""

    def test_loaders_are_as_they_were(self, modules: Path) -> None:
        before = dict(vars(SourceFileLoader))
        with pytest.raises(ZeroDivisionError), ImportWatch(lambda: False).watching():
            raise ZeroDivisionError
        assert dict(vars(SourceFileLoader)) == before


# As torch has them: functions of a module, without a closure.
TORCH = """
def is_available(): return "torch's own"
def device_count(): return "torch's own"
def current_device(): return "torch's own"
def get_device_name(device=None): return "torch's own"
def get_device_properties(device=None): return "torch's own"
def get_device_capability(device=None): return "torch's own"
_cached_device_count = 8
"""

DEVICES = [
    {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132},
    {"name": "NVIDIA B200", "major": 10, "minor": 0, "multi_processor_count": 148},
]


class Driver:
    """As libcuda answers: by what it is pointed to, and a code. Each attribute's value is its number."""

    def cuInit(self, flags: int) -> int:  # noqa: N802 - its name
        return flags

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:  # noqa: N802
        name.value = f"H200 {device.value}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:  # noqa: N802
        memory._obj.value = 150 * 10**9
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = attribute
        return 1 if attribute == 50 else 0


class TestGpuAnswers:
    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        torch, cuda = ModuleType("torch"), ModuleType("torch.cuda")
        exec(TORCH, vars(cuda))
        torch.cuda = cuda  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch", torch)
        return cuda

    def test_questions_are_answered_and_who_took_one_by_name_has_torchs_own_afterwards(self, cuda: Any) -> None:
        with gpu_answers.given(DEVICES):
            taken = [cuda.is_available, cuda.get_device_capability, cuda.get_device_properties, cuda.device_count]
            assert [cuda.is_available(), cuda.device_count(), cuda.current_device()] == [True, 2, 0]
            assert cuda.get_device_capability() == (9, 0)
            assert cuda.get_device_capability("cuda:1") == (10, 0)
            assert cuda.get_device_name(SimpleNamespace(index=None)) == "NVIDIA H200"
            assert cuda.get_device_properties(SimpleNamespace(idx=1)).multi_processor_count == 148
            assert cuda.get_device_properties(device=1).major == 10
        assert {function() for function in taken} == {"torch's own"}
        assert taken[0] is cuda.is_available
        assert cuda._cached_device_count is None, "what was answered is not kept for a rank that sees other GPUs"

    def test_a_function_that_cannot_be_answered_for_is_named(self, cuda: Any) -> None:
        own = cuda.is_available
        cuda.get_device_name = print
        named = r"torch\.cuda\.get_device_name cannot be answered for"
        with pytest.raises(NoAnswersError, match=named), gpu_answers.given(DEVICES):
            pass
        assert own() == "torch's own"

    def test_where_no_gpu_is_to_be_seen_nobody_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu_answers, "_driver", lambda: None)
        assert gpu_answers.ask() is None
        monkeypatch.setattr(gpu_answers, "_driver", object)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert gpu_answers.ask() is None

    def test_a_driver_tells_what_torchs_properties_would(self) -> None:
        devices = gpu_answers.snapshot(Driver())
        assert len(devices) == 2
        found = SimpleNamespace(**devices[1])
        assert (found.name, found.total_memory, found.major, found.minor) == ("H200 1", 150 * 10**9, 75, 76)
        assert not hasattr(found, "pci_domain_id"), "this driver does not know it"

    def test_a_driver_without_a_device_tells_of_none(self) -> None:
        assert gpu_answers.snapshot(SimpleNamespace(cuInit=lambda _: 100)) == []

    def test_a_driver_that_breaks_off_is_an_error(self) -> None:
        with pytest.raises(OSError, match="cuDeviceGetCount: CUDA's error 999"):
            gpu_answers.snapshot(SimpleNamespace(cuInit=lambda _: 0, cuDeviceGetCount=lambda _: 999))

    @pytest.mark.parametrize(("answer", "is_initialised"), [(3, False), (0, True), (100, True)])
    def test_the_driver_says_whether_anybody_has_initialised_cuda(
        self, monkeypatch: pytest.MonkeyPatch, answer: int, is_initialised: bool
    ) -> None:
        monkeypatch.setattr(gpu_answers, "_driver", lambda: SimpleNamespace(cuDeviceGetCount=lambda _: answer))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert gpu_answers.is_initialised() == is_initialised


class FakeServer:
    """A server that forks what it is told to."""

    started: list[FakeServer]

    def __init__(self, python: str, environment: dict[str, str], _folder: str, log: Path) -> None:
        self.python, self.environment, self.home = python, environment, log.parent
        self.is_over = self.is_stale = False
        self.is_ready, self.refuses = True, ""
        FakeServer.started.append(self)

    def launch(self, order: LaunchOrder, waiting: Callable[[], object]) -> Any:
        if self.refuses:
            raise ColdStartError(self.refuses)
        return self

    def end(self) -> None:
        self.is_over = True


def _ended(server: FakeServer, *_: object) -> None:
    server.end()
    raise ColdStartError(server.refuses)


ORDER = LaunchOrder(torchrun=(), environment={}, needs=(), log=Path())


class TestServerPool:
    @pytest.fixture(autouse=True)
    def _fakes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeServer.started = []
        monkeypatch.setattr(pool_module, "ServerProcess", FakeServer)

    def key(self, **variables: str) -> ServerKey:
        return server_key("python", variables, on_gpu=False)

    def launched(self, pool: pool_module.ServerPool, key: ServerKey) -> Any:
        return pool.launch(key, ORDER, lambda: None)

    def test_two_are_kept_and_the_one_that_was_used_longest_ago_is_ended(self, tmp_path: Path, golden: Golden) -> None:
        pool = ServerPool(lambda: tmp_path)
        first, second, again, third = (self.launched(pool, self.key(SIDE=side)) for side in "abac")
        assert first is again
        assert [server.is_over for server in (first, second, third)] == [False, True, False]
        pool.close()
        assert all(server.is_over for server in FakeServer.started)
        with pytest.raises(ColdStartError) as raised:
            self.launched(pool, self.key())
        golden(raised)

    @pytest.mark.parametrize("what", ["is_stale", "is_over"])
    def test_one_that_is_stale_or_over_is_replaced(self, tmp_path: Path, what: str) -> None:
        pool = ServerPool(lambda: tmp_path)
        first = self.launched(pool, self.key())
        setattr(first, what, True)
        assert self.launched(pool, self.key()) is not first
        assert first.is_over

    def test_one_that_could_not_import_is_not_tried_again(self, tmp_path: Path, golden: Golden) -> None:
        pool = ServerPool(lambda: tmp_path)
        pool.prepare(self.key())
        (server,) = FakeServer.started
        server.is_ready, server.refuses = False, "a thread was started"
        for _ in range(2):
            with pytest.raises(ColdStartError) as raised:
                self.launched(pool, self.key())
            golden(raised)
        assert FakeServer.started == [server]
        assert server.is_over

    def test_one_that_did_not_answer_is_not_asked_again(self, tmp_path: Path, golden: Golden) -> None:
        pool = ServerPool(lambda: tmp_path)
        server = self.launched(pool, self.key())
        server.is_over, server.is_stale, server.refuses = False, False, "its fork server forked for more than 30 s"
        server.launch = partial(_ended, server)
        for _ in range(2):
            with pytest.raises(ColdStartError) as raised:
                self.launched(pool, self.key())
            golden(raised)
        assert FakeServer.started == [server]

    def test_a_folder_that_cannot_be_written_is_a_reason(self, tmp_path: Path, golden: Golden) -> None:
        with pytest.raises(ColdStartError) as raised:
            self.launched(ServerPool(lambda: tmp_path / "nothing"), self.key())
        golden(raised)

    def test_its_environment_is_the_launchs_but_for_what_imports_need(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        pool = ServerPool(lambda: tmp_path)
        on_cpu = self.launched(pool, server_key(sys.executable, {"PYTHONPATH": "/users"}, on_gpu=False))
        on_gpu = self.launched(pool, server_key("/other/python", {"PYTHONPATH": "/users"}, on_gpu=True))
        assert (on_cpu.environment["CUDA_VISIBLE_DEVICES"], on_gpu.environment["CUDA_VISIBLE_DEVICES"]) == ("", "4,5")
        assert on_cpu.environment["OPENBLAS_NUM_THREADS"] == "1"
        assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in on_cpu.environment
        first, users = on_gpu.environment["PYTHONPATH"].split(os.pathsep)
        assert users == "/users"
        assert [path.name for path in Path(first).iterdir()] == ["pytest_llmperf"], "nothing else of ours beside it"

    def test_what_nothing_reads_at_import_needs_no_other_server(self) -> None:
        live = {"CUDA_VISIBLE_DEVICES": "1", "LLMPERF_INJECT": "slow=0.1", "PYTEST_CURRENT_TEST": "a", "RANK": "3"}
        assert self.key(**live) == self.key()
        assert self.key(HF_HUB_OFFLINE="0") != self.key()
        assert server_key("python", {}, on_gpu=True) != self.key()
        assert server_key("other", {}, on_gpu=False) != self.key()


class TestWarmSites:
    """What launches begin from, here and on a job's nodes."""

    def context(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, slurm: bool, **settings: Any) -> Run:
        if slurm:
            monkeypatch.setenv("SLURM_JOB_ID", "7")
        launcher = "slurm" if slurm else "local"
        context = Run(Settings(baselines=tmp_path, launcher=launcher, gpus=0, **settings), rootdir=tmp_path)
        vars(context)["_found"] = Machine(gpus=(), cpu_name="EPYC", cores=2), ""
        vars(context.site)["cluster"] = SimpleNamespace(
            allocation=SimpleNamespace(job_id="7"), machine=SimpleNamespace(gpus=())
        )
        return context

    @pytest.fixture(autouse=True)
    def _fakes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeServer.started = []
        monkeypatch.setattr(pool_module, "ServerProcess", FakeServer)

    def test_each_interpreter_has_a_server_that_ends_with_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = self.context(tmp_path, monkeypatch, slurm=False, against="/old/bin/python")
        context.begin()
        assert [server.python for server in FakeServer.started] == [sys.executable, "/old/bin/python"]
        context.close()
        assert all(server.is_over for server in FakeServer.started)

    @pytest.mark.parametrize("slurm", [False, True])
    @pytest.mark.parametrize("settings", [{"dry_run": True}, {"start": "cold"}])
    def test_what_launches_nothing_here_or_begins_cold_starts_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], slurm: bool
    ) -> None:
        nodes = mock.Mock()
        monkeypatch.setattr(slurm_site, "NodeServers", nodes)
        context = self.context(tmp_path, monkeypatch, slurm=slurm, **settings)
        context.begin()
        context.close()
        assert FakeServer.started == []
        assert not nodes.called

    def test_in_a_job_the_nodes_have_them_and_not_this_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes = mock.Mock()
        monkeypatch.setattr(slurm_site, "NodeServers", mock.Mock(return_value=nodes))
        context = self.context(tmp_path, monkeypatch, slurm=True)
        context.begin()
        context.close()
        assert [call[0] for call in nodes.method_calls] == ["prepare", "close"]
        assert FakeServer.started == []

    @pytest.mark.parametrize("slurm", [False, True])
    def test_launches_that_begin_cold_have_no_warm_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: bool
    ) -> None:
        cold = self.context(tmp_path, monkeypatch, slurm=slurm, start="cold").site
        assert cold.warm_start(print) is None
        start = self.context(tmp_path, monkeypatch, slurm=slurm, start="warm").site.warm_start(print)
        assert start is not None
        assert start.is_required
