"""Where the time of launches went: what a record is told of the wait for hardware, and what a run's sum has."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import pytest

from pytest_llmperf.judge.pairs import Bounds
from pytest_llmperf.launch import machine, prediction
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.records.failure import HELD
from pytest_llmperf.run.findings import DidNotTrainError
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.engine.conftest import EAGER, SPEC, Engine
from tests.fakes import MACHINE
from tests.golden import Golden

PHASES = {"start": 4.0, "steps": 6.0}
WAITED = 0.2


@pytest.fixture
def slow_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else trains for a moment, each time."""

    @contextmanager
    def lease(_say: Callable[[str], None], *, shared: bool, wait: Callable[[str], None]) -> Iterator[tuple[()]]:
        assert not shared
        time.sleep(WAITED)
        yield ()

    monkeypatch.setattr(machine, "lease_cpu", lease)


def test_a_record_tells_the_wait_for_its_hardware_first(engine: Engine, slow_lease: None) -> None:
    engine.fake(phases=PHASES)
    (launch,) = engine.run().measure(SPEC)
    assert list(launch.phases) == ["waiting_for_hardware", "start", "steps"]
    assert launch.phases["waiting_for_hardware"] == pytest.approx(WAITED, abs=0.1)
    assert sum(launch.phases.values()) == launch.wall_seconds + launch.phases["waiting_for_hardware"]
    assert engine.findings.spent.phases == pytest.approx(launch.phases, abs=0.001)


def test_of_launches_in_one_place_the_first_has_waited_for_all(engine: Engine, slow_lease: None) -> None:
    engine.fake(phases=PHASES)
    bounds = {name: Bounds() for name in ("throughput", "memory", "loss")}
    result = engine.run(launches=2).compare(EAGER, SPEC, bounds).result
    waited = [launch.phases["waiting_for_hardware"] for launch in (*result.launches_before, *result.launches)]
    assert sorted(waited)[:-1] == [0.0] * (len(waited) - 1)
    assert max(waited) >= WAITED
    assert engine.findings.spent.phases["waiting_for_hardware"] == pytest.approx(max(waited), abs=0.001)
    assert engine.findings.spent.phases["steps"] == 6.0 * len(waited)


def test_a_launch_without_a_record_is_counted_as_failed(engine: Engine, slow_lease: None) -> None:
    engine.fake(fail="error")
    with pytest.raises(DidNotTrainError):
        engine.run().measure(SPEC)
    spent = engine.findings.spent
    assert spent.phases.pop("failed_launches") == 10.0  # type: ignore[attr-defined]
    assert spent.phases == {"waiting_for_hardware": pytest.approx(WAITED, abs=0.1)}


def test_a_record_that_tells_nothing_is_not_told_to_have_waited(engine: Engine) -> None:
    (launch,) = engine.run().measure(SPEC)
    assert launch.phases == {}
    assert engine.findings.spent.phases["other"] == 10.0


def test_a_wait_that_is_given_up_is_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    def lease(_say: Callable[[str], None], **_: bool) -> NoReturn:
        time.sleep(WAITED)
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "lease_cpu", lease)
    with pytest.raises(KeyboardInterrupt):
        engine.run().measure(SPEC)
    assert engine.findings.spent.launches == 0
    assert engine.findings.spent.seconds >= WAITED
    golden(engine.heard.said[-1])


def test_launches_that_look_for_the_largest_micro_batch_are_counted_as_all_are(engine: Engine) -> None:
    engine.fake(most=12, phases=PHASES)
    engine.run(memory_limit_bytes=2 * 2**30).max_micro_batch(SPEC)
    spent = engine.findings.spent
    assert spent.launches == 8
    assert spent.phases["failed_launches"] == 30.0, "those that ran out of memory"
    assert spent.phases["steps"] == 5 * 6.0


def test_a_prediction_is_part_of_that_search(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(specs: Sequence[TrainSpec]) -> Iterator[dict[str, int]]:
        time.sleep(WAITED)
        return ({"activations": spec.micro_batch_size * 2**36 // 12} for spec in specs)

    monkeypatch.setattr(prediction, "predictions", predicted)
    engine.on(replace(MACHINE, gpus=(Gpu(index=0, uuid="GPU-0", name="NVIDIA Z9", memory_bytes=2**36),)))
    engine.fake(most=12)
    engine.run(gpus=1).max_micro_batch(SPEC)
    assert engine.findings.spent.phases["searching"] == pytest.approx(WAITED, abs=0.1)


def test_a_stored_record_keeps_what_later_ones_are_held_against_and_no_change_is_told_of_it(engine: Engine) -> None:
    engine.record(phases={**PHASES, "end": 2.0})
    (baseline,) = engine.baselines
    stored = json.loads(baseline.read_text())["launches"][0]["phases"]
    assert stored == {name: seconds for name, seconds in PHASES.items() if name in HELD}
    engine.fake(phases={"start": 9.0, "steps": 30.0})
    result = engine.check().result
    assert (result.verdict, result.changed, result.differences) == ("pass", (), ())
