"""Silent changes in the real stack, by means that no code of ours knows of: a ``sitecustomize`` on the path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.exact import changes
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.registry import lost
from tests.worker.import_patch import after_import, in_the_rank
from tests.worker.launching import launched
from tests.worker.user import REPOSITORY

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

SPEC = TrainSpec(
    model="llama-tiny",
    micro_batch_size=2,
    sequence_length=32,
    steps=5,
    min_steps=5,
    warmup_steps=1,
    mixed_precision="no",
)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launched(SPEC, tmp_path_factory.mktemp("before") / "run")


LLAMA = "transformers.models.llama.modeling_llama"


def patched(folder: Path, module: str, patch: str) -> Launch:
    return launched(SPEC, folder / "run", variables=in_the_rank(folder, module, patch))


def test_more_steps_and_another_process_learn_the_same_to_the_last_digit(tmp_path: Path, before: Launch) -> None:
    longer = launched(replace(SPEC, steps=9, min_steps=9), tmp_path / "run")
    assert longer.losses[:5] == before.losses
    assert changes([longer], [before]) == ()


@pytest.mark.wide
def test_attention_that_lost_its_kernel_is_named(tmp_path: Path, before: Launch) -> None:
    patch = 'module.sdpa_attention_forward.__globals__["torch"].nn.functional.scaled_dot_product_attention = plain'
    plain = """
def plain(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, **_):
    import torch
    if enable_gqa:
        times = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.transpose(-1, -2) * (scale or query.size(-1) ** -0.5)
    future = torch.ones(query.size(-2), key.size(-2)).triu(1).bool()
    return scores.masked_fill(future, float("-inf")).softmax(-1).to(value.dtype) @ value
"""
    # As a user's environment would have it, on the path from the first import on; the others' are put into a fork.
    whole = after_import("transformers.integrations.sdpa_attention", patch)
    (tmp_path / "sitecustomize.py").write_text(whole + plain)
    path = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    after = launched(SPEC, tmp_path / "run", start="cold", variables=path)
    said = "\n".join(changes([after], [before]))
    assert "attention_kernel: aten._scaled_dot_product_flash_attention_for_cpu.default -> none" in said
    assert "sources sitecustomize: " in said
    assert [*lost(SPEC, [after.seen], [before.seen], frozenset())]


def test_dropout_that_was_left_on_is_named_and_moves_the_first_loss(tmp_path: Path, before: Launch) -> None:
    patch = (
        "init = module.LlamaAttention.__init__\n"
        "    def left_on(self, *args, **kwargs):\n"
        "        init(self, *args, **kwargs)\n"
        "        self.attention_dropout = 0.3\n"
        "    module.LlamaAttention.__init__ = left_on"
    )
    said = changes([patched(tmp_path, LLAMA, patch)], [before])
    assert "dropout LlamaAttention.attention_dropout: none -> 0.3 x2" in said
    assert any(line.startswith(f"numerics changed at step 1: {before.losses[0]:.6f} -> ") for line in said)


@pytest.fixture(scope="module")
def without_numerics(tmp_path_factory: pytest.TempPathFactory, before: Launch) -> list[str]:
    """What is said of two changes that leave every digit: in the registry of attention, and behind a decorator."""
    patch = (
        "sdpa = module.ALL_ATTENTION_FUNCTIONS['sdpa']\n"
        "    def another(*args, **kwargs):\n"
        "        return sdpa(*args, **kwargs)\n"
        "    module.ALL_ATTENTION_FUNCTIONS.register('sdpa', another)\n"
        "    import functools, gc\n"
        "    forward = module.LlamaMLP.forward\n"
        "    @functools.wraps(forward)\n"
        "    def twice(self, states):\n"
        "        forward(self, states)\n"
        "        return forward(self, states)\n"
        "    module.LlamaMLP.forward = twice\n"
        "    gc.set_threshold(1)"
    )
    after = patched(tmp_path_factory.mktemp("without numerics"), LLAMA, patch)
    return [*changes([after], [before])]


def test_a_function_that_the_registry_holds_instead_is_named(without_numerics: list[str]) -> None:
    was = "transformers.integrations.sdpa_attention.sdpa_attention_forward"
    assert f"attention_function: {was} -> sitecustomize.patch.<locals>.another" in without_numerics
    assert not any("numerics" in line for line in without_numerics)


def test_work_behind_a_well_written_decorator_is_named(without_numerics: list[str]) -> None:
    chain = f"sitecustomize > {LLAMA}"
    assert f"step LlamaMLP.forward: none -> {chain}" in without_numerics
    assert any(line.startswith("overhead gc_threshold: ") for line in without_numerics)
