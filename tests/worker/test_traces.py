"""Traces of real launches on the CPU, where operators stand for kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trace import UNWANTED
from tests.worker.import_patch import in_the_rank
from tests.worker.launching import launched

pytestmark = pytest.mark.torchrun

SPEC = TrainSpec(model="llama-tiny", sequence_length=16, micro_batch_size=2, warmup_steps=2, min_steps=6, steps=12)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launched(SPEC, tmp_path_factory.mktemp("once") / "run")


def test_two_launches_of_one_spec_run_the_same_operators(once: Launch, tmp_path: Path) -> None:
    again = launched(SPEC, tmp_path / "run")
    assert once.trace.counts == again.trace.counts
    assert (once.trace.steps, once.trace.ranks, once.trace.is_on_host) == (3, 1, True)
    # Two layers with seven products each and the head's, forth and twice back; the first has no gradient to pass on.
    products = sum(row.count for row in once.trace.rows if row.name == "aten::mm")
    assert products == 3 * (2 * 7 + 1)


def test_a_trace_is_no_part_of_what_is_measured(once: Launch, tmp_path: Path) -> None:
    untraced = launched(SPEC, tmp_path / "run", trace=False)
    assert untraced.trace.none == UNWANTED
    assert "trace" not in untraced.phases
    assert once.phases["trace"] > 0
    shared = min(len(once.losses), len(untraced.losses))
    assert once.losses[:shared] == untraced.losses[:shared]
    for launch in (once, untraced):
        assert 6 <= len(launch.step_seconds) == len(launch.losses) <= SPEC.steps
        assert launch.tokens_per_step == 2 * 16
        assert launch.train_seconds >= sum(launch.step_seconds)


def test_each_rank_is_traced_by_itself(once: Launch, tmp_path: Path) -> None:
    two = launched(TrainSpec(**{**SPEC.to_dict(), "gpus": 2}), tmp_path / "run")
    assert two.trace.ranks == 2
    assert any(row.name.startswith("gloo:") or "allreduce" in row.name for row in two.trace.rows)
    assert all(row.count == int(row.count) for row in two.trace.rows)
    assert once.trace.counts != two.trace.counts


@pytest.mark.parametrize(
    ("module", "patch", "why"),
    [
        (
            "torch.profiler",
            "module.profile.start = lambda self: (_ for _ in ()).throw(RuntimeError('CUPTI is taken'))",
            "the profiler failed (RuntimeError: CUPTI is taken)",
        ),
        (
            "pytest_llmperf.observe.tracer",
            "module.read = lambda events, on_host: module.Activities([], [])",
            "the profiler saw no operator",
        ),
        (
            "pytest_llmperf.observe.tracer",
            "module.Tracer.batch_arrived = lambda self: 1 / 0 if self.is_running else None",
            "a traced step failed (ZeroDivisionError: division by zero)",
        ),
    ],
)
def test_what_breaks_while_it_traces_takes_nothing_from_what_was_measured(
    module: str, patch: str, why: str, tmp_path: Path
) -> None:
    launch = launched(SPEC, tmp_path / "run", variables=in_the_rank(tmp_path, module, patch))
    assert launch.trace.none == why
    assert 6 <= len(launch.step_seconds) <= SPEC.steps


@pytest.mark.parametrize("trace", [True, False])
def test_what_stays_the_same_is_gathered_once(trace: bool, tmp_path: Path) -> None:
    once = (
        "seen, own = [], module.environment; "
        "module.environment = lambda device: seen.append(device) or (own(device) if len(seen) == 1 else 1 / 0); "
        "told, real = [], module.loaded; "
        "module.loaded = lambda: told.append(1) or (real() if len(told) == 1 else 1 / 0)"
    )
    patched = in_the_rank(tmp_path, "pytest_llmperf.worker.rank_job", once)
    launch = launched(SPEC, tmp_path / "run", variables=patched, trace=trace)
    assert launch.environment.versions["torch"]
    assert launch.evidence["attention_kernel"] not in ("", "unknown")
    assert bool(launch.trace.rows) is trace


_ON_RANK_1 = (
    "import os, time, pytest_llmperf.observe.tracer as tracer; module._TRACE_SECONDS = 2.0; "
    "tracer.Tracer.batch_arrived = lambda self: {what} if self.is_running and os.environ['RANK'] == '1' else None"
)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("1 / 0", "a traced or inspected step failed (rank 1: ZeroDivisionError: division by zero)"),
        ("os.kill(os.getpid(), 9)", "a traced or inspected step failed (rank 1 was ended by SIGKILL"),
        ("time.sleep(1000)", "a traced or inspected step failed (rank "),
    ],
)
def test_what_breaks_or_hangs_on_one_rank_costs_the_trace_alone(what: str, why: str, tmp_path: Path) -> None:
    patched = in_the_rank(tmp_path, "pytest_llmperf.worker.rank_job", _ON_RANK_1.format(what=what))
    two = TrainSpec(**{**SPEC.to_dict(), "gpus": 2})
    launch = launched(two, tmp_path / "run", variables=patched)
    assert launch.trace.none.startswith(why)
    assert "sleep" not in what or "TimeoutError: they did not end within" in launch.trace.none
    assert [len(rank.step_seconds) for rank in launch.ranks] == 2 * [len(launch.losses)]
    assert len(launch.losses) >= 6
    # One that is killed at once has told nobody that it traces.
    assert launch.phases.get("trace", 0.0) < 60
    # All evidence is there but for what is tried at the very end.
    assert (launch.evidence["attention"], launch.evidence["attention_kernel"]) == ("sdpa", "unknown")
