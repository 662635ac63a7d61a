"""The fenced blocks of the documentation, and where each says that it comes from.

A block names its language; a comment on the line above it names its origin, where it shows what was printed::

    <!-- from: run -->                            the tests run its commands and compare what they print
    <!-- from: run torch -->                      the same, where torch is
    <!-- from: tutorial -->                       so they do, with torch: one block after the other in one folder
    <!-- from: tutorial fails -->                 the last of its commands ends with another code than 0
    <!-- from: tutorial NAME -->                  not a command: the file of that name in that folder
    <!-- from: measured 2026-11-21, one H200 -->  printed by a machine that CI does not have
    <!-- from: file PATH -->                      lines of a file of this repository
    <!-- from: drawing -->                        nothing printed it: a diagram, a formula

A table below ``docs/explanation/`` has such a comment too, or one of these::

    <!-- from: run COMMAND -->                    the tests run it and compare
    <!-- from: computed COMMAND -->               it prints it, and takes minutes
    <!-- from: data FILE -->                      rows and columns of that file of docs/data/tables/
    <!-- from: rule -->                           nothing was measured: what the code does, or a word means

A page shows a file of ``docs/data/tables/`` by a directive of Sphinx, ``csv-table``, which has such a comment as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]

#: Their lines are commands, or begin with ``$`` where they are.
SHELLS = ("bash", "console")

_FENCE = re.compile(r"(?m)^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2[ ]*$", re.DOTALL)
_TABLE = re.compile(r"(?m)^( *)\|.*\n *\|[ :|-]*--[ :|-]*\n(?: *\|.*\n?)*")
_SHOWN = re.compile(r"(?m)^```\{csv-table\}\n:file: (\S+)\n(?::.*\n)*```$")
_ORIGIN = re.compile(r"<!-- from: (\w+) ?(.*?) -->\n\s*\Z")


class Block(NamedTuple):
    """``line`` is that of its fence, the first being 1."""

    page: Path
    line: int
    language: str
    text: str
    origin: str
    detail: str

    @property
    def place(self) -> str:
        """For a message: where it stands."""
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def shows_output(self) -> bool:
        """Whether any of it was printed by something."""
        return self.language == "text" or (self.language == "console" and any(printed for _, printed in steps(self)))


def pages() -> list[Path]:
    """What people read: the site, README and CONTRIBUTING; not the changelog."""
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> Iterator[Block]:
    """Each fenced block of ``page``, but directives of Sphinx: these are made when the site is."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        language = match[3].strip()
        if language.startswith("{"):
            continue
        before = text[: match.start()]
        origin = _ORIGIN.search(before)
        inside = re.sub(rf"(?m)^{match[1]}", "", match[4])
        yield Block(
            page, before.count("\n") + 1, language, inside, origin[1] if origin else "", origin[2] if origin else ""
        )


def tables_of(page: Path) -> Iterator[Block]:
    """Each table of ``page``, without its indent; its language is ``table``."""
    text = page.read_text(encoding="utf-8")
    for match in _TABLE.finditer(text):
        before = text[: match.start()]
        origin = _ORIGIN.search(before)
        inside = re.sub(rf"(?m)^{match[1]}", "", match[0])
        yield Block(
            page, before.count("\n") + 1, "table", inside, origin[1] if origin else "", origin[2] if origin else ""
        )


def data_tables_of(page: Path) -> Iterator[Block]:
    """Each file of ``docs/data/`` that ``page`` shows as a table; its text is the file's, its language ``csv``."""
    text = page.read_text(encoding="utf-8")
    for match in _SHOWN.finditer(text):
        before = text[: match.start()]
        origin = _ORIGIN.search(before)
        rows = (page.parent / match[1]).read_text(encoding="utf-8")
        yield Block(page, before.count("\n") + 1, "csv", rows, origin[1] if origin else "", origin[2] if origin else "")


def steps(block: Block) -> list[tuple[str, str]]:
    """Each command of a shell's block, with what it prints; a line that ends with a backslash goes on."""
    text = block.text.replace("\\\n", " ")
    if block.language == "bash":
        return [(line.strip(), "") for line in text.splitlines() if line.strip()]
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:].strip(), ""))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return [(command, printed.strip("\n")) for command, printed in found]
