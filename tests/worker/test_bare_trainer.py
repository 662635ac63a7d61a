"""A case's training as a script of its own has what its launch by the recipe has."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pytest_llmperf import ScriptSpec, TrainSpec
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.precision import bytes_each
from tests.worker.import_patch import after_import
from tests.worker.launching import launched
from tests.worker.user import REPOSITORY

pytest.importorskip("torch")
from pytest_llmperf.observe.measurement import _FIRST_STEPS as KEPT_NORMS

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


# After all callbacks of a step, the bytes of all storages that a tensor of Python's has.
_LIVE = """
    own = module.CallbackHandler.on_step_end
    def on_step_end(self, args, state, control):
        import gc, os, torch
        ended = own(self, args, state, control)
        gc.collect()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
        live = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
        with open(os.environ["LLMPERF_TEST_LIVE"], "a") as file:
            file.write(f"{sum(live.values())}\\n")
        return ended
    module.CallbackHandler.on_step_end = on_step_end"""


@pytest.mark.wide
def test_nothing_of_ours_is_alive_at_a_step_s_end_but_its_loss_and_first_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(after_import("transformers.trainer_callback", _LIVE))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    found = []
    for name in ("ours", "bare"):
        monkeypatch.setenv("LLMPERF_TEST_LIVE", str(tmp_path / name))
        if name == "ours":
            launched(SPEC, tmp_path / "run", start="cold", all_steps=True)
        else:
            words = [sys.executable, *COMMAND.split()[1:]]
            subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True, timeout=240)
        found.append([int(line) for line in (tmp_path / name).read_text().split()][: SPEC.steps])
    ours, bare = found
    assert len(ours) == len(bare) == SPEC.steps
    assert SPEC.architecture.geometry is not None
    weights = bytes_each(SPEC) * SPEC.architecture.geometry.weights
    assert min(bare) > 3 * weights, "they and Adam's two states"
    # In fp32 and in bf16; the newest of both are the Trainer's own too.
    kept = [4 * before + 2 * min(before, KEPT_NORMS) for before in range(SPEC.steps)]
    assert [one - other for one, other in zip(ours, bare, strict=True)] == kept
