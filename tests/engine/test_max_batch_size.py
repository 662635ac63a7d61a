"""The largest micro-batch: verdicts beside neighbours, what is launched for it and what is recorded."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.run.findings import CannotRunError, Concluded, DidNotTrainError
from tests.engine.conftest import SPEC, Engine
from tests.fakes import FakeLauncher
from tests.golden import Golden

NEIGHBOUR = ["GPU 0: pid 7 (python) holds 40.0 GiB"]
LIMIT = 2 * 2**30


def largest(engine: Engine, **settings: Any) -> Concluded:
    return engine.run(memory_limit_bytes=LIMIT, **settings).max_micro_batch(SPEC)


def record(engine: Engine, most: int) -> None:
    engine.fake(most=most)
    assert largest(engine, update="all", reason="start").result.updated
    (engine.path / "launches.txt").unlink()


def test_one_sequence_less_is_a_loss(engine: Engine) -> None:
    record(engine, 12)
    assert largest(engine).result.verdict == "pass"
    engine.fake(most=11)
    concluded = largest(engine)
    assert (concluded.result.verdict, concluded.held_against) == ("regressed", "12 sequences")
    assert concluded.result.reason == "max_micro_batch_size 11, baseline 12"


def test_without_a_limit_a_cpu_is_not_filled(engine: Engine) -> None:
    with pytest.raises(CannotRunError, match="give this run a limit with --perf-memory-limit"):
        engine.run().max_micro_batch(SPEC)
    assert engine.launches == []


def test_what_is_stored_and_still_right_is_only_confirmed(engine: Engine) -> None:
    record(engine, 12)
    largest(engine)
    assert [re.sub(r".*-mbs(\d+)-.*", r"\1", spec_id) for spec_id in engine.launches] == ["12", "13"]


def test_what_fits_beside_a_neighbour_is_no_answer(engine: Engine, golden: Golden) -> None:
    record(engine, 12)
    engine.fake(most=8, foreign_processes=NEIGHBOUR)
    result = largest(engine, update="all", reason="why").result
    assert (result.verdict, result.updated) == ("invalid", "")
    golden(result.reason)
    assert len(engine.launches) == 2  # a launch and its retry: the search ends there
    engine.fake(most=12)
    assert largest(engine).result.verdict == "pass"


@pytest.mark.parametrize("spoilt", [1, 2])  # the launch that is to train, and the one that is to run out of memory
def test_a_neighbour_that_goes_costs_a_launch(engine: Engine, spoilt: int, golden: Golden) -> None:
    record(engine, 12)
    beside = {"most": 12 if spoilt == 1 else 10, "foreign_processes": NEIGHBOUR}
    engine.fake(sequence=[{"most": 12}] * (spoilt - 1) + [beside, {"most": 12}])
    result = largest(engine).result
    assert (result.verdict, result.checks[0].value) == ("pass", 12)
    golden.lines(result.notes, "one launch was")


def test_what_an_injected_fault_left_is_never_recorded(engine: Engine, golden: Golden) -> None:
    engine.fake(most=5, evidence={"injected": "hold=5"})
    concluded = largest(engine, update="all", reason="why")
    golden(concluded.refused)
    assert engine.baselines == []
    assert "measured under LLMPERF_INJECT=hold=5" in largest(engine).result.notes


def test_a_loss_is_recorded_with_a_reason_alone(engine: Engine, golden: Golden) -> None:
    record(engine, 12)
    engine.fake(most=8)
    refused = largest(engine, update="all").refused
    golden(refused)
    assert "--perf-reason" in refused
    assert largest(engine, update="all", reason="a workspace").result.updated


def test_a_search_that_somebody_else_ends_is_no_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(_self: FakeLauncher, request: LaunchRequest, _watch: Any) -> None:
        request.folder.mkdir(parents=True)
        raise RuntimeError

    monkeypatch.setattr(FakeLauncher, "launch", ended)
    monkeypatch.setattr(engine.heard, "ended_from_outside", lambda _: "Timeout (>5.0s) from pytest-timeout")
    with pytest.raises(DidNotTrainError, match="pytest-timeout"):
        largest(engine)
