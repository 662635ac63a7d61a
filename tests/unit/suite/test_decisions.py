"""Decisions: each has a number, ten lines at most, and is where its number is looked for."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tools.documentation.blocks import REPOSITORY

DECISIONS = REPOSITORY / "docs" / "decisions"
MOST_LINES = 10


def decisions(text: str) -> dict[int, str]:
    """What each decision of a page says, by its number."""
    parts = re.split(r"(?m)^## (\d+)\. .+$", text)
    return {int(number): said for number, said in zip(parts[1::2], parts[2::2], strict=True)}


PAGES = {path.name: decisions(path.read_text(encoding="utf-8")) for path in sorted(DECISIONS.glob("*.md"))}
NUMBERS = Counter(number for of_page in PAGES.values() for number in of_page)


def test_each_number_stands_once() -> None:
    assert [number for number, times in NUMBERS.items() if times != 1] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_decision_has_ten_lines_at_most(page: str) -> None:
    lines = {number: len(said.strip().splitlines()) for number, said in PAGES[page].items()}
    assert [number for number, many in lines.items() if many > MOST_LINES] == []


def test_the_index_lists_the_numbers_of_each_page() -> None:
    listed = re.findall(r"(?m)^- \[.*\]\((\w+\.md)\): ([\d, ]+)$", (DECISIONS / "index.md").read_text(encoding="utf-8"))
    assert {page: [int(each) for each in numbers.split(", ")] for page, numbers in listed} == {
        page: list(of_page) for page, of_page in PAGES.items() if of_page
    }


def _named() -> list[tuple[str, int]]:
    """Each decision that a file of the repository names, by that file."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    found = []
    for name in listed.splitlines():
        if Path(name).suffix in (".py", ".md", ".toml", ".ini", ".sbatch", ".yml") and (REPOSITORY / name).is_file():
            text = (REPOSITORY / name).read_text(encoding="utf-8")
            found += [(name, int(number)) for number in re.findall(r"\b[Dd]ecision\s+(\d+)\b", text)]
    return sorted(set(found))


def test_a_decision_that_is_named_is_there() -> None:
    named = _named()
    assert len(named) > 10
    assert [(name, number) for name, number in named if number not in NUMBERS] == []
