"""Settings that leave the arithmetic alone train the same model, and the worker sees that they were on."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.validity import troubles, unlearnt
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.ranks import RefusedError
from pytest_llmperf.settings.lora import trained_weights
from pytest_llmperf.settings.registry import Evidence, contradictions
from pytest_llmperf.worker.build import build_model
from pytest_llmperf.worker.recipes.huggingface import small_trainer
from pytest_llmperf.worker.settings import Training, liger
from pytest_llmperf.worker.settings.liger import _revision, _watched
from tests.worker import launching
from tests.worker.import_patch import as_on_gpus, in_the_rank
from tests.worker.launching import launched
from tools.tables import FOLDER

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(600)]

PLAIN = TrainSpec(
    model="llama-tiny",
    micro_batch_size=2,
    sequence_length=32,
    model_precision="fp32",
    mixed_precision="no",
    steps=5,
    min_steps=5,
    warmup_steps=1,
)


def launch(spec: TrainSpec, folder: Path) -> Launch:
    record = launched(spec, folder, timeout_seconds=400)
    assert troubles(spec, record) == ()
    return record


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch(PLAIN, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        ({"sdpa_backend": "math"}, {"attention_kernel": ""}),
        ({"loss": "chunked"}, {"loss": "chunked"}),
        (
            {"gradient_checkpointing": True, "checkpointing_policy": "selective"},
            {"checkpointing_policy": "selective", "gradient_checkpointing": True},
        ),
        pytest.param(
            {"torch_compile": True, "torch_compile_scope": "layers"},
            {"compiled_modules": ["LlamaDecoderLayer"], "torch_compile_scope": "layers", "compiled_graphs": 1}
            | {"graph_breaks": 0, "recompilations": 0},
            marks=pytest.mark.wide,
        ),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_the_same_model_is_trained(
    setting: dict[str, Any], seen: dict[str, Any], plain: Launch, tmp_path: Path
) -> None:
    record = launch(replace(PLAIN, **setting), tmp_path / "run")
    assert {name: record.evidence[name] for name in seen} == seen
    assert record.losses == pytest.approx(plain.losses, abs=1e-3)


@pytest.mark.wide
def test_a_model_that_is_compiled_as_a_whole_is_the_same(tmp_path: Path) -> None:
    # Of one layer: each that is compiled takes seconds, and more of them are no other whole.
    config = tmp_path / "shallow" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({**PLAIN.architecture.config, "num_hidden_layers": 1}))
    eager = replace(PLAIN, model=str(config))
    compiled = launch(replace(eager, torch_compile=True), tmp_path / "compiled")
    seen = {"torch_compile_mode": "default", "torch_compile_scope": "model"}
    assert {name: compiled.evidence[name] for name in seen} == seen
    assert compiled.losses == pytest.approx(launch(eager, tmp_path / "eager").losses, abs=1e-3)


MIXTURE = replace(PLAIN, model="mixtral-tiny")
EXPERTS = {"eager": "aten.mm.default", "batched_mm": "aten.bmm.default", "grouped_mm": "aten._grouped_mm.default"}


class TestExperts:
    def test_each_implementation_trains_the_same_model(self, tmp_path: Path) -> None:
        records = {name: launch(replace(MIXTURE, experts=name), tmp_path / name) for name in EXPERTS}
        for name, kernel in EXPERTS.items():
            assert (records[name].evidence["experts"], records[name].evidence["experts_kernel"]) == (name, kernel)
            assert records[name].losses == pytest.approx(records["eager"].losses, abs=1e-4)

    def test_a_silent_fall_back_is_a_contradiction(self, tmp_path: Path) -> None:
        spec = replace(MIXTURE, experts="grouped_mm")
        fallen = in_the_rank(tmp_path, "transformers.integrations.moe", "module._can_use_grouped_mm = lambda *_: False")
        record = launched(spec, tmp_path / "run", variables=fallen)
        (line,) = troubles(spec, record)
        assert "grouped_mm_fallback" in line


SHARDED: Mapping[str, TrainSpec] = {
    "all": replace(PLAIN, gpus=2, parallelism="fsdp"),
    "replicas": replace(PLAIN, gpus=4, parallelism="fsdp_hybrid", model_precision="bf16"),
    "together": replace(PLAIN, gpus=2, parallelism="tensor"),
    "parts": replace(PLAIN, gpus=2, parallelism="context", model_precision="bf16"),
    "gathered": replace(PLAIN, gpus=2, parallelism="fsdp", mixed_precision="bf16"),
}


# A CPU has no ring attention: each rank is given its part of a sequence, and attends to that alone.
_DIVIDED = """
    import contextlib
    from torch.distributed.tensor import experimental
    @contextlib.contextmanager
    def divided(*, mesh, buffers, buffer_seq_dims, no_restore_buffers):
        for whole, dimension in zip(buffers, buffer_seq_dims):
            part = whole.chunk(mesh.size(), dimension)[mesh.get_local_rank()].clone()
            whole.resize_(part.shape).copy_(part)
        yield
    experimental.context_parallel = divided"""


def trained(name: str, folder: Path) -> Launch:
    """By FSDP on the CPU."""
    patch = as_on_gpus() + (_DIVIDED if name == "parts" else "")
    variables = in_the_rank(folder, "transformers.trainer", patch)
    return launched(SHARDED[name], folder / "run", variables=variables)


class TestSharded:
    """FSDP needs GPUs in accelerate; the code that asks for it and looks at it is tried where it is told otherwise."""

    def test_over_all_ranks(self, tmp_path: Path) -> None:
        spec, sharded = SHARDED["all"], trained("all", tmp_path)
        evidence = sharded.evidence
        assert (evidence["parallelism"], evidence["mesh"]) == ("fsdp", [2])
        assert list(contradictions(spec, Evidence.read(evidence), frozenset())) == []
        assert sharded.parameters == 125_248
        together = launch(replace(spec, parallelism="ddp"), tmp_path / "ddp" / "run")
        assert sharded.losses == pytest.approx(together.losses, abs=1e-3)

    @pytest.mark.wide
    def test_ranks_that_share_each_sequence_count_it_once(self, plain: Launch, tmp_path: Path) -> None:
        spec, record = SHARDED["together"], trained("together", tmp_path)
        assert troubles(spec, record) == ()
        assert [*unlearnt(spec, record)] == []
        assert (record.evidence["parallelism"], record.evidence["mesh"]) == ("tensor", [2])
        assert record.tokens_per_step == plain.tokens_per_step == 2 * 32
        assert [rank.tokens_per_step for rank in record.ranks] == [32, 32]
        assert record.losses == pytest.approx(plain.losses, abs=1e-3)
        assert record.parameters == plain.parameters

    def test_ranks_that_have_parts_of_each_sequence_count_it_once(self, plain: Launch, tmp_path: Path) -> None:
        spec, record = SHARDED["parts"], trained("parts", tmp_path)
        assert troubles(spec, record) == ()
        assert [*unlearnt(spec, record)] == []
        assert record.learning.tensors == 20
        assert (record.evidence["parallelism"], record.evidence["mesh"]) == ("context", [2])
        assert record.tokens_per_step == plain.tokens_per_step
        assert [rank.tokens_per_step for rank in record.ranks] == [32, 32]
        # Who asked for it and was given whole sequences is told.
        whole = Evidence.read({**record.evidence, "parallelism": "fsdp"})
        assert [*contradictions(spec, whole, frozenset())] == ["asked for parallelism context, the run had fsdp"]

    @pytest.mark.wide
    def test_replicas_of_shards(self, tmp_path: Path) -> None:
        replicated = trained("replicas", tmp_path)
        evidence = replicated.evidence
        assert (evidence["parallelism"], evidence["mesh"]) == ("fsdp_hybrid", [2, 2])
        assert replicated.learning
        assert list(unlearnt(SHARDED["replicas"], replicated)) == []

    @pytest.mark.wide
    def test_the_type_that_weights_are_gathered_in_is_seen(self, tmp_path: Path) -> None:
        evidence = trained("gathered", tmp_path).evidence
        assert (evidence["autocast_dtype"], evidence["gathered_dtype"]) == (None, "torch.bfloat16")


@pytest.mark.wide
@pytest.mark.parametrize(("parallelism", "passes"), [("zero2", 1), ("zero3", 1), ("sequence", 2)])
def test_deepspeeds_stages_train_as_ddp_does(parallelism: str, passes: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    ddp = replace(PLAIN, gpus=2 // passes, mixed_precision="bf16", gradient_accumulation_steps=passes)
    spec = replace(ddp, gpus=2, parallelism=parallelism)
    record, together = (launch(each, tmp_path / each.id) for each in (spec, ddp))
    told = record.evidence
    assert (told["parallelism"], told["gathered_dtype"], told["optimizer"]) == (parallelism, "torch.bfloat16", "AdamW")
    assert {*told["parameter_dtypes"]} == {"torch.float32"}
    assert (record.tokens_per_step, record.parameters) == (together.tokens_per_step, together.parameters)
    assert record.losses == pytest.approx(together.losses, abs=2e-3)


class TestOpen:
    """What transformers has a name for is given on, and read off what has trained."""

    ASKED = replace(
        PLAIN,
        training_arguments={"adam_beta2": 0.95, "accelerator_config": {"split_batches": False}},
        model_kwargs={"num_hidden_layers": 1, "rope_theta": 5e5},
    )

    def test_the_trainer_and_the_model_hold_it(self, tmp_path: Path) -> None:
        record = launch(self.ASKED, tmp_path / "run")
        assert record.evidence["training_arguments"]["adam_beta2"] == 0.95
        assert record.evidence["model_kwargs"] == {"num_hidden_layers": 1, "rope_theta": 5e5}
        assert record.evidence["setup"]["optimizer"]["betas"] == [0.9, 0.95]
        assert record.evidence["setup"]["modules"]["transformers.models.llama.modeling_llama.LlamaDecoderLayer"] == 1
        for other in ({"training_arguments": {"adam_beta2": 0.9}}, {"training_arguments": ""}, {"model_kwargs": ""}):
            lines = list(contradictions(replace(self.ASKED, **other), Evidence.read(record.evidence), frozenset()))
            assert len(lines) == 1


def test_the_defaults_that_differ_are_those_of_the_documentation() -> None:
    from tools import defaults  # noqa: PLC0415 - it needs torch

    made = [*defaults.rows()]
    with (FOLDER / "defaults.csv").open(encoding="utf-8", newline="") as file:
        kept = [tuple(row) for row in csv.reader(file)]
    if made[1][-1]:  # TRL is there
        assert made == kept
    else:
        assert [row[:3] for row in made[1:]] == [row[:3] for row in kept[1:] if row[1] != row[2]]


@pytest.mark.wide
class TestLora:
    """Adapters alone are trained, over weights as they are or in four bits."""

    ASKED = replace(PLAIN, model_precision="bf16", lora=True, lora_rank=8, lora_targets="q_proj+down_proj")

    @pytest.fixture(autouse=True)
    def packages(self) -> None:
        pytest.importorskip("peft")

    def test_the_layers_that_were_named_have_adapters(self, tmp_path: Path) -> None:
        record = launch(self.ASKED, tmp_path / "run")
        seen = record.evidence["lora"]
        assert seen["targets"] == ["down_proj", "q_proj"]
        assert (seen["rank"], seen["base"], seen["dropout"]) == (8, "as_is", 0.0)
        assert seen["trained"] == seen["adapters"] == record.parameters - 125_248 == trained_weights(self.ASKED)
        assert list(unlearnt(self.ASKED, record)) == []
        for other in ({"lora_rank": 4}, {"lora_targets": "q_proj"}, {"lora_dropout": 0.1}, {"lora_base": "nf4"}):
            (_line,) = contradictions(replace(self.ASKED, **other), Evidence.read(record.evidence), frozenset())
        full = replace(PLAIN, model_precision="bf16")
        assert list(contradictions(full, Evidence.read(record.evidence), frozenset()))

    def test_a_mixture_has_adapters_in_its_experts_too(self, tmp_path: Path) -> None:
        spec = replace(self.ASKED, model="mixtral-tiny", lora_targets="all-linear")
        seen = launch(spec, tmp_path / "run").evidence["lora"]
        assert seen["targets"] == ["experts", "gate", "k_proj", "o_proj", "q_proj", "v_proj"]
        assert (seen["left"], seen["trained"]) == (0, seen["adapters"])

    def test_all_linear_layers_in_four_bits_and_made_again(self, tmp_path: Path) -> None:
        pytest.importorskip("bitsandbytes")
        spec = replace(
            self.ASKED, lora_base="nf4", lora_targets="all-linear", lora_dropout=0.05, gradient_checkpointing=True
        )
        seen = launch(spec, tmp_path / "run").evidence
        assert (seen["lora"]["base"], seen["lora"]["left"], seen["lora"]["dropout"]) == ("nf4", 0, 0.05)
        assert seen["parameter_dtypes"].keys() == {"torch.bfloat16", "torch.uint8"}


#: A kernel of pure PyTorch: a CPU trains with it.
KERNELS = Path(__file__).parents[2] / "perf_tests" / "kernels" / "rmsnorm"


#: The source of one with a layer that trains.
_NORM = """
import functools, torch
def as_it_is(forward):
    return functools.wraps(forward)(lambda self, x: forward(self, x))
class Norm(torch.nn.Module):
    def forward(self, x): return x
"""


class TestHubKernels:
    """Layers of the model are those of a kernel repository that lies in a folder."""

    ASKED = replace(PLAIN, hub_kernels={"LlamaRMSNorm": f"{KERNELS}:LlamaRMSNorm"})

    @pytest.fixture(autouse=True)
    def packages(self) -> None:
        pytest.importorskip("kernels")

    def test_the_same_model_is_trained_by_the_layers_that_were_named(self, plain: Launch, tmp_path: Path) -> None:
        record = launch(self.ASKED, tmp_path / "run")
        seen = record.evidence["hub_kernels"]["LlamaRMSNorm"]
        digits = seen.pop("revision")
        assert re.fullmatch(r"[0-9a-f]{16}", digits)
        of = {"layer": "LlamaRMSNorm", "kernel": "rmsnorm", "repository": "rmsnorm"}
        assert seen == of | {"modules": 5, "left": 0}
        assert record.losses == pytest.approx(plain.losses, abs=1e-3)
        assert record.environment.versions["kernels"]
        assert [name for name in record.evidence["setup"]["sources"] if "rmsnorm" in name] == ["_rmsnorm_cpu_1.layers"]
        (line,) = contradictions(PLAIN, Evidence.read(record.evidence), frozenset())
        assert "did not ask" in line

    def test_a_kernel_that_is_put_aside_later_is_a_contradiction(self, tmp_path: Path) -> None:
        patch = "module.prepare_layers = lambda _, model: vars(model.model.norm).pop('forward')"
        aside = in_the_rank(tmp_path, "pytest_llmperf.worker.recipes.huggingface.trainer", patch)
        record = launched(self.ASKED, tmp_path / "run", variables=aside)
        (line,) = troubles(self.ASKED, record)
        assert " 4 of its 5 " in line

    def test_what_no_layer_of_the_model_can_be_is_refused(self, tmp_path: Path) -> None:
        failure = launching.launch(
            replace(PLAIN, hub_kernels={"LlamaMPL": f"{KERNELS}:LlamaRMSNorm"}), tmp_path / "run"
        )
        assert isinstance(failure, Failure)
        assert "(did you mean 'LlamaMLP'?)" in failure.message

    @pytest.mark.parametrize(
        ("source", "layer", "said"),
        [
            ("", "Other", "Layer `Other` not found in kernel repo"),
            ("import nothing_here", "Norm", "No module named 'nothing_here'"),
            (
                "import torch\nclass Norm(torch.nn.Module):\n    def forward(self): pass",
                "Norm",
                "different number of arg",
            ),
            (
                "import torch\nclass Norm(torch.nn.Module):\n    has_backward = False\n    def forward(self, x): pass",
                "Norm",
                "5 modules are left as they were: it has no backward pass, or none that compiles",
            ),
        ],
        ids=["no such layer", "does not import", "another signature", "no backward pass"],
    )
    def test_what_cannot_train_is_refused(self, source: str, layer: str, said: str, tmp_path: Path) -> None:
        spec = replace(PLAIN, hub_kernels={"LlamaRMSNorm": f"{written(tmp_path, source)}:{layer}"})
        with pytest.raises(ValueError, match=r"^hub_kernels: LlamaRMSNorm by rmsnorm:") as refusal:
            build_model(spec, spec.architecture.config, torch.device("cpu"))
        assert said in str(refusal.value)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize(
        "source",
        [
            f"{_NORM}LlamaRMSNorm = Norm",
            f"{_NORM}class LlamaRMSNorm(Norm): pass",
            _NORM.replace("    def", "    @as_it_is\n    def").replace("Norm", "LlamaRMSNorm"),
            f"_get = {{}}.get\n{_NORM}".replace("Norm", "LlamaRMSNorm"),
        ],
        ids=["alias", "inherited", "decorated", "a name of no module"],
    )
    def test_a_layer_is_known_however_its_kernel_writes_it(self, source: str, tmp_path: Path) -> None:
        spec = replace(PLAIN, hub_kernels={"LlamaRMSNorm": f"{written(tmp_path, source)}:LlamaRMSNorm"})
        seen = witnessed(spec)["LlamaRMSNorm"]
        assert (seen["layer"], seen["modules"], seen["left"]) == ("LlamaRMSNorm", 5, 0)

    def test_a_layer_keeps_its_kernel_in_another_that_has_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Put here, the mark of a class that torch shares with everybody goes with the test.
        monkeypatch.setattr(torch.nn.ModuleList, "kernel_layer_name", "ModuleList", raising=False)
        folder = written(tmp_path, _NORM + _NORM.replace("Norm", "Outer").replace("x)", "*input)"))
        spec = replace(PLAIN, hub_kernels={"LlamaMLP": f"{folder}:Norm", "ModuleList": f"{folder}:Outer"})
        assert {name: (each["modules"], each["left"]) for name, each in witnessed(spec).items()} == {
            "LlamaMLP": (2, 0),
            "ModuleList": (1, 0),
        }

    def test_a_library_that_does_not_tell_what_it_loaded_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("kernels.get_loaded_kernels")
        with pytest.raises(ValueError, match=r"does not tell what it has loaded; pip install --upgrade kernels$"):
            witnessed(self.ASKED)
        assert witnessed(PLAIN) is None

    def test_the_revision_is_the_caches_the_checkouts_or_what_the_files_hold(self, tmp_path: Path) -> None:
        cached = copied(tmp_path / "kernels--acme--norms" / "snapshots" / "0a1b2c3d")
        assert revised(cached) == ("acme/norms", "0a1b2c3d")
        plain = copied(tmp_path / "plain")
        name, digits = revised(plain)
        assert (name, revised(copied(tmp_path / "other"))) == ("rmsnorm", (name, digits))
        git(plain, "init", "-q")
        git(plain, "add", ".")
        git(plain, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first")
        assert revised(plain) == ("rmsnorm", git(plain, "rev-parse", "HEAD"))
        assert _revision(plain / "build" / "cpu" / "rmsnorm", "rmsnorm")[1] == revised(plain)[1]
        (plain / "torch-cpu" / "layers.py").write_text("", encoding="utf-8")
        assert revised(plain)[1].endswith("-dirty")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("Expected to have finished reduction: which did not receive grad for rank 0: 1 2 99", "2 of 20 weights"),
        ("element 0 of tensors does not require grad and does not have a grad_fn", "20 of 20 weights"),
    ],
)
def test_a_small_training_names_the_kernel_without_a_backward_pass(
    error: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TrainSpec(model="llama-tiny", hub_kernels={"LlamaRMSNorm": f"{KERNELS}:LlamaRMSNorm"}, sequence_length=32)
    fails = SimpleNamespace(train=mock.Mock(side_effect=RuntimeError(error)), get_decay_parameter_names=lambda _: [])
    fails.args = SimpleNamespace(bf16=True, deepspeed=None)

    def trainer_of(_kind: Any, _spec: Any, model: Any, *_: Any, **__: Any) -> Any:
        fails.model = model
        return fails

    monkeypatch.setattr(small_trainer, "training_arguments", lambda *_: fails.args)
    monkeypatch.setattr(small_trainer, "trainer_of", trainer_of)
    monkeypatch.setattr(liger, "PREPARE", lambda *_: None)  # whatever its layers are
    with pytest.raises(RefusedError) as refusal:
        small_trainer.train_small(spec, spec.architecture.config, tmp_path, torch.device("cpu"))
    assert str(refusal.value).startswith(f"llama: {said}")
    assert str(refusal.value).endswith(f"of hub_kernels={spec.hub_kernels}")


def witnessed(spec: TrainSpec) -> Any:
    model = build_model(spec, spec.architecture.config, torch.device("cpu"))
    return _watched(spec, model)(cast("Training", SimpleNamespace(model=model))).hub_kernels


def written(folder: Path, source: str) -> Path:
    """A kernel of these layers; by its id one process knows a kernel that it has imported."""
    kernel = copied(folder / "kernel")
    (kernel / "torch-cpu" / "layers.py").write_text(source, encoding="utf-8")
    about = kernel / "torch-cpu" / "metadata.json"
    about.write_text(about.read_text(encoding="utf-8").replace("_cpu_1", folder.name), encoding="utf-8")
    return kernel


def copied(folder: Path) -> Path:
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def revised(folder: Path) -> tuple[str, str]:
    return _revision(folder / "torch-cpu", "rmsnorm")


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
