"""A page as HTML: text and pictures in, one file's text out that needs no network. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from pytest_llmperf.report.page import charts
from pytest_llmperf.report.page.page_model import FOR_A_PERSON, Case, Chart, Page
from pytest_llmperf.report.text import leaving

#: Characters of a page; nearly all of them are a byte each, and five megabytes are the most that is promised.
MOST = 4_600_000
# Of what rows open to: a page that takes long to load is looked at by nobody.
_MOST_OPENED = 2_000_000
# More are not read at the top.
_MOST_AT_THE_TOP = 30


def html(page: Page, pictures: Mapping[Chart, str]) -> str:
    """The whole file; a chart without a picture is told by its table alone."""
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415 - only a page that is written pays for it
    from markupsafe import Markup  # noqa: PLC0415 - the same

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined, finalize=_finalize)
    # Of our own drawing, which escapes the text in it.
    marked = {chart: Markup(picture) for chart, picture in pictures.items()}  # noqa: S704
    environment.filters |= {"legend": charts.legend, "picture": lambda chart: marked.get(chart, "")}
    template: Any = environment.from_string(_file("page.html.jinja")).module
    script = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style, code = Markup(_file("page.css")), Markup(script)  # noqa: S704 - of ours
    shown = partial(template.page_of, page, style, code, f"sha256-{digest}", most=_MOST_AT_THE_TOP)
    short = {case.anchor: template.more_of(case, full=False) for case in page.cases}
    room = min(_MOST_OPENED, MOST - len(shown(more=short)))
    return str(shown(more={**short, **_opened(partial(template.more_of, full=True), page.cases, room)}))


def _finalize(value: Any) -> Any:
    """Whatever the template shows, as it may leave: attributes and what is copied too; markup is of our own making."""
    return leaving(value) if type(value) is str else value


def _file(name: str) -> str:
    return (files(__package__) / "template" / name).read_text(encoding="utf-8")


def _opened(more_of: Callable[[Case], Any], cases: Sequence[Case], room: int) -> dict[str, Any]:
    """All that a row opens to, by anchor: of those first that somebody has to look at, as long as there is room."""
    found = {}
    for case in sorted(cases, key=_urgency):
        if room <= 0:
            break
        text = more_of(case)
        if len(text) <= room:
            room -= len(text)
            found[case.anchor] = text
    return found


def _urgency(case: Case) -> int:
    return FOR_A_PERSON.index(case.verdict) if case.verdict in FOR_A_PERSON else len(FOR_A_PERSON)


# Whether what a page takes is installed, asked before anything is launched.


# By the names they are imported by; the extra ``page`` has them.
_NEEDED = {"jinja2": "jinja2", "vl_convert": "vl-convert-python"}


def missing() -> str:
    """What is not installed of what a page takes, and what installs it, in a line; imports nothing of it."""
    names = [name for module, name in _NEEDED.items() if find_spec(module) is None]
    if not names:
        return ""
    are = "is" if len(names) == 1 else "are"
    return f"a page takes {' and '.join(names)}, which {are} not installed; pip install 'pytest-llmperf[page]'"
