"""What is made of a page's text and of a docstring on the way to the site. Pure.

An index page's list is on GitHub a list of links, and in the site the tree of its pages.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_LISTED = re.compile(r"(?m)^- \[[^\]]*\]\(([^)#:]+)\.md\)")


def contents(docname: str, text: str) -> str:
    """The pages that ``text`` lists, as Sphinx has to be told of them; nothing for a page that is no index."""
    pages = _LISTED.findall(text) if PurePosixPath(docname).name == "index" else []
    inside = [each for each in pages if not each.startswith("..")]
    return "\n".join(["", "```{toctree}", ":hidden:", "", *inside, "```", ""]) if inside else ""


def as_fields(lines: list[str]) -> list[str]:
    """A docstring whose section ``Raises:`` is what Sphinx has for it; all others are plain text already."""
    found: list[str] = []
    of_raises = False
    for line in lines:
        if line.strip() == "Raises:":
            of_raises = True
            continue
        if not line.startswith(" ") and line.strip():
            of_raises = False
        named = re.fullmatch(r" {4}(\w[\w.]*): (.*)", line) if of_raises else None
        found.append(f":raises {named[1]}: {named[2]}" if named else line)
    return found
