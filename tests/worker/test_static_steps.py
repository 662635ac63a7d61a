"""Static figures of real models: the same in every process, and a fault in the stack is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.static_steps import come_and_gone, judge_step
from pytest_llmperf.launch import prediction
from pytest_llmperf.launch.prediction import PredictionError, StaticSteps
from pytest_llmperf.records.trace import StaticStep
from tests.worker.import_patch import after_import
from tests.worker.user import REPOSITORY

pytest.importorskip("torch")

from pytest_llmperf.worker.estimate.prediction_server import identity, kind

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

SMALL = TrainSpec(model="llama-tiny", sequence_length=64, micro_batch_size=2)
LIGER = replace(SMALL, liger=True)
SHARDED = replace(SMALL, parallelism="fsdp", gpus=4, mixed_precision="no")
ACCUMULATED = replace(SMALL, gradient_accumulation_steps=4)
UNKNOWN = replace(SMALL, optimizer="adafactor")


@contextmanager
def asking() -> Iterator[StaticSteps]:
    steps = StaticSteps()
    try:
        yield steps
    finally:
        steps.close()


def told(*specs: TrainSpec) -> list[StaticStep]:
    """By one process."""
    with asking() as steps:
        steps.ask(specs)
        found = [steps.of(spec) for spec in specs]
    assert not [each for each in found if isinstance(each, PredictionError)], found
    return [each for each in found if isinstance(each, StaticStep)]


def test_a_python_without_what_trains_is_refused_and_one_with_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with asking() as steps:
        steps.check()
        monkeypatch.setattr(prediction, "find_spec", lambda name: None if name == "torch" else name)
        with pytest.raises(PredictionError, match=r"python.* has no torch, so it can judge no step"):
            steps.check()


@pytest.fixture(scope="module")
def answers() -> Mapping[TrainSpec, StaticStep | PredictionError]:
    """By one process, of what can be told and what cannot."""
    pytest.importorskip("liger_kernel")
    specs = (SMALL, LIGER, UNKNOWN, SHARDED, ACCUMULATED)
    with asking() as steps:
        steps.ask(specs)
        return {spec: steps.of(spec) for spec in specs}


@pytest.fixture(scope="module")
def clean(answers: Mapping[TrainSpec, StaticStep | PredictionError]) -> Mapping[TrainSpec, StaticStep]:
    told_of = {spec: answer for spec, answer in answers.items() if isinstance(answer, StaticStep)}
    assert len(told_of) == len(answers) - 1, answers
    return told_of


@pytest.mark.slow
@pytest.mark.wide
def test_two_processes_tell_the_same_in_any_order(clean: Mapping[TrainSpec, StaticStep]) -> None:
    assert told(ACCUMULATED, SHARDED, LIGER, SMALL) == [clean[spec] for spec in (ACCUMULATED, SHARDED, LIGER, SMALL)]


@pytest.mark.wide
def test_the_predicted_memory_is_what_the_command_says(clean: Mapping[TrainSpec, StaticStep]) -> None:
    # One request alone, in a process that nothing has warmed.
    words = ["plan", "model=llama-tiny", "sequence_length=64", "micro_batch_size=2", "--json"]
    command = [sys.executable, "-m", "pytest_llmperf.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120, check=True)
    document = json.loads(done.stdout)
    assert document["parts"] == clean[SMALL].memory
    assert document["peak_allocated_bytes"] == sum(document["parts"].values()) > 2**20
    assert document["digest"] == SMALL.digest


def test_every_micro_batch_of_a_step_counts(clean: Mapping[TrainSpec, StaticStep]) -> None:
    once, four = clean[SMALL], clean[ACCUMULATED]
    assert sum(four.flops.values()) == 4 * sum(once.flops.values())
    assert four.operators["aten::mm"] == 4 * once.operators["aten::mm"]
    assert four.operators["aten::_foreach_sqrt"] == once.operators["aten::_foreach_sqrt"] == 1


@pytest.mark.wide
def test_ligers_kernels_are_counted_by_their_names(clean: Mapping[TrainSpec, StaticStep]) -> None:
    assert clean[LIGER].operators["liger::_rms_norm_forward_kernel"] == 2 * 2 + 1
    assert not [name for name in clean[SMALL].operators if name.startswith("liger::")]


def test_questions_are_not_counted_and_versions_are_of_what_ran(clean: Mapping[TrainSpec, StaticStep]) -> None:
    names = {name for step in clean.values() for name in step.operators}
    assert not {name for name in names if name.startswith(("prim::", "profiler::"))}
    assert set(clean[SMALL].versions) == {"torch", "transformers", "accelerate", "pytest-llmperf"}
    assert "liger-kernel" in clean[LIGER].versions
    assert "+" not in clean[SMALL].versions["torch"]  # builds for CPU and CUDA count alike


LLAMA = "transformers.models.llama.modeling_llama"
# What somebody's environment does to the stack, where nothing of ours looks.
FORWARD = "module.LlamaMLP.forward = lambda self, x, own=module.LlamaMLP.forward: own(self, x{})"
FLOAT = FORWARD.format(".float().to(x.dtype)")
ITEM = FORWARD.format(") if x.sum().item() else (x")
EAGER = "module.ALL_ATTENTION_FUNCTIONS['sdpa'] = module.eager_attention_forward"
NORM = "module._patch_rms_norm_module = lambda *args, **kwargs: None"
MONKEY_PATCH = "liger_kernel.transformers.monkey_patch"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patches", "said"),
    [
        pytest.param(
            {LLAMA: f"{FLOAT}; {ITEM}"},
            {SMALL: ("copies a step +8 (+8 aten::_to_copy)", "synchronisations a step +2 (+2 aten::item)")},
            id="a float and a wait more",
        ),
        pytest.param(
            {LLAMA: EAGER, MONKEY_PATCH: NORM},
            {
                SMALL: ("gone: aten::_scaled_dot_product_flash_attention",),
                LIGER: ("gone: liger::_rms_norm_backward_kernel",),
            },
            id="eager attention, and no kernel for norms",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_faults_in_the_stack_are_named(
    clean: Mapping[TrainSpec, StaticStep],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    patches: Mapping[str, str],
    said: Mapping[TrainSpec, tuple[str, ...]],
) -> None:
    sources = (after_import(module, patch) for module, patch in patches.items())
    (tmp_path / "sitecustomize.py").write_text("".join(f"exec({source!r}, {{}})\n" for source in sources))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for step, (spec, words) in zip(told(*said), said.items(), strict=True):
        judgement = judge_step(step, clean[spec])
        assert judgement.verdict == "regressed"
        line = f"{come_and_gone(step, clean[spec])}; {judgement.reason}"
        for word in words:
            assert word in line


def test_what_cannot_be_told_says_why_in_one_line(answers: Mapping[TrainSpec, StaticStep | PredictionError]) -> None:
    answer = answers[UNKNOWN]
    assert isinstance(answer, PredictionError)
    assert str(answer).startswith(f"{UNKNOWN.id}: its step cannot be told without a launch: optimizer adafactor ")
    assert "\n" not in str(answer)


def request(**values: Any) -> Mapping[str, Any]:
    spec = TrainSpec(**{**SMALL.to_dict(), **values})
    return {"spec": json.loads(json.dumps(spec.to_dict())), "model_config": dict(spec.architecture.config)}


def test_what_a_prediction_does_not_look_at_is_predicted_once() -> None:
    same: list[dict[str, Any]] = [
        {"seed": 7},
        {"steps": 99},
        {"torch_compile": True},
        {"tf32": False},
        {"data": "text", "split": "test"},
    ]
    assert {identity(request(**values)) for values in same} == {identity(request())}
    assert identity(request(gpus=4)) == identity(request(gpus=8)) != identity(request())


@pytest.mark.parametrize(
    "values",
    [
        {"micro_batch_size": 3},
        {"attention": "eager"},
        {"liger": True},
        {"optimizer": "sgd"},
        {"optimizer": "adamw_torch_fused"},
        pytest.param({"lora": True}, marks=pytest.mark.wide),
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True},
        {"sdpa_backend": "math"},
        {"model": "opt-tiny"},
        {"mixed_precision": "no"},
    ],
    ids=str,
)
def test_what_makes_another_step_is_predicted_by_itself(values: dict[str, Any]) -> None:
    assert identity(request(**values)) != identity(request())


def test_a_process_predicts_no_two_that_patch_otherwise() -> None:
    for values in ({"micro_batch_size": 3}, {"model": "opt-tiny"}):  # neither is patched at all
        assert kind(request(**values)) == kind(request())
    others: list[dict[str, Any]] = [
        {"liger": True},
        {"liger": True, "liger_kernels": "rms_norm"},
        {"liger": True, "model": "opt-tiny"},
    ]
    assert len({kind(request(**values)) for values in [{}, *others]}) == 4
