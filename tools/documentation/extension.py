"""What Sphinx does of this project's own: reference pages from the code, and contents from an index page's list.

An ``index.md`` lists the pages beside it as GitHub shows them; that list is the site's table of contents too. A page of
the reference has a directive in place of its text::

    ```{llmperf-reference} options
    ```
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tools.documentation.contents import as_fields, contents
from tools.documentation.reference import page


class Reference(SphinxDirective):
    """``llmperf-reference SUBJECT``."""

    required_arguments = 1

    def run(self) -> list[Any]:
        """The subject's text, as if it stood in the page; another one tomorrow, though the page's file be the same."""
        self.env.note_reread()
        found: list[Any] = self.parse_text_to_nodes(page(self.arguments[0]), allow_section_headings=True)
        return found


def _add_contents(_app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] += contents(docname, source[0])


def _add_fields(_app: Sphinx, _what: str, _name: str, _found: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = as_fields(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """For Sphinx."""
    app.add_directive("llmperf-reference", Reference)
    app.connect("source-read", _add_contents)
    app.connect("autodoc-process-docstring", _add_fields)
    return {"version": "1", "parallel_read_safe": True}
