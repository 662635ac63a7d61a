"""A recipe is a file found by its name, and what it drives to be observed knows no trainer."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402 - they need torch

from pytest_llmperf.observe import training  # noqa: E402
from pytest_llmperf.observe.tracer import TRACED_STEPS  # noqa: E402
from pytest_llmperf.observe.training import ObservedTraining, Plan  # noqa: E402
from pytest_llmperf.observe.vital_signs import Heartbeat  # noqa: E402
from pytest_llmperf.records.ranks import Request, Trained  # noqa: E402
from pytest_llmperf.settings.train_spec import TrainSpec  # noqa: E402
from pytest_llmperf.worker import rank_job as job  # noqa: E402
from pytest_llmperf.worker import recipes  # noqa: E402

_CPU = torch.device("cpu")
_TOKENS, _PASSES = 8, 2


PLAN = Plan(steps=6, min_steps=6, warmup_steps=1)


class Loop:
    """A training in plain PyTorch, which says nothing: who observes it hears of its steps by an optimizer's hook."""

    def __init__(self, folder: Path) -> None:
        words: Any = None
        self.beat = Heartbeat(folder, 0, words)
        self.kept: list[Trained] = []
        self.observed = ObservedTraining(PLAN, _CPU, self.beat)
        self.observed.measured = lambda: self.kept.append(self.trained())
        self.losses: list[float] = []
        self.num_steps, self.is_over = 0, False

    def trained(self) -> Trained:
        return self.observed.trained({}, parameters=32, evidence={})

    def run(self) -> None:
        model = torch.nn.Linear(8, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.observed.begin()
        while not self.is_over:
            assert self.num_steps < 10 * PLAN.steps
            self.observed.batches_asked()
            for _ in range(_PASSES):
                self.observed.pass_began(model.parameters())
                loss = model(torch.ones(_TOKENS, 8)).square().mean() / _PASSES
                loss.backward()
                self.losses.append(loss.item())
                self.observed.pass_ended(loss.detach(), _TOKENS)
            optimizer.step()
            optimizer.zero_grad()

    def stepped(self, *_: Any) -> None:
        self.num_steps += 1
        came = self.observed.step_ended(self.num_steps)
        self.is_over = came == "over" or (came == "measured" and not self.observed.go_on())


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    loop = Loop(tmp_path_factory.mktemp("run"))
    hook = register_optimizer_step_post_hook(loop.stepped)
    loop.run()
    hook.remove()
    return loop


class TestObservedByHooks:
    def test_each_timed_step_has_its_time_loss_and_tokens(self, loop: Loop) -> None:
        (trained,) = loop.kept
        assert len(trained.record.step_seconds) == PLAN.steps
        assert all(seconds > 0 for seconds in trained.record.step_seconds)
        assert trained.record.tokens_per_step == _TOKENS * _PASSES
        by_step = [sum(loop.losses[at : at + _PASSES]) for at in range(0, PLAN.steps * _PASSES, _PASSES)]
        assert trained.losses == pytest.approx(by_step)

    def test_steps_that_are_traced_come_after_them_and_are_counted_apart(self, loop: Loop) -> None:
        assert loop.num_steps == PLAN.steps + TRACED_STEPS
        products = {row.name: row.count for row in loop.observed.trace().rows if row.name == "aten::mm"}
        assert products == {"aten::mm": 2 * _PASSES}

    def test_where_steps_are_long_one_less_is_traced_and_the_counts_are_the_same(
        self, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(training, "LONG_SECONDS", 0.0)
        other = Loop(tmp_path)
        hook = register_optimizer_step_post_hook(other.stepped)
        other.run()
        hook.remove()
        assert other.num_steps == PLAN.steps + TRACED_STEPS - 1
        assert other.observed.trace().counts == loop.observed.trace().counts

    def test_its_phases_are_told(self, loop: Loop) -> None:
        assert list(loop.beat._reached) == ["importing", "training", "gathering", "tracing", "finishing"]
        assert loop.beat.step == PLAN.steps


def _request(**more: Any) -> Request:
    return Request(spec=TrainSpec(model="llama-tiny"), folder=Path(), model_config={}, **more)


def test_a_second_recipe_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_test.py").write_text("def train(*_, **__): return 'trained'\n")
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path)])
    recipe: Any = job.recipe_of(_request(recipe="of_a_test"))
    assert recipe.train() == "trained"
    del sys.modules[recipe.__name__]


def test_who_names_none_has_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text('{"spec": {"model": "llama-tiny"}, "model_config": {}}')
    assert Request.read(tmp_path).recipe == _request().recipe == "huggingface"


def test_one_that_is_not_there_is_said() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"worker\.recipes\.nemo"):
        job.recipe_of(_request(recipe="nemo"))


def test_a_rank_that_takes_its_place_back_has_one_heartbeat(tmp_path: Path) -> None:
    """Two processes that go backward in the same moment both begin; the one that trains begins once more."""
    words: Any = None
    beat = Heartbeat(tmp_path, 0, words)
    beat.start()
    beat.start()
    assert [each.name for each in threading.enumerate()].count("llmperf-heartbeat") == 1
    beat.stop()
