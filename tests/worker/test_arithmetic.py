"""What is counted as arithmetic: every product of matrices that a step runs, by whichever operator, and none twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from pytest_llmperf.launch.prediction import FlopCounts
from pytest_llmperf.settings import models
from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.estimate.arithmetic import Arithmetic, as_on_gpu, model_flops
from tests.worker.ligered import STEPS

pytestmark = pytest.mark.torchrun

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BATCH, HEADS, TOKENS, SIZE = 2, 4, 48, 16
#: Attention's two products over the full square.
SQUARE = 2 * 2 * BATCH * HEADS * TOKENS * TOKENS * SIZE


@pytest.fixture(autouse=True)
def _without_content() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def counted(step: Callable[[], Any]) -> dict[str, int]:
    with Arithmetic() as arithmetic:
        step()
    return dict(arithmetic.by_operator)


def by_torch(step: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=dtype.is_floating_point)


FORMULA = ["llama-tiny", "llama-3.2-1b", "opt-tiny", "opt-1.3b", "gpt2-tiny", "mistral-tiny", "qwen3-tiny"]


@pytest.mark.parametrize("name", FORMULA)
def test_a_plain_decoder_has_the_formulas_flops_to_the_last_one(name: str) -> None:
    model = models.resolve(name)
    assert model.geometry is not None
    for sequence_length in (33, 512) if name.endswith("tiny") else (1024,):
        assert model_flops(model.config, sequence_length) == model.geometry.flops_per_token(sequence_length)


_LLAMA = {"intermediate_size": 176, "num_key_value_heads": 2}
_GEMMA = {**_LLAMA, "head_dim": 32}
OTHERS: dict[str, dict[str, int]] = {
    **dict.fromkeys(("phi3", "olmo2", "qwen2", "smollm3"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2"), _GEMMA),
    "gpt_neox": {"intermediate_size": 176},
}


@pytest.mark.parametrize("family", OTHERS)
def test_each_family_of_the_formula_has_its_flops(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 250}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SPECIAL, **sizes, **OTHERS[family]}))
    model = models.resolve(str(tmp_path))
    assert model.flops_per_token(64) == model_flops(model.config, 64)


def test_a_process_that_is_asked_counts_the_same() -> None:
    model = models.resolve("mixtral-tiny")
    counts = FlopCounts()
    try:
        assert counts.answer(counts.ask(model, 64)) == model_flops(model.config, 64)
    finally:
        counts.close()


def test_gemma_3_has_those_of_a_gated_decoder_whatever_its_windows() -> None:
    config = models.resolve("gemma-3-tiny").config
    hidden, attention, key_value, gated, vocabulary = 64, 4 * 16, 1 * 16, 128, 512
    layer = 6 * hidden * (2 * attention + 2 * key_value + 3 * gated) + 12 * 256 * attention
    assert model_flops(config, 256) == 2 * layer + 6 * vocabulary * hidden


def test_a_mixture_has_those_of_the_experts_that_a_token_is_sent_to() -> None:
    config = models.resolve("mixtral-tiny").config
    hidden, key_value, expert, experts, chosen, vocabulary = 64, 2 * 16, 96, 4, 2, 512
    layer = 6 * hidden * (2 * hidden + 2 * key_value + chosen * 3 * expert + experts) + 12 * 256 * hidden
    assert model_flops(config, 256) == 2 * layer + 6 * vocabulary * hidden


def a_step(name: str, attention: str) -> Callable[[], Any]:
    model = AutoModelForCausalLM.from_config(
        hf_config_of(models.resolve(name).config), dtype=torch.bfloat16, attn_implementation=attention
    ).train()
    ids = torch.zeros(1, 64, dtype=torch.long)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    return step


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "gemma-3-tiny", "mixtral-tiny"])
def test_eager_and_fused_attention_are_the_same_arithmetic(name: str) -> None:
    per_token = model_flops(models.resolve(name).config, 64)
    for attention in ("eager", "sdpa"):
        assert sum(counted(a_step(name, attention)).values()) == per_token * 64


def test_a_layer_that_is_computed_again_is_counted_again_in_its_step() -> None:
    layer, product = torch.nn.Sequential(torch.nn.Linear(SIZE, 32), torch.nn.Linear(32, SIZE)), 2 * TOKENS * SIZE * 32

    def step(run: Callable[[torch.Tensor], Any]) -> None:
        run(tensor(TOKENS, SIZE, dtype=torch.float32)).sum().backward()

    again = partial(checkpoint, layer, use_reentrant=False)
    assert counted(partial(step, layer)) == {"aten::addmm": 2 * product, "aten::mm": 4 * product}
    # What leads to the first of the two alone is needed twice.
    assert counted(partial(step, again)) == {"aten::addmm": 3 * product, "aten::mm": 4 * product}


def attention_on_the_cpu() -> None:
    query, key, value = (tensor(BATCH, HEADS, TOKENS, SIZE) for _ in range(3))
    functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()


def experts() -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    functional.grouped_mm(tensor(TOKENS, SIZE), tensor(3, SIZE, 32), offs=offsets).square().sum().backward()


def columns_in_groups() -> None:
    functional.grouped_mm(tensor(3, 32, SIZE), tensor(SIZE, TOKENS), offs=torch.zeros(3, dtype=torch.int32))


def experts_one_by_one() -> None:
    import transformers.integrations.moe  # noqa: F401, PLC0415 - it registers the operator

    product = torch.ops.transformers.grouped_mm_fallback
    product(tensor(TOKENS, SIZE), tensor(3, SIZE, 32), torch.zeros(3, dtype=torch.int32)).sum().backward()


def products_with_vectors() -> None:
    (tensor(TOKENS, SIZE) @ tensor(SIZE)).sum().backward()


GROUPED = 2 * TOKENS * SIZE * 32
_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"
_FALLBACK = "transformers::grouped_mm_fallback"

MISSED: dict[str, tuple[Callable[[], None], dict[str, int]]] = {
    "attention on the CPU": (attention_on_the_cpu, {_CPU: SQUARE, f"{_CPU}_backward": 2 * SQUARE}),
    "grouped products": (experts, {"aten::_grouped_mm": 3 * GROUPED}),
    "grouped columns": (columns_in_groups, {"aten::_grouped_mm": GROUPED}),
    "grouped products one by one": (experts_one_by_one, {_FALLBACK: GROUPED, f"{_FALLBACK}_backward": 2 * GROUPED}),
    "products with vectors": (products_with_vectors, {"aten::mv": 2 * 2 * TOKENS * SIZE}),
}


@pytest.mark.parametrize("what", MISSED)
def test_what_torchs_own_counter_misses_is_counted(what: str) -> None:
    step, expected = MISSED[what]
    # That of torch 2.15 counts attention on the CPU too, with the product that its backward does again.
    assert by_torch(step) in (0, 3.5 * SQUARE if what == "attention on the CPU" else 0)
    assert counted(step) == expected


@pytest.mark.parametrize("name", ["aten::_scaled_mm", "aten::mm", "aten::addmm"])
def test_a_product_of_two_matrices_is_counted_in_any_precision(name: str) -> None:
    def step() -> None:
        one, other = torch.empty(TOKENS, SIZE), torch.empty(32, SIZE).t()
        if name == "aten::_scaled_mm":
            one, other = one.to(torch.float8_e4m3fn), other.to(torch.float8_e4m3fn)
            torch._scaled_mm(one, other, torch.ones(()), torch.ones(()), out_dtype=torch.bfloat16)
        elif name == "aten::mm":
            torch.mm(one, other)
        else:
            torch.addmm(torch.empty(32), one, other)

    assert counted(step) == {name: 2 * TOKENS * SIZE * 32}


# As flash-attn registers them, but for what does not decide their arithmetic.
FLASH = {
    "_flash_attn_forward": "Tensor q, Tensor k, Tensor v, float dropout_p, bool causal",
    "_flash_attn_backward": "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor? dq",
    "_flash_attn_varlen_forward": "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k",
}


@pytest.mark.parametrize("namespace", ["flash_attn", "flash_attn_3", "_flash_attn2_588b404"])
def test_flash_attns_operators_are_counted_by_any_of_their_names(namespace: str) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    for name, arguments in FLASH.items():
        library.define(f"{name}({arguments}) -> Tensor")
        library.impl(name, lambda *args: torch.empty_like(args[0]), "Meta")
    operators = getattr(torch.ops, namespace)
    query, key, value = (tensor(BATCH, TOKENS, HEADS, SIZE).detach() for _ in range(3))

    def step() -> None:
        out = operators._flash_attn_forward(query, key, value, 0.0, True)
        operators._flash_attn_backward(out, query, key, value, out, None)
        flat = (each.flatten(0, 1) for each in (query, key, value))
        ends = torch.zeros(BATCH + 1, dtype=torch.int32)
        operators._flash_attn_varlen_forward(*flat, ends, ends, TOKENS, TOKENS)

    try:
        assert by_torch(step) == 0
        assert counted(step) == {
            f"{namespace}::_flash_attn_forward": SQUARE,
            f"{namespace}::_flash_attn_backward": 2 * SQUARE,
            f"{namespace}::_flash_attn_varlen_forward": SQUARE,
        }
    finally:
        library._destroy()


def test_sequences_that_follow_each_other_attend_to_themselves_alone() -> None:
    ends = [0, 5, TOKENS]
    with unset_fake_temporarily():  # a fake one cannot say how long they are
        query = torch.zeros(TOKENS, HEADS, SIZE, device="meta")
        lengths = torch.tensor(ends, dtype=torch.int32)
        operator = torch.ops.aten._flash_attention_forward
        with Arithmetic() as arithmetic:
            operator(query, query, query, lengths, lengths, TOKENS, TOKENS, 0.0, True, False)
    pairs = sum((end - begin) ** 2 for begin, end in pairwise(ends))
    assert dict(arithmetic.by_operator) == {"aten::_flash_attention_forward": 2 * 2 * pairs * HEADS * SIZE}


def test_fused_attention_computes_its_scores_again_and_they_are_none_of_the_models() -> None:
    query, key, value = (torch.empty(BATCH, HEADS, TOKENS, SIZE, device="cuda") for _ in range(3))
    rest = (torch.zeros((), dtype=torch.long),) * 2
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    rows = torch.empty(BATCH, HEADS, TOKENS, device="cuda")

    def step() -> None:
        backward(query, query, key, value, query, rows, None, None, TOKENS, TOKENS, 0.0, True, *rest)

    assert by_torch(step) == SQUARE * 5 // 2
    assert counted(step) == {"aten::_scaled_dot_product_flash_attention_backward": 2 * SQUARE}


def test_flex_attention_is_counted_once_and_not_by_its_parts() -> None:
    query, key, value = (tensor(BATCH, HEADS, 128, SIZE, dtype=torch.float32) for _ in range(3))
    # No function of it says which blocks there are when none is left out.
    mask = flex._create_empty_block_mask(query, key).as_tuple()

    def step() -> None:
        flex.flex_attention_hop(query, key, value, lambda score, *_: score, mask, 1.0, {})[0].sum().backward()

    forward = 2 * 2 * BATCH * HEADS * 128 * 128 * SIZE
    assert counted(step) == {"flex_attention": forward, "flex_attention_backward": 2 * forward}


def test_convolutions_are_counted_by_group_and_direction() -> None:
    def step() -> None:
        functional.conv1d(tensor(BATCH, SIZE, TOKENS), tensor(SIZE, 1, 5), groups=SIZE).sum().backward()

    forward = 2 * BATCH * SIZE * (TOKENS - 4) * 5
    assert counted(step) == {"aten::convolution": forward, "aten::convolution_backward": 2 * forward}


@pytest.mark.parametrize("convolve", [functional.conv1d, functional.conv_transpose1d])
def test_convolutions_of_one_group_are_counted_as_torch_counts_them(convolve: Callable[..., torch.Tensor]) -> None:
    def step() -> None:
        convolve(tensor(BATCH, SIZE, TOKENS), tensor(SIZE, SIZE, 5)).sum().backward()

    counts = counted(step)
    assert sum(counts.values()) == by_torch(step)
    assert counts["aten::convolution_backward"] == 2 * counts["aten::convolution"]


def test_angles_of_positions_are_no_product_of_matrices() -> None:
    assert counted(lambda: tensor(1, SIZE, 1) @ tensor(1, 1, TOKENS)) == {}


def test_ligers_vocabulary_is_counted_as_a_whole_whatever_pieces_it_is_computed_in() -> None:
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction  # noqa: PLC0415

    hidden, weight = tensor(64, SIZE), tensor(512, SIZE)

    def step(hidden: torch.Tensor = hidden) -> None:
        LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, torch.zeros(64, dtype=torch.long))[0].backward()

    product = 2 * 64 * SIZE * 512
    real = LigerFusedLinearCrossEntropyFunction.forward
    with as_on_gpu(liger=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "item", lambda tensor: tensor.numel())
        assert counted(step) == {"LigerFusedLinearCrossEntropyFunction": 3 * product}
        assert counted(lambda: step(hidden.detach())) == {"LigerFusedLinearCrossEntropyFunction": 2 * product}
    assert LigerFusedLinearCrossEntropyFunction.forward is real


def test_ligers_experts_which_are_no_operators_are_counted() -> None:
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops import fused_moe  # noqa: PLC0415

    tokens, up, down = tensor(TOKENS, SIZE), tensor(4, 2 * 32, SIZE), tensor(4, SIZE, 32)
    chosen, weights = torch.zeros(TOKENS, 2, dtype=torch.int32), tensor(TOKENS, 2)

    def call(*args: Any) -> None:
        fused_moe.LigerFusedMoEFunction.forward(*args)

    class Context:
        needs_input_grad = (True, True, True, False, True)

    forward = 2 * TOKENS * 2 * 3 * 32 * SIZE
    real = fused_moe.LigerFusedMoEFunction.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_moe.LigerFusedMoEFunction, "forward", staticmethod(lambda *_: tokens @ tensor(SIZE, 3)))
        step = partial(call, Context, tokens, up, down, chosen, weights)
        assert counted(step) == {"LigerFusedMoEFunction": 3 * forward}
    assert fused_moe.LigerFusedMoEFunction.forward is real


def test_a_model_that_transformers_does_not_have_is_said_so() -> None:
    with pytest.raises(ValueError, match="no model type 'no-such-type'"):
        model_flops({"model_type": "no-such-type"}, 64)


@pytest.mark.wide
def test_a_whole_step_with_ligers_kernels_is_the_models_own_arithmetic(ligered: Mapping[str, list[Any]]) -> None:
    for name, fused in STEPS.items():
        assert ligered[name] == [model_flops(models.resolve(name).config, 64) * 64, fused]
