"""The worker's parts in this process: geometry, optimizer names, patches, clocks."""

from __future__ import annotations

import functools
import gc
import json
import mmap
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pytest_llmperf.judge import validity
from pytest_llmperf.records import ranks
from pytest_llmperf.records.ranks import merged_evidence
from pytest_llmperf.settings import models
from pytest_llmperf.settings.attention import ATTENTIONS, FLASH
from pytest_llmperf.settings.optimizer import MUON, OPTIMIZERS, optimizer_class
from pytest_llmperf.settings.registry import Evidence, contradictions
from pytest_llmperf.settings.setting import gathered, stored_evidence
from pytest_llmperf.settings.train_spec import TrainSpec

torch = pytest.importorskip("torch")

import transformers  # noqa: E402 - they need torch
from transformers.integrations.liger import apply_liger_kernel  # noqa: E402 - they need torch
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.training_args import OptimizerNames  # noqa: E402
from transformers.utils.deprecation import deprecate_kwarg  # noqa: E402

from pytest_llmperf.observe import device, environment, measurement  # noqa: E402
from pytest_llmperf.observe.measurement import Clock, Diary, Memory  # noqa: E402
from pytest_llmperf.observe.reference_work import slowest  # noqa: E402
from pytest_llmperf.observe.training import Exchange  # noqa: E402
from pytest_llmperf.worker import evidence, imports  # noqa: E402
from pytest_llmperf.worker.build import build_model, hf_config_of, unused_settings  # noqa: E402
from pytest_llmperf.worker.recipes.huggingface import trainer  # noqa: E402
from pytest_llmperf.worker.recipes.huggingface.data import RandomTokens  # noqa: E402
from pytest_llmperf.worker.settings.attention import choose_sdpa, found_settings  # noqa: E402
from pytest_llmperf.worker.settings.compilation import seen_compilation  # noqa: E402
from pytest_llmperf.worker.settings.liger import WITNESSES, liger_forwards  # noqa: E402
from pytest_llmperf.worker.settings.optimizer import seen_optimizer  # noqa: E402
from pytest_llmperf.worker.settings.precision import parameter_dtypes  # noqa: E402
from tests.waiting import until  # noqa: E402
from tests.worker.ligered import CHOICES  # noqa: E402

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("opt-1.3b", 1_315_758_080),
        ("qwen3-0.6b", 596_049_920),
        ("gemma-3-270m", 268_098_176),
        ("smollm2-360m", 361_821_120),
        ("gpt2-medium", 354_823_168),
    ],
)
def test_parameters_are_the_published_number(name: str, parameters: int) -> None:
    spec = TrainSpec(model=name)
    model = build_model(spec, models.resolve(name).config, torch.device("meta"))
    assert model.num_parameters() == parameters


@pytest.mark.parametrize(("length", "parts"), [(32, 2), (64, 1)], ids=["divided", "whole"])
def test_ranks_share_rows_that_a_loader_has_divided_and_no_others(
    length: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, told = torch.zeros(3, length, dtype=torch.long), list[int]()
    watched = object.__new__(trainer.WatchedTrainer)
    observed = SimpleNamespace(pass_began=lambda _: None, pass_ended=lambda _, tokens, __: told.append(tokens))
    known = {"_observed": observed, "_inspection": None, "_sharing": 2, "_length": 64, "_given": ids.numel()}
    for name, value in {**known, "args": SimpleNamespace(process_index=0)}.items():
        setattr(watched, name, value)
    monkeypatch.setattr(transformers.Trainer, "training_step", lambda *_: torch.tensor(1.0))
    watched.training_step(torch.nn.Linear(1, 1), {"input_ids": ids})
    assert (watched.parts, told) == (parts, [96])


def test_optimizers_are_those_of_transformers() -> None:
    assert {*OPTIMIZERS} - {MUON} <= {name.value for name in OptimizerNames}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_a_class_that_is_not_sgds(name: str) -> None:
    parts = optimizer_class(name)
    assert parts
    assert all(part in "sgd" for part in parts) == (name == "sgd")


def test_how_an_optimizer_keeps_its_states() -> None:
    # As bitsandbytes' classes have it.
    quantized = SimpleNamespace(args=SimpleNamespace(optim_bits=8), is_paged=True, defaults={})
    assert stored_evidence(seen_optimizer(quantized)) == {
        "optimizer": "SimpleNamespace",
        "optimizer_fused": False,
        "optimizer_bits": "8bit",
        "optimizer_paged": True,
    }
    plain = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    seen = seen_optimizer(plain)
    assert (seen.optimizer, seen.optimizer_bits, seen.optimizer_paged) == ("AdamW", "", False)


def test_evidence_of_all_ranks() -> None:
    seen = {
        "liger_modules": 6,
        "attention_kernel": "a",
        "compiled_graphs": 2,
        "graph_breaks": 0,
        "recompilations": 0,
        "allocator_retries": 0,
    }
    assert merged_evidence([seen, dict(seen)]) == seen
    # What one rank could not see is no disagreement, and of counts the worst is kept.
    odd = {
        "liger_modules": 0,
        "attention_kernel": "unknown",
        "compiled_graphs": 0,
        "graph_breaks": 3,
        "recompilations": 1,
        "allocator_retries": 2,
    }
    assert merged_evidence([seen, seen, odd]) == {
        **seen,
        "compiled_graphs": 0,
        "graph_breaks": 3,
        "recompilations": 1,
        "allocator_retries": 2,
        "other_ranks": {"liger_modules": {"2": 0}},
    }


def test_of_a_setup_only_what_ranks_saw_differently_is_told() -> None:
    setups = [{"torch": {"cpu_capability": "AVX2"}, "sources": {"a": "1", "b": "2"}} for _ in range(2)]
    setups[1] = {"torch": {"cpu_capability": "AVX512"}, "sources": {"a": "1", "b": "3"}}
    merged = merged_evidence([{**dict.fromkeys(ranks._COUNTS, 0), "setup": each} for each in setups])
    assert merged["other_ranks"] == {"setup.sources.b": {"1": "3"}}
    assert list(validity.disagreements(merged, Evidence.read(merged))) == ["sources.b: rank 1 has 3, rank 0 has 2"]


def test_every_dropout_of_a_class_is_told() -> None:
    model = torch.nn.Sequential(
        torch.nn.Dropout(0.3), torch.nn.Dropout(0.1), torch.nn.Dropout(0.1), torch.nn.Dropout(0.0)
    )
    assert environment.dropout(model) == {"Dropout.p": "0.1 x2, 0.3 x1"}


def test_a_hook_of_whatever_kind_is_counted() -> None:
    model = torch.nn.Linear(2, 2)
    assert environment.hooks(model) == {}
    model.weight.register_post_accumulate_grad_hook(lambda _: None)
    model.register_forward_hook(lambda *_: None)
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        counts = {"forward_hooks": 1, "parameters_post_accumulate_grad_hooks": 1, "global_forward_hooks": 1}
        assert environment.hooks(model) == counts
    finally:
        everywhere.remove()


def test_what_a_step_calls_is_told_by_whose_code_it_is() -> None:
    def plain() -> None: ...

    @functools.wraps(plain)
    def decorated() -> None: ...

    assert list(environment.defining(plain)) == [__name__]
    assert list(environment.defining(decorated)) == [__name__, __name__]
    assert list(environment.defining(torch.nn.functional.scaled_dot_product_attention)) == ["built in"]
    model = torch.nn.Linear(2, 2)
    told = environment.of_a_step(model, torch.optim.AdamW(model.parameters()), evidence._CALLABLES)
    assert told["Trainer.training_step"] == "transformers.trainer"
    assert told["functional.scaled_dot_product_attention"] == "built in"
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", plain):
        assert environment.of_a_step(model, None, {})["functional.scaled_dot_product_attention"] == __name__


def test_the_interpreters_own_customisation_is_none_of_the_users(tmp_path: Path) -> None:
    own, users = ModuleType("sitecustomize"), ModuleType("sitecustomize")
    own.__file__, users.__file__ = f"{sysconfig.get_path('stdlib')}/sitecustomize.py", f"{tmp_path}/sitecustomize.py"
    assert evidence._is_the_interpreters(own)
    assert not evidence._is_the_interpreters(users)


def test_the_canary_is_the_slowest_ranks() -> None:
    rates = [{"matmul_flops": 5.0, "copy_bytes_per_second": 1.0}, {"matmul_flops": 4.0, "copy_bytes_per_second": 2.0}]
    assert slowest(rates) == {"matmul_flops": 4.0, "copy_bytes_per_second": 1.0}


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name not in FLASH])
def test_attention_is_what_was_asked_for(attention: str) -> None:
    spec = TrainSpec(model="llama-tiny", attention=attention)
    model = build_model(spec, spec.architecture.config, torch.device("cpu"))
    assert model.config._attn_implementation == attention
    assert parameter_dtypes(model) == {"torch.bfloat16": 125_248}


@pytest.mark.parametrize(("name", "is_patched"), [("llama-tiny", True), ("opt-tiny", False)])
def test_liger_is_counted_where_it_patched(name: str, is_patched: bool) -> None:
    pytest.importorskip("liger_kernel")
    spec = TrainSpec(model=name)
    model = build_model(spec, models.resolve(name).config, torch.device("cpu"))
    seen = WITNESSES["liger"](spec, model)
    assert liger_forwards(model) == []
    # Liger replaces classes and functions for good, and other tests build models here.
    with mock.patch.dict(modeling_llama.__dict__):
        apply_liger_kernel(model, None)
    assert bool(liger_forwards(model)) == is_patched
    if not is_patched:
        assert "no Liger kernels supported for model type: opt" in seen(mock.Mock(model=model)).liger_note


@pytest.mark.parametrize("words", CHOICES)
def test_a_choice_of_ligers_kernels_is_what_is_patched(ligered: Mapping[str, list[Any]], words: str) -> None:
    functions, forwards = CHOICES[words]
    assert ligered[words] == [functions, forwards]
    name, kernels = words.split()
    spec = TrainSpec(model=name, liger=True, liger_kernels=kernels)
    ran = {"liger_modules": len(forwards), "liger_forwards": forwards, "liger_functions": functions}
    assert [*contradictions(spec, Evidence.read(ran), frozenset())] == []


def test_tokens_are_the_same_for_one_seed_and_within_the_vocabulary() -> None:
    a, b, other = (RandomTokens(length=600, sequence_length=8, vocabulary_size=11, seed=seed) for seed in (1, 1, 2))
    assert len(a) == 600
    assert all(torch.equal(a[i]["input_ids"], b[i]["input_ids"]) for i in (0, 511, 599))
    assert not torch.equal(a[0]["input_ids"], other[0]["input_ids"])
    assert int(max(a[i]["input_ids"].max() for i in range(600))) == 10
    # Whatever their number: what is trained does not depend on how long one measures.
    few = RandomTokens(length=3, sequence_length=8, vocabulary_size=11, seed=1)
    assert all(torch.equal(few[i]["input_ids"], a[i]["input_ids"]) for i in range(3))


def test_the_host_clock_tells_the_time_between_marks() -> None:
    clock = Clock()
    clock.mark()
    time.sleep(0.05)
    clock.mark()
    clock.mark()
    first, second = clock.seconds()
    assert 0.05 <= first < 1
    assert second < first


def test_the_exchange_is_watched_by_the_last_gradient_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    clock = CountingClock()
    watch = Exchange(clock)
    watch.arrive()  # of no step
    watch.watch(model.parameters())
    for _ in range(2):
        for _ in range(2):
            watch.leave()
            model(torch.ones(1, 2)).sum().backward()
            watch.end_pass()
        watch.end_step()
        watch.arrive()
    # All four parameters in the first pass, one from then on, and the end of each; the meeting between the steps.
    assert clock.instants == 4 + 1 + 3 * 2 + 3
    assert watch.seconds() == (2.0, 3.0)


def test_a_pass_without_that_gradient_leaves_nothing_to_tell() -> None:
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    watch = Exchange(Clock())
    watch.watch([*first.parameters(), *second.parameters()])
    for layer in (first, second):
        layer(torch.ones(1, 2)).sum().backward()
        watch.end_pass()
        watch.end_step()
    assert watch.seconds() == ()


class DeviceClock(Clock):
    """One of a device that is a step behind its host, and that hears no other thread than the one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.issued, self.thread = 0, threading.get_ident()

    def instant(self) -> int:
        self.issued += 1
        return self.issued

    def has_passed(self, instant: int) -> bool:
        assert threading.get_ident() == self.thread
        return instant < self.issued

    def between(self, start: int, end: int) -> float:
        assert threading.get_ident() == self.thread
        return float(end - start)


def test_a_diary_asks_the_device_in_the_thread_that_trains_and_adds_up_the_waits_of_a_long_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A capture of a CUDA graph ends where another thread asks for an event; a step may be longer than a look."""
    monkeypatch.setattr(measurement, "_WRITE_SECONDS", 0.01)
    # Whoever there is waits always, and is on a core for half of the time.
    monkeypatch.setattr(measurement, "_on_cores", lambda _: (time.monotonic() / 2, time.monotonic()))
    monkeypatch.setattr(gc, "callbacks", [])
    (tmp_path / "diary").touch()
    diary = Diary(DeviceClock(), Memory(), tmp_path / "diary")

    def lines() -> list[Any]:
        return [json.loads(line) for line in (tmp_path / "diary").read_text(encoding="utf-8").splitlines()]

    def has_written(number: int) -> bool:
        return len(lines()) == number

    diary.begin()
    diary.end_step()
    for number in (1, 2):
        time.sleep(0.3)
        diary.end_step()
        until(partial(has_written, number))
    assert [line["steps"] for line in lines()] == [[[1.0, 0.0, 0.0]]] * 2
    assert lines()[1]["waited_seconds"] > 0.2
    assert lines()[1]["computed_seconds"] == pytest.approx(lines()[1]["waited_seconds"] / 2, abs=0.05)


def test_pages_of_a_file_that_is_mapped_are_no_growth_of_a_process(tmp_path: Path) -> None:
    """Of a data set each step touches others, and nothing leaks."""
    (tmp_path / "train.bin").write_bytes(bytes(2**27))
    held = [_host_bytes(tmp_path)]
    with (tmp_path / "train.bin").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as tokens:
        seen = sum(tokens[::4096])
        held.append(_host_bytes(tmp_path))
    kept = torch.ones(2**25)
    held.append(_host_bytes(tmp_path))
    assert (seen, len(kept)) == (0, 2**25)
    assert held[1] - held[0] < 2**25
    assert held[2] - held[1] > 2**26


def _host_bytes(folder: Path) -> int:
    diary = Diary(Clock(), Memory(), folder / "diary")
    gc.callbacks.remove(diary._collects)
    diary._passed.append(((0.1, 0.0, 0.0), None))
    return int(diary._line()["host_bytes"])


class CountingClock(Clock):
    """Each instant is one second after the one before."""

    instants = 0

    def instant(self) -> float:
        self.instants += 1
        return float(self.instants)


def test_host_memory_sees_what_was_held_and_given_back() -> None:
    memory = Memory()
    held = torch.ones(50 * 2**20)
    del held
    assert 190 * 2**20 < memory.peaks()[0] < 400 * 2**20


def test_host_memory_leaves_out_what_is_held_apart() -> None:
    memory = Memory()
    with memory.apart():
        kept, passing = torch.ones(20 * 2**20), torch.ones(50 * 2**20)
        del passing
    assert memory.peaks()[0] < 20 * 2**20
    more = torch.ones(30 * 2**20)
    assert 110 * 2**20 < memory.peaks()[0] < 200 * 2**20
    del kept, more


def test_gpu_memory_keeps_no_count_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5)
    for name in ("max_memory_reserved", "max_memory_allocated"):
        # Not of the current one, which in another thread is the first.
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 5 if device == rank else 0)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: {"allocated_bytes": {"all": {"current": 3}}})
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _pool, on: nullcontext(on))
    memory = device.GpuMemory(rank, forgets=False)
    with memory.apart():
        text = "kept by the host" * 2**16
    assert (memory.now(), memory.allocated(), memory.peaks(), len(text)) == (5, 3, (5, 5), 2**20)
    # What it had from a host's would look for counts that it has not.
    assert {name for name in vars(Memory) if not name.startswith("_")} <= vars(device.GpuMemory).keys()


def test_expandable_segments_are_asked_for_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some torch raises there; and they leave no gaps."""
    asked: list[object] = []

    def use(pool: object, _: object) -> AbstractContextManager[None]:
        asked.append(pool)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    memory = device.GpuMemory(torch.device("cuda", 0), forgets=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128, expandable_segments:True")
    with memory.apart():
        assert asked == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    with memory.apart():
        assert len(asked) == 1


def test_the_launchers_own_path_is_none_of_the_users(tmp_path: Path) -> None:
    (tmp_path / environment._PACKAGE.name).symlink_to(environment._PACKAGE)  # as another interpreter is given it
    for own in (str(environment._PACKAGE.parent), str(tmp_path)):
        told = environment._variables({"PYTHONPATH": f"{own}:/a:/b", "HOME": "/root", "OMP_NUM_THREADS": "1"})
        assert told == {"PYTHONPATH": "/a:/b", "OMP_NUM_THREADS": "1"}
        assert environment._variables({"PYTHONPATH": own}) == {}


def test_what_a_package_sets_where_it_is_imported_is_no_difference() -> None:
    assert environment._variables({"KMP_DUPLICATE_LIB_OK": "True", "KMP_BLOCKTIME": "0"}) == {"KMP_BLOCKTIME": "0"}


HYBRID = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "full_attention_interval": 2,
}


def on_meta(config: Mapping[str, Any]) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(hf_config_of(config))


class TestOptionalFunctions:
    def test_each_function_with_a_fall_back_says_whose_code_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = on_meta(HYBRID)
        assert evidence.optional_functions(model)["causal_conv1d_fn"] in ("transformers", "causal_conv1d")
        owner, package = sys.modules[type(model).__module__], ModuleType("fast_package")
        exec("def fast(x): return x", vars(package))
        for name, value in {"causal_conv1d_fn": package.fast, "lost_fn": None, "is_fast_path_available": False}.items():
            monkeypatch.setattr(owner, name, value, raising=False)
        monkeypatch.setattr(model, "kept_fn", package.fast, raising=False)
        found = evidence.optional_functions(model)
        assert found["causal_conv1d_fn"] == found[f"{type(model).__name__}.kept_fn"] == "fast_package"
        assert (found["lost_fn"], found["is_fast_path_available"]) == ("none", "false")

    def test_a_family_without_any_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # As transformers 5.24 wraps some for the old name of an argument.
        renamed = deprecate_kwarg("mask", "99.0", new_name="attention_mask")(modeling_llama.eager_attention_forward)
        monkeypatch.setattr(modeling_llama, "renamed", renamed, raising=False)
        assert evidence.optional_functions(on_meta(dict(models.resolve("llama-tiny").config))) == {}


class TestUnusedSettings:
    def test_what_is_asked_for_and_not_done_is_told(self) -> None:
        config = dict(models.resolve("llama-tiny").config)
        asked = {
            "architectures": ["LlamaForSequenceClassification"],
            "auto_map": {"AutoModelForCausalLM": "mine.Model"},
            "quantization_config": {"quant_method": "fp8"},
            "num_nextn_predict_layers": 1,
            "aux_loss_alpha": 0.1,
            "hidden_layers_extra": 0,
        }
        lines = [*unused_settings({**config, **asked}, on_meta(config))]
        assert [line.partition(",")[0] for line in lines] == [
            "its configuration names the class LlamaForSequenceClassification",
            "its configuration's own code (auto_map) is not run",
            "its configuration's quantization_config (fp8) is not applied: weights are float32",
            "its configuration has settings that LlamaForCausalLM does not use: aux_loss_alpha",
        ]
        assert "num_nextn_predict_layers" in lines[-1]
        assert "hidden_layers_extra" not in lines[-1]

    def test_how_text_is_generated_is_no_work(self) -> None:
        config = dict(models.resolve("llama-tiny").config)
        older = {"temperature": 0.6, "cache_implementation": "hybrid", "task_specific_params": {"a": {"max_length": 9}}}
        assert [*unused_settings({**config, **older}, on_meta(config))] == []
        assert "use_mtp" in next(unused_settings({**config, **older, "use_mtp": True}, on_meta(config)))

    @pytest.mark.parametrize("name", [path.stem for path in Path(models.__file__).parent.glob("configs/*-tiny.json")])
    def test_a_built_in_model_uses_all_of_its_own(self, name: str) -> None:
        config = dict(models.resolve(name).config)
        assert [*unused_settings(config, on_meta(config))] == []


def test_auto_leaves_attentions_kernels_as_the_environment_has_them() -> None:
    found_settings.cache_clear()
    try:
        torch.backends.cuda.enable_flash_sdp(False)
        choose_sdpa(TrainSpec(model="llama-tiny", sdpa_backend="auto"))
        assert "flash" not in device.sdpa_kernels()
        choose_sdpa(TrainSpec(model="llama-tiny", sdpa_backend="math"))
        assert device.sdpa_kernels() == ["math"]
        choose_sdpa(TrainSpec(model="llama-tiny", sdpa_backend="auto"))
        assert device.sdpa_kernels() == ["efficient", "math", "cudnn"]
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        found_settings.cache_clear()


def test_a_precision_that_was_set_by_the_new_names_is_told() -> None:
    was = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert device.matmul_precision() == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = was


def test_modes_of_the_interpreter_are_told_where_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tracemalloc" not in environment._python_settings()
    monkeypatch.setattr("tracemalloc.is_tracing", lambda: True)
    assert environment._python_settings()["tracemalloc"] is True
    variables = {"PYTHONDEVMODE": "1", "PYTHONTRACEMALLOC": "5", "PYTHON_VERSION": "3.11", "PYTHONUNBUFFERED": "1"}
    assert environment._variables(variables) == {"PYTHONDEVMODE": "1", "PYTHONTRACEMALLOC": "5"}
    network = dict.fromkeys(("FI_PROVIDER", "UCX_TLS", "OPENBLAS_NUM_THREADS", "COVERAGE_PROCESS_START"), "x")
    assert environment._variables({**network, "HIP_VISIBLE_DEVICES": "0"}) == network


def test_a_file_that_is_not_as_it_was_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "site-packages"
    about = packages / "fast_thing-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: Fast_Thing\nVersion: 1.2\n")
    (about / "top_level.txt").write_text("fast_thing\n")
    (packages / "fast_thing.py").write_text("x = 1\n")
    (packages / "start.pth").write_text("# none\nimport sys\n")
    (about / "RECORD").write_text("fast_thing.py,sha256=another,6\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setitem(sys.modules, "fast_thing", SimpleNamespace(__file__=str(packages / "fast_thing.py")))
    broken = packages / "broken_off-1.0.dist-info"  # files, and no name
    broken.mkdir()
    (broken / "RECORD").write_text("broken_off.py,,\n")
    monkeypatch.setitem(sys.modules, "broken_off", ModuleType("broken_off"))
    imports.known.cache_clear()
    assert imports.loaded()["fast-thing"] == "1.2"
    assert "start.pth" not in imports.loaded()  # Python reads those of its own folders alone
    monkeypatch.setattr("site.getsitepackages", lambda: [str(packages)])
    assert "start.pth" in imports.loaded()
    assert "fast_thing.py" not in imports.patched_files()  # its size and date are RECORD's
    (packages / "fast_thing.py").write_text("x = 100\n")
    assert "fast_thing.py" not in imports.patched_files(), "what runs is what was looked at"
    imports.LOOKED_AT.clear()
    assert "fast_thing.py" in imports.patched_files()
    assert "fast_thing.py" in imports.patched_files()
    imports._PATCHED.clear()
    imports.known.cache_clear()


def test_a_collector_that_raises_takes_nothing_from_the_others() -> None:
    def broken() -> dict[str, Any]:
        raise AttributeError("no such thing")

    found = gathered({"a": lambda: {"x": 1}, "torch_compile": broken, "b": lambda: {"y": 2}})
    assert found == {"x": 1, "y": 2, "uncollected": {"torch_compile": "AttributeError: no such thing"}}
    lines = list(contradictions(TrainSpec(model="llama-tiny"), Evidence.read(found), frozenset()))
    why = (
        "no evidence of torch_compile was recorded (collecting it failed: torch_compile: AttributeError: no such thing)"
    )
    assert why in lines


def test_compiled_is_what_dynamo_wrapped() -> None:
    module = torch.nn.Linear(2, 2)
    module.compile()
    assert seen_compilation(module).torch_compile_scope == "layers"
    module.compile(mode="reduce-overhead")
    assert (seen_compilation(module).torch_compile_mode, seen_compilation(module).cuda_graphs) == ("reduce-overhead", 0)
    # As torch leaves it under TORCHDYNAMO_DISABLE=1.
    module._compiled_call_impl = module._call_impl
    assert seen_compilation(module).torch_compile is False
    assert seen_compilation(module).torch_compile_mode == ""
