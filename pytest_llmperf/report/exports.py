"""Tables that leave the terminal: as Markdown. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_llmperf.report.table import Column
from pytest_llmperf.report.text import one_line

#: How a table can be asked for.
FORMATS = ("text", "markdown")

# What Markdown would read as markup, or as the end of a cell. An underscore inside a word is none.
_MARKUP = re.compile(r"[\\`*<\[\]|~$]|&(?=#?\w+;)|(?<!\w)_|_(?!\w)")
# @team tells people, #12 and !12 link to what is discussed: neither a backslash nor &#64; hinders that.
_PINGING = re.compile(r"(?<!\w)@(?=\w)|(?<!&)[#!](?=\d)")
_NO_WIDTH = "&#8203;"


def markdown(columns: Sequence[Column]) -> list[str]:
    """The table in GitHub's Markdown, padded so that its source is a table too."""
    cells = [[escaped(text) for text in (column.heading, *column.cells)] for column in columns]
    widths = [max(3, *map(len, column)) for column in cells]
    rules = [
        "-" * (width - 1) + ":" if column.right else "-" * width for column, width in zip(columns, widths, strict=True)
    ]
    padded = [
        [text.rjust(width) if column.right else text.ljust(width) for text in texts]
        for column, width, texts in zip(columns, widths, cells, strict=True)
    ]
    heading, *rows = zip(*padded, strict=True)
    return ["| " + " | ".join(row) + " |" for row in (heading, rules, *rows)]


def escaped(text: str) -> str:
    """``text`` as Markdown that shows it, on one line."""
    line = _MARKUP.sub(r"\\\g<0>", " ".join(one_line(text).split()))
    return _PINGING.sub(rf"\g<0>{_NO_WIDTH}", line)
