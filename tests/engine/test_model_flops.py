"""MFU of families that no formula is known of: counted once, never while something is timed, and never in the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf.launch.flop_count import CountError
from pytest_llmperf.launch.machine import Gpu, Machine
from pytest_llmperf.run import model_flops
from pytest_llmperf.spec.models import Model
from pytest_llmperf.spec.train_spec import TrainSpec
from tests import fakes
from tests.engine.conftest import SPEC, Engine

MIXTURE = replace(SPEC, model="mixtral-tiny", mixed_precision="bf16")
LARGER = replace(MIXTURE, micro_batch_size=2)
PLAIN = replace(SPEC, mixed_precision="bf16")
H200 = Machine(gpus=(Gpu(0, "GPU-0", "NVIDIA H200", 140 * 2**30),), cpu_name="Fake CPU", cores=8)


class Counts:
    """Stands for the process that counts: what it was asked, and how many launches there were by then."""

    def __init__(self, engine: Engine) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self._engine = engine
        self.answer: float | CountError = 1e6

    def __call__(self, model: Model, sequence_length: int) -> float:
        self.asked.append((model.slug, sequence_length, len(self._engine.launches)))
        if isinstance(self.answer, CountError):
            raise self.answer
        return self.answer


@pytest.fixture
def counts(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counts:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fakes, "ENVIRONMENT", replace(fakes.ENVIRONMENT, gpu="NVIDIA H200"))
    found = Counts(engine)
    monkeypatch.setattr(model_flops, "counted_flops", found)
    return found


def mfu(engine: Engine, spec: TrainSpec) -> float | None:
    check = engine.check(spec).result.check("mfu")
    return check.value if check else None


def test_a_mixture_has_an_mfu_and_is_counted_by_the_first_run_alone(engine: Engine, counts: Counts) -> None:
    tokens_per_second = MIXTURE.sequences_per_step * MIXTURE.sequence_length / 0.1
    for _ in range(2):
        assert mfu(engine, MIXTURE) == pytest.approx(tokens_per_second * 1e6 / 989.4e12)
    assert [asked[:2] for asked in counts.asked] == [("mixtral-tiny", 64)]


def test_another_length_is_another_count_and_another_batch_is_not(engine: Engine, counts: Counts) -> None:
    for spec in (MIXTURE, LARGER, replace(MIXTURE, sequence_length=128)):
        assert mfu(engine, spec) is not None
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
    counts.answer = CountError("RuntimeError: it asks for the content of a tensor")
    engine.record(MIXTURE)
    result = engine.check(MIXTURE).result
    assert (result.verdict, result.check("mfu")) == ("pass", None)
    line = f"MFU is not told: the FLOPs of mixtral-tiny cannot be counted: {counts.answer}"
    assert [note for note in result.notes if "MFU" in note] == [line]
    assert len(counts.asked) == 2, "once a run"


def test_one_that_fails_in_turns_says_so_too(engine: Engine, counts: Counts) -> None:
    counts.answer = CountError("no answer after 300 s")
    result = engine.run().compare(MIXTURE, LARGER, {}).result
    assert result.verdict == "pass"
    assert any(note.endswith("no answer after 300 s") for note in result.notes)


def test_before_turns_it_is_counted_while_no_gpu_is_held(engine: Engine, counts: Counts) -> None:
    engine.on(H200)
    engine.run(gpus=1).compare(MIXTURE, LARGER, {})
    assert counts.asked == [("mixtral-tiny", 64, 0)]


def test_what_a_mixture_must_read_is_not_known(engine: Engine, counts: Counts) -> None:
    names = {spec: {check.metric for check in engine.check(spec).result.checks} for spec in (MIXTURE, PLAIN)}
    assert "least_memory_traffic" in names[PLAIN] - names[MIXTURE]
    assert counts.asked


def test_a_window_that_spares_arithmetic_makes_no_launch_invalid(engine: Engine, counts: Counts) -> None:
    counts.answer = 1e18  # beyond the chip
    windowed = replace(MIXTURE, model="gemma-3-tiny", sequence_length=128)
    assert engine.check(windowed).result.verdict == "new"
    assert "is more than the chip can do" in engine.check(MIXTURE).result.reason
    assert engine.check(replace(windowed, sequence_length=32)).result.verdict == "invalid"
