"""The history on the page: where a case ran before, and what changed there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf.records.result import PastResult
from pytest_llmperf.run.history import histories_of
from pytest_llmperf.run.page_charts import history_section
from pytest_llmperf.run.run_page import page_of
from tests.golden import Golden
from tests.runs import night, nineteen_nights


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return nineteen_nights(tmp_path / "history.sqlite")


def test_changes_are_drawn_with_versions(store: Path, tmp_path: Path, golden: Golden) -> None:
    told, troubles = histories_of([night(20, 1.1, "2.12")], store, tmp_path)
    assert troubles == []
    section = history_section(told)
    assert section is not None
    (line,) = section.lines
    golden(line)
    chart = section.charts[0]
    assert "since 2026-03-11" in chart.says
    assert "torch: 2.11 -> 2.12" in chart.note
    assert chart.table is not None
    before, after = chart.table.rows
    assert before[:2] == ("2026-03-01", "2026-03-10")
    assert after[:3] == ("2026-03-11", "2026-03-20", "torch: 2.11 -> 2.12")
    row = dict(zip(chart.table.headings, after, strict=True))
    assert (row["torch"], row["change"]) == ("2.12", "-9.1 %")
    assert [len(line.points) for line in chart.lines] == [2, 2, 20]
    assert (chart.x_axis, chart.lines[2].points[-1][0]) == ("days since 2026-03-01", 19)


@pytest.mark.parametrize("began", ["2026-03-01T05:00:00Z", "no time"])
def test_runs_of_one_day_stand_in_their_order(store: Path, tmp_path: Path, began: str) -> None:
    (told, *_), _ = histories_of([night(20, 1.1, "2.12")], store, tmp_path)

    def moved(result: PastResult) -> PastResult:
        return replace(result, launches=tuple(replace(launch, started_at=began) for launch in result.launches))

    same = [replace(one, results=tuple(map(moved, one.results))) for one in told.segments]
    section = history_section([replace(told, segments=tuple(same))])
    assert section is not None
    (chart,) = section.charts
    before, after, runs = (tuple(at for at, _ in line.points) for line in chart.lines)
    assert (chart.x_axis, before, after, runs) == ("run", (1, 10), (11, 20), tuple(range(1, 21)))


def test_a_run_that_is_in_the_store_already_counts_once(store: Path, tmp_path: Path) -> None:
    told, _ = histories_of([night(19, 1.1, "2.12")], store, tmp_path)
    assert {len(one.results) for one in told} == {19}


def test_the_section_is_there_only_where_cases_ran_before(tmp_path: Path, golden: Golden) -> None:
    for source in (None, tmp_path / "none.sqlite"):
        told, _ = histories_of([night(1)], source, tmp_path)
        assert history_section(told) is None
    several, _ = histories_of([night(1), night(2)], None, tmp_path)
    section = history_section(several)
    assert section is not None
    assert section.charts == ()
    golden(section.lines)


def test_a_store_that_is_broken_is_a_line_on_the_page(tmp_path: Path, golden: Golden) -> None:
    store = tmp_path / "history.sqlite"
    store.write_text("nothing of ours " * 100)
    told, troubles = histories_of([night(1)], store, tmp_path)
    assert told == []
    (line,) = troubles
    golden(line)


def test_the_page_has_it_after_what_changed(store: Path, tmp_path: Path) -> None:
    run = night(20, 1.1, "2.12")
    told, _ = histories_of([run], store, tmp_path)
    page = page_of([run], {}, histories=told)
    anchors = [section.anchor for section in page.sections]
    assert "history" in anchors
    assert "history" not in [section.anchor for section in page_of([run], {}).sections]


def test_names_in_a_history_are_text(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="a page takes the extra `page`")
    pytest.importorskip("vl_convert", reason="a page takes the extra `page`")
    from pytest_llmperf.report.page import html  # noqa: PLC0415
    from tests.pages import EVIL  # noqa: PLC0415

    run = night(20, 1.1, EVIL)
    told, _ = histories_of([run, night(21, 1.1, EVIL)], store, tmp_path)
    page = page_of([run], {}, histories=told)
    text = html(page)
    assert "throw 1" not in text or "<img src=x" not in text
    assert "<script>throw 2" not in text
