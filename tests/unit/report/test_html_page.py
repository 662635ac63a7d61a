"""A page as HTML: what is in the file."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report import page as html_page
from pytest_llmperf.report.page import Chart, Page, drawn, html
from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.run.run_page import MOST_CASES, page_of
from tests.golden import Golden
from tests.pages import evil_run, made, many
from tests.runs import LADDER, ladder_run, result_of, stored_figures

pytest.importorskip("jinja2", reason="a page takes the extra `page`")
pytest.importorskip("vl_convert", reason="a page takes the extra `page`")

# What is promised, in bytes, and what a usual run is to stay below.
MOST, USUAL = 5_000_000, 1_500_000


class Elements(HTMLParser):
    """Every element with its attributes; what is not closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.misplaced: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.misplaced.append(tag)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return made(ladder_run(), stored_figures())


def test_every_element_is_closed_where_it_should_be(text: str) -> None:
    elements = Elements(text)
    assert (elements.misplaced, elements.open) == ([], [])


def test_nothing_of_it_is_elsewhere(text: str) -> None:
    addresses = [
        value
        for _, attributes in Elements(text).found
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster")
    ]
    assert addresses
    assert {str(value)[:6] for value in addresses} <= {
        "data:,",
        *(str(value)[:6] for value in addresses if "#" in str(value)),
    }
    assert all(str(value).startswith(("#", "data:,")) for value in addresses)
    assert "url(" not in text
    assert "@import" not in text


def test_its_parts_have_names_and_tables_have_headings(text: str) -> None:
    elements = Elements(text)
    plots = [each for each in elements.named("div") if each.get("class") == "plot"]
    assert plots
    assert all(each["role"] == "img" and each["aria-label"] for each in plots)
    assert len(elements.named("svg")) == len(plots)
    assert {each.get("scope") for each in elements.named("th")} == {"col", "row"}
    ids = [attributes["id"] for _, attributes in elements.found if attributes.get("id")]
    assert len(ids) == len(set(ids))
    linked = {str(each["href"])[1:] for each in elements.named("a")}
    assert linked <= set(ids)


def test_a_usual_page_is_small(text: str) -> None:
    assert len(text.encode()) < USUAL


def test_what_is_in_a_document_is_text_and_no_markup() -> None:
    text = made(evil_run(), stored_figures())
    elements = Elements(text)
    assert elements.named("img") == []
    assert len(elements.named("script")) == 1
    assert "{{ 7 * 7 }}" in text
    assert ">49<" not in text
    assert not [attributes for _, attributes in elements.found if any(name.startswith("on") for name in attributes)]
    assert (elements.misplaced, elements.open) == ([], [])


@pytest.fixture(scope="module")
def many_cases() -> str:
    return made(many(2000), stored_figures())


@pytest.mark.slow
@pytest.mark.wide
def test_two_thousand_cases_are_below_five_megabytes_and_none_is_left_out(many_cases: str) -> None:
    assert len(many_cases.encode()) < MOST
    rows = [each for each in Elements(many_cases).named("tbody") if each.get("class") == "case"]
    assert len(rows) == 2000
    # Each has its command, also where there is no room for all that it could open to.
    assert many_cases.count("Run it again") == 2000


@pytest.mark.slow
@pytest.mark.wide
def test_of_more_cases_than_a_page_holds_those_that_pass_are_left_out(golden: Golden) -> None:
    values = many(MOST_CASES + 100)
    page = page_of([RunDocument(values)], {})
    golden(page.warnings)
    assert len(page.cases) == MOST_CASES
    kinds = [one.verdict for one in page.cases]
    assert kinds.count("regressed") == sum(
        result["verdict"] == "regressed" for result in many(MOST_CASES + 100)["results"]
    )


@pytest.mark.parametrize(
    "results",
    [
        [],
        [CaseResult(id="x", digest="", nodeid="t.py::t", machine="m", verdict="invalid", reason="it broke")],
        [replace(result_of(*LADDER[name]), rung="", reference=None) for name in list(LADDER)[:1]],
    ],
    ids=["none", "without a figure", "one"],
)
def test_a_run_of_few_cases_is_a_page(results: list[CaseResult]) -> None:
    text = made(ladder_run(results))
    assert ("No case was measured." in text) == (not results)


def test_no_figure_that_is_none_reaches_a_chart() -> None:
    values = json.loads(json.dumps(ladder_run()))
    for result in values["results"][::2]:
        for metric in result["metrics"].values():
            metric |= {"value": math.nan, "baseline": math.inf, "change": None}
    text = made(values, stored_figures())
    assert "NaN" not in text
    assert "Infinity" not in text.partition("<script>")[0]


def test_a_page_of_nothing_is_a_page() -> None:
    assert Elements(html(Page(title="t"))).misplaced == []


LINES = Chart(title="t", says="s", x_axis="a", y_axis="b", lines=())


def test_a_chart_that_cannot_be_drawn_is_told_by_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    known = LINES, replace(LINES, title="u")
    assert set(drawn(known)) == set(known)
    # As the library does where it finds what it did not expect: with the process.
    fatal = {"t": {"mark": "text", "title": "\x00"}, "u": {"mark": "text"}}
    monkeypatch.setattr(html_page, "specification", lambda chart: fatal[chart.title])
    assert list(drawn(known)) == [known[1]]
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert drawn(known) == {}
    monkeypatch.setattr(html_page, "specification", lambda _: {})
    text = made(ladder_run(), stored_figures())
    assert "No picture of" in text
    assert "<svg" not in text
    assert Elements(text).misplaced == []
