"""The table of contents that an index page's list is: on GitHub a list of links, in the site the tree of its pages."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_LISTED = re.compile(r"(?m)^- \[[^\]]*\]\(([^)#:]+)\.md\)")


def contents(docname: str, text: str) -> str:
    """The pages that ``text`` lists, as Sphinx has to be told of them; nothing for a page that is no index."""
    pages = _LISTED.findall(text) if PurePosixPath(docname).name == "index" else []
    inside = [each for each in pages if not each.startswith("..")]
    return "\n".join(["", "```{toctree}", ":hidden:", "", *inside, "```", ""]) if inside else ""
