"""Predicted memory against what was measured on H200, and what cannot be predicted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeAlias

import psutil
import pytest

from perf_tests.optimisations import HUB_KERNELS
from pytest_llmperf import TrainSpec
from pytest_llmperf.analysis.formulas import MemoryPlan, newest_on_a_gpu
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.launch import prediction
from pytest_llmperf.launch.prediction import PredictionError, predictions, why_none
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.optimizer import update_flops

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_llmperf.judge.store import parse
from pytest_llmperf.worker.estimate import exchanges, prediction_server
from pytest_llmperf.worker.estimate.exchanges import OperatorCounter
from pytest_llmperf.worker.estimate.memory_estimator import IN_FP32, SUMMED_IN_FP32, GpuFunctions, plan
from pytest_llmperf.worker.estimate.storages import StorageCounter

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

REPOSITORY = Path(__file__).parents[2]


Case: TypeAlias = tuple[TrainSpec, Launch | None]


def stored() -> list[Baseline]:
    paths = sorted((REPOSITORY / "baselines" / "nvidia-h200-140gib").glob("*/*.json"))
    return [parse(Baseline, path.read_text(encoding="utf-8"), str(path)) for path in paths]


def stored_cases() -> list[Case]:
    """Those of which a prediction claims to be right; of each kind the largest."""
    cases = [(TrainSpec.from_dict(baseline.spec), newest_on_a_gpu(baseline.launches)) for baseline in stored()]
    return of_each_kind(case for case in cases if is_modelled(case[0]))


def of_each_family(cases: Iterable[Case]) -> list[Case]:
    """One case that was launched."""
    return [*{spec.architecture.model_type: (spec, launch) for spec, launch in cases if launch}.values()]


Answers: TypeAlias = Mapping[TrainSpec, Mapping[str, int] | PredictionError]


def answers(specs: Sequence[TrainSpec]) -> Answers:
    """By one process."""
    return dict(zip(specs, predictions(specs), strict=True))


FAMILIES = {"gemma3_text", "gpt2", "llama", "mistral", "mixtral", "opt", "qwen3"}


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.timeout(1200)
def test_a_stored_case_of_each_family_is_predicted() -> None:
    pytest.importorskip("liger_kernel")
    cases = of_each_family(stored_cases())
    assert {spec.architecture.model_type for spec, _ in cases} >= FAMILIES
    found = answers([spec for spec, _ in (*cases, *MEASURED)])
    check_errors(cases, [found[spec] for spec, _ in cases])
    for spec, measured in MEASURED:
        assert sum(predicted(found[spec]).values()) == pytest.approx(measured, rel=0.005), spec.id


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.timeout(1200)
def test_stored_cases_of_every_kind_that_is_modelled_are_predicted() -> None:
    pytest.importorskip("liger_kernel")
    cases = [case for case in stored_cases() if case[1]]
    assert len(cases) >= 40
    check_errors(cases, [*predictions([spec for spec, _ in cases])])


def check_errors(cases: Sequence[Case], plans: Sequence[Mapping[str, int] | PredictionError]) -> None:
    errors = {
        spec.id: MemoryPlan(predicted(parts)).error(launch)
        for (spec, launch), parts in zip(cases, plans, strict=True)
        if launch
    }
    # The median was below 0.0001 when this was written, the worst 0.0035; another version of torch or Liger may keep a
    # little more or less. (Of older launches one is off by 0.046: two GPUs, one of which let go of its bucket late.)
    assert median(map(abs, errors.values())) < 0.002, errors
    assert max(map(abs, errors.values())) < 0.01, errors


# On an H200 too, and stored nowhere: scores with dropout, and sizes that fill no blocks; and what each took at most.
MEASURED = [
    (TrainSpec(model="gpt2-medium", attention="eager", micro_batch_size=4), 24_632_420_864),
    (TrainSpec(model="gemma-3-270m", liger=True, micro_batch_size=6, sequence_length=1000), 5_309_425_664),
]


def of_each_kind(cases: Iterable[Case]) -> list[Case]:
    """Of those that differ in their micro-batch or their number of GPUs alone, the largest."""
    kinds = {}
    for spec, launch in sorted(cases, key=lambda case: (case[0].micro_batch_size, case[0].gpus)):
        kind = {**spec.to_dict(), "micro_batch_size": 0, "gpus": min(spec.gpus, 2)}
        kinds[json.dumps(kind)] = spec, launch
    return [*kinds.values()]


def predicted(answer: Mapping[str, int] | PredictionError) -> Mapping[str, int]:
    if isinstance(answer, PredictionError):
        raise answer
    return answer


def is_modelled(spec: TrainSpec) -> bool:
    """Whether a prediction claims to be right of it: docs/explanation/memory.md lists of what it does not."""
    known = spec.fp8 == "no" and spec.optimizer in ("adamw_torch", "adamw_torch_fused", "sgd")
    known = known and not spec.hub_kernels
    counted = why_none(replace(spec, liger=False, liger_kernels="all")) is None and spec.parallelism != "sequence"
    return known and counted and not spec.torch_compile and not spec.has_padding


SMALL = TrainSpec(model="llama-tiny", sequence_length=64, micro_batch_size=8)


@cache
def planned(spec: TrainSpec, config: str) -> Mapping[str, int]:
    """Many tests compare with the same one."""
    return plan(spec, json.loads(config))


def parts(**values: Any) -> Mapping[str, int]:
    spec = TrainSpec(**{**SMALL.to_dict(), **values})
    return planned(spec, json.dumps(spec.architecture.config))


def test_a_real_backward_pass_comes_before_any_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else a build for CUDA that sees no GPU has a thread for one, and predicts in no fork.
    seen: list[str] = []

    def backward(tensor: torch.Tensor) -> None:
        seen.append(type(tensor).__name__)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    server = SimpleNamespace(run=lambda: seen.append("serving"))
    monkeypatch.setattr(prediction_server, "_Server", lambda _asks, _answers: server)
    asks, answers = os.pipe()
    assert prediction_server.serve(asks, answers) == 0
    os.close(asks)
    os.close(answers)
    assert seen == ["Tensor", "serving"]


def test_products_of_muons_update_are_those_that_its_formula_tells() -> None:
    counted = []
    for optimizer in ("muon", "adamw_torch"):
        spec, counter = TrainSpec(model="llama-tiny", optimizer=optimizer), OperatorCounter()
        plan(spec, spec.architecture.config, counter)
        counted.append(sum(counter.flops.values()))
    assert counted[0] - counted[1] == update_flops(TrainSpec(model="llama-tiny", optimizer="muon")) > 0


def test_what_each_setting_does_to_the_parts() -> None:
    base = parts()
    assert base["weights"] == pytest.approx(125_248 * 2, rel=0.1)
    assert base["optimizer"] == pytest.approx(2 * 125_248 * 2, rel=0.15)
    assert parts(micro_batch_size=16)["activations"] > 1.8 * base["activations"]
    assert parts(gradient_checkpointing=True)["activations"] < 0.7 * base["activations"]
    assert parts(attention="eager")["activations"] > base["activations"]
    assert parts(model_precision="fp32")["weights"] > 1.9 * base["weights"]
    assert parts(gpus=2)["buckets"] == base["weights"]
    assert "optimizer" not in parts(optimizer="sgd")
    assert base["optimizer"] / 2 < parts(optimizer="muon")["optimizer"] < 0.9 * base["optimizer"]
    accumulated = parts(gradient_accumulation_steps=2)
    assert accumulated["gradients"] >= base.get("gradients", 0) + 125_248


def test_what_waits_in_the_hosts_memory_is_not_counted() -> None:
    own, elsewhere = (parts(micro_batch_size=512, loss="chunked", offloading=where) for where in ("no", "activations"))
    assert elsewhere["activations"] < own["activations"] / 2
    assert sum(elsewhere.values()) < sum(own.values()) - own["activations"] / 2
    assert parts(micro_batch_size=1, offloading="activations") == parts(micro_batch_size=1)  # small ones stay


def sharded(**values: Any) -> Mapping[str, int]:
    return parts(**{"mixed_precision": "no", "gpus": 4, "parallelism": "fsdp", **values})


# Rows that do not divide are padded, and what is small takes a whole block of the allocator's on every rank.
ROUNDING = 40 * 512


def test_a_chunked_loss_never_holds_all_logits() -> None:
    own, chunked = parts(micro_batch_size=32), parts(micro_batch_size=32, loss="chunked")
    assert sum(chunked.values()) < sum(own.values()) - 0.8 * own["logits"]


def test_sharding_divides_what_the_optimizer_works_on() -> None:
    whole, quarter = parts(mixed_precision="no"), sharded()
    for part in ("weights", "optimizer"):
        assert whole[part] <= 4 * quarter[part] <= whole[part] + 4 * ROUNDING
    assert "buckets" not in quarter
    assert quarter["activations"] == pytest.approx(whole["activations"], rel=0.1)


def test_each_rank_of_context_has_a_part_of_each_sequence_and_of_the_weights() -> None:
    attention = torch.nn.functional.scaled_dot_product_attention
    whole, part = (sharded(micro_batch_size=64, parallelism=kind) for kind in ("fsdp", "context"))
    for name in ("weights", "optimizer"):
        assert part[name] == whole[name]
    assert part["activations"] == pytest.approx(whole["activations"] / 4, rel=0.15)
    assert torch.nn.functional.scaled_dot_product_attention is attention


@pytest.mark.parametrize("ranks", [8, *(pytest.param(each, marks=pytest.mark.wide) for each in (16, 32))])
def test_one_turn_of_a_ring_counts_for_all_that_are_like_it(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"parallelism": "context", "mixed_precision": "no", "gpus": ranks}
    again = {"gradient_accumulation_steps": 3, "gradient_checkpointing": True}
    spec = TrainSpec(**{**SMALL.to_dict(), **values, **again})

    def counted() -> tuple[int, Sequence[object]]:
        found = OperatorCounter()
        peak = sum(plan(spec, spec.architecture.config, found).values())
        assert found.exchanges.found["all_to_all"][0] == 3 * 2 * ranks  # of two layers' gradients
        return peak, [found.operators, found.flops, found.exchanges.found, found.padding]

    counted()  # what PyTorch then remembers of sharded shapes is asked for once
    peak, short = counted()
    monkeypatch.setattr(exchanges, "_TURNS", ranks)
    real, whole = counted()
    assert short == whole
    assert peak == pytest.approx(real, rel=0.002)  # blocks are split otherwise after many turns


def test_a_rank_of_deepspeed_sends_whole_gradients_and_keeps_its_parts() -> None:
    """Of eight elements and five for four ranks two each, so three are none's; one that is divided is sent as it is."""
    found = OperatorCounter()
    counter = StorageCounter(8, found)
    spec = TrainSpec(**{**SMALL.to_dict(), "gpus": 4, "parallelism": "zero3", "model_precision": "fp32"})
    with exchanges.among_ranks(spec), FakeTensorMode(), counter:
        both = [torch.zeros(2, 4), torch.zeros(5)]
        parts = exchanges.scattered(both)
        assert [tuple(each.shape) for each in parts] == [(2,), (2,)]
        assert found.exchanges.found["reduce_scatter"] == [1, 4 * 16, 0]
        counter.take()
        (alone,) = exchanges.scattered(both[:1])
        assert alone.untyped_storage() is both[0].untyped_storage()
    assert found.exchanges.found["reduce_scatter"] == [2, 4 * (16 + 8), 0]


class Status(Enum):
    INFLIGHT = 1
    AVAILABLE = 2


def test_each_of_what_deepspeed_gathers_is_a_copy_in_its_shape() -> None:
    weights = [SimpleNamespace(ds_numel=rows * 3, ds_shape=(rows, 3), ds_tensor=torch.zeros(3)) for rows in (1, 2)]
    for each in weights:
        each.ds_status = Status.INFLIGHT
    waited: list[int] = []
    handle = SimpleNamespace(wait=lambda: waited.append(1))
    both = SimpleNamespace(complete=False, allgather_handle=handle, params=weights, partitions=[torch.zeros(12)[:3]])
    exchanges.gathered(both)
    exchanges.gathered(both)  # it is asked for as often as a module needs it
    assert waited == [1]
    found = [(tuple(each.data.shape), each.ds_status) for each in weights]
    assert found == [((1, 3), Status.AVAILABLE), ((2, 3), Status.AVAILABLE)]


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize("ranks", [4, 7])
def test_one_view_in_the_place_of_one_for_each_rank_changes_no_figure(
    stage: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    partitions, stage3 = (
        import_module(f"deepspeed.runtime.zero.{name}") for name in ("partition_parameters", "stage3")
    )
    values = {"parallelism": stage, "model_precision": "fp32", "gpus": ranks, "gradient_accumulation_steps": 3}
    spec = TrainSpec(**{**SMALL.to_dict(), **values})

    def counted() -> list[object]:
        found = OperatorCounter()
        peak = sum(plan(spec, spec.architecture.config, found).values())
        return [peak, found.flops, found.exchanges.found, found.padding]

    short = counted()
    monkeypatch.setattr(exchanges, "gathered", partitions.AllGatherCoalescedHandle.wait)
    monkeypatch.setattr(exchanges, "scattered", stage3.reduce_scatter_coalesced)
    monkeypatch.setattr(exchanges, "own", range)
    assert short == counted()


@pytest.mark.parametrize("gpus", [4, 8])
def test_replicas_of_shards_hold_what_their_shards_hold(gpus: int) -> None:
    assert sharded(gpus=gpus, parallelism="fsdp_hybrid") == sharded(gpus=gpus // 2)


def test_a_group_of_layers_is_gathered_at_a_time(tmp_path: Path) -> None:
    few, many = (
        sharded(model=configured(tmp_path, num_hidden_layers=layers), micro_batch_size=64) for layers in (4, 8)
    )
    assert few["gathered"] == many["gathered"]
    # At least the vocabulary's weights, which stay from the embedding at one end to the logits at the other.
    assert few["gathered"] >= 1009 * 64 * 2


def test_gradients_are_sharded_once_they_are_whole() -> None:
    at_once, accumulated = sharded(), sharded(gradient_accumulation_steps=2)
    whole = parts(mixed_precision="no", gradient_accumulation_steps=2)
    assert at_once["gradients"] < whole["gradients"] / 2
    assert accumulated["gradients"] >= whole["gradients"] / 2


def test_weights_are_gathered_in_the_type_that_they_are_used_in() -> None:
    fp32, under_autocast = (sharded(model_precision="fp32", mixed_precision=autocast) for autocast in ("no", "bf16"))
    assert under_autocast["weights"] == fp32["weights"]
    assert under_autocast["gathered"] == sharded()["gathered"] == pytest.approx(fp32["gathered"] / 2, abs=ROUNDING)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_shards_are_gathered_again_for_recomputation(policy: str) -> None:
    values = {"gradient_checkpointing": True, "checkpointing_policy": policy}
    whole, quarter = parts(mixed_precision="no", **values), sharded(**values)
    assert quarter["activations"] == pytest.approx(whole["activations"], rel=0.1)
    assert quarter["activations"] < 0.7 * sharded()["activations"]


def test_sharding_is_done_when_it_is_told() -> None:
    sharded(seed=1)  # nobody has asked for it before
    assert not torch.distributed.is_initialized()
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_selective_recomputation_keeps_more_than_full_and_less_than_none(tmp_path: Path) -> None:
    deep = {"model": configured(tmp_path, num_hidden_layers=8), "micro_batch_size": 16}
    kept = [
        parts(**deep, gradient_checkpointing=policy != "none", checkpointing_policy=policy.replace("none", "full"))
        for policy in ("full", "selective", "none")
    ]
    full, selective, none = (found["activations"] for found in kept)
    # Of each layer seven products and attention, 16 x 64 rows each: six of them 64 wide, two 160.
    assert selective - full == pytest.approx(8 * 16 * 64 * (6 * 64 + 2 * 160) * 2, rel=0.1)
    assert selective < 0.8 * none


def test_plain_functions_keep_the_scores_that_one_kernel_does_not() -> None:
    fused, math, eager = parts(), parts(sdpa_backend="math"), parts(attention="eager")
    scores = 8 * SMALL.sequence_length**2  # of one head, in each sequence of the micro-batch
    assert math["activations"] > fused["activations"] + scores
    assert math["activations"] == pytest.approx(eager["activations"], rel=0.5)


# 64 tokens, each of which sees 32.
WINDOW = {"model_type": "mistral", "sliding_window": 32, "num_key_value_heads": 2}
ONE_MASK = SMALL.micro_batch_size * SMALL.sequence_length**2 * 2


def test_each_attention_keeps_numbers_of_its_mask_for_each_sequence(tmp_path: Path) -> None:
    def more(layers: int) -> int:
        windowed, plain = (
            parts(model=configured(tmp_path, **{**WINDOW, "sliding_window": window, "num_hidden_layers": layers}))
            for window in (32, None)
        )
        return windowed["activations"] - plain["activations"]

    # Where there is a mask, transformers repeats keys and values for all heads; where there is none, it does not.
    repeated = 2 * SMALL.micro_batch_size * SMALL.sequence_length * (64 - 32) * 2
    assert more(6) - more(2) == pytest.approx(4 * (ONE_MASK + repeated), rel=0.01)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_kernels_that_are_told_of_a_window_keep_no_mask(attention: str, tmp_path: Path) -> None:
    path = configured(tmp_path, **WINDOW)
    masked, without = parts(model=path), parts(model=path, attention=attention)
    assert masked["activations"] >= without["activations"] + 2 * ONE_MASK
    assert without == parts(model=configured(tmp_path, **{**WINDOW, "sliding_window": None}))


@pytest.mark.parametrize(
    "function",
    [
        lambda each: each**3,
        lambda each: each.pow(2),
        lambda each: torch.pow(each, 2),
        lambda each: 2**each,
        torch.exp,
        torch.Tensor.rsqrt,
        torch.nn.functional.softplus,
        torch.sum,
        lambda each: each.cumsum(0),
    ],
)
def test_autocast_runs_in_fp32_what_cuda_s_does(function: Any) -> None:
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        half, double = torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.float64)
        plain = function(half).dtype
        with GpuFunctions(torch.bfloat16, vocabulary_size=8):
            assert function(half).dtype == torch.float32
            assert function(double).dtype == torch.float64
        with GpuFunctions(None, vocabulary_size=8):
            assert function(half).dtype == plain


def test_what_autocast_runs_in_fp32_is_what_torch_says() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file():
        pytest.skip("this torch comes without its headers")
    macros = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    named = {name for macro in macros for name in re.findall(r"_\((\w+)", macro)}
    called = {name for name in named for place in (torch, torch.Tensor, torch.nn.functional) if hasattr(place, name)}
    assert len(called) > 40
    assert called <= {*IN_FP32.split(), *SUMMED_IN_FP32.split()}


def test_a_sum_that_is_told_a_type_has_it_under_autocast() -> None:
    with FakeTensorMode(), GpuFunctions(torch.bfloat16, vocabulary_size=8):
        half = torch.ones(4, dtype=torch.bfloat16)
        assert half.sum(dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.ones(4, dtype=torch.int64).sum().dtype == torch.int64
        assert half.tanh().dtype == torch.bfloat16


def test_an_activation_with_a_power_in_it_keeps_fp32(tmp_path: Path) -> None:
    def kept(activation: str) -> int:
        sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 4096, "vocab_size": 1009, "n_positions": 256}
        path = tmp_path / f"{activation}.json"
        path.write_text(json.dumps({"model_type": "gpt2", **sizes, "activation_function": activation}))
        return parts(model=str(path))["activations"]

    # Of one number, the plain kernel keeps input and output in bf16. Written out, the input in fp32, half of it in
    # bf16, the tangent and what is multiplied by it in fp32, and the output in bf16.
    one = SMALL.micro_batch_size * SMALL.sequence_length * 4096
    assert kept("gelu_new") - kept("gelu") >= 2 * one * ((4 + 2 + 4 + 4 + 2) - (2 + 2))


def configured(folder: Path, **values: Any) -> str:
    """The path of a small configuration that nothing was tuned for."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", **sizes, "vocab_size": 1009, "max_position_embeddings": 256, **values}
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_nothing_is_padded_and_no_layer_left_out_where_a_model_asks() -> None:
    with FakeTensorMode(), GpuFunctions(None, vocabulary_size=8):
        assert torch.ones(2, 3).all()
        assert not torch.rand([]) < 0.1
        assert torch.rand(3).shape == (3,)


def test_sizes_that_nothing_divides(tmp_path: Path) -> None:
    found = parts(model=configured(tmp_path), sequence_length=61, micro_batch_size=3)
    # At the peak the loss holds the logits in bf16 and in fp32, and what they become: 61 x 3 rows of 1009.
    assert found["logits"] >= 61 * 3 * 1009 * (2 + 4)
    assert found["logits"] % 512 == 0


def test_an_output_layer_of_its_own_is_counted(tmp_path: Path) -> None:
    tied = parts(model=configured(tmp_path, tie_word_embeddings=True))
    untied = parts(model=configured(tmp_path, tie_word_embeddings=False))
    assert untied["weights"] - tied["weights"] == pytest.approx(1009 * 64 * 2, abs=512)
    assert untied["optimizer"] - tied["optimizer"] == pytest.approx(2 * 1009 * 64 * 2, abs=4 * 512)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_every_fused_attention_keeps_what_sdpa_keeps(attention: str) -> None:
    assert parts(attention=attention) == parts()


def test_fp16_is_counted_as_bf16() -> None:
    half = parts(model_precision="fp32", mixed_precision="fp16")
    assert half == parts(model_precision="fp32", mixed_precision="bf16")
    assert parts(model_precision="fp16", mixed_precision="no") == parts(mixed_precision="no")


def test_what_is_compiled_is_counted_as_if_it_were_not() -> None:
    assert parts(torch_compile=True) == parts()


SEQUENCE = replace(SMALL, parallelism="sequence", gpus=2, model_precision="fp32", gradient_accumulation_steps=2)
ODD: Mapping[str, tuple[dict[str, Any], str]] = {
    "code of its own": (
        {"model_type": "of-its-own", "auto_map": {"AutoConfig": "code.C"}},
        "no model type 'of-its-own', and code that",
    ),
    "no language model": ({"model_type": "vit"}, "has no causal language model of type 'vit'"),
    "a bare KeyError": ({"hidden_act": "none-such"}, "KeyError: 'none-such'"),
    "an error of several lines": ({"rms_norm_eps": "tiny"}, "'rms_norm_eps' expected float, got str"),
    "a long one": ({"hidden_act": "x" * 1000}, "KeyError: 'xxx"),
}


def odd(folder: Path) -> dict[TrainSpec, str]:
    """What cannot be predicted, and what is said of it."""
    said: dict[TrainSpec, str] = {}
    for name, (values, words) in ODD.items():
        (folder / name).mkdir()
        said[TrainSpec(model=configured(folder / name, **values), sequence_length=64)] = words
    said[replace(SMALL, optimizer="adafactor")] = "optimizer adafactor is not modelled; known: adamw_torch,"
    said[replace(SMALL, fp8="rowwise")] = "compiled, as they are used, 8-bit ones"
    said[replace(SMALL, hub_kernels=HUB_KERNELS)] = "hub_kernels are not modelled"
    said[SEQUENCE] = "parallelism='sequence' is not modelled"
    return said


def test_what_cannot_be_predicted_is_one_line_each_and_hinders_no_other(tmp_path: Path) -> None:
    found = answers([SMALL, *odd(tmp_path), SMALL])
    assert found[SMALL] == {**parts(), "workspace": 2 * 32 * 2**20}
    said = {words for _, words in ODD.values()}
    said |= {
        "hub_kernels are not modelled",
        "parallelism='sequence' is not modelled",
        "optimizer adafactor is not modelled; known: adamw_torch,",
        "compiled, as they are used, 8-bit ones",
    }
    errors = {spec: answer for spec, answer in found.items() if isinstance(answer, PredictionError)}
    assert len(errors) == len(said)
    for spec, error in errors.items():
        assert str(error).startswith(f"{spec.id}: its memory cannot be predicted: ")
        assert [words for words in said if words in str(error)], error
        assert "\n" not in str(error)
        assert len(str(error)) < 500


# Prints without an end of line, before the forks and in each of them; one of two is waited for by none.
FAULTS = """
import os, threading, pytest_llmperf.settings.train_spec as spec
import pytest_llmperf.worker.estimate.prediction_server as server
server._MOST_SECONDS = 10.0
print("importing", end="", flush=True)
print("importing", end="")
own = spec.TrainSpec.from_dict
def from_dict(values):
    size = values["micro_batch_size"]
    print("\\r50 %", end="", flush=size == 3)
    if size == 7:
        os.kill(os.getpid(), 9)
    if size in (9, 11):
        threading.Event().wait()
    return own(values)
spec.TrainSpec.from_dict = from_dict
"""


@pytest.mark.wide
def test_a_library_that_prints_one_that_hangs_or_is_killed_costs_others_no_answer_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PREDICTED_BY", str(tmp_path))  # by this test's own mark: others may predict on this host
    monkeypatch.setattr(prediction, "_SECONDS", 60)
    found = predictions([replace(SMALL, micro_batch_size=size) for size in (8, 7, 3, 9, 8, 11)])
    first, killed, other, hung, last = islice(found, 5)
    found.close()  # whoever stops before the last, which hangs too
    for error, said in ((killed, "its process ended with -9"), (hung, "it was not done within 10 s")):
        assert isinstance(error, PredictionError)
        assert str(error).endswith(f"its memory cannot be predicted: {said}")
    assert not [each for each in (first, other) if isinstance(each, PredictionError)]
    assert first == last
    variables = [process.info["environ"] or {} for process in psutil.process_iter(["environ"])]
    assert not [each for each in variables if each.get("PREDICTED_BY") == str(tmp_path)]
