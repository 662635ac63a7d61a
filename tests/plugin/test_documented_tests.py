"""The tests that the documentation shows are tests: each is collected, and each of its cases could run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugin.conftest import Project
from tools.documentation.blocks import Block, blocks_of, pages

SHOWN = [
    block for page in pages() for block in blocks_of(page) if block.language == "python" and "def test_" in block.text
]

#: What a page leaves out where it would say it once more.
LEFT_OUT = """
import dataclasses
from dataclasses import replace

import pytest

from pytest_llmperf import TrainSpec

WINNER = TrainSpec(model="llama-tiny", attention="sdpa")
"""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}


def a_model(folder: Path) -> None:
    (folder / "models" / "mine").mkdir(parents=True)
    (folder / "models" / "mine" / "config.json").write_text(json.dumps(LLAMA))


def test_there_are_some() -> None:
    assert len(SHOWN) > 5


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.place)
def test_each_of_its_cases_is_planned(project: Project, block: Block) -> None:
    a_model(project.path)
    project.pytester.makepyfile(test_mine=LEFT_OUT + block.text)
    result = project.run("--perf-dry-run", gpus="8")
    assert set(result.parseoutcomes()) == {"skipped"}, "\n".join(result.outlines)
    result.stdout.re_match_lines([r"\d+ case\(s\), \d+ launch\(es\).*"])
