"""MFU of families that no formula is known of: counted once, never while something is timed, and never in the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.launch import machine
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.prediction import CountError
from pytest_llmperf.run import derived_metrics
from pytest_llmperf.run.cases import Cases
from pytest_llmperf.settings.models import Model
from pytest_llmperf.settings.train_spec import TrainSpec
from tests import fakes
from tests.engine.conftest import SPEC, Engine
from tests.golden import Golden

MIXTURE = replace(SPEC, model="mixtral-tiny", mixed_precision="bf16")
LARGER = replace(MIXTURE, micro_batch_size=2)
PLAIN = replace(SPEC, mixed_precision="bf16")
H200 = Machine(gpus=(Gpu(0, "GPU-0", "NVIDIA H200", 140 * 2**30),), cpu_name="Fake CPU", cores=8)


class Counts:
    """Stands for the process that counts: what it was asked, and how many launches there were by then."""

    is_open = False

    def __init__(self, engine: Engine) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self._engine = engine
        self.found: float | CountError = 1e6

    def __call__(self) -> Counts:
        """A new one."""
        self.is_open = True
        return self

    def ask(self, model: Model, sequence_length: int) -> int:
        self.asked.append((model.slug, sequence_length, len(self._engine.launches)))
        return len(self.asked)

    def answer(self, _number: int) -> float:
        if isinstance(self.found, CountError):
            raise self.found
        return self.found

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def counts(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counts:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fakes, "ENVIRONMENT", replace(fakes.ENVIRONMENT, gpu="NVIDIA H200"))
    found = Counts(engine)
    monkeypatch.setattr(derived_metrics, "FlopCounts", found)
    return found


def mfu(engine: Engine, spec: TrainSpec) -> float | None:
    check = engine.check(spec).result.check("mfu")
    return check.value if check else None


def test_a_mixture_has_an_mfu_and_is_counted_once_by_each_run(engine: Engine, counts: Counts) -> None:
    tokens_per_second = MIXTURE.sequences_per_step * MIXTURE.sequence_length / 0.1
    for _ in range(2):
        assert mfu(engine, MIXTURE) == pytest.approx(tokens_per_second * 1e6 / 989.4e12)
    assert [asked[:2] for asked in counts.asked] == 2 * [("mixtral-tiny", 64)]


def test_another_length_is_another_count_and_another_batch_is_not(counts: Counts) -> None:
    flops = derived_metrics.ModelFlops()
    for spec in (MIXTURE, LARGER, replace(MIXTURE, sequence_length=128)):
        assert flops.per_token(spec) == 1e6
    assert [asked[:2] for asked in counts.asked] == [("mixtral-tiny", 64), ("mixtral-tiny", 128)]


def test_the_formula_costs_no_count_and_gives_the_figure_that_it_gave(engine: Engine, counts: Counts) -> None:
    tokens_per_second = PLAIN.sequences_per_step * PLAIN.sequence_length / 0.1
    geometry = PLAIN.architecture.geometry
    assert geometry is not None
    assert mfu(engine, PLAIN) == pytest.approx(tokens_per_second * geometry.flops_per_token(64) / 989.4e12)
    assert counts.asked == []


def test_where_the_chips_peak_is_not_known_nothing_is_counted(
    engine: Engine, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "ENVIRONMENT", replace(fakes.ENVIRONMENT, gpu="Some Chip"))
    assert mfu(engine, MIXTURE) is None
    assert counts.asked == []


def test_a_count_that_fails_leaves_the_case_its_verdict_and_says_so_in_a_line(engine: Engine, counts: Counts) -> None:
    counts.found = CountError("RuntimeError: it asks for the content of a tensor")
    engine.record(MIXTURE)
    result = engine.check(MIXTURE).result
    assert (result.verdict, result.check("mfu")) == ("pass", None)
    line = f"MFU is not told: the FLOPs of mixtral-tiny cannot be counted: {counts.found}"
    assert [note for note in result.notes if "MFU" in note] == [line]
    assert len(counts.asked) == 2, "once a run"


def test_one_that_fails_in_turns_says_so_too(engine: Engine, counts: Counts, golden: Golden) -> None:
    counts.found = CountError("no answer after 300 s")
    result = engine.run().compare(MIXTURE, LARGER, {}).result
    assert result.verdict == "pass"
    golden.lines(result.notes, "no answer after")


def test_before_turns_it_is_counted_while_no_gpu_is_held(engine: Engine, counts: Counts) -> None:
    engine.on(H200)
    engine.run(gpus=1).compare(MIXTURE, LARGER, {})
    assert counts.asked == [("mixtral-tiny", 64, 0)]


def test_it_is_counted_from_collection_on_and_done_before_hardware_is_leased(
    engine: Engine, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.on(H200)
    caller = engine.caller(gpus=1, start="cold")
    caller.run.begin([PLAIN, MIXTURE, LARGER])
    assert counts.asked == [("mixtral-tiny", 64, 0)]
    assert counts.is_open
    held: list[bool] = []

    @contextmanager
    def lease(*_: object, **__: object) -> Iterator[tuple[Gpu, ...]]:
        held.append(counts.is_open)
        yield H200.gpus

    monkeypatch.setattr(machine, "lease_gpus", lease)
    result = Cases(caller).check(MIXTURE).result
    assert result.check("mfu") is not None
    assert held
    assert not any(held)
    assert len(counts.asked) == 1


def test_what_nobody_announced_is_counted_before_its_first_launch(engine: Engine, counts: Counts) -> None:
    engine.on(H200)
    assert engine.check(MIXTURE, gpus=1).result.check("mfu") is not None
    assert counts.asked == [("mixtral-tiny", 64, 0)]


def test_what_is_still_counted_when_the_run_ends_ends_with_it(engine: Engine, counts: Counts) -> None:
    engine.on(H200)
    context = engine.caller(gpus=1, start="cold").run
    context.begin([MIXTURE])
    assert counts.is_open
    context.close()
    assert not counts.is_open


@pytest.mark.parametrize(
    ("found", "settings"),
    [
        (H200, {"gpus": 0}),
        (H200, {"gpus": 1, "dry_run": True}),
        (H200, {"static": True}),
        (replace(H200, gpus=(replace(H200.gpus[0], name="Some Chip"),)), {"gpus": 1}),
    ],
    ids=str,
)
def test_where_no_use_of_a_chip_is_told_nothing_is_counted_at_collection(
    engine: Engine, counts: Counts, found: Machine, settings: dict[str, Any]
) -> None:
    engine.on(found)
    engine.caller(**{"start": "cold", **settings}).run.begin([MIXTURE])
    assert counts.asked == []


def test_what_a_mixture_must_read_is_not_known(engine: Engine, counts: Counts) -> None:
    names = {spec: {check.metric for check in engine.check(spec).result.checks} for spec in (MIXTURE, PLAIN)}
    assert "least_memory_traffic" in names[PLAIN] - names[MIXTURE]
    assert counts.asked


def test_a_window_that_spares_arithmetic_makes_no_launch_invalid(
    engine: Engine, counts: Counts, golden: Golden
) -> None:
    counts.found = 1e18  # beyond the chip
    windowed = replace(MIXTURE, model="gemma-3-tiny", sequence_length=128)
    assert engine.check(windowed).result.verdict == "new"
    golden(engine.check(MIXTURE).result.reason)
    assert engine.check(replace(windowed, sequence_length=32)).result.verdict == "invalid"
