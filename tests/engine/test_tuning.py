"""A whole search without a GPU: launches whose speed and memory follow from their settings."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llmperf.cli.commands.tune import page
from pytest_llmperf.judge.objective import OBJECTIVES, Trial
from pytest_llmperf.launch import local, machine
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.learning import TrainingErrors
from pytest_llmperf.records.result import Spent
from pytest_llmperf.run.case import CaseTerms
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError
from pytest_llmperf.run.tuning import tuner, winner
from pytest_llmperf.run.tuning.trials import Tried, Tuning
from pytest_llmperf.run.tuning.tuner import MemoryForecast, Tuner
from pytest_llmperf.run.tuning.winner import FULL_STEPS, Final, _longer, proof_seconds
from pytest_llmperf.settings import space
from pytest_llmperf.settings.space import ScriptSpace, Space, axes_of
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.engine.conftest import Engine
from tests.fakes import Fake, launch_of
from tests.golden import Golden

BASE = TrainSpec(model="llama-tiny", sequence_length=64, micro_batch_size=2)
AXES = {
    "micro_batch_size": [1, 2, 4, 8, 16, 32],
    "attention": ["sdpa", "eager"],
    "optimizer": ["adamw_torch", "adamw_torch_fused"],
    "gradient_checkpointing": [False, True],
}
GPU = Gpu(0, "GPU-0", "NVIDIA H200", 8 * 2**30)


class World:
    """What each configuration does."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.outcome: Callable[[TrainSpec], str] = lambda _: ""
        """A kind of failure, and its message; empty where it trains."""
        self.unsound: Callable[[TrainSpec], bool] = lambda _: False
        self.neighbours: Callable[[TrainSpec], tuple[str, ...]] = lambda _: ()
        """Others on the hardware, beside whom a step takes twice as long."""
        self.proves = False
        """Whether a winner is asked for its proofs; none can be shown here."""
        self.script: Callable[[ScriptSpec], Fake] = lambda _: Fake()

    def step_seconds(self, spec: TrainSpec) -> float:
        each = 1.0 + 0.3 * (spec.attention == "eager") + 0.25 * spec.gradient_checkpointing
        each -= 0.1 * (spec.optimizer == "adamw_torch_fused")
        return 0.001 * each * (spec.micro_batch_size + 2)

    @staticmethod
    def peak(spec: TrainSpec) -> int:
        each = 2**28 if spec.gradient_checkpointing else 2**29
        return 2**30 + each * spec.micro_batch_size

    def launch(self, request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        spec = request.spec
        self.launched.append(spec)
        request.meter.seconds += 1.0
        watch(Progress(phase="training", step=1, steps=spec.steps))
        if isinstance(spec, ScriptSpec):
            return self._of_script(spec, self.script(spec))
        assert isinstance(spec, TrainSpec)
        kind, _, message = self.outcome(spec).partition(": ")
        if kind == "interrupt":
            raise KeyboardInterrupt
        neighbours = self.neighbours(spec)
        if kind:
            health = Health(foreign_processes=neighbours)
            message = message or f"it ended by {kind}"
            return Failure(kind=kind, message=message, tail=(), folder="nowhere", health=health)
        evidence = {"attention": "eager"} if self.unsound(spec) else {}
        seconds, peak = self.step_seconds(spec) * (2 if neighbours else 1), self.peak(spec)
        fake = Fake(step_seconds=seconds, reserved_bytes=peak, evidence=evidence, foreign_processes=neighbours)
        return launch_of(spec, fake)

    @staticmethod
    def _of_script(spec: ScriptSpec, fake: Fake) -> Launch | Failure:
        if fake.fail:
            return Failure(kind=fake.fail, message=f"it ended by {fake.fail}", tail=(), folder="nowhere")
        made = launch_of(spec, fake)
        tokens = 64 * spec.micro_batch_size
        return replace(made, ranks=tuple(replace(rank, tokens_per_step=tokens) for rank in made.ranks))

    def training_errors(
        self, request: LaunchRequest, _watch: Callable[[Progress], None]
    ) -> list[TrainingErrors] | Failure:
        request.meter.seconds += 1.0
        return Failure(kind="error", message="there is no parity here", tail=(), folder="nowhere")


@pytest.fixture
def world(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    monkeypatch.setattr(local, "LocalLauncher", lambda: found)
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(engine.path / "cache"))

    class Predictions:
        """Without a process that imports torch."""

        def __init__(self, _niceness: int = 0) -> None:
            self._asked: list[dict[str, Any]] = []

        def send(self, request: dict[str, Any]) -> int:
            self._asked.append(request)
            return len(self._asked) - 1

        def receive(self, number: int) -> dict[str, Any]:
            request = self._asked[number]
            spec = TrainSpec.from_dict(request["spec"])
            return {"parts": {"all": World.peak(spec)}}

        def close(self) -> None: ...

    monkeypatch.setattr(tuner, "PredictionProcess", Predictions)
    monkeypatch.setattr(Final, "_prove", lambda final, ranked: _PROVE(final, ranked) if found.proves else None)
    return found


_PROVE = Final._prove


def _tuned(
    engine: Engine,
    *,
    objective: str = "throughput",
    seconds: float = 600.0,
    watch: Any = lambda *_: None,
    axes: Any = None,
    base: TrainSpec = BASE,
    **settings: Any,
) -> Tuning:
    found = _asked(axes or AXES, base, objective, seconds)
    return Tuner(engine.caller(**{"gpus": 0, **settings}), found, watch).run()


def _asked(axes: Any, base: TrainSpec = BASE, objective: str = "throughput", seconds: float = 600.0) -> Tuning:
    return _of_space(Space(base, axes_of(axes)), objective, seconds)


def _of_space(space: Space, objective: str = "throughput", seconds: float = 600.0) -> Tuning:
    return Tuning(space=space, objective=OBJECTIVES[objective], seconds_given=seconds, begun_at=space.base)


def _best(world: World, fits: Callable[[TrainSpec], bool] = lambda _: True) -> TrainSpec:
    specs: list[TrainSpec] = [spec for spec in Space(BASE, axes_of(AXES)).candidates().specs if fits(spec)]
    return min(specs, key=lambda spec: world.step_seconds(spec) / spec.micro_batch_size)


def test_it_finds_the_fastest_by_a_part_of_the_space_and_says_what_each_choice_brought(
    engine: Engine, world: World
) -> None:
    seen: list[int] = []
    tuning = _tuned(engine, watch=lambda found, doing, _: None if doing else seen.append(found.left))
    assert tuning.winner == _best(world) == replace(BASE, micro_batch_size=32, optimizer="adamw_torch_fused")
    assert 4 <= len(tuning.tried) < 40
    assert tuning.ended == ""
    without = [(first, turns) for (first, second), turns in tuning.compared.items() if second == tuning.winner]
    brought = {(first.micro_batch_size, first.optimizer): turns.log for first, turns in without}
    expected = {
        (BASE.micro_batch_size, "adamw_torch_fused"): math.log(34 / 32 / 2),
        (32, BASE.optimizer): math.log(0.9),
    }
    assert {one: brought[one] for one in expected} == pytest.approx(expected, abs=0.01)
    assert seen == sorted(seen, reverse=True)


def test_of_a_large_space_what_is_beside_the_best_is_searched_too(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates are a sample of it then, in which the best of all may not be."""
    monkeypatch.setattr(space, "MOST", 14)
    candidates, best = (
        Space(BASE, axes_of(AXES)).candidates(),
        replace(BASE, micro_batch_size=32, optimizer="adamw_torch_fused"),
    )
    tuning = _tuned(engine)
    assert best not in candidates.specs
    assert tuning.winner == best
    assert tuning.unseen < candidates.unseen
    assert tuning.left == len(candidates.specs) + candidates.unseen - tuning.unseen - len(tuning.tried)


def test_beside_the_best_one_that_two_choices_make_is_launched_once(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "MOST", 14)
    fused = {"optimizer": "adamw_torch_fused"}
    _tuned(
        engine, axes={**AXES, "optimizer": {"plain": {"optimizer": "adamw_torch"}, "fused": fused, "fused too": fused}}
    )
    trials = [spec.digest for spec in world.launched if spec.steps == 7]
    assert len(trials) == len({*trials})


def test_beside_the_best_nothing_larger_than_what_was_too_large_is_launched(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "MOST", 18)
    world.outcome = lambda spec: "oom" if spec.micro_batch_size >= 8 else ""
    tuning = _tuned(engine)
    assert tuning.winner == replace(BASE, micro_batch_size=4, optimizer="adamw_torch_fused")
    sizes = dict[tuple[object, ...], list[int]]()
    for one in tuning.tried:
        if one.trial.is_too_large:
            shape = one.spec.changed(micro_batch_size=1)
            sizes.setdefault((shape,), []).append(one.spec.micro_batch_size)
    assert all(found == sorted(found, reverse=True) for found in sizes.values())


def test_what_is_predicted_not_to_fit_is_never_launched(engine: Engine, world: World) -> None:
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    tuning = _tuned(engine, gpus=1)
    limit = 8 * 2**30
    assert all(world.peak(spec) <= limit for spec in world.launched)
    assert tuning.winner == _best(world, lambda spec: world.peak(spec) <= 0.985 * limit)
    assert tuning.too_large > 0


def test_a_limit_of_memory_makes_a_smaller_card_of_it(engine: Engine, world: World) -> None:
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    tuning = _tuned(engine, gpus=1, memory_limit_bytes=2 * 2**30)
    assert tuning.winner == _best(world, lambda spec: world.peak(spec) <= 0.985 * 2 * 2**30)
    assert all(first.gradient_checkpointing for first, _ in tuning.compared)  # without it nothing would fit
    assert all(world.peak(spec) <= 0.985 * 2 * 2**30 for spec in world.launched)


def test_where_nothing_fits_the_least_that_is_needed_is_told(engine: Engine, world: World) -> None:
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    tuning = _tuned(engine, gpus=1, memory_limit_bytes=2**29)
    assert (tuning.winner, tuning.left, world.launched) == (None, 0, [])
    assert tuning.least is not None
    spec, needed = tuning.least
    assert (spec.micro_batch_size, spec.gradient_checkpointing) == (1, True)
    assert needed == 2**30 + 2**28


def test_on_a_cpu_a_model_too_large_for_its_host_is_not_launched(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights alone would take what others on the host need; small models are launched as they are."""
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 2**30)
    tuning = _tuned(engine, base=replace(BASE, model="llama-3.2-1b"))
    assert (tuning.winner, tuning.left, world.launched) == (None, 0, [])
    assert tuning.least is not None
    assert (tuning.least[1], tuning.limit_bytes) == (2**30 + 2**28, 2**30)
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 64 * 2**30)
    tuning = _tuned(engine, base=replace(BASE, model="llama-3.2-1b"))
    assert (tuning.limit_bytes, tuning.too_large) == (0, 0)
    assert tuning.winner is not None


def test_what_takes_the_least_is_predicted_before_all_others(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To predict each of 48 would take as many answers."""
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    predicted: list[TrainSpec] = []
    plain = MemoryForecast.fits

    def fits(self: MemoryForecast, spec: TrainSpec) -> bool:
        predicted.append(spec)
        return plain(self, spec)

    monkeypatch.setattr(MemoryForecast, "fits", fits)
    tuning = _tuned(engine, gpus=1, memory_limit_bytes=2**29)
    assert tuning.least == (replace(BASE, micro_batch_size=1, gradient_checkpointing=True), 2**30 + 2**28)
    assert (tuning.too_large, tuning.left) == (48, 0)
    assert len(predicted) < 8


def test_where_the_beginning_does_not_fit_it_goes_on_from_what_takes_the_least(engine: Engine, world: World) -> None:
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    limit = 2**30 + 2**28 + 2**26  # one sequence, recomputed
    tuning = _tuned(engine, gpus=1, memory_limit_bytes=limit)
    assert world.launched[0].micro_batch_size == 1
    assert tuning.winner == _best(world, lambda spec: world.peak(spec) <= 0.985 * limit)
    assert {world.peak(spec) for spec in world.launched} == {2**30 + 2**28}


def test_predictions_take_no_longer_than_there_is_time(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes two seconds, and what is predicted to take the least is all that fits."""
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    plain = MemoryForecast.fits

    def fits(self: MemoryForecast, spec: TrainSpec) -> bool:
        now[0] += 2.0
        return plain(self, spec)

    monkeypatch.setattr(MemoryForecast, "fits", fits)
    tuning = _tuned(engine, gpus=1, memory_limit_bytes=2**30 + 2**28 + 2**26, seconds=30)
    assert now[0] <= 32.0
    assert tuning.winner is not None


def test_without_predictions_what_asks_for_the_least_is_tried_before_nothing_is_said_to_fit(
    engine: Engine, world: World
) -> None:
    world.outcome = lambda _: "oom"
    tuning = _tuned(engine)
    assert len(world.launched) == 2
    assert (tuning.winner, tuning.too_large, tuning.left) == (None, 48, 0)
    assert tuning.least is not None
    assert (tuning.least[0].micro_batch_size, tuning.least[0].gradient_checkpointing) == (1, True)
    assert tuning.least[1] == 0


def test_without_predictions_what_fits_is_found_from_there(engine: Engine, world: World) -> None:
    world.outcome = lambda spec: "oom" if spec.micro_batch_size > 1 else ""
    tuning = _tuned(engine)
    assert tuning.winner == _best(world, lambda spec: spec.micro_batch_size == 1)


@pytest.mark.parametrize(("share", "largest"), [(0.5, 16), (0.9, 8), (1.2, 8)])
def test_what_is_compiled_is_held_to_what_it_took_of_its_prediction(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch, share: float, largest: int
) -> None:
    """Predictions are those of what is not compiled: half of a size twice as large fits, nine tenths do not."""
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    plain = World.peak
    monkeypatch.setattr(world, "peak", lambda spec: int(plain(spec) * (share if spec.torch_compile else 1.0)))
    each = {"no": {"torch_compile": False}, "model": {"torch_compile": True, "torch_compile_scope": "model"}}
    axes = {"micro_batch_size": [2, 4, 8, 16], "compile": each}
    tuning = _tuned(engine, gpus=1, axes=axes, memory_limit_bytes=2**30 + 2**29 * 10)
    assert max(spec.micro_batch_size for spec in world.launched if spec.torch_compile) == largest
    assert max(spec.micro_batch_size for spec in world.launched if not spec.torch_compile) == 8
    assert tuning.too_large == (1 if largest == 16 else 2)


def test_what_ran_out_of_memory_is_launched_no_larger_whatever_what_is_compiled_took(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    plain = World.peak
    monkeypatch.setattr(world, "peak", lambda spec: int(plain(spec) * (0.5 if spec.torch_compile else 1.0)))
    world.outcome = lambda spec: "oom" if not spec.torch_compile and spec.micro_batch_size >= 4 else ""
    each = {"no": {"torch_compile": False}, "model": {"torch_compile": True, "torch_compile_scope": "model"}}
    _tuned(engine, gpus=1, axes={"micro_batch_size": [2, 4, 8, 16], "compile": each}, memory_limit_bytes=2**33)
    assert any(spec.torch_compile for spec in world.launched)
    sizes = [one.micro_batch_size for one in world.launched if not one.torch_compile and one.micro_batch_size >= 4]
    assert sizes == sorted({*sizes}, reverse=True)
    assert sizes


def test_of_a_compiled_shape_it_is_the_largest_share_that_holds_also_where_that_was_all() -> None:
    forecast = MemoryForecast(100)
    shapes = [replace(BASE, torch_compile=True, micro_batch_size=size) for size in (1, 2, 4)]
    forecast.peaks = dict(zip(shapes, (20, 40, 120), strict=True))
    forecast.ask = lambda specs: None  # type: ignore[method-assign]
    forecast.process.close()
    assert not forecast.fits(shapes[2])
    assert forecast.learn(shapes[0], 10)
    assert forecast.fits(shapes[2])
    assert forecast.learn(shapes[1], 42)
    assert not forecast.fits(shapes[2])


def test_what_fails_takes_the_search_nowhere(engine: Engine, world: World) -> None:
    def outcome(spec: TrainSpec) -> str:
        if spec.optimizer == "adamw_torch_fused":
            return "error"
        return "oom" if spec.micro_batch_size > 8 else "timeout" if spec.attention == "eager" else ""

    world.outcome = outcome
    tuning = _tuned(engine)
    assert tuning.winner == _best(world, lambda spec: not outcome(spec))
    assert {one.trial.kind for one in tuning.tried} >= {"", "error"}
    assert all(one.trial.failure for one in tuning.tried if one.trial.kind)


def test_a_choice_that_takes_a_trial_more_than_its_time_is_tried_no_third_time(engine: Engine, world: World) -> None:
    world.outcome = lambda spec: "timeout" if spec.attention == "eager" else ""
    tuning = _tuned(engine, axes={name: AXES[name] for name in ("attention", "optimizer", "micro_batch_size")})
    assert 1 <= sum(one.trial.kind == "timeout" for one in tuning.tried) <= 2


_NO_SDPA = "llama has no attention='sdpa' in transformers 5, expected 'eager': use attention='eager'"


@pytest.mark.parametrize("most", [14, 20_000])
def test_a_value_that_a_launch_refuses_is_launched_once(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Of a large space, too, of which more is looked at later."""
    best = _best(world, lambda spec: spec.attention == "eager")
    monkeypatch.setattr(space, "MOST", most)
    world.outcome = lambda spec: f"refused: {_NO_SDPA}" if spec.attention == "sdpa" else ""
    tuning = _tuned(engine)
    assert [one.spec for one in tuning.tried if one.trial.failure] == [BASE]
    assert tuning.winner == best
    assert 0 < tuning.refused[_NO_SDPA] <= 23
    assert tuning.too_large == 0


def test_what_fails_whatever_its_micro_batch_does_not_take_the_time_of_all_sizes(engine: Engine, world: World) -> None:
    world.outcome = lambda spec: "error" if spec.attention == "sdpa" else ""
    tuning = _tuned(engine)
    assert tuning.winner is not None
    failed = [one.spec for one in itertools.takewhile(lambda one: one.trial.failure, tuning.tried)]
    assert len(failed) == len({replace(spec, micro_batch_size=1) for spec in failed})


def test_where_nothing_trained_in_its_time_it_says_so(engine: Engine, world: World, golden: Golden) -> None:
    def outcome(_: TrainSpec) -> str:
        time.sleep(0.1)
        return "error"

    world.outcome = outcome
    tuning = _tuned(engine, seconds=0.5)
    assert tuning.winner is None
    assert tuning.left
    golden(tuning.ended)


def test_the_lowest_memory_is_looked_for_where_settings_ask_for_the_least(engine: Engine, world: World) -> None:
    tuning = _tuned(engine, objective="memory")
    least = replace(BASE, micro_batch_size=1, gradient_checkpointing=True)
    assert [one.spec for one in tuning.tried[:2]] == [BASE, least]
    assert max(one.spec.micro_batch_size for one in tuning.tried[:8]) <= BASE.micro_batch_size


def test_in_a_short_search_what_is_compiled_is_tried_and_what_times_kernels_is_not(
    engine: Engine, world: World
) -> None:
    modes = ["default", "max-autotune"]
    tuning = _tuned(engine, axes={"torch_compile": [False, True], "torch_compile_mode": modes}, seconds=300.0)
    tried = {(one.spec.torch_compile, one.spec.torch_compile_mode) for one in tuning.tried}
    assert tried == {(False, "default"), (True, "default")}


def test_what_was_not_active_is_no_winner(engine: Engine, world: World, golden: Golden) -> None:
    world.unsound = lambda spec: spec.optimizer == "adamw_torch_fused"
    tuning = _tuned(engine)
    assert tuning.winner == _best(world, lambda spec: spec.optimizer == "adamw_torch")
    contradicted = [one for one in tuning.tried if one.trial.kind == "contradicted"]
    assert contradicted
    golden(contradicted[0].trial.failure)


@pytest.mark.parametrize("most", [14, 20_000])
def test_started_again_it_launches_nothing_twice(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(space, "MOST", most)
    first = _tuned(engine)
    trials = [spec for spec in world.launched if spec.steps == 7]
    world.launched.clear()
    again = _tuned(engine)
    assert again.winner == first.winner
    assert not {spec.digest for spec in world.launched if spec.steps == 7} & {spec.digest for spec in trials}
    assert sum(one.was_kept for one in again.tried) == len(first.tried)


def test_ctrl_c_keeps_what_is_known(engine: Engine, world: World) -> None:
    world.outcome = lambda _: "interrupt" if len(world.launched) > 6 else ""
    tuning = _tuned(engine)
    assert tuning.ended == "interrupted"
    assert len(tuning.tried) == 6
    assert tuning.winner is not None
    world.outcome = lambda _: ""
    assert sum(one.was_kept for one in _tuned(engine).tried) == 6


def test_a_kept_trial_that_is_broken_is_made_anew(engine: Engine, world: World) -> None:
    _tuned(engine)
    kept = sorted((engine.path / "cache" / "trials").rglob("*.json"))
    kept[0].write_text('{"digest": ')
    kept[1].write_text(json.dumps({**json.loads(kept[1].read_text()), "step_seconds": -3}))
    world.launched.clear()
    assert _tuned(engine).winner == _best(world)


def test_time_is_never_exceeded(engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    plain = world.launch

    def launch(request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        now[0] += min(10.0, request.timeout_seconds)
        return plain(request, watch)

    monkeypatch.setattr(world, "launch", launch)
    tuning = _tuned(engine, seconds=60.0)
    assert now[0] <= 60.0
    assert 1 <= len(tuning.tried) <= 6
    assert tuning.winner is not None


def test_of_a_text_only_the_batches_are_tried_that_it_has_rows_for(engine: Engine, world: World) -> None:
    """Three rows, and a start that takes eight."""
    (engine.path / "three.txt").write_text("a" * 3 * 64)
    base = replace(BASE, data="text", text=str(engine.path / "three.txt"), sequence_length=64, micro_batch_size=8)
    found = _tuned(engine, axes={"micro_batch_size": [1, 2, 8, 16]}, base=base)
    assert {spec.micro_batch_size for spec in world.launched} == {1, 2}
    assert found.winner is not None
    assert found.winner.micro_batch_size == 2
    assert sum(number for why, number in found.refused.items() if "3 rows" in why) == 2


def test_a_trial_is_neither_traced_nor_inspected(engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plain = list[tuple[bool, bool]](), world.launch

    def launch(request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        asked.append((request.trace, request.inspect))
        return plain(request, watch)

    monkeypatch.setattr(world, "launch", launch)
    tuning = _tuned(engine, axes={"optimizer": ["adamw_torch", "adamw_torch_fused"]})
    assert len(asked) >= len(tuning.tried) == 2
    assert {*asked} == {(False, False)}


def test_a_trial_that_would_leave_its_own_proofs_no_time_is_ended(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast step whose launches take eight times as long as the others'."""
    now, plain, left = [0.0], world.launch, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def launch(request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        seconds = 40.0 if "fused" in request.spec.to_dict()["optimizer"] else 5.0
        now[0] += min(seconds, request.timeout_seconds)
        made = plain(request, watch)
        if seconds > request.timeout_seconds:
            return Failure(kind="timeout", message="it was ended", tail=(), folder="nowhere")
        return replace(made, wall_seconds=seconds) if isinstance(made, Launch) else made

    monkeypatch.setattr(world, "launch", launch)
    tuning = _tuned(engine, seconds=150.0, watch=lambda _found, _doing, seconds: left.append(seconds))
    assert "timeout" in {one.trial.kind for one in tuning.tried}
    assert left[len(tuning.tried) - 1] >= proof_seconds(tuning.winner, 5.0)


def test_the_wait_for_imports_is_told_before_the_first_trial_and_is_not_its_own(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, told = world.launch, list[str]()

    def launch(request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        made, waited = plain(request, watch), 60.0 if len(world.launched) == 1 else 1.0
        assert isinstance(made, Launch)
        warm = {**made.evidence, "start": "warm"}
        return replace(made, wall_seconds=3.0 + waited, phases={"start": waited, "steps": 3.0}, evidence=warm)

    monkeypatch.setattr(world, "launch", launch)
    for seconds in (5.0, 4.0):  # made, and kept
        tuning = _tuned(
            engine, axes={"micro_batch_size": [2, 4]}, watch=lambda _found, doing, _left: told.append(doing)
        )
        assert [one.trial.wall_seconds for one in tuning.tried] == [5.0, 4.0], seconds
    assert sum("imports" in doing for doing in told) == 1
    assert "imports" in told[0]


def test_what_ran_into_its_limit_says_whose_it_was_and_is_made_anew_with_far_more_time(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    plain, eager = world.launch, list[float]()

    def launch(request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        if request.spec.to_dict()["attention"] == "eager":
            eager.append(request.timeout_seconds)
            request.meter.seconds += request.timeout_seconds
        return plain(request, watch)

    monkeypatch.setattr(world, "launch", launch)
    world.outcome = lambda spec: "timeout" if spec.attention == "eager" else ""
    for seconds, launches in ((240.0, 1), (240.0, 1), (700.0, 2)):
        tuning = _tuned(engine, seconds=seconds, axes={"attention": ["sdpa", "eager"]})
        golden([one.trial.failure for one in tuning.tried if one.trial.kind == "timeout"])
        assert len(eager) == launches
    assert eager[1] > 2 * eager[0]


def test_trials_leave_the_turns_of_the_best_their_time(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others hold the hardware while the third trial waits, until little more is left than the end takes."""
    now, plain, given = [0.0], world.launch, 320.0
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def launch(request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
        now[0] = max(now[0] + 1.0, given - 53.0 if len(world.launched) == 2 else 0.0)
        made = plain(request, watch)
        return replace(made, wall_seconds=1.0) if isinstance(made, Launch) else made

    monkeypatch.setattr(world, "launch", launch)
    tuning = _tuned(engine, seconds=given)
    assert tuning.left > 0
    assert any(tuning.winner in pair for pair in tuning.compared)


def test_time_is_over_while_it_waits_for_what_others_hold(engine: Engine, world: World, golden: Golden) -> None:
    with machine.lease_cpu(print):
        tuning = _tuned(engine, seconds=0.5)
    assert world.launched == []
    golden(tuning.ended)
    assert tuning.left == 48


LARGE = replace(BASE, micro_batch_size=8)


def _two_in_turns(engine: Engine) -> tuple[Final, Callable[[], Tuning], TrainSpec, TrainSpec]:
    """Two that trials could not tell apart, the first of which is the faster one."""
    engine.on(Machine(gpus=(replace(GPU, memory_bytes=64 * 2**30),), cpu_name="", cores=8))
    fast, slow = replace(LARGE, optimizer="adamw_torch_fused"), LARGE
    found = _asked(AXES)
    found.rivals = [slow]
    final = Final(engine.caller(gpus=1), found, time.monotonic() + 600, lambda _: None)

    def decided() -> Tuning:
        final.decide([fast, slow], lambda _: True)
        return found

    return final, decided, fast, slow


def _ties(found: Tuning) -> list[TrainSpec]:
    return [other for (other, _), turns in found.compared.items() if turns.verdict == "tie"]


def test_what_fails_in_turns_is_no_tie(engine: Engine, world: World, golden: Golden) -> None:
    _, decided, fast, slow = _two_in_turns(engine)
    world.outcome = lambda spec: "error" if spec.optimizer == "adamw_torch" else ""
    found = decided()
    assert (found.winner, _ties(found)) == (fast, [])
    golden.lines(found.notes, "it ended by")
    assert not any("possible in time" in note for note in found.notes)
    world.outcome = lambda spec: "error" if spec.optimizer == "adamw_torch_fused" else ""
    assert _two_in_turns(engine)[1]().winner == slow


def test_what_a_launch_takes_is_its_trials_and_not_that_of_one_which_ran_into_its_time(engine: Engine) -> None:
    found, caller = _asked(AXES), engine.caller(gpus=1)
    fast, slow = LARGE, replace(LARGE, optimizer="adamw_torch_fused")
    trial = Trial(digest=fast.digest, id=fast.id, wall_seconds=4.0, step_seconds=0.1, steps=7, tokens_per_step=64)
    timeout = Trial(digest=slow.digest, id=slow.id, wall_seconds=60.0, failure="no end after 60 s", kind="timeout")
    found.tried, found.winner = [Tried(fast, trial, was_kept=True), Tried(slow, timeout)], fast
    caller.findings.spent = Spent(launches=1, phases={"steps": 60.0})
    final = Final(caller, found, time.monotonic() + 100, lambda _: None)
    assert final._seconds_of(fast) == final._seconds_of(slow) == pytest.approx(1.2 * 4.9)


def test_recipes_are_those_of_the_best_whatever_an_earlier_search_tried_last(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.on(Machine(gpus=(replace(GPU, memory_bytes=64 * 2**30),), cpu_name="", cores=8))
    monkeypatch.setattr(world, "step_seconds", lambda spec: 0.01 * spec.seed)
    axes = {"seed": [1, 2], "compile": {"no": {"torch_compile": False}, "model": {"torch_compile": True}}}
    _tuned(engine, gpus=1, axes={"seed": [1, 2]}, base=replace(LARGE, seed=1))
    begun, found = list[set[int]](), _asked(axes, replace(LARGE, seed=1))

    def watch(tuning: Tuning, _doing: str, _left: float) -> None:
        if [one.was_kept for one in tuning.tried] == [True, True]:
            begun.append({searched._specs[one[0]].to_dict()["seed"] for one in searched._field.beginnings if one})

    searched = Tuner(engine.caller(gpus=1), found, watch)
    searched.run()
    assert begun
    assert {*itertools.chain(*begun)} == {1}


def test_ctrl_c_while_a_space_is_looked_at_is_an_end_as_any_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "field_of", interrupted)
    assert _tuned(engine).ended == "interrupted"


@pytest.mark.parametrize(("left", "has_turns"), [(100.0, False), (600.0, True)])
def test_what_would_compile_for_a_minute_takes_no_turns_in_the_time_of_the_proofs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, left: float, has_turns: bool
) -> None:
    monkeypatch.setattr(Final, "_disproof", lambda *_: "")
    engine.on(Machine(gpus=(replace(GPU, memory_bytes=64 * 2**30),), cpu_name="", cores=8))
    winner = replace(LARGE, optimizer="adamw_torch_fused", torch_compile=True)
    found = _asked({**AXES, "compile": {"no": {"torch_compile": False}, "model": {"torch_compile": True}}})
    trial = Trial(digest=winner.digest, id=winner.id, wall_seconds=55.0, step_seconds=0.1, tokens_per_step=64)
    found.tried.append(Tried(winner, trial))
    Final(engine.caller(gpus=1), found, time.monotonic() + left, lambda _: None).decide([winner], lambda _: True)
    compiled = [other for other, _ in found.compared if other.torch_compile]
    assert bool(compiled) is has_turns


@pytest.mark.parametrize(
    ("against", "updated", "shown", "ends_as"),
    [
        ("", "", 2, "fast"),
        ("", "", 1, "slow"),
        ("it is wrong", "", 2, "slow"),
        ("", "recorded", 2, "slow"),
        ("a tie", "", 2, "slow"),
    ],
    ids=["it is proved", "no time for its proofs", "its proofs disprove it", "another was recorded", "no better"],
)
def test_what_time_the_proofs_have_left_goes_to_turns_whose_winner_is_proved_too(
    engine: Engine,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    against: str,
    updated: str,
    shown: int,
    ends_as: str,
) -> None:
    """Its proofs keep all of the time, and take little of it."""
    final, _, fast, slow = _two_in_turns(engine)
    found, cases = final._found, list[Any]()
    found.rivals, world.proves = [fast], True
    if against == "a tie":
        world.step_seconds = lambda spec: 0.1 - 1e-5 * (spec == _longer(fast))  # type: ignore[method-assign]

    def disproof(_: Final, name: str, spec: Any) -> str:
        if name == "case" and len(cases) < shown:
            cases.append(spec)
            found.case = SimpleNamespace(result=SimpleNamespace(updated=updated), of=spec)  # type: ignore[assignment]
        return against if spec == fast else ""

    monkeypatch.setattr(Final, "_disproof", disproof)
    monkeypatch.setattr(winner, "proof_seconds", lambda *_: math.inf)
    final.decide([slow, fast], lambda _: True)
    assert found.winner == {"fast": fast, "slow": slow}[ends_as]
    assert found.case is not None
    assert vars(found.case)["of"] == found.winner
    is_told = ends_as == "fast" or against == "a tie"
    unsound = [fast] if against == "it is wrong" else []
    assert (found.unsound, len(found.rivals)) == (unsound, 0 if is_told or unsound else 1)
    assert len(found.notes) == (0 if is_told else 1)


def test_one_that_took_no_turn_with_what_is_proved_and_is_ahead_when_time_is_over_is_a_rival(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ahead of what was ahead of that one."""
    final, _, fast, slow = _two_in_turns(engine)
    found, last, case = final._found, replace(fast, gradient_accumulation_steps=2), object()
    order, taken, take_turns = [slow, fast, last], list[Any](), Final._take_turns
    world.step_seconds = lambda spec: 0.1 / (1 + order.index(spec))  # type: ignore[method-assign]
    monkeypatch.setattr(winner, "_longer", lambda spec: spec)
    monkeypatch.setattr(winner, "RIVALS", 1)

    def until_all_were_ahead(own: Final, specs: Any) -> Any:
        taken.append(specs)
        return take_turns(own, specs) if found.winner != last else None

    monkeypatch.setattr(Final, "_take_turns", until_all_were_ahead)
    found.winner, found.rivals, found.case, final._able = slow, [fast, last], case, order  # type: ignore[assignment]
    final._spend_what_is_left(case)  # type: ignore[arg-type]
    assert not any({slow, last} <= {*specs} for specs in taken[:-1])
    assert (found.winner, found.case, last in found.rivals, len(found.notes)) == (slow, case, True, 1)


def test_what_turns_do_not_tell_apart_is_a_tie_and_what_they_do_is_none(engine: Engine, world: World) -> None:
    assert _ties(_two_in_turns(engine)[1]()) == []
    world.step_seconds = lambda spec: 0.001  # type: ignore[method-assign]
    _, decided, fast, slow = _two_in_turns(engine)
    found = decided()
    assert (found.winner, _ties(found)) == (fast, [slow])


def test_turns_with_what_was_not_active_count_for_nothing(engine: Engine, world: World, golden: Golden) -> None:
    _, decided, _, slow = _two_in_turns(engine)
    world.unsound = lambda spec: spec.optimizer == "adamw_torch_fused"
    found = decided()
    assert found.winner == slow, found.notes
    assert all("fused" not in f"{first.id} {second.id}" for first, second in found.compared)
    golden.lines(found.notes, "asked for attention")


def test_what_turns_showed_is_kept_where_what_follows_is_interrupted(engine: Engine, world: World) -> None:
    final, decided, _, slow = _two_in_turns(engine)
    # The order of the two is turned round by turns, and their winner is then interrupted without its own choice.
    world.step_seconds = lambda spec: 0.001 * (1.0 - 0.1 * (spec.optimizer == "adamw_torch"))  # type: ignore[method-assign]
    world.outcome = lambda spec: "interrupt" if spec.micro_batch_size == BASE.micro_batch_size else ""
    with pytest.raises(KeyboardInterrupt):
        decided()
    assert (final._found.winner, [second for _, second in final._found.compared]) == (slow, [slow])


def test_a_search_that_is_interrupted_at_its_end_tells_what_turns_showed(engine: Engine, world: World) -> None:
    """By their trials the first two are alike, and by turns the second is better."""
    fused = "adamw_torch_fused"
    engine.on(Machine(gpus=(replace(GPU, memory_bytes=64 * 2**30),), cpu_name="", cores=8))

    def step_seconds(spec: TrainSpec) -> float:
        is_fused = spec.optimizer == fused
        return 0.001 * (1.0 + (0.01 * is_fused if spec.steps == 7 else 0.05 * (not is_fused)))

    world.step_seconds = step_seconds  # type: ignore[method-assign]
    told: list[str] = []

    def watch(_found: Tuning, doing: str, _seconds_left: float) -> None:
        told.append(doing)
        if sum("in turns with" in line for line in told) > 2:  # the winner without its choice
            raise KeyboardInterrupt

    tuning = _tuned(engine, gpus=1, axes={"optimizer": ["adamw_torch", fused]}, watch=watch)
    assert (tuning.ended, len(tuning.tried)) == ("interrupted", 2)
    assert tuning.winner == replace(BASE, optimizer=fused)
    assert [one.verdict for one in tuning.compared.values()] == ["second"]


def test_an_interrupted_search_says_of_nothing_that_it_does_not_fit(engine: Engine, world: World) -> None:
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    world.outcome = lambda _: "interrupt"
    tuning = _tuned(engine, gpus=1)
    assert (tuning.winner, tuning.ended, tuning.least) == (None, "interrupted", None)
    assert tuning.left + tuning.too_large == 48


def test_where_all_fail_otherwise_nothing_is_said_not_to_fit(engine: Engine, world: World) -> None:
    engine.on(Machine(gpus=(GPU,), cpu_name="", cores=8))
    world.outcome = lambda _: "error"
    assert _tuned(engine, gpus=1, axes={"attention": ["sdpa", "eager"]}).least is None


def test_the_first_trial_is_made_however_little_time_there_is(engine: Engine, world: World) -> None:
    tuning = _tuned(engine, seconds=0.5)
    assert len(world.launched) >= 1
    assert tuning.winner is not None


def test_a_space_of_one(engine: Engine, world: World) -> None:
    tuning = _tuned(engine, axes={"micro_batch_size": [4]})
    assert (tuning.winner, tuning.left) == (replace(BASE, micro_batch_size=4), 0)


@pytest.mark.parametrize(("objective", "size"), [("memory", 1), ("cost", 32)])
def test_other_objectives(engine: Engine, world: World, objective: str, size: int) -> None:
    tuning = _tuned(engine, objective=objective)
    assert tuning.winner is not None
    assert tuning.winner.micro_batch_size == size


def test_energy_that_nobody_tells_of_finds_no_winner(engine: Engine, world: World) -> None:
    tuning = _tuned(engine, objective="energy", axes={"micro_batch_size": [1, 2]})
    assert tuning.winner is None


def test_nothing_that_can_run_here_is_refused_at_once(engine: Engine, world: World, golden: Golden) -> None:
    with pytest.raises(CaseFailedError) as raised:
        _tuned(engine, axes={"gpus": [16, 32]})
    golden(raised)
    assert world.launched == []


def test_a_winner_whose_parity_nobody_can_show_is_not_one(engine: Engine, world: World, golden: Golden) -> None:
    """Its small training ends by an error three times, and so no configuration is sound."""
    world.proves = True
    tuning = _tuned(engine)
    assert tuning.winner is None
    golden.lines(tuning.notes, "there is no")


def test_where_the_fastest_is_unsound_turns_are_told_of_the_next_and_nothing_is_called_decided(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has asked what comes near the next one."""
    engine.on(Machine(gpus=(replace(GPU, memory_bytes=64 * 2**30),), cpu_name="", cores=8))
    world.proves = True
    wrong = replace(BASE, micro_batch_size=16)
    monkeypatch.setattr(Final, "_disproof", lambda _final, _name, spec: "it is wrong" if spec == wrong else "")
    tuning = _tuned(engine, gpus=1, axes={"micro_batch_size": [2, 8, 16]})
    assert (tuning.winner, tuning.unsound, tuning.rivals) == (replace(BASE, micro_batch_size=8), [wrong], [])
    assert all(winner == tuning.winner and first != wrong for first, winner in tuning.compared)
    assert not any("decided" in line for line in page(tuning))
    monkeypatch.setattr(Final, "_disproof", lambda *_: "")
    assert any("decided" in line for line in page(_tuned(engine, gpus=1, axes={"micro_batch_size": [2, 8, 16]})))


def test_rivals_are_those_that_are_as_near_as_they_scatter_and_not_the_next_ones(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is slower by 4 % and steady; the third by 6 %, and its own steps scatter by more than that."""
    engine.on(Machine(gpus=(replace(GPU, memory_bytes=64 * 2**30),), cpu_name="", cores=8))
    behind = {2: 0.0, 4: 0.04, 8: 0.06}
    world.step_seconds = lambda spec: (  # type: ignore[method-assign]
        0.001 * spec.micro_batch_size * (1 + behind[spec.micro_batch_size])
    )
    of = Trial.of

    def scattering(launch: Launch, *told: Any) -> Trial:
        trial = of(launch, *told)
        return replace(trial, step_error=0.05 if "mbs8" in trial.id else 0.0)

    asked: list[list[TrainSpec]] = []
    monkeypatch.setattr(Trial, "of", scattering)
    monkeypatch.setattr(Final, "decide", lambda final, *_: asked.append(final._found.rivals))
    _tuned(engine, gpus=1, axes={"micro_batch_size": [*behind]})
    assert asked == [[replace(BASE, micro_batch_size=8)]]


class TestNeighbours:
    """Other processes on the hardware, which a launch's own record tells of."""

    def test_a_trial_that_one_spoilt_is_made_once_more_and_ranks_by_that(self, engine: Engine, world: World) -> None:
        best = replace(BASE, micro_batch_size=32, optimizer="adamw_torch_fused")
        world.neighbours = lambda spec: ("python 7",) if world.launched.count(spec) == 1 and _same(spec, best) else ()
        tuning = _tuned(engine)
        trials = [one.trial for one in tuning.tried if one.spec == best]
        assert [bool(trial.disturbances) for trial in trials] == [True, False]
        assert tuning.winner == best
        assert len(tuning.tried) == len({one.spec for one in tuning.tried}) + 1

    def test_one_that_is_spoilt_again_ranks_nowhere_and_is_not_kept(self, engine: Engine, world: World) -> None:
        """It is so fast that even half its speed would win."""
        plain, wrong = world.step_seconds, replace(BASE, micro_batch_size=16)
        world.step_seconds = lambda spec: plain(spec) / (4 if _same(spec, wrong) else 1)  # type: ignore[method-assign]
        world.neighbours = lambda spec: ("python 7",) if _same(spec, wrong) else ()
        axes = {"micro_batch_size": [1, 2, 4, 16]}
        tuning = _tuned(engine, axes=axes)
        spoilt = [one.trial for one in tuning.tried if one.trial.disturbances]
        assert [trial.disturbances for trial in spoilt] == [("another process on the hardware: python 7",)] * 2
        assert tuning.winner == replace(BASE, micro_batch_size=4)
        world.neighbours = lambda _: ()
        again = _tuned(engine, axes=axes)
        assert sum(one.was_kept for one in again.tried) == len(tuning.tried) - len(spoilt)
        assert again.winner == wrong

    def test_where_they_spoil_all_the_best_of_these_is_told(self, engine: Engine, world: World) -> None:
        world.neighbours = lambda _: ("python 7",)
        tuning = _tuned(engine, axes={"micro_batch_size": [1, 4]})
        assert tuning.winner == replace(BASE, micro_batch_size=4)
        assert len(tuning.tried) == 4

    def test_memory_that_they_took_and_time_say_nothing_of_a_configuration(self, engine: Engine, world: World) -> None:
        engine.on(Machine(gpus=(replace(GPU, memory_bytes=64 * 2**30),), cpu_name="", cores=8))

        def neighbours(spec: TrainSpec) -> tuple[str, ...]:
            return ("python 7",) if world.launched.count(spec) == 1 and spec.micro_batch_size >= 16 else ()

        world.neighbours = neighbours
        world.outcome = lambda spec: "oom" if neighbours(spec) else ""
        tuning = _tuned(engine, gpus=1)
        assert tuning.winner == replace(BASE, micro_batch_size=32, optimizer="adamw_torch_fused")
        assert tuning.too_large == 0

    def test_a_winner_whose_case_they_spoilt_is_one_all_the_same(
        self, engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        final, _, fast, _ = _two_in_turns(engine)
        world.neighbours, world.proves = lambda _: ("python 7",), True
        asked = final._disproof
        monkeypatch.setattr(final, "_disproof", lambda name, spec: asked(name, spec) if name == "case" else "")
        final._prove([fast])
        found = final._found
        assert found.winner == fast
        assert found.case is not None
        assert found.case.result.verdict == "invalid"


def _same(spec: TrainSpec, other: TrainSpec) -> bool:
    """Whatever its number of steps."""
    return replace(spec, steps=9, min_steps=9, warmup_steps=2) == replace(other, steps=9, min_steps=9, warmup_steps=2)


class TestAgain:
    """``perf.tune``: whether a winner still is one."""

    SPEC = replace(BASE, micro_batch_size=32, optimizer="adamw_torch_fused", steps=12, min_steps=10)

    @pytest.fixture(autouse=True)
    def _on_a_gpu(self, engine: Engine) -> None:
        """A CPU's launches scatter too much for any neighbour to be shown to be faster."""
        engine.on(Machine(gpus=(replace(GPU, memory_bytes=64 * 2**30),), cpu_name="", cores=8))

    def test_a_winner_that_still_is_one_passes(self, engine: Engine, world: World, golden: Golden) -> None:
        conclusion = engine.run(gpus=1).tune(
            self.SPEC, Space(self.SPEC, axes_of({**AXES, "micro_batch_size": [8, 24, 32]})), 2
        )
        assert (conclusion.result.verdict, conclusion.fails) == ("pass", False)
        golden(conclusion.result.reason)
        golden(conclusion.result.notes[0])
        too_slow = "4 others are too slow for turns, the fastest optimizer=adamw_torch, at -10.0 % in a trial"
        assert conclusion.result.notes[1] == too_slow

    def test_a_neighbour_that_has_become_faster_is_named(self, engine: Engine, world: World, golden: Golden) -> None:
        world.step_seconds = lambda spec: 0.01 * (1 - 0.05 * (spec.optimizer == "adamw_torch"))  # type: ignore[method-assign]
        space = Space(self.SPEC, axes_of({"optimizer": ["adamw_torch", "adamw_torch_fused"]}))
        conclusion = engine.run(gpus=1).tune(self.SPEC, space, 3)
        assert conclusion.result.verdict == "improved"
        golden(conclusion.result.reason)
        assert not conclusion.fails
        assert engine.run(gpus=1, strict=True).tune(self.SPEC, space, 3).fails

    def test_what_to_do_about_a_faster_one_is_told_and_what_cannot_be(
        self, engine: Engine, world: World, golden: Golden
    ) -> None:
        world.step_seconds = lambda spec: 0.01 * (1 - 0.05 * (spec.optimizer == "adamw_torch"))  # type: ignore[method-assign]
        space = Space(self.SPEC, axes_of({"optimizer": ["adamw_torch", "adamw_torch_fusd"]}))
        notes = engine.run(gpus=1).tune(self.SPEC, space, 3).result.notes
        golden(notes[0])
        (wrong,) = (note for note in notes if note.startswith("optimizer=adamw_torch_fusd cannot be: "))
        golden(wrong)

    def test_one_whose_trial_others_spoil_twice_is_told(self, engine: Engine, world: World) -> None:
        world.neighbours = lambda spec: ("python 7",) if (spec.micro_batch_size, spec.steps) == (24, 7) else ()
        space = Space(self.SPEC, axes_of({"micro_batch_size": [16, 24, 32]}))
        result = engine.run(gpus=1).tune(self.SPEC, space, 1).result
        assert sum((spec.micro_batch_size, spec.steps) == (24, 7) for spec in world.launched) == 2
        told = "the trial of micro_batch_size=24 was spoilt twice: another process on the hardware: python 7"
        assert told in result.notes

    def test_where_others_spoil_the_trials_of_all_neighbours_nothing_passes(
        self, engine: Engine, world: World, golden: Golden
    ) -> None:
        world.neighbours = lambda spec: ("python 7",) if spec.micro_batch_size != 32 else ()
        space = Space(self.SPEC, axes_of({"micro_batch_size": [16, 24, 32]}))
        result = engine.run(gpus=1).tune(self.SPEC, space, 1).result
        assert result.verdict == "inconclusive"
        golden(result.reason)
        assert sum("was spoilt twice" in note for note in result.notes) == 2
        assert engine.run(gpus=1, strict=True).tune(self.SPEC, space, 1).fails

    def test_a_neighbour_that_does_not_train_is_a_note(self, engine: Engine, world: World, golden: Golden) -> None:
        world.outcome = lambda spec: "error" if spec.attention == "eager" else ""
        space = Space(self.SPEC, axes_of({"attention": ["eager", "sdpa"]}))
        result = engine.run(gpus=1).tune(self.SPEC, space, 3).result
        assert result.verdict == "pass"
        golden(result.notes[0])

    def test_a_winner_that_was_not_active_is_invalid(self, engine: Engine, world: World, golden: Golden) -> None:
        world.unsound = lambda spec: spec.optimizer == "adamw_torch_fused"
        space = Space(self.SPEC, axes_of({"micro_batch_size": [16, 32]}))
        result = engine.run(gpus=1).tune(self.SPEC, space, 3).result
        assert result.verdict == "invalid"
        golden(result.reason)

    def test_where_no_neighbour_can_be_tried_nothing_passes(self, engine: Engine, world: World, golden: Golden) -> None:
        space = Space(self.SPEC, axes_of({"gpus": [1, 16]}))
        with pytest.raises(CannotRunError) as raised:
            engine.run(gpus=1).tune(self.SPEC, space, 3)
        golden(raised)
        assert world.launched == []

    def test_a_neighbour_that_was_not_active_is_a_note(self, engine: Engine, world: World, golden: Golden) -> None:
        world.unsound = lambda spec: spec.optimizer == "adamw_torch"
        space = Space(self.SPEC, axes_of({"optimizer": ["adamw_torch", "adamw_torch_fused"]}))
        result = engine.run(gpus=1).tune(self.SPEC, space, 3).result
        assert result.verdict == "pass"
        golden(result.notes[0])

    def test_a_dry_run_launches_nothing(self, engine: Engine, world: World) -> None:
        result = engine.run(gpus=1, dry_run=True).tune(self.SPEC, Space(self.SPEC, axes_of(AXES)), 2).result
        assert (result.verdict, world.launched) == ("planned", [])


@pytest.mark.parametrize(("tolerance", "verdict"), [(None, "pass"), (0.3, "improved")])
def test_on_a_cpu_a_neighbour_is_faster_by_what_its_gate_holds(
    engine: Engine, world: World, tolerance: float | None, verdict: str
) -> None:
    """One night it was 48 % faster, the next 48 % slower."""
    world.step_seconds = lambda spec: 0.01 / (1 + (spec.optimizer == "adamw_torch"))  # type: ignore[method-assign]
    spec = replace(BASE, optimizer="adamw_torch_fused")
    space = Space(spec, axes_of({"optimizer": ["adamw_torch", "adamw_torch_fused"]}))
    terms = CaseTerms(tolerances={} if tolerance is None else {"tokens_per_second_per_gpu": tolerance})
    result = engine.run(terms).tune(spec, space, 3).result
    assert result.verdict == verdict
    told = f"a neighbour counts as faster from {1 + (tolerance or 3.0):g} times on"
    assert any(told in note for note in result.notes)


def test_a_model_that_fits_on_several_gpus_alone_is_searched_there(engine: Engine, world: World) -> None:
    gpus = tuple(Gpu(index, f"GPU-{index}", "NVIDIA H200", 64 * 2**30) for index in range(2))
    engine.on(Machine(gpus=gpus, cpu_name="", cores=8))
    world.outcome = lambda spec: "oom" if spec.gpus == 1 else ""
    tuning = _tuned(engine, gpus=2, base=replace(BASE, gpus=2), axes={"micro_batch_size": [1, 2, 4]})
    assert tuning.winner == replace(BASE, gpus=2, micro_batch_size=4)


def test_a_choice_without_which_the_winner_is_faster_is_given_up(engine: Engine, world: World) -> None:
    """Right beside small micro-batches, wrong beside large ones: no trial of that one was made."""
    engine.on(Machine(gpus=(replace(GPU, memory_bytes=64 * 2**30),), cpu_name="", cores=8))
    fused = "adamw_torch_fused"

    def step_seconds(spec: TrainSpec) -> float:
        large = spec.micro_batch_size == 32
        return 0.001 * (spec.micro_batch_size + 4) * (1 + (0.02 if large else -0.05) * (spec.optimizer == fused))

    world.step_seconds = step_seconds  # type: ignore[method-assign]
    axes = {"micro_batch_size": [2, 8, 32], "optimizer": ["adamw_torch", fused]}
    found = _asked(axes)
    final = Final(engine.caller(gpus=1), found, time.monotonic() + 600, lambda _: None)
    final.decide([replace(BASE, micro_batch_size=32, optimizer=fused)], lambda _: True)
    assert found.winner == replace(BASE, micro_batch_size=32)
    assert [one.verdict for one in found.compared.values()] == ["second", "second"]
    assert {winner for _, winner in found.compared} == {found.winner}


def test_a_cache_that_cannot_be_written_is_a_note(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine.path / "cache").write_text("a file")
    tuning = _tuned(engine, axes={"micro_batch_size": [1, 4]})
    assert tuning.winner is not None
    (note,) = tuning.notes
    assert "not kept" in note


class TestScripts:
    """Any training command, its words as axes."""

    def _world(self, world: World) -> None:
        losses = [6.0 - 0.02 * step + 0.01 * (step % 2) for step in range(40)]

        def script(spec: ScriptSpec) -> Fake:
            size, command = spec.micro_batch_size, spec.command
            each = 1.0 - 0.2 * ("--fused" in command) + 0.5 * ("--eager" in command) - 0.4 * ("--summed" in command)
            wrong = 2.0 if "--summed" in command else 1.0
            told = tuple(wrong * (loss + 0.001 * math.log2(size)) for loss in losses[: spec.steps])
            fail = "oom" if size > 16 else "never-started" if "--broken" in command else ""
            return Fake(step_seconds=0.001 * each * (size + 2), reserved_bytes=size * 2**28, losses=told, fail=fail)

        world.script = script

    def _space(self, engine: Engine, axes: str, command: str = "python train.py --batch {batch} {flag}") -> ScriptSpace:
        path = engine.path / "axes.toml"
        path.write_text(axes)
        return ScriptSpace.read({"command": command}, path, engine.path)

    def _tuned(self, engine: Engine, axes: str, objective: str = "throughput", watch: Any = lambda *_: None) -> Tuning:
        return Tuner(engine.caller(gpus=0), _of_space(self._space(engine, axes), objective), watch).run()

    def test_it_goes_along_the_micro_batch_and_chooses_flags(self, engine: Engine, world: World) -> None:
        self._world(world)
        found = self._tuned(engine, 'batch = [1, 2, 4, 8, 16, 32]\nflag = ["", "--fused", "--eager"]\n')
        assert found.winner.command == "python train.py --batch {micro_batch_size} --fused"
        assert found.winner.micro_batch_size == 16
        assert found.too_large == 3
        assert world.launched[0].digest == world.launched[1].digest  # which shows what of its losses repeats

    def _slow(self, world: World, monkeypatch: pytest.MonkeyPatch, seconds: float, *, fails: bool = False) -> None:
        """Each launch takes so long, by a clock of its own; the second one ``fails``."""
        self._world(world)
        now, plain = [0.0], world.launch
        monkeypatch.setattr(time, "monotonic", lambda: now[0])

        def launch(request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
            now[0] += seconds
            made = plain(request, watch)
            if fails and len(world.launched) == 2:
                return Failure(kind="error", message="its port is taken", tail=(), folder="")
            return replace(made, wall_seconds=seconds) if isinstance(made, Launch) else made

        monkeypatch.setattr(world, "launch", launch)

    @pytest.mark.parametrize(("seconds", "launches"), [(10.0, 2), (55.0, 2), (60.0, 1)])
    def test_whether_its_losses_repeat_is_asked_where_there_is_time(
        self, engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch, seconds: float, launches: int
    ) -> None:
        self._slow(world, monkeypatch, seconds)
        space = self._space(engine, 'batch = [1]\nflag = [""]\n')
        found = Tuner(engine.caller(gpus=0), _of_space(space, seconds=240.0), lambda *_: None).run()
        assert len(world.launched) == launches
        assert any("no first loss" in note for note in found.notes) == (launches == 1)

    @pytest.mark.parametrize(("seconds", "fails"), [(100.0, False), (40.0, True)], ids=["one trial", "second fails"])
    def test_why_losses_are_not_compared_and_which_minutes_would_do_is_told(
        self,
        engine: Engine,
        world: World,
        monkeypatch: pytest.MonkeyPatch,
        golden: Golden,
        seconds: float,
        fails: bool,
    ) -> None:
        self._slow(world, monkeypatch, seconds, fails=fails)
        space = self._space(engine, 'batch = [1, 2, 4]\nflag = [""]\n')
        golden(Tuner(engine.caller(gpus=0), _of_space(space, seconds=240.0), lambda *_: None).run().notes)

    @pytest.mark.parametrize(("planted", "told"), [(0.1, True), (0.0, False)])
    def test_what_time_is_left_goes_to_turns_of_those_that_trials_leave_undecided(
        self, engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch, planted: float, told: bool
    ) -> None:
        """Launches of 4 s that scatter by 5 %, as a CPU's are believed to, in two minutes; six orders and scatters."""
        now, plain, decided = [0.0], world.launch, 0
        monkeypatch.setattr(time, "monotonic", lambda: now[0])

        def launch(request: LaunchRequest, watch: Callable[[Progress], None]) -> Launch | Failure:
            now[0] += 4.0
            made = plain(request, watch)
            return replace(made, wall_seconds=4.0) if isinstance(made, Launch) else made

        monkeypatch.setattr(world, "launch", launch)
        for seed in range(6):
            chance, began = random.Random(seed), now[0]
            monkeypatch.setenv("LLMPERF_CACHE_DIR", str(engine.path / f"cache-{seed}"))
            fast = chance.choice("abcd")

            def script(spec: ScriptSpec, chance: random.Random = chance, fast: str = fast) -> Fake:
                each = 0.03 * (1 - planted * (spec.argv[-1] == fast)) * math.exp(chance.gauss(0, 0.05))
                return Fake(step_seconds=each, losses=(6.0,) * spec.steps)

            world.script = script
            space = self._space(engine, 'name = ["a", "b", "c", "d"]\n', "python train.py {name}")
            found = Tuner(engine.caller(gpus=0), _of_space(space, seconds=120.0)).run()
            decided += not found.rivals
            assert not told or found.winner.argv[-1] == fast
            assert {winner for _, winner in found.compared} == {found.winner}
            assert {other for (other, _), one in found.compared.items() if not one.verdict} <= {*found.rivals}
            assert not found.rivals or now[0] - began > 90.0  # all but the winner's own case
        assert decided >= 3 if told else decided == 0

    def test_a_batch_that_is_split_otherwise_draws_others_and_that_is_no_contradiction(
        self, engine: Engine, world: World
    ) -> None:
        def script(spec: ScriptSpec) -> Fake:
            more = 1.02 if "--accum 2" in spec.command else 1.0
            losses = tuple(more * (6.0 - 0.01 * step) for step in range(spec.steps))
            return Fake(step_seconds=0.001 * spec.micro_batch_size, losses=losses)

        world.script = script
        axes = "[axes.split]\nwhole = { batch = 16, accum = 1 }\ntwo = { batch = 8, accum = 2 }\n"
        space = self._space(engine, axes, "python train.py --batch {batch} --accum {accum}")
        found = Tuner(engine.caller(gpus=0), _of_space(space)).run()
        assert [one.trial.kind for one in found.tried] == ["", ""]

    def test_the_winner_s_own_case_takes_the_steps_that_its_test_will(self, engine: Engine, world: World) -> None:
        self._world(world)
        world.proves = True
        found = self._tuned(engine, 'batch = [1, 2]\nflag = ["", "--fused"]\n')
        assert found.case is not None
        assert {len(launch.step_seconds) for launch in found.case.result.launches} == {30}

    def test_one_that_learns_otherwise_is_told_and_no_winner(
        self, engine: Engine, world: World, golden: Golden
    ) -> None:
        self._world(world)
        found = self._tuned(engine, 'batch = [8, 16]\nflag = ["", "--summed"]\n')
        assert "--summed" not in found.winner.command
        golden(found.notes[:1])
        launches = len(world.launched)
        again = self._tuned(engine, 'batch = [8, 16]\nflag = ["", "--summed"]\n')
        assert (again.winner.id, sorted(again.notes)) == (found.winner.id, sorted(found.notes))
        assert not [one for one in world.launched[launches:] if one.steps == 7]  # trials are kept

    def test_it_begins_where_it_is_told(self, engine: Engine, world: World) -> None:
        self._world(world)
        self._tuned(engine, 'batch = [1, 2, 4]\nflag = ["", "--fused"]\n[start]\nbatch = 4\nflag = "--fused"\n')
        assert world.launched[0].argv == ["python", "train.py", "--batch", "4", "--fused"]

    def test_the_lowest_memory_is_an_objective(self, engine: Engine, world: World) -> None:
        self._world(world)
        found = self._tuned(engine, 'batch = [4, 2, 1]\nflag = ["", "--fused"]\n', "memory")
        assert found.winner.micro_batch_size == 1

    def test_a_command_that_fails_where_it_begins_ends_the_search(
        self, engine: Engine, world: World, golden: Golden
    ) -> None:
        self._world(world)
        with pytest.raises(CaseFailedError) as refused:
            self._tuned(engine, 'batch = [1, 2]\nflag = ["--broken", ""]\n')
        golden(refused.value)
        assert len(world.launched) == 1

    def test_what_its_case_is_refused_for_is_no_fault_of_the_fastest(self, engine: Engine, world: World) -> None:
        """It ends after fewer steps than are measured, say, as others would."""
        self._world(world)
        plain, world.proves = world.script, True
        world.script = lambda spec: replace(plain(spec), fail="refused") if spec.steps > FULL_STEPS else plain(spec)
        found = self._tuned(engine, 'batch = [8, 16]\nflag = ["--fused"]\n')
        assert (found.winner.micro_batch_size, found.case, found.unsound) == (16, None, [])
        assert any("by refused" in note for note in found.notes)

    def test_one_that_fails_later_is_a_trial_like_others(self, engine: Engine, world: World) -> None:
        self._world(world)
        found = self._tuned(engine, 'batch = [1, 2]\nflag = ["", "--broken"]\n')
        assert found.winner.argv[-1] == "2"
        assert "never-started" in {one.trial.kind for one in found.tried}

    def test_without_tokens_nothing_is_compared(self, engine: Engine, world: World, golden: Golden) -> None:
        world.script = lambda _: Fake(evidence={"tokens": "unknown"})
        with pytest.raises(CaseFailedError) as refused:
            self._tuned(engine, 'batch = [1, 2]\nflag = [""]\n')
        golden(refused.value)

    def test_what_was_tried_of_other_files_is_tried_anew(self, engine: Engine, world: World) -> None:
        digest = hashlib.sha256(b"one").hexdigest()[:12]
        world.script = lambda _: Fake(evidence={"setup": {"sources": {"train.py": digest}}})
        script, axes = engine.path / "train.py", 'batch = [1]\nflag = [""]\n'
        script.write_text("one")
        counts = []
        for text in ("one", "one", "two"):
            script.write_text(text)
            before = len(world.launched)
            self._tuned(engine, axes)
            counts.append(len(world.launched) - before)
        assert counts == [2, 0, 2]
