"""The documentation is read in a day: few pages, few words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.documentation.blocks import REPOSITORY

#: Words of tables and printed blocks count, too; data files are no words.
MOST_PAGES, MOST_WORDS = 45, 40_000
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))


def test_pages_and_words_are_few() -> None:
    assert len(PAGES) <= MOST_PAGES
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_line_is_a_comment_of_the_sites_parser(page: Path) -> None:
    """A line that begins with ``%`` is left out of the site, and GitHub shows it."""
    assert re.findall(r"(?m)^\s*%.*$", page.read_text(encoding="utf-8")) == []
