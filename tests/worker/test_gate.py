"""The gate's own test: faults injected into the real worker, under the real torchrun, are found and named."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.insight.stragglers import by_work
from pytest_llmperf.judge.validity import troubles
from tests.worker.launching import launched
from tests.worker.user import make, run_one

torch = pytest.importorskip("torch")

from torch.distributed import TCPStore  # noqa: E402 - it needs torch

from pytest_llmperf.worker import stopping  # noqa: E402

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

SPEC = TrainSpec(model="llama-tiny", sequence_length=32, steps=6, min_steps=6, warmup_steps=2)

CASE = """
from dataclasses import replace

def test_case(perf, train_spec):
    perf.check(replace(train_spec, sequence_length=32, steps=40, min_steps=40))
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("attention=eager", "asked for attention sdpa, the model ran eager"),
        ("mixed_precision=no", "asked for autocast to torch.bfloat16, the run had none"),
        ("model_precision=fp32", "asked for weights of torch.bfloat16, the run had torch.float32"),
        ("gradient_checkpointing=true", "asked for gradient checkpointing False, the run had True"),
        ("optimizer=sgd", "asked for optimizer (class, fused) ('AdamW', False), the run had ('SGD', False)"),
    ],
)
def test_what_was_not_active_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", fault)
    launch = launched(SPEC, tmp_path / "run")
    assert said in troubles(SPEC, launch)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_others_wait_for_a_slow_rank_and_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", "slow=5 rank=1")
    spec = replace(SPEC, gpus=2, steps=10, min_steps=10, warmup_steps=4, gradient_accumulation_steps=accumulation)
    launch = launched(spec, tmp_path / "run")
    assert [len(rank.waiting_seconds) for rank in launch.ranks] == [10, 10]
    assert all(wait > 0 for rank in launch.ranks for wait in rank.waiting_seconds)
    assert all(work > 0 for rank in launch.ranks for work in rank.working_seconds)
    slowest = by_work(launch)
    assert slowest is not None
    assert (slowest.rank, slowest.share > 1) == (1, True)


def test_a_rank_that_did_something_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", "attention=eager rank=1")
    spec = replace(SPEC, gpus=2)
    launch = launched(spec, tmp_path / "run")
    lines = troubles(spec, launch)
    assert "attention: rank 1 has eager, rank 0 has sdpa" in lines
    assert all(line.startswith("attention") for line in lines), lines


class TestThroughPytest:
    """One baseline, then each fault against it."""

    @pytest.fixture(scope="class")
    def project(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = make(tmp_path_factory.mktemp("a project"), CASE)
        assert run_one(folder, "--update-baselines=new", "--perf-launches", "2")["verdict"] == "new"
        return folder

    def test_the_same_again_passes_in_one_launch(self, project: Path) -> None:
        result = run_one(project)
        assert result["verdict"] == "pass"
        assert len(result["launches"]) == 1

    def test_a_slowdown_is_found_by_two_launches(self, project: Path) -> None:
        result = run_one(project, inject="slow=20")
        assert result["verdict"] == "regressed"
        assert len(result["launches"]) == 2
        assert result["reason"].startswith("tokens_per_second_per_gpu")

    def test_a_leak_is_found_by_two_launches(self, project: Path) -> None:
        result = run_one(project, inject="hold=400000000")
        assert (result["verdict"], len(result["launches"])) == ("regressed", 2)
        assert result["reason"].startswith("peak_reserved_bytes")

    def test_a_fault_is_never_recorded(self, project: Path) -> None:
        before = {path: path.read_text() for path in project.rglob("baselines/**/*.json")}
        result = run_one(project, "--update-baselines", "--perf-reason", "why", inject="slow=20")
        assert "measured under LLMPERF_INJECT=slow=20" in result["notes"]
        assert {path: path.read_text() for path in project.rglob("baselines/**/*.json")} == before


class FakeClock:
    def __init__(self, times: list[float]) -> None:
        self._times = times

    def so_far(self) -> tuple[float, ...]:
        return tuple(self._times)


class TestStopping:
    @pytest.fixture
    def server(self, monkeypatch: pytest.MonkeyPatch) -> TCPStore:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(store.port))
        return store

    @pytest.mark.usefixtures("server")
    def test_every_rank_stops_where_rank_0_does(self) -> None:
        spec = TrainSpec(model="llama-tiny", gpus=3, sequence_length=32)
        steady, noisy = [0.5, *[0.1] * 80], [0.1, 0.3, 0.05] * 30
        stopped: dict[int, int] = {}

        def train(rank: int, times: list[float]) -> None:
            clock = FakeClock([])
            stop = stopping.Stopping(spec, clock, rank)
            for step in range(1, spec.steps + 1):
                clock._times = times[:step]
                if stop.now(step):
                    stopped[rank] = step
                    return

        # What the others' clocks say does not count, or they would not agree.
        threads = [threading.Thread(target=train, args=(rank, steady if rank == 0 else noisy)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert stopped == dict.fromkeys(range(3), spec.min_steps)

    def test_noise_takes_every_step_there_is(self) -> None:
        spec = TrainSpec(model="llama-tiny", sequence_length=32)
        stop = stopping.Stopping(spec, FakeClock([0.1, 0.3, 0.05, 0.2] * 20), 0)
        assert not any(stop.now(step) for step in range(1, spec.steps + 1))

    def test_looks_grow_apart_and_none_is_the_last_step(self) -> None:
        assert stopping.looks(16, 60) == [16, 20, 24, 28, 32, 36, 40, 45, 50, 56]
        assert stopping.looks(16, 16) == []
        assert stopping.looks(20, 12) == []
        assert len(stopping.looks(16, 10_000)) < 80
