"""Whatever leaves moves no cursor, turns no words round, pings nobody and tells no secret."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_llmperf.records.results_document import document_of
from pytest_llmperf.report.exports import ExportedRun, markdown_page
from pytest_llmperf.report.results_json import write_json
from pytest_llmperf.report.text import escaped
from tests.pages import made
from tests.runs import ladder_run

#: ESC, NUL, C1, marks that turn text round, a secret.
EVIL = "a\x1b[31m\x00\x9b1m\u202eb\u2066\u2069c https://u:hunter2@h @team"


def attacked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: value[name] if name == "verdict" else attacked(value[name]) for name in value}
    if isinstance(value, list):
        return [attacked(each) for each in value]
    return EVIL if isinstance(value, str) else value


@pytest.fixture(scope="module")
def run() -> Any:
    values = attacked(json.loads(json.dumps(ladder_run())))
    values["results"][0]["metrics"][EVIL] = {"value": 1.0, "unit": EVIL}
    return values | {"skipped": [{"id": EVIL, "reason": EVIL}], "unfinished": EVIL, "rerun": ["pytest", "{test}", EVIL]}


def _is_harmless(text: str) -> bool:
    return "hunter2" not in text and all(line.isprintable() for line in text.split("\n"))


def test_a_page_and_its_copied_commands_have_none(run: Any) -> None:
    page = made(run)
    assert "Run it again" in page
    assert _is_harmless(page.replace("\t", " "))


def test_an_export_has_none(run: Any) -> None:
    text = "\n".join(markdown_page(ExportedRun.of(document_of(run))))
    assert _is_harmless(text)
    assert "@team" not in text


def test_the_results_file_has_no_secret(run: Any, tmp_path: Any) -> None:
    write_json(tmp_path / "out.json", {**run, "x": {"variables": {"NCCL_TOKEN": "hunter2"}}})
    assert _is_harmless((tmp_path / "out.json").read_text())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("@team and @a/b", "@&#8203;team and @&#8203;a/b"),
        ("&#64;team &commat;team R&D", "\\&#64;team \\&commat;team R&D"),
        ("fixes #12 !34 a_b _c_", "fixes #&#8203;12 !&#8203;34 a_b \\_c\\_"),
        ("u@host.example", "u@host.example"),
    ],
)
def test_markdown_pings_nobody(text: str, told: str) -> None:
    assert escaped(text) == told
