"""TrainSpec: what it refuses, what identifies it, what it is called."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.run.case import Case
from pytest_llmperf.settings.arguments import known_arguments
from pytest_llmperf.settings.attention import ATTENTIONS
from pytest_llmperf.settings.data import OF_A_TEXT
from pytest_llmperf.settings.lora import unmade_flops_per_token
from pytest_llmperf.settings.optimizer import OPTIMIZERS, least_copies
from pytest_llmperf.settings.precision import PRECISIONS
from pytest_llmperf.settings.train_spec import SpecError, precision_fields
from tests.golden import Golden

SPEC = TrainSpec(model="llama-3.2-1b", attention="sdpa", liger=True, micro_batch_size=37)
#: A kernel repository.
KERNELS = Path(__file__).parents[3] / "perf_tests" / "kernels" / "rmsnorm"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": "lama-3.2-1b"}, "did you mean 'llama-3.2-1b'"),
        ({"attention": "spda"}, "did you mean 'sdpa'"),
        ({"optimizer": "adamw_torch_fuse"}, "did you mean 'adamw_torch_fused'"),
        ({"optimizer": "adamww"}, "did you mean 'adamw_torch'"),
        ({"optimizer": "paged_adam_8bit"}, "did you mean 'paged_adamw_8bit'"),
        ({"optimizer": "galore_adamw_8bit"}, "unknown optimizer 'galore_adamw_8bit'"),
        ({"model_precision": "bf61"}, "did you mean 'bf16'"),
        ({"mixed_precision": "yes"}, "known: no, bf16, fp16"),
        ({"parallelism": "dpp"}, "did you mean 'ddp'"),
        ({"data": "texts"}, "unknown data 'texts' (did you mean 'text'?)"),
        ({"text": "mine.txt"}, "text='mine.txt' without data='text' changes nothing"),
        ({"split": "test"}, "split='test' without data='text' changes nothing"),
        ({"tokenizer": "mine"}, "tokenizer='mine' without data='text' changes nothing"),
        ({"rows": "padded"}, "rows='padded' without data='text' changes nothing"),
        ({"tokenise": "on_the_fly"}, "TrainSpec has no field 'tokenise': tokens are made ahead of all training"),
        ({"data_workers": 2}, "'data_workers': say training_arguments={'dataloader_num_workers': …}"),
        ({"data": "text", "rows": "pad"}, "unknown rows 'pad' (did you mean 'padded'?)"),
        ({"data": "text", "rows": "padded", "sdpa_backend": "flash"}, "flash kernel takes no mask"),
        ({"model_precision": "fp16", "mixed_precision": "fp16"}, "the gradient scaler refuses fp16 gradients"),
        ({"model_precision": "bf16", "mixed_precision": "fp16"}, "use one 16-bit type"),
        (
            {"attention": "flash_attention_2", "model_precision": "fp32", "mixed_precision": "no"},
            "flash_attention_2 has no fp32 kernels",
        ),
        ({"tf32": True}, "leave tf32=False"),
        ({"sdpa_backend": "cuDNN"}, "unknown sdpa_backend 'cuDNN' (did you mean 'cudnn'?)"),
        ({"attention": "eager", "sdpa_backend": "flash"}, "acts on attention='sdpa', and this is eager"),
        (
            {"sdpa_backend": "flash", "model_precision": "fp32", "mixed_precision": "no"},
            "sdpa's flash kernel takes no fp32",
        ),
        ({"sdpa_backend": "efficient"}, "takes no shared key-value heads"),
        ({"offloading": "activations", "torch_compile": True}, "leave torch_compile or offloading out"),
        (
            {"offloading": "activations", "gpus": 2, "parallelism": "fsdp", "mixed_precision": "no"},
            "would move the weights",
        ),
        ({"loss": "chunked"}, "replaces what Liger does"),
        (
            {"loss": "cut", "liger_kernels": "rope", "model_precision": "fp32", "mixed_precision": "no"},
            "multiplies in 16 bits",
        ),
        ({"experts": "eager"}, "acts on a mixture of experts, and llama has none"),
        ({"model": "mixtral-tiny", "experts": "eager"}, "Liger's swiglu kernel computes experts in its own way"),
        ({"liger": False, "liger_kernels": "rope"}, "liger_kernels='rope' without liger=True changes nothing"),
        ({"liger_kernels": "ropes"}, "unknown Liger kernel 'ropes'; known: rope, rms_norm"),
        ({"liger_kernels": "rms_norm+rope"}, "in Liger's order: 'rope+rms_norm'"),
        ({"liger_kernels": "rope+rope"}, "once, in Liger's order: 'rope'"),
        ({"liger_kernels": "cross_entropy+fused_linear_cross_entropy"}, "name one of them"),
        ({"torch_compile_mode": "max-autotune"}, "without torch_compile=True changes nothing"),
        ({"torch_compile_scope": "layers"}, "without torch_compile=True changes nothing"),
        ({"torch_compile": True, "torch_compile_mode": "fast"}, "unknown torch_compile_mode 'fast'"),
        ({"checkpointing_policy": "selective"}, "without gradient_checkpointing=True changes nothing"),
        ({"gradient_checkpointing": True, "checkpointing_policy": "selective"}, "name the others in liger_kernels"),
        ({"fp8": "e4m3"}, "unknown fp8 'e4m3'"),
        ({"fp8": "rowwise", "model_precision": "fp32", "mixed_precision": "no"}, "made from bf16 ones"),
        ({"fp8": "tensorwise_all_gather"}, "use parallelism='fsdp', or fp8='tensorwise'"),
        ({"fp8": "rowwise", "sequence_length": 1000, "micro_batch_size": 1}, "tokens in multiples of 16"),
        ({"parallelism": "fsdp"}, "nothing to shard over on one GPU"),
        ({"parallelism": "fsdp", "gpus": 2}, "keeps fp32 weights whatever was asked for"),
        (
            {"parallelism": "fsdp", "gpus": 2, "model_precision": "fp32", "mixed_precision": "fp16"},
            "with fp16 loss scaling",
        ),
        ({"parallelism": "fsdp_hybrid", "gpus": 2, "mixed_precision": "no"}, "an even number of GPUs from 4 on, not 2"),
        ({"parallelism": "fsdp_hybrid", "gpus": 5, "mixed_precision": "no"}, "an even number of GPUs from 4 on, not 5"),
        ({"parallelism": "tensor"}, "nothing to shard over on one GPU"),
        ({"parallelism": "tensor", "gpus": 3}, "3 GPUs do not divide 32 and 8"),
        ({"parallelism": "tensor", "gpus": 2, "optimizer": "adamw_torch_fused"}, "use optimizer='adamw_torch' or"),
        (
            {"parallelism": "tensor", "gpus": 2, "model_precision": "fp32", "mixed_precision": "fp16"},
            "fp16 loss scaling does not train",
        ),
        ({"parallelism": "context", "gpus": 2, "mixed_precision": "no", "attention": "eager"}, "not by eager"),
        ({"parallelism": "context", "gpus": 3, "mixed_precision": "no"}, "6 do not divide 1024"),
        ({"parallelism": "context", "gpus": 2, "mixed_precision": "no", "torch_compile": True}, "torch_compile out"),
        (
            {"parallelism": "context", "gpus": 2, "mixed_precision": "no", "model_precision": "fp32"},
            "sdpa has none of fp32 for shared key-value heads: use bf16",
        ),
        ({"parallelism": "sequence", "gpus": 2, "model_precision": "fp32"}, "a multiple of 2"),
        ({"parallelism": "sequence", "gpus": 2, "model_precision": "fp32", "attention": "eager"}, "not with eager"),
        ({"parallelism": "sequence", "gpus": 3, "model_precision": "fp32"}, "3 do not divide 1024"),
        ({"parallelism": "zero2", "gpus": 2, "mixed_precision": "no"}, "use model_precision='fp32'"),
        ({"parallelism": "zero3", "gpus": 2, "optimizer": "adafactor"}, "zero3 with adafactor does not train"),
        ({"parallelism": "fsdp", "gpus": 2, "mixed_precision": "no", "optimizer": "muon"}, "it takes whole matrices"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be at least 1"),
        ({"sequence_length": 0}, "sequence_length=0 must be at least 1"),
        ({"sequence_length": 1}, "no next token"),
        ({"model": "opt-1.3b", "sequence_length": 2049}, "exceeds the model's 2048 positions"),
        ({"gpus": 0}, "gpus=0 must be at least 1"),
        ({"gpus": -1}, "gpus=-1 must be at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"warmup_steps": 60}, "leaves no step to measure of steps=60"),
        ({"warmup_steps": 0}, "the first step is never steady"),
        ({"steps": 20, "min_steps": 21}, "min_steps=21 is more than steps=20; lower it too, or raise steps"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "below 2**32"),
        ({"weights": ""}, "weights='' names no folder"),
        ({"weights": "no/such/folder"}, f"weights='no/such/folder' names no folder from {Path.cwd()}, expected"),
        ({"weights": "/no/such"}, "weights='/no/such' names no folder, expected"),
        ({"weights": "x" * 300}, "names no folder"),
        ({"model": "~nosuchuser/x"}, "'~nosuchuser/x': cannot be looked up"),
        ({"model": "x" * 300}, "model 'xxx"),
        ({"sequence_lenght": 64}, "TrainSpec has no field 'sequence_lenght' (did you mean 'sequence_length'?)"),
        ({"precision": "bf16"}, "fixture's word for three of its fields: model_precision, mixed_precision and tf32"),
        ({"throughput_tolerance": 0.0}, "positive fraction"),
        ({"memory_tolerance": float("nan")}, "positive fraction"),
        (
            {"throughput_tolerance": 3},
            "throughput_tolerance=3 must be a positive fraction of at most 1, e.g. 0.03 for 3",
        ),
        ({"memory_tolerance": 1.5}, "memory_tolerance=1.5 must be a positive fraction of at most 1"),
        ({"micro_batch_size": "4"}, "must be int, not str"),
        ({"gpus": True}, "must be int, not bool"),
        ({"liger": 1}, "must be bool, not int"),
        ({"lora_rank": 8}, "lora_rank=8 without lora=True changes nothing"),
        ({"lora": True, "lora_rank": 0}, "lora_rank=0 must be at least 1"),
        ({"lora": True, "lora_targets": "q_proj,v_proj"}, "expected all-linear, or names"),
        (
            {"lora": True, "lora_targets": "q_prj"},
            "llama has no linear layer 'q_prj' (did you mean 'q_proj'?); use some",
        ),
        ({"lora": True, "lora_rank": 2049}, "more than the rank of any layer that it adapts; use 2048 at most"),
        ({"lora": True, "lora_targets": "k_proj", "lora_rank": 513}, "use 512 at most"),
        ({"lora": True, "lora_dropout": 1.0}, "at least 0 and below 1"),
        ({"lora": True, "lora_base": "int8"}, "unknown lora_base 'int8'"),
        ({"lora": True, "fp8": "rowwise"}, "LoRA's are not; use fp8='no'"),
        (
            {"lora": True, "lora_base": "nf4", "gpus": 2, "mixed_precision": "no", "parallelism": "fsdp"},
            "four bits are not sharded",
        ),
        (
            {"hub_kernels": {"RMSNorm": "no/such:Layer"}},
            f"'no/such' is no folder from {Path.cwd()}, expected a kernel repository's",
        ),
        (
            {"hub_kernels": {"RMSNorm": f"{KERNELS.parent}:Layer"}},
            "holds no build that says its name (build/…/metadata",
        ),
        (
            {"hub_kernels": {"RMSNorm": str(KERNELS)}},
            "names no kernel, expected 'FOLDER:LAYER' or 'FOLDER@REVISION:LAYER'",
        ),
        (
            {"hub_kernels": {"LlamaMLP": f"{KERNELS}:MLP", "LlamaRMSNorm": f"{KERNELS}:LlamaRMSNorm"}},
            "Liger's rms_norm+swiglu would replace layers of hub_kernels again; use liger_kernels='rope+fused_linear_",
        ),
        (
            {"hub_kernels": {"LlamaMLP": f"{KERNELS}:MLP"}, "liger_kernels": "swiglu"},
            "Liger's swiglu would replace layers of hub_kernels again; use liger=False",
        ),
        ({"hub_kernels": "[1]"}, "expected names with their values, e.g. {'RMSNorm': 'kernels/rmsnorm:LlamaRMSNorm'}"),
        ({"training_arguments": 3}, "must be str | Mapping[str, Any], not int"),
        ({"training_arguments": "beta"}, "training_arguments='beta': expected names with values as JSON has them"),
        ({"training_arguments": {"x": float("nan")}}, "expected names with values as JSON has them"),
        ({"training_arguments": "[1]"}, "expected names with their values, e.g. {'adam_beta2': 0.95}"),
        (
            {"training_arguments": {"optim": "sgd"}},
            "says optim, which has a field of its own: use optimizer",
        ),
        (
            {"training_arguments": {"save_steps": 5}},
            "says save_steps, which a measured training decides by itself: leave it out",
        ),
        ({"training_arguments": {"logging_steps": 1}}, "which a measured training decides by itself: leave it out"),
        (
            {"model_kwargs": {"dtype": "float32"}},
            "model_kwargs says dtype, which has a field of its own: use",
        ),
        ({"model_kwargs": {"num_hidden_layers": 0}}, "model_kwargs: num_hidden_layers=0 must be a whole number"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=r".") as refusal:
        replace(SPEC, **values)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_few_steps_need_no_word_about_the_least() -> None:
    assert replace(SPEC, steps=10).steps == 10
    assert TrainSpec(model="llama-tiny", steps=5).steps == 5


def test_an_unknown_field_names_the_nearest(golden: Golden) -> None:
    with pytest.raises(ValueError, match="no field 'optimiser' ") as raised:
        TrainSpec.from_dict({"model": "llama-tiny", "optimiser": "sgd"})
    golden(raised)


def test_a_spec_needs_a_model_and_takes_it_by_name(golden: Golden) -> None:
    with pytest.raises(SpecError, match="needs a model"):
        TrainSpec()  # type: ignore[call-arg]
    with pytest.raises(SpecError, match="needs a model"):
        TrainSpec.from_dict({})
    with pytest.raises(SpecError) as raised:
        TrainSpec("llama-tiny")  # type: ignore[call-arg]
    golden(raised)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_spec_survives_pickle(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(SPEC, protocol)) == SPEC


def test_a_spec_can_be_copied() -> None:
    assert copy.copy(SPEC) == copy.deepcopy(SPEC) == replace(SPEC) == SPEC


def test_a_refusal_shows_the_callers_line_and_none_of_ours(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_llmperf import TrainSpec

        def test_field():
            TrainSpec(model="llama-tiny", sequence_lenght=64)

        def test_value():
            TrainSpec(model="llama-tiny", seed=-1)

        def test_model():
            TrainSpec(model="lama-tiny")
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:llmperf", "-p", "no:randomly")
    result.assert_outcomes(failed=3)
    output = result.stdout.str()
    assert output.count("E   ") == 3
    assert "spec.py:" not in output
    assert "models.py:" not in output


def test_the_digest_is_the_one_stored_baselines_hold() -> None:
    # Every baseline ever stored is found by this value: if it changes, none is.
    assert SPEC.digest == "e8eccc4c06e1f771"


def test_how_long_to_measure_is_not_part_of_the_digest() -> None:
    longer = replace(SPEC, steps=400, warmup_steps=20, throughput_tolerance=0.1, memory_tolerance=0.2)
    assert longer.digest == SPEC.digest


CHANGES_OF_WORK: list[dict[str, Any]] = [
    {"model": "opt-1.3b"},
    {"gpus": 2},
    {"micro_batch_size": 38},
    {"sequence_length": 512},
    {"model_precision": "fp32"},
    {"mixed_precision": "no"},
    {"model_precision": "fp32", "tf32": True},
    {"attention": "eager"},
    {"liger": False},
    {"torch_compile": True},
    {"optimizer": "adamw_torch_fused"},
    {"gradient_accumulation_steps": 2},
    {"gradient_checkpointing": True},
    {"liger": False, "gradient_checkpointing": True, "checkpointing_policy": "selective"},
    {"sdpa_backend": "cudnn"},
    {"offloading": "activations"},
    {"liger": False, "loss": "chunked"},
    {"model": "mixtral-like-0.6b", "liger": False, "experts": "batched_mm"},
    {"liger_kernels": "rope"},
    {"torch_compile": True, "torch_compile_scope": "layers"},
    {"torch_compile": True, "torch_compile_mode": "max-autotune"},
    {"fp8": "rowwise"},
    {"gpus": 2, "mixed_precision": "no", "parallelism": "fsdp"},
    {"weights": str(Path(__file__).parent)},
    {"data": "text"},
    {"seed": 1},
    {"data": "text", "rows": "padded"},
    {"lora": True},
    {"lora": True, "lora_base": "nf4"},
    {"lora": True, "lora_rank": 8},
    {"lora": True, "lora_targets": "q_proj+v_proj"},
    {"lora": True, "lora_targets": "lm_head", "lora_rank": 9},
    {"lora": True, "lora_dropout": 0.05},
    {"training_arguments": {"adam_beta2": 0.95}},
    {"model_kwargs": {"num_hidden_layers": 4}},
    {"liger": False, "hub_kernels": {"LlamaRMSNorm": f"{KERNELS}:LlamaRMSNorm"}},
]


@pytest.mark.parametrize("values", CHANGES_OF_WORK)
def test_whatever_changes_the_work_changes_digest_and_id(values: dict[str, Any]) -> None:
    other = replace(SPEC, **values)
    assert other.digest != SPEC.digest
    assert other.id != SPEC.id


def test_no_field_of_the_work_is_left_out_above() -> None:
    work = {f.name for f in fields(TrainSpec) if f.metadata.get("work", True)}
    tried = {name for values in CHANGES_OF_WORK for name in values}
    assert work - tried == {*OF_A_TEXT} - {"rows"}  # what says which one: test_text_files.py


@pytest.mark.parametrize(
    "values",
    [
        {"liger": False, "sdpa_backend": "flash"},
        {"torch_compile": True, "torch_compile_scope": "layers", "torch_compile_mode": "reduce-overhead"},
        {"liger": False, "gradient_checkpointing": True, "checkpointing_policy": "selective"},
        {"fp8": "tensorwise"},
        {"training_arguments": '{"adam_beta2": 0.95}', "model_kwargs": {"num_hidden_layers": 4}},
    ],
)
def test_a_field_that_came_later_counts_where_it_is_set(values: dict[str, Any]) -> None:
    # At its default it does not: the digest above would be another.
    changed = replace(SPEC, **values)
    plain = {name: value for name, value in values.items() if TrainSpec.__dataclass_fields__[name].metadata == {}}
    assert changed.digest != replace(SPEC, **plain).digest
    assert changed.id != replace(SPEC, **plain).id
    assert TrainSpec.from_dict(changed.to_dict()).digest == changed.digest


def test_the_order_of_fields_does_not_matter() -> None:
    names = [field.name for field in fields(SPEC)]
    random.Random(0).shuffle(names)
    assert TrainSpec.from_dict({name: getattr(SPEC, name) for name in names}).digest == SPEC.digest


def test_ranks_that_share_each_sequence_have_a_batch_in_common() -> None:
    together, apart = (replace(SPEC, gpus=4, parallelism=each) for each in ("tensor", "ddp"))
    parts = replace(SPEC, gpus=4, parallelism="context", mixed_precision="no")
    assert parts.sequences_per_step == together.sequences_per_step
    assert (together.sequences_per_step, apart.sequences_per_step) == (37, 4 * 37)
    assert "-tensor-gpus4" in together.id


def test_the_id_carries_what_is_on_and_nothing_else() -> None:
    assert SPEC.id == "llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus1"
    assert "liger" not in replace(SPEC, liger=False).id
    assert replace(SPEC, model_precision="fp32", mixed_precision="no").id.startswith("llama-3.2-1b-fp32-")


def test_hub_kernels_of_other_layers_have_an_id_of_their_own() -> None:
    one, two = f"{KERNELS}:LlamaRMSNorm", f"{KERNELS}:Other"
    asked = [{"A": one}, {"LlamaRMSNorm": one}, {"A": one, "B": one}, {"A": one, "B": two}, {"A": two, "B": one}]
    specs = [replace(SPEC, liger=False, hub_kernels=each) for each in asked]
    assert len({spec.id for spec in specs}) == len({spec.digest for spec in specs}) == len(asked)
    assert specs[1].id == "llama-3.2-1b-bf16-sdpa-hub-rmsnorm-llamarmsnorm-mbs37-gpus1"
    assert replace(SPEC, liger_kernels="rope", hub_kernels=asked[1]).hub_kernels == specs[1].hub_kernels


def test_another_content_of_a_hub_kernel_is_other_work_of_one_digest(tmp_path: Path) -> None:
    folders = [shutil.copytree(KERNELS, tmp_path / name / "rmsnorm") for name in ("one", "two")]
    one, two = (
        replace(SPEC, liger=False, hub_kernels={"LlamaRMSNorm": f"{folder}:LlamaRMSNorm"}) for folder in folders
    )
    before = one.content
    assert one.digest == two.digest
    layers = next(folders[0].rglob("layers.py"))
    layers.write_text(layers.read_text(encoding="utf-8") + "# slower\n", encoding="utf-8")
    assert len({before, one.content, two.content}) == 3
    assert Case.same_training(one).digest != Case.same_training(two).digest
    assert SPEC.content == SPEC.digest


def test_a_folder_of_hub_kernels_is_looked_at_where_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"LlamaRMSNorm": f"{KERNELS.name}:LlamaRMSNorm"}
    monkeypatch.chdir(KERNELS.parent)
    assert "-hub-rmsnorm-" in replace(SPEC, liger=False, hub_kernels=asked).id
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="is no folder"):
        replace(SPEC, liger=False, hub_kernels=asked)


def test_open_settings_are_one_however_they_are_written() -> None:
    values = {"weight_decay": 0.1, "adam_beta2": 0.95}
    mapping, text = (replace(SPEC, training_arguments=each) for each in (values, json.dumps(values, indent=1)))
    assert mapping == text
    assert hash(mapping) == hash(text)
    assert replace(SPEC, training_arguments={}, model_kwargs="{}").digest == SPEC.digest
    assert mapping.id == "llama-3.2-1b-bf16-sdpa-liger-mbs37-args-adam_beta2-0.95-weight_decay-0.1-gpus1"
    nested = replace(SPEC, training_arguments={"accelerator_config": {"split_batches": True}})
    assert re.search(r"-mbs37-args-[0-9a-f]{8}-gpus1$", nested.id)


def test_adapters_need_a_third_fewer_products_of_the_weights() -> None:
    geometry = SPEC.architecture.geometry
    assert geometry is not None
    assert unmade_flops_per_token(SPEC) == 0
    assert unmade_flops_per_token(replace(SPEC, lora=True)) == 2 * geometry.weights
    assert unmade_flops_per_token(TrainSpec(model="mixtral-tiny", lora=True)) is None
    assert replace(SPEC, lora=True, lora_base="nf4").id == "llama-3.2-1b-bf16-sdpa-liger-lora-nf4-mbs37-gpus1"


def test_a_changed_configuration_is_the_one_that_is_built_and_counted() -> None:
    few = replace(SPEC, model_kwargs={"num_hidden_layers": 4}).architecture
    assert few.config["num_hidden_layers"] == 4
    assert few.geometry is not None
    assert few.geometry.num_layers == 4
    assert few.slug == SPEC.architecture.slug
    assert few.fingerprint != SPEC.architecture.fingerprint  # by which counts of its arithmetic are kept


def test_arguments_are_those_of_the_installed_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise ImportError('never imported')")
    fields = 'adam_beta2: float = 0.999\n    style: "A | B" = None\n    decay: int | None = None'
    (tmp_path / "transformers" / "training_args.py").write_text(f"class TrainingArguments:\n    {fields}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    known_arguments.cache_clear()
    said = []
    for values in ({"adam_beta": 0.9}, {"adam_beta2": "high"}, {"adam_beta2": True}, {"decay": 0.5}):
        with pytest.raises(SpecError) as refusal:
            replace(SPEC, training_arguments=values)
        said.append(str(refusal.value))
    replace(SPEC, training_arguments={"adam_beta2": 1, "decay": None, "style": 3})  # is taken
    known_arguments.cache_clear()
    golden("\n".join(said))


def test_a_models_identity_is_what_its_configuration_says(tmp_path: Path) -> None:
    config = json.loads(json.dumps(dict(SPEC.architecture.config)))
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"transformers_version": name}))
    here, there = (replace(SPEC, model=str(tmp_path / name)) for name in ("here", "there"))
    assert here.digest == there.digest == SPEC.digest


specs = st.builds(
    TrainSpec,
    model=st.sampled_from(["llama-tiny", "opt-tiny"]),
    gpus=st.integers(1, 64),
    micro_batch_size=st.integers(1, 512),
    sequence_length=st.integers(2, 2048),
    attention=st.sampled_from(ATTENTIONS),
    liger=st.booleans(),
    torch_compile=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    gradient_accumulation_steps=st.integers(1, 64),
    gradient_checkpointing=st.booleans(),
    seed=st.integers(0, 2**31),
)


@given(specs)
def test_a_spec_survives_json(spec: TrainSpec) -> None:
    again = TrainSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert (again.id, again.digest) == (spec.id, spec.digest)


@given(specs, specs)
def test_ids_differ_wherever_digests_do(a: TrainSpec, b: TrainSpec) -> None:
    # One baseline file per id: two specs of one id and two digests would fight over it.
    assert (a.id == b.id) == (a.digest == b.digest)


@pytest.mark.parametrize("word", PRECISIONS)
def test_every_precision_word_comes_back(word: str) -> None:
    assert TrainSpec(model="llama-tiny", **precision_fields(word)).precision == word


@pytest.mark.parametrize(
    ("word", "hint"),
    [("fp23", " (did you mean 'fp32'?)"), (["fp32"], " (did you mean 'fp32'?)"), (None, ""), ("8", "")],
)
def test_a_word_that_is_no_precision(word: object, hint: str, golden: Golden) -> None:
    with pytest.raises(SpecError) as raised:
        precision_fields(word)
    golden(raised)


@pytest.mark.parametrize("values", [{"torch_compile": True}, {"liger": True}, {"attention": "flex_attention"}])
def test_each_setting_that_makes_kernels_says_so(values: dict[str, Any]) -> None:
    plain = replace(SPEC, liger=False)
    assert not plain.compiles
    assert replace(plain, **values).compiles


@pytest.mark.parametrize(
    ("values", "copies"),
    [
        ({"optimizer": "adamw_torch"}, 4),
        ({"optimizer": "paged_adamw_8bit"}, 2),
        ({"optimizer": "sgd"}, 2),
        ({"lora": True, "lora_base": "as_is"}, 1),
    ],
)
def test_a_weight_has_a_gradient_and_the_states_of_its_optimizer(values: dict[str, Any], copies: float) -> None:
    assert least_copies(replace(SPEC, **values)) == copies
