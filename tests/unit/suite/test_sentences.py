"""The documentation's sentences: short enough to be read once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.documentation.blocks import REPOSITORY, pages

MOST_WORDS = 40
PAGES = pages()


def sentences(text: str) -> Iterator[str]:
    """Those of paragraphs, items, headings and cells; without blocks, comments and where links lead."""
    text = re.sub(r"(?ms)^( *)(`{3,}).*?^\1\2 *$|<!--.*?-->|^(?: {4}[^\n]*\n)+", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for part in re.split(r"\n\s*\n|\n(?= *(?:[-*#|]|\d+\.) ?)|\|", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(part.split()))


def words(sentence: str) -> int:
    return sum(1 for each in sentence.split() if re.search(r"\w", each))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_sentence_is_long(page: Path) -> None:
    assert [each for each in sentences(page.read_text(encoding="utf-8")) if words(each) > MOST_WORDS] == []


def test_an_item_and_a_cell_are_sentences_of_their_own() -> None:
    text = (
        "# A\n\nOne two. Three\nfour [five](six.md).\n- seven\n  eight\n| nine | ten |\n\n"
        "```text\nnone\n```\n\n    none\n\nEleven\n"
    )
    found = [each for each in sentences(text) if words(each)]
    assert found == ["# A", "One two.", "Three four [five].", "- seven eight", "nine", "ten", "Eleven"]
