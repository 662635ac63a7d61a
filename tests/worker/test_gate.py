"""The gate's own test: faults injected into the real worker, under the real torchrun, are found and named."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.analysis.waits import by_work
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.steady_state import MOST_GROWTH, PassingRange, PassingRanges
from tests.worker import engine
from tests.worker.engine import checks
from tests.worker.import_patch import in_the_rank
from tests.worker.launching import launched

torch = pytest.importorskip("torch")

from torch.distributed import TCPStore  # noqa: E402 - it needs torch

from pytest_llmperf.observe import training  # noqa: E402
from pytest_llmperf.observe.measurement import Clock  # noqa: E402

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

SPEC = TrainSpec(model="llama-tiny", sequence_length=32, steps=6, min_steps=6, warmup_steps=2)


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


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.wide), 2])
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


class TestAgainstABaseline:
    """One baseline, then each fault against it."""

    SPEC = replace(engine.SPEC, sequence_length=32, steps=10, min_steps=10, warmup_steps=4)

    @pytest.fixture(scope="class")
    def project(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("a project")
        assert checks(folder, update="new", launches=2).check(self.SPEC).result.verdict == "new"
        return folder

    def test_the_same_again_passes(self, project: Path) -> None:
        """In how many launches is for whoever else is busy here; tests/engine/test_verdicts.py has it by its rule."""
        assert checks(project).check(self.SPEC).result.verdict == "pass"

    def test_a_slowdown_is_found_by_two_launches(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLMPERF_INJECT", "slow=10")
        result = checks(project).check(self.SPEC).result
        assert result.verdict == "regressed"
        assert len(result.launches) == 2
        assert result.reason.startswith("tokens_per_second_per_gpu")

    def test_a_leak_is_found_by_two_launches(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLMPERF_INJECT", "hold=400000000")
        result = checks(project).check(self.SPEC).result
        assert (result.verdict, len(result.launches)) == ("regressed", 2)
        assert result.reason.startswith("peak_reserved_bytes")

    def test_a_fault_is_never_recorded(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = {path: path.read_text() for path in project.rglob("baselines/**/*.json")}
        monkeypatch.setenv("LLMPERF_INJECT", "slow=1")
        result = checks(project, update="all", reason="why", max_launches=2).check(self.SPEC).result
        assert "measured under LLMPERF_INJECT=slow=1" in result.notes
        assert {path: path.read_text() for path in project.rglob("baselines/**/*.json")} == before


WIDE = PassingRange(low=math.log(0.01), high=math.log(1.0), error=0.5, drift=0.5)
HERE = Place("host", "Fake CPU")


def plan_of(
    spec: TrainSpec, rank: int = 0, passing: PassingRanges | None = None, *, all_steps: bool = False
) -> training.Plan:
    return training.Plan(
        steps=spec.steps,
        min_steps=spec.min_steps,
        warmup_steps=spec.warmup_steps,
        ranks=spec.gpus,
        rank=rank,
        passing=passing,
        all_steps=all_steps,
    )


class FakeClock(Clock):
    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self._times = times

    def so_far(self) -> tuple[float, ...]:
        return tuple(self._times)


class FakeDevice(Clock):
    """Whose host issues each step in 50 ms, some ``ahead`` of it. Time passes only as the host issues and waits."""

    def __init__(self, step_seconds: Sequence[float], monkeypatch: pytest.MonkeyPatch, ahead: int = 4) -> None:
        super().__init__()
        self.now, self.waited, self.idle, self._times, self._ahead = 0.0, 0.0, 0.0, step_seconds, ahead
        self._ends: list[float] = []
        self.left: list[int] = []
        """Steps that it still had, each time that the host had waited for it."""
        monkeypatch.setattr("pytest_llmperf.observe.training.time.sleep", self._sleep)

    def issue(self) -> None:
        self.idle += max(0.0, self.now - self._ends[-1]) if self._ends else 0.0
        start = max(self.now, self._ends[-1]) if self._ends else self.now
        self._ends.append(start + self._times[len(self._ends)])
        self.now = max([self.now + 0.05, *self._ends[: -self._ahead][-1:]])

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.waited += seconds

    def so_far(self) -> tuple[float, ...]:
        return tuple(self._times[: sum(end <= self.now for end in self._ends)])

    def ends_at(self, plan: training.Plan) -> int:
        """After which step the launch ends."""
        stop = training.Ending(plan, self, HERE)
        for step in range(1, plan.steps + 1):
            self.issue()
            before = self.waited
            if stop.now(step):
                return step
            if self.waited > before:
                self.left.append(step - len(self.so_far()))
        raise AssertionError("it never ends")


class TestAHostThatRunsAhead:
    FP32 = training.Plan(steps=20, min_steps=6, warmup_steps=1)

    @pytest.mark.parametrize("ahead", [1, 2, 4, 20])
    def test_where_steps_are_long_those_end_it_that_decide(self, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
        device = FakeDevice([2.0, *[1.1, 1.1005] * 10], monkeypatch, ahead)
        assert device.ends_at(self.FP32) == 6
        assert device.idle == 0.0

    def test_its_device_has_work_all_the_time_where_they_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = FakeDevice([2.0, *[1.1, 1.25, 0.95, 1.2, 0.9, 1.3, 1.05] * 3], monkeypatch)
        assert device.ends_at(self.FP32) == 20
        assert (device.idle, device.left) == (0.0, [1, 1, 1, 1])

    def test_short_steps_are_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = FakeDevice([0.4] * 60, monkeypatch)
        assert device.ends_at(training.Plan(steps=60, min_steps=16, warmup_steps=4)) == 16
        assert (device.waited, device.idle) == (0.0, 0.0)

    def test_a_first_step_that_compiles_is_no_long_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = FakeDevice([30.0, *[0.1] * 59], monkeypatch, ahead=20)
        assert device.ends_at(training.Plan(steps=60, min_steps=16, warmup_steps=4)) == 32
        assert (device.idle, device.left) == (0.0, [14])

    def test_on_a_cpu_each_step_that_ended_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = FakeDevice([1.1] * 20, monkeypatch)
        monkeypatch.setattr(device, "so_far", lambda: tuple(device._times[: len(device._ends)]))
        assert (device.ends_at(self.FP32), device.waited) == (6, 0.0)


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
            stop = training.Ending(plan_of(spec, rank), clock, HERE)
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
        stop = training.Ending(plan_of(spec), FakeClock([0.1, 0.3, 0.05, 0.2] * 20), HERE)
        assert [step for step in range(1, spec.steps + 1) if stop.now(step)] == [spec.steps]

    def test_one_that_takes_all_its_steps_looks_at_none(self) -> None:
        spec = TrainSpec(model="llama-tiny", sequence_length=32)
        stop = training.Ending(plan_of(spec, all_steps=True), FakeClock([0.5, *[0.1] * 80]), HERE)
        assert [step for step in range(1, spec.steps + 1) if stop.now(step)] == [spec.steps]

    @pytest.mark.usefixtures("server")
    @pytest.mark.parametrize(("elsewhere", "ends_at"), [(WIDE, 16), (replace(WIDE, high=-9.0), 60)])
    def test_all_ranks_end_by_what_passes_where_they_are(self, elsewhere: PassingRange, ends_at: int) -> None:
        spec = TrainSpec(model="llama-tiny", gpus=2, sequence_length=32)
        times = [0.1, 0.11, 0.09, 0.1, 0.1, 0.12] * 10
        # Rank 0's own GPU is known, together they are not: they are held by what passes elsewhere.
        passing = PassingRanges({"host Fake CPU": WIDE}, {}, elsewhere)
        ended: dict[int, tuple[int, dict[str, str]]] = {}

        def train(rank: int) -> None:
            stop = training.Ending(plan_of(spec, rank, passing=passing), FakeClock(times), HERE)
            step = next((step for step in range(1, spec.steps + 1) if stop.now(step)), spec.steps)
            ended[rank] = step, stop.evidence

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        evidence = {"ended": "decided"} if ends_at < spec.steps else {}
        assert ended == dict.fromkeys(range(2), (ends_at, evidence))


def test_a_real_launch_that_passes_by_far_ends_sooner_and_says_why(tmp_path: Path) -> None:
    # A CPU's step times are known to no 0.2 %, and their drift is anything.
    far = PassingRange(low=math.log(1e-6), high=math.log(1e6), error=5.0, drift=5.0)
    spec = replace(SPEC, steps=40, min_steps=10)
    launch = launched(spec, tmp_path / "run", passing=PassingRanges({}, {}, far))
    assert len(launch.losses) == 10
    assert launch.evidence["ended"] == "decided"
    assert not troubles(spec, launch)


LEAKS = """
    step, kept = module.Trainer.training_step, []
    def leaking(self, *args, **kwargs):
        kept.append(bytearray(200_000))
        return step(self, *args, **kwargs)
    module.Trainer.training_step = leaking"""


@pytest.mark.parametrize(("patch", "grows"), [("pass", False), (LEAKS, True)])
def test_what_steps_leave_behind_is_counted_and_all_steps_are_taken(tmp_path: Path, patch: str, *, grows: bool) -> None:
    spec = TrainSpec(model="llama-tiny", sequence_length=32, gradient_accumulation_steps=2, steps=24)
    variables = in_the_rank(tmp_path, "transformers.trainer", patch)
    launch = launched(spec, tmp_path / "run", all_steps=True, variables=variables)
    assert (len(launch.ranks[0].allocated_bytes), launch.planned_steps) == (24, 0)
    assert launch.allocated_growth is not None
    assert (launch.allocated_growth > MOST_GROWTH) == grows
    assert grows or launch.allocated_growth < MOST_GROWTH / 4
