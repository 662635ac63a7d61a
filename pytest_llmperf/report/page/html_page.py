"""A page as HTML: text and pictures in, one file's text out that needs no network. Pure."""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from pytest_llmperf.report.page import charts
from pytest_llmperf.report.page.page_model import Page
from pytest_llmperf.report.text import leaving

#: Characters of a page; nearly all of them are a byte each, and five megabytes are the most that is promised.
MOST = 4_600_000
# Of what rows open to: a page that takes long to load is looked at by nobody.
_MOST_OPENED = 2_000_000
# More are not read at the top.
_MOST_AT_THE_TOP = 30


def html(page: Page) -> str:
    """The whole file; a chart of which no picture could be drawn is told by its table alone."""
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - only a page that is written pays for it
    from markupsafe import Markup  # noqa: PLC0415 - the same

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined, finalize=_finalize)
    # Of our own drawing, which escapes the text in it.
    pictures = {chart: Markup(picture) for chart, picture in charts.drawn(page.charts).items()}  # noqa: S704
    environment.filters |= {"legend": charts.legend, "picture": lambda chart: pictures.get(chart, "")}
    template: Any = environment.from_string(_file("page.html.jinja")).module
    script = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style, code = Markup(_file("page.css")), Markup(script)  # noqa: S704 - of ours
    shown = partial(template.page_of, page, style, code, f"sha256-{digest}", most=_MOST_AT_THE_TOP)
    more = {case.anchor: template.more_of(case, full=False) for case in page.cases}
    room = min(_MOST_OPENED, MOST - len(shown(more=more)))
    # All that a row opens to: of those first that somebody has to look at, which come first, as long as there is room.
    for case in page.cases:
        text = template.more_of(case, full=True) if room > 0 else ""
        if 0 < len(text) <= room:
            room -= len(text)
            more[case.anchor] = text
    return str(shown(more=more))


def _finalize(value: Any) -> Any:
    """Whatever the template shows, as it may leave: attributes and what is copied too; markup is of our own making."""
    return leaving(value) if type(value) is str else value


def _file(name: str) -> str:
    return (files(__package__) / "template" / name).read_text(encoding="utf-8")


# By the names they are imported by; the extra ``page`` has them.
_NEEDED = {"jinja2": "jinja2", "vl_convert": "vl-convert-python"}


def missing() -> str:
    """Name what a page takes and is not installed, and what installs it, in a line; imports nothing of it."""
    names = [name for module, name in _NEEDED.items() if find_spec(module) is None]
    if not names:
        return ""
    are = "is" if len(names) == 1 else "are"
    return f"a page takes {' and '.join(names)}, which {are} not installed; pip install 'pytest-llmperf[page]'"
