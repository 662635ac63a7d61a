"""A page in a real browser, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.run.history import histories_of
from tests.browser import CHROMIUM, Browser, browser
from tests.golden import Golden
from tests.pages import EVIL, evil_run, made, many
from tests.runs import ladder_run, nineteen_nights, stored_figures

pytest.importorskip("jinja2", reason="a page takes the extra `page`")
pytest.importorskip("vl_convert", reason="a page takes the extra `page`")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium here; apt-get install chromium"),
]

ROWS = "[...document.querySelectorAll('tbody.case')]"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run after nineteen nights that are stored."""
    folder = tmp_path_factory.mktemp("nights")
    told, troubles = histories_of([RunDocument(ladder_run())], nineteen_nights(folder / "history.sqlite"), folder)
    assert not troubles
    return made(ladder_run(), stored_figures(), told)


def show(opened: Browser, folder: Path, text: str, *, width: int = 1280, dark: bool = False) -> None:
    """``text`` as a file in ``folder``, opened anew."""
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    opened.requests.clear()
    opened.errors.clear()
    opened.open(f"file://{path}", width=width, dark=dark)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path, text: str) -> Browser:
    show(chromium, tmp_path, text)
    return chromium


def test_it_asks_for_nothing_and_says_nothing_in_the_console(opened: Browser, tmp_path: Path) -> None:
    assert opened.requests == [f"file://{tmp_path}/page.html"]
    assert opened.errors == []


@pytest.mark.parametrize("key", ["Enter", " "])
def test_a_row_opens_by_a_key_to_what_it_has(opened: Browser, key: str, golden: Golden) -> None:
    row = "document.querySelector('tbody.case')"
    assert opened.evaluate(f"{row}.rows[1].offsetHeight") == 0
    opened.evaluate(f"{row}.querySelector('summary').focus()")
    opened.press(key)
    assert opened.evaluate(f"{row}.rows[1].offsetHeight") > 200
    told = opened.evaluate(f"{row}.rows[1].innerText")
    golden.lines(told, "Run it again")
    assert "torch: 2.11.0 -> 2.12.0" in told
    assert "Step times" in told
    opened.press(key)
    assert opened.evaluate(f"{row}.rows[1].offsetHeight") == 0


def test_a_link_at_the_top_leads_to_its_row_which_opens(opened: Browser) -> None:
    opened.evaluate("document.querySelector('.person a').click()")
    assert opened.evaluate(
        "new Promise(done => setTimeout(() => done(document.querySelector('#case-1 details').open)))"
    )
    assert opened.evaluate("Math.abs(document.querySelector('#case-1').getBoundingClientRect().top)") < 5


def test_the_history_is_drawn_with_its_levels_as_a_table(opened: Browser, golden: Golden) -> None:
    section = "[...document.querySelectorAll('section')].find(one => one.innerText.startsWith('History'))"
    assert opened.evaluate(f"{section}.querySelectorAll('.plot svg').length") == 8
    opened.evaluate(f"{section}.querySelectorAll('details').forEach(one => {{ one.open = true; }})")
    told = opened.evaluate(f"{section}.innerText")
    golden.lines(told, "a change point")
    assert "torch: 2.11 -> 2.12" in told
    assert opened.evaluate(f"{section}.querySelectorAll('table').length") == 8


def test_words_and_verdict_filter(opened: Browser) -> None:
    shown = f"{ROWS}.filter(one => one.offsetHeight).map(one => one.dataset.verdict)"
    assert len(opened.evaluate(shown)) == 11
    opened.evaluate("document.getElementById('words').focus()")
    for letter in "sdpa mbs7":
        opened.press(letter)
    assert opened.evaluate(shown) == ["regressed"]
    assert opened.evaluate("document.getElementById('shown').value") == "1 of 11 cases"
    opened.evaluate("document.getElementById('words').value = ''")
    opened.evaluate("document.getElementById('verdict').value = 'improved'")
    opened.evaluate("document.getElementById('verdict').dispatchEvent(new Event('change'))")
    assert opened.evaluate(shown) == ["improved"]


def test_a_column_sorts_by_its_figures_up_and_down(opened: Browser) -> None:
    heading = "document.querySelectorAll('table.cases thead button')[2]"
    rates = "[...document.querySelectorAll('tbody.case')].map(one => one.rows[0].cells[2].innerText.replace(',', ''))"
    opened.evaluate(f"{heading}.focus()")
    for order, reverse in (("ascending", False), ("descending", True)):
        opened.press("Enter")
        found = [float(rate) for rate in opened.evaluate(rates)]
        assert found == sorted(found, reverse=reverse)
        assert opened.evaluate(f"{heading}.parentElement.getAttribute('aria-sort')") == order
    opened.evaluate("document.querySelectorAll('table.cases thead button')[0].click()")
    names = opened.evaluate("[...document.querySelectorAll('tbody.case summary')].map(one => one.innerText)")
    assert names.index("llama-3.2-1b-bf16-sdpa-mbs7-gpus1") < names.index("llama-3.2-1b-bf16-sdpa-mbs14-gpus1")
    assert opened.evaluate("document.querySelectorAll('[aria-sort]').length") == 1


@pytest.mark.parametrize("width", [320, 375, 1280])
def test_nothing_is_wider_than_the_window(chromium: Browser, tmp_path: Path, text: str, width: int) -> None:
    show(chromium, tmp_path, text, width=width)
    chromium.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    # As the names of tests are, of which a note tells.
    words = "document.querySelectorAll('.told li, .again code, .person span')"
    chromium.evaluate(f"{words}.forEach(one => {{ one.append('x'.repeat(300)); }})")
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark_follow_the_reader(chromium: Browser, tmp_path: Path, text: str) -> None:
    grounds = []
    for dark in (False, True):
        show(chromium, tmp_path, text, dark=dark)
        grounds.append(chromium.evaluate("getComputedStyle(document.body).backgroundColor"))
        ink, line = (
            chromium.evaluate(f"getComputedStyle(document.querySelector('.plot {mark}')).{of}")
            for mark, of in (("text", "fill"), ('path[stroke="var(--now)"]', "stroke"))
        )
        assert len({ink, line, grounds[-1]}) == 3
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]


# Of all text that is seen its contrast (https://www.w3.org/TR/WCAG21/#contrast-minimum asks for 4.5), the least first.
CONTRASTS = """(() => {
    const channels = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => channels(colour).slice(0, 3).map(one => one / 255)
        .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
        .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
    const ground = one => {
        for (; one; one = one.parentElement) {
            const colour = getComputedStyle(one).backgroundColor;
            if (channels(colour)[3] !== 0) return colour;
        }
    };
    const seen = [...document.querySelectorAll('body *')].filter(one => one.getClientRects().length
        && [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
    return seen.map(one => {
        const ink = getComputedStyle(one)[one instanceof SVGElement ? 'fill' : 'color'];
        const [low, high] = [light(ink), light(ground(one))].sort((a, b) => a - b);
        return [(high + 0.05) / (low + 0.05), one.tagName, one.textContent.slice(0, 40)];
    }).sort((a, b) => a[0] - b[0]);
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(chromium: Browser, tmp_path: Path, text: str, dark: bool) -> None:
    show(chromium, tmp_path, text, width=375, dark=dark)
    chromium.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    found = chromium.evaluate(CONTRASTS)
    assert len(found) > 1000
    assert {"text", "P", "TH", "SUMMARY"} <= {tag for _, tag, _ in found}
    assert found[0][0] >= 4.5, found[:5]


def test_tab_leads_from_the_top_to_the_rows_and_through_what_they_open_to(opened: Browser) -> None:
    here = """(() => {
        const one = document.activeElement, before = window.last;
        window.last = one;
        return [one.tagName, one.className || one.id || one.innerText, !!one.closest('tbody.case'),
            !before || !!(before.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING)];
    })()"""
    reached: list[Any] = []
    while not reached or not reached[-1][2]:
        assert len(reached) < 200, reached
        opened.press("Tab")
        reached.append(opened.evaluate(here))
    assert all(in_order for *_, in_order in reached), reached
    told = [name for _, name, *_ in reached]
    assert told[0] == "What needs a person"
    assert told[-11:-8] == ["words", "verdict", "case"]  # then the other headings, which sort, and the first row
    opened.press("Enter")
    assert opened.evaluate("document.querySelector('tbody.case').rows[1].offsetHeight") > 200
    opened.press("Tab")
    assert opened.evaluate(here)[:3] == ["BUTTON", "copy", True]


def test_a_screen_reader_is_told_what_each_thing_is(opened: Browser) -> None:
    opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    nodes = [node for node in opened.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    named: dict[str, list[str]] = {}
    for node in nodes:
        named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    told = ("heading", "link", "button", "image", "region", "searchbox", "combobox", "DisclosureTriangle", "navigation")
    assert not [role for role in told if not all(named[role])]
    assert len(named["image"]) > 15
    assert "Filter" in named["searchbox"]
    assert any("regressed" in text for text in named["heading"])
    opened.call("Accessibility.disable")


def test_paper_has_what_needs_a_person_and_what_was_opened(opened: Browser, golden: Golden) -> None:
    opened.evaluate("document.querySelectorAll('tbody.case')[2].querySelector('details').open = true")
    opened.call("Emulation.setEmulatedMedia", media="print")
    rows = opened.evaluate(
        f"{ROWS}.map(one => [one.dataset.verdict, one.rows[1].offsetHeight && one.rows[1].innerText])"
    )
    assert [(verdict, bool(told)) for verdict, told in rows[:4]] == [
        ("regressed", True),
        ("improved", True),
        ("pass", True),
        ("pass", False),
    ]
    regressed, _, passed, *_ = (told for _, told in rows)
    golden.lines(regressed, "Run it again")
    assert "torch: 2.11.0 -> 2.12.0" in regressed
    assert "Launches" not in regressed
    assert "Launches" in passed
    assert not opened.evaluate(
        "document.querySelector('nav').offsetHeight + document.querySelector('form').offsetHeight"
    )
    grounds = "getComputedStyle(document.body).backgroundColor"
    assert opened.evaluate(grounds) == "rgb(255, 255, 255)"
    printed = opened.printed()
    assert printed.startswith(b"%PDF-")
    assert 5 <= printed.count(b"/Type /Page\n") <= 14


def test_markup_in_names_is_text_there_too(chromium: Browser, tmp_path: Path) -> None:
    show(chromium, tmp_path, made(evil_run(), stored_figures()))
    assert chromium.errors == []
    assert chromium.evaluate("document.querySelectorAll('img').length") == 0
    chromium.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert EVIL in chromium.evaluate("document.querySelector('tbody.case summary').textContent")


@pytest.mark.wide
def test_two_thousand_rows_filter_and_sort_at_once(chromium: Browser, tmp_path: Path) -> None:
    show(chromium, tmp_path, made(many(2000)))
    script = """(() => {
        const words = document.getElementById('words');
        const began = performance.now();
        words.value = 'case1999'; words.dispatchEvent(new Event('input'));
        const shown = document.getElementById('shown').value;
        words.value = ''; words.dispatchEvent(new Event('input'));
        document.querySelectorAll('table.cases thead button')[2].click();
        document.body.offsetHeight;
        return [shown, performance.now() - began];
    })()"""
    shown, milliseconds = chromium.evaluate(script)
    assert shown == "1 of 2000 cases"
    assert milliseconds < 10_000  # a third of a second on two cores
    assert chromium.errors == []
