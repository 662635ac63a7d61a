"""Whether a launch may count: arithmetic, evidence, neighbours."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.stats import Experience
from pytest_llmperf.judge.validity import Circumstances, circumstances, troubles, unusable
from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.optimizer import OPTIMIZERS, optimizer_class
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.evidence import evidence_of
from tests.fakes import Fake, launch_of
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4, gpus=2)
LIGER = replace(SPEC, liger=True)
BF16 = replace(SPEC, mixed_precision="no")
APART = replace(SPEC, data="text", rows="packed_apart")
MIXTURE = TrainSpec(model="mixtral-tiny", sequence_length=64, experts="grouped_mm")
KERNELS = Path(__file__).parents[3] / "perf_tests" / "kernels" / "rmsnorm"
HUB = replace(SPEC, hub_kernels={"LlamaRMSNorm": f"{KERNELS}@0a1b2c3:LlamaRMSNorm"})
FP32 = replace(SPEC, model_precision="fp32", mixed_precision="no")
_SEEN = evidence_of(HUB)["hub_kernels"]["LlamaRMSNorm"]
_ASKED_HUB = "asked for LlamaRMSNorm by the hub kernel rmsnorm@0a1b2c3:LlamaRMSNorm"
NO_LIGER: dict[str, Any] = {"liger_modules": 0, "liger_functions": []}
NOTE = "There are currently no Liger kernels supported for model type: opt."


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        LIGER,
        BF16,
        FP32,
        replace(FP32, tf32=True),
        replace(SPEC, torch_compile=True, gradient_checkpointing=True),
        replace(SPEC, optimizer="adamw_torch_fused"),
        replace(SPEC, gradient_accumulation_steps=3, micro_batch_size=5),
        replace(SPEC, gradient_checkpointing=True, checkpointing_policy="selective"),
        replace(SPEC, torch_compile=True, torch_compile_scope="layers", torch_compile_mode="reduce-overhead"),
        replace(SPEC, fp8="rowwise"),
        replace(LIGER, liger_kernels="rms_norm+swiglu+fused_linear_cross_entropy"),
        HUB,
        replace(BF16, parallelism="fsdp"),
        replace(BF16, gpus=4, parallelism="fsdp_hybrid"),
    ],
    ids=lambda spec: spec.id,
)
def test_a_launch_that_did_what_was_asked_has_none(spec: TrainSpec) -> None:
    assert troubles(spec, launch_of(spec)) == ()


@pytest.mark.parametrize(
    ("spec", "evidence", "line"),
    [
        (
            LIGER,
            {**NO_LIGER, "liger_note": NOTE},
            f"asked for liger, nothing was patched ({NOTE})",
        ),
        (LIGER, NO_LIGER, "asked for liger, nothing was patched"),
        (SPEC, {"liger_modules": 7}, "liger was not asked for, and 7 modules were patched"),
        (SPEC, {"attention": "eager"}, "asked for attention sdpa, the model ran eager"),
        (
            SPEC,
            {"parameter_dtypes": {"torch.float32": 9, "torch.bfloat16": 1}},
            "asked for weights of torch.bfloat16, the run had torch.bfloat16, torch.float32",
        ),
        (SPEC, {"autocast_dtype": None}, "asked for autocast to torch.bfloat16, the run had none"),
        (BF16, {"autocast_dtype": "torch.bfloat16"}, "asked for no autocast, the run had autocast to torch.bfloat16"),
        (FP32, {"tf32": True}, "asked for tf32 False, the run had True"),
        (SPEC, {"world_size": 1}, "asked for world size 2, the run had 1"),
        (SPEC, {"gradient_checkpointing": True}, "asked for gradient checkpointing False, the run had True"),
        (SPEC, {"torch_compile": True}, "asked for torch_compile False, the run had True"),
        (
            replace(SPEC, gradient_checkpointing=True, checkpointing_policy="selective"),
            {"checkpointing_policy": "full"},
            "asked for recomputation selective, the run had full",
        ),
        (
            replace(SPEC, torch_compile=True, torch_compile_mode="max-autotune"),
            {"torch_compile_mode": "default"},
            "asked for torch_compile's mode max-autotune, the run had default",
        ),
        (
            replace(SPEC, torch_compile=True, torch_compile_mode="reduce-overhead"),
            {"cuda_graphs": 0, "device_type": "cuda"},
            "asked for torch_compile_mode='reduce-overhead', no CUDA graph was captured",
        ),
        (
            replace(SPEC, attention="flash_attention_3"),
            {"attention_kernel": "flash_attn._flash_attn_forward.default"},
            "asked for attention flash_attention_3, the operators that ran were flash_attn._flash_attn_forward.default",
        ),
        (
            replace(SPEC, torch_compile=True, torch_compile_scope="layers"),
            {"torch_compile_scope": "model"},
            "asked for torch_compile's scope layers, the run had model",
        ),
        (
            replace(SPEC, torch_compile=True),
            {"torch_compile_scope": "layers"},
            "asked for torch_compile's scope model, the run had layers",
        ),
        (
            replace(SPEC, torch_compile=True),
            {"torch_compile_mode": "max-autotune"},
            "asked for torch_compile's mode default, the run had max-autotune",
        ),
        (
            replace(SPEC, gradient_checkpointing=True),
            {"checkpointing_policy": "selective"},
            "asked for recomputation full, the run had selective",
        ),
        (replace(SPEC, fp8="rowwise"), {"fp8_modules": 0}, "asked for fp8, no linear layer was converted"),
        (
            replace(SPEC, fp8="rowwise"),
            {"fp8_modules": 1, "linear_modules": 112},
            "asked for fp8, 112 linear layers were left as they were and 1 converted",
        ),
        (
            replace(SPEC, fp8="rowwise"),
            {"fp8_recipe": "tensorwise"},
            "asked for fp8's recipe rowwise, the run had tensorwise",
        ),
        (
            replace(BF16, parallelism="fsdp", fp8="tensorwise_all_gather"),
            {"fp8_gathered": 0},
            "asked for weights gathered in fp8: 112, the run had 0",
        ),
        (SPEC, {"liger_functions": ["rope"]}, "liger was not asked for, and 1 modules were patched"),
        (SPEC, {"fp8_modules": 112}, "fp8 was not asked for, and 112 modules had it"),
        (
            replace(LIGER, liger_kernels="rms_norm"),
            {},
            "asked for the Liger kernels rms_norm, the run had rms_norm+swiglu+fused_linear_cross_entropy",
        ),
        (replace(BF16, parallelism="fsdp"), {"parallelism": "ddp"}, "asked for parallelism fsdp, the run had ddp"),
        (
            replace(SPEC, sdpa_backend="flash"),
            {"attention_kernel": "aten._scaled_dot_product_cudnn_attention.default"},
            "asked for sdpa's flash kernel, the run had aten._scaled_dot_product_cudnn_attention.default",
        ),
        (APART, {"documents": "mixed"}, "asked for rows packed_apart, and tokens saw those of other documents"),
        (
            replace(SPEC, offloading="activations"),
            {"offloaded_bytes": 0},
            "asked for offloading='activations', 0 bytes were moved",
        ),
        *(
            (HUB, {"hub_kernels": {"LlamaRMSNorm": _SEEN | seen}}, f"{_ASKED_HUB}, {line}")
            for seen, line in (
                ({"modules": 0, "left": 5}, "0 of its 5 modules ran that"),
                ({"modules": 4, "left": 1}, "4 of its 5 modules ran that"),
                ({"layer": "Other"}, "the run had rmsnorm:Other"),
                ({"kernel": "other"}, "the run had other:LlamaRMSNorm"),
                ({"revision": "0a1b2c4"}, "the folder's revision was 0a1b2c4"),
                ({"revision": "0a1b2c3d-dirty"}, "the folder's revision was 0a1b2c3d-dirty"),
            )
        ),
        (
            SPEC,
            {"hub_kernels": {"LlamaRMSNorm": _SEEN}},
            "hub_kernels did not ask for LlamaRMSNorm, and rmsnorm's LlamaRMSNorm ran in its place",
        ),
        (MIXTURE, {"experts": ""}, "asked for experts grouped_mm, the run had another implementation"),
        (
            MIXTURE,
            {"experts_kernel": "transformers.grouped_mm_fallback.default"},
            "asked for experts grouped_mm, the operators that ran were transformers.grouped_mm_fallback.default",
        ),
        (SPEC, {"optimizer": "SGD"}, "asked for optimizer (class, fused) ('AdamW', False), the run had ('SGD', False)"),
    ],
)
def test_a_contradiction_is_one_line(spec: TrainSpec, evidence: dict[str, Any], line: str) -> None:
    assert troubles(spec, launch_of(spec, Fake(evidence=evidence))) == (line,)


@pytest.mark.parametrize(
    ("spec", "name", "asked"),
    [
        (replace(SPEC, torch_compile=True), "torch_compile_mode", {"torch_compile_mode": "max-autotune"}),
        (replace(SPEC, torch_compile=True), "torch_compile_scope", {"torch_compile_scope": "layers"}),
        (replace(SPEC, gradient_checkpointing=True), "checkpointing_policy", {"checkpointing_policy": "selective"}),
    ],
    ids=["mode", "scope", "policy"],
)
def test_a_record_from_before_a_setting_did_what_is_its_default_now(
    spec: TrainSpec, name: str, asked: dict[str, Any]
) -> None:
    def old(spec: TrainSpec) -> Launch:
        record = launch_of(spec)
        return replace(record, evidence={key: value for key, value in record.evidence.items() if key != name})

    assert troubles(spec, old(spec)) == ()
    other = replace(spec, **asked)
    (line,) = troubles(other, old(other))
    assert line.endswith(f" {asked[name]}, the run had {getattr(spec, name)}")


def test_fp8_in_every_linear_layer_leaves_none() -> None:
    spec = replace(SPEC, fp8="rowwise")
    assert troubles(spec, launch_of(spec, Fake(evidence={"fp8_modules": 112, "linear_modules": 112}))) == ()


@pytest.mark.parametrize("kernels", ["rope", "cross_entropy", "rope+rms_norm"])
def test_liger_kernels_that_replace_functions_are_seen(kernels: str) -> None:
    spec = replace(LIGER, liger_kernels=kernels)
    functions = [name for name in ("rope", "cross_entropy") if name in kernels]
    forwards = ["LigerRMSNorm.forward"] if "rms_norm" in kernels else []
    ran = {"liger_modules": len(forwards), "liger_forwards": forwards, "liger_functions": functions}
    assert troubles(spec, launch_of(spec, Fake(evidence=ran))) == ()
    lost = ran | {"liger_functions": []}
    assert len(troubles(spec, launch_of(spec, Fake(evidence=lost)))) == 1


@pytest.mark.parametrize("name", ["lce_forward", "causal_forward"])
def test_ligers_loss_is_seen_by_either_name_of_its_forward_pass(name: str) -> None:
    spec = replace(LIGER, liger_kernels="fused_linear_cross_entropy")
    ran = {"liger_modules": 1, "liger_forwards": [name], "liger_functions": []}
    assert troubles(spec, launch_of(spec, Fake(evidence=ran))) == ()


class TestOptimizers:
    @staticmethod
    def lines(name: str, **evidence: Any) -> tuple[str, ...]:
        spec = replace(SPEC, optimizer=name)
        return troubles(spec, launch_of(spec, Fake(evidence=evidence)))

    @pytest.mark.parametrize(
        ("name", "seen"),
        [
            ("paged_adamw_8bit", {"optimizer": "AdamW", "optimizer_bits": "8bit", "optimizer_paged": True}),
            ("adamw_bnb_8bit", {"optimizer": "AdamW8bit"}),
            ("adamw_torch_4bit", {"optimizer": "AdamW4bit", "optimizer_bits": ""}),
            ("ademamix", {"optimizer": "AdEMAMix", "optimizer_bits": "32bit"}),
            ("lion_32bit", {"optimizer": "Lion", "optimizer_bits": "32bit"}),
            ("rmsprop_bnb", {"optimizer": "RMSprop", "optimizer_bits": "32bit"}),
            ("grokadamw", {"optimizer": "GrokAdamW", "optimizer_bits": ""}),
            ("schedule_free_sgd", {"optimizer": "SGDScheduleFree", "optimizer_bits": ""}),
            ("stable_adamw", {"optimizer": "StableAdamW", "optimizer_bits": ""}),
            ("adamw_8bit", {"optimizer": "AdamW"}),  # of an old record, which has no bits
        ],
    )
    def test_the_one_that_was_asked_for(self, name: str, seen: dict[str, Any]) -> None:
        assert self.lines(name, **seen) == ()

    @pytest.mark.parametrize(
        ("name", "seen", "said"),
        [
            ("paged_adamw_8bit", {"optimizer": "SGD"}, "the run had SGD"),
            ("schedule_free_adamw", {"optimizer": "AdamW"}, "the run had AdamW"),
            ("ademamix", {"optimizer": "AdamW"}, "the run had AdamW"),
            ("adamw_8bit", {"optimizer": "AdamW", "optimizer_bits": ""}, "the run had AdamW without 8bit states"),
            ("lion_8bit", {"optimizer": "Lion", "optimizer_bits": "32bit"}, "the run had Lion without 8bit states"),
            ("rmsprop_bnb", {"optimizer": "RMSprop", "optimizer_bits": ""}, "the run had RMSprop without 32bit states"),
            (
                "paged_lion_8bit",
                {"optimizer": "Lion", "optimizer_bits": "8bit", "optimizer_paged": False},
                "the run had Lion without paging",
            ),
        ],
    )
    def test_another_one(self, name: str, seen: dict[str, Any], said: str) -> None:
        assert self.lines(name, **seen) == (f"asked for optimizer {name}, {said}",)

    @pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "sgd" not in name])
    def test_plain_sgd_is_none_of_the_others(self, name: str) -> None:
        parts = optimizer_class(name)
        assert parts
        assert not all(part in "sgd" for part in parts)


class TestAttentionKernels:
    @staticmethod
    def lines(device_type: str, kernel: str) -> tuple[str, ...]:
        seen = {"device_type": device_type, "attention_kernel": kernel}
        return troubles(SPEC, launch_of(SPEC, Fake(evidence=seen)))

    @pytest.mark.parametrize("kernel", ["", "aten._scaled_dot_product_attention_math.default"])
    def test_sdpas_fallback_is_trouble_on_a_gpu_alone(self, kernel: str, golden: Golden) -> None:
        (line,) = self.lines("cuda", kernel)
        golden(line)
        assert "can_use_flash_attention" in line
        assert self.lines("cpu", kernel) == ()

    @pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
    def test_fused_ones_are_what_was_asked_for(self, kind: str) -> None:
        assert self.lines("cuda", f"aten._scaled_dot_product_{kind}_attention.default") == ()


def test_ranks_that_disagree_are_named(golden: Golden) -> None:
    others = {"liger_modules": {"1": 0}, "attention": {"1": "eager"}}
    golden(troubles(LIGER, launch_of(LIGER, Fake(evidence={"liger_modules": 6, "other_ranks": others}))))


#: By key of the evidence, a spec that asks for what it tells of.
ASKED = {
    "liger_modules": LIGER,
    "attention": replace(SPEC, attention="eager"),
    "parameter_dtypes": FP32,
    "autocast_dtype": BF16,
    "tf32": replace(FP32, tf32=True),
    "world_size": SPEC,
    "gradient_checkpointing": replace(SPEC, gradient_checkpointing=True),
    "torch_compile": replace(SPEC, torch_compile=True),
    "optimizer": replace(SPEC, optimizer="adamw_torch_fused"),
}


def without(launch: Launch, *keys: str) -> Launch:
    return replace(launch, evidence={name: value for name, value in launch.evidence.items() if name not in keys})


@pytest.mark.parametrize("key", ASKED)
@pytest.mark.parametrize("inactive", [frozenset[str](), frozenset({"liger", "attention", "optimizer"})])
def test_what_is_asked_for_has_to_be_claimed(key: str, inactive: frozenset[str], golden: Golden) -> None:
    spec = ASKED[key]
    golden(troubles(spec, without(launch_of(spec), key), inactive))


def test_what_nobody_asked_for_need_not_be_claimed() -> None:
    plain = replace(SPEC, gpus=1)
    launch = launch_of(plain)
    for key in launch.evidence:
        assert troubles(plain, without(launch, key)) == ()
    assert troubles(plain, without(launch, *launch.evidence)) == ()


def test_what_could_not_be_collected_is_no_silence(golden: Golden) -> None:
    plain = replace(SPEC, gpus=1)
    broken = replace(launch_of(plain), evidence={"uncollected": {"attention": "AttributeError: no such thing"}})
    golden(troubles(plain, broken))


def test_evidence_of_another_type_is_not_claimed() -> None:
    launch = replace(launch_of(SPEC), evidence={"liger_modules": "many", "world_size": 2, "parameter_dtypes": []})
    assert troubles(SPEC, launch) == ()
    assert launch.seen.liger.liger_modules is None


class TestDeclaredInactive:
    INACTIVE = frozenset({"liger"})

    def test_nothing_patched_is_as_declared(self) -> None:
        assert troubles(LIGER, launch_of(LIGER, Fake(evidence=NO_LIGER)), self.INACTIVE) == ()

    def test_being_active_contradicts_it(self, golden: Golden) -> None:
        golden(troubles(LIGER, launch_of(LIGER), self.INACTIVE))

    def test_where_it_is_not_asked_for_it_means_nothing(self, golden: Golden) -> None:
        assert troubles(SPEC, launch_of(SPEC), self.INACTIVE) == ()
        patched = launch_of(SPEC, Fake(evidence={"liger_modules": 3}))
        golden(troubles(SPEC, patched, self.INACTIVE))

    def test_it_excuses_nothing_else(self, golden: Golden) -> None:
        launch = launch_of(LIGER, Fake(evidence={**NO_LIGER, "attention": "eager"}))
        golden(troubles(LIGER, launch, self.INACTIVE))

    def test_an_unknown_setting_names_the_nearest(self, golden: Golden) -> None:
        golden(troubles(SPEC, launch_of(SPEC), frozenset({"lieger"})))


class TestArithmetic:
    def test_tokens_that_do_not_add_up(self, golden: Golden) -> None:
        other = replace(SPEC, micro_batch_size=2)
        lines = troubles(other, replace(launch_of(SPEC), digest=other.digest))
        golden(lines)

    def test_a_record_of_other_settings(self, golden: Golden) -> None:
        lines = troubles(SPEC, replace(launch_of(SPEC), digest="0" * 16))
        golden(lines)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -0.1, 1e-320, 1e308])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_step_time_of_any_rank(self, bad: float, rank: int, golden: Golden) -> None:
        launch = launch_of(SPEC)
        ranks = list(launch.ranks)
        ranks[rank] = replace(ranks[rank], step_seconds=(*ranks[rank].step_seconds[:-1], bad))
        golden(troubles(SPEC, replace(launch, ranks=tuple(ranks))))

    @pytest.mark.parametrize("wait", [math.nan, math.inf, -1.0])
    def test_a_wait_that_is_no_time(self, wait: float, golden: Golden) -> None:
        run = launch_of(SPEC)
        waits = (0.0,) * (len(run.step_seconds) - 1)
        run = replace(run, ranks=(replace(run.ranks[0], waiting_seconds=(*waits, wait)), *run.ranks[1:]))
        golden.lines(unusable(run), "what was waited")

    @pytest.mark.parametrize("name", ["peak_reserved_bytes", "peak_allocated_bytes"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -1])
    def test_a_memory_peak_of_any_rank(self, name: str, bad: Any, golden: Golden) -> None:
        launch = launch_of(SPEC)
        ranks = (launch.ranks[0], replace(launch.ranks[1], **{name: bad}))
        golden(troubles(SPEC, replace(launch, ranks=ranks)))

    def test_no_memory_at_all(self, golden: Golden) -> None:
        golden(troubles(SPEC, launch_of(SPEC, Fake(reserved_bytes=0))))

    def test_a_rank_that_saw_no_tokens(self, golden: Golden) -> None:
        launch = launch_of(SPEC)
        ranks = (replace(launch.ranks[0], tokens_per_step=128), replace(launch.ranks[1], tokens_per_step=0))
        golden(troubles(SPEC, replace(launch, ranks=ranks)))

    def test_losses(self, golden: Golden) -> None:
        launch = launch_of(SPEC)
        golden(troubles(SPEC, replace(launch, losses=())))
        golden(troubles(SPEC, replace(launch, losses=(1.0,))))
        lost = (*launch.losses[:3], *[math.nan] * 9)
        golden(troubles(SPEC, replace(launch, losses=lost)))

    def test_one_rank_needs_no_number(self, golden: Golden) -> None:
        single = replace(SPEC, gpus=1)
        golden(troubles(single, launch_of(single, Fake(step_seconds=math.nan))))


def test_another_process_on_the_hardware(golden: Golden) -> None:
    launch = launch_of(SPEC, Fake(foreign_processes=("GPU 0: pid 7 (python) holds 3.2 GiB",)))
    golden(circumstances(launch, 0.05).lines)


def test_clocks_lowered_by_heat_and_new_memory_errors(golden: Golden) -> None:
    hot = Health(
        clock_reasons={"hardware thermal slowdown": 0.4, "power limit": 1.0, "software thermal slowdown": 0.05},
        temperature_celsius=91,
        sm_clock_mhz=1200,
        memory_errors=2,
    )
    golden(circumstances(replace(launch_of(SPEC), health=hot), 0.05).lines)


def test_a_canary_far_below_the_usual_one(golden: Golden) -> None:
    def sung(rate: float) -> Launch:
        run = launch_of(SPEC)
        environment = replace(run.environment, driver="580")
        return replace(run, canary={"matmul_flops": rate}, environment=environment)

    noise = Policy.for_gpu().noise
    experience = Experience.of([[sung(790e12), sung(892e12), sung(850e12)]], noise)
    assert circumstances(sung(700e12), 0.05, experience).lines == ()
    golden(circumstances(sung(600e12), 0.05, experience).lines)
    # Two stored ones are no band, and a busy CPU is nobody's fault.
    assert circumstances(sung(600e12), 0.05, Experience.of([[sung(790e12), sung(892e12)]], noise)).lines == ()
    on_cpu = replace(launch_of(SPEC), canary={"matmul_flops": 1.0})
    assert circumstances(on_cpu, 0.05, experience).lines == ()
    assert circumstances(sung(math.nan), 0.05, experience).lines
    low_one_stored = Experience.of([[sung(400e12), sung(892e12), sung(850e12)]], noise)
    assert circumstances(sung(600e12), 0.05, low_one_stored).lines


def test_a_launch_that_drifts_by_more_than_half_of_its_tolerance(golden: Golden) -> None:
    run = launch_of(SPEC)
    times = tuple(0.1 * 1.01**step for step in range(SPEC.steps))
    drifting = replace(run, ranks=tuple(replace(rank, step_seconds=times) for rank in run.ranks))
    found = circumstances(drifting, 0.05)
    assert not found.lines
    golden(found.drift)
    assert circumstances(drifting, 0.5) == Circumstances()
