"""A case's training as a script of its own has what its launch by the recipe has."""

from __future__ import annotations

from collections import Counter

import pytest

from pytest_llmperf import ScriptSpec, TrainSpec
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.launch import Launch
from tests.worker.launching import launched
from tests.worker.user import REPOSITORY

pytest.importorskip("torch")

pytestmark = pytest.mark.torchrun

SPEC = TrainSpec(model="llama-tiny", steps=8, sequence_length=32, micro_batch_size=2)
COMMAND = (
    "python -m torch.distributed.run --nproc-per-node 1 tools/bare_trainer.py model=llama-tiny steps=8 "
    "sequence_length=32 micro_batch_size=2"
)

# Fetching a batch of two tensors is left out of a recipe's step, and is in a script's: each is made of its rows and
# brought to its device.
OF_A_BATCH = "stack cat select as_strided view to _to_copy empty_strided copy_".split()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launch, Launch]:
    folder = tmp_path_factory.mktemp("bare")
    script = ScriptSpec(command=COMMAND, steps=8)
    request = LaunchRequest(spec=script, folder=folder / "script", gpus=(), root=REPOSITORY, timeout_seconds=240)
    watched = LocalLauncher().launch(request, lambda _: None)
    assert isinstance(watched, Launch), watched
    return launched(SPEC, folder / "recipe", all_steps=True), watched


def test_its_losses_and_tokens_are_the_same(both: tuple[Launch, Launch]) -> None:
    recipe, script = both
    assert script.losses == recipe.losses
    assert script.tokens_per_step == recipe.tokens_per_step
    assert script.parameters == recipe.parameters


def test_a_step_has_the_same_operators_but_for_those_that_fetch(both: tuple[Launch, Launch]) -> None:
    recipe, script = (Counter({name: int(count) for (_, name), count in each.trace.counts.items()}) for each in both)
    assert script - recipe == Counter({f"aten::{name}": 2 for name in OF_A_BATCH})
    assert not recipe - script


def test_it_waits_as_often_and_the_lines_of_both_tell_of_all_waits(both: tuple[Launch, Launch]) -> None:
    for launch in both:
        waits = launch.trace.count("synchronisations_per_step")
        assert sum(launch.trace.places["wait"].values()) == waits == 21


def test_what_trains_is_the_same(both: tuple[Launch, Launch]) -> None:
    recipe, script = (launch.evidence for launch in both)
    for topic in ("config", "optimizer", "parameter_groups", "dropout", "buffer_dtypes", "torch", "overhead"):
        assert script["setup"][topic] == recipe["setup"][topic], topic
    for name in ("attention", "optimizer", "parallelism", "parameter_dtypes", "torch_compile", "liger_modules"):
        assert script[name] == recipe[name], name
