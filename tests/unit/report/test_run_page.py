"""What a page shows of a run, before it is drawn."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_llmperf.analysis import ladder as chapter15
from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.page import Case, Page, Section, specification
from pytest_llmperf.report.results_json import RunDocument, document
from pytest_llmperf.run.page_charts import Baselines, parts_of_name
from pytest_llmperf.run.run_page import page_of, write_page
from tests.examples import examples
from tests.golden import Golden
from tests.runs import LADDER, MACHINE, WIDTHS, ladder_run, launches_at, result_of, stored_at, stored_figures
from tests.shelf import keep

NOTHING: Baselines = {}


@pytest.fixture(scope="module")
def page() -> Page:
    return page_of([RunDocument(ladder_run())], stored_figures())


def section(page: Page, anchor: str) -> Section:
    return next(each for each in page.sections if each.anchor == anchor)


def case(page: Page, part: str) -> Case:
    return next(each for each in page.cases if part in each.name)


def ladder(page: Page, title: str = "llama-3.2-1b") -> dict[str, tuple[str, ...]]:
    """Its rows by their rungs."""
    return {row[0]: row[1:] for row in dict(section(page, "ladder").tables)[title].rows}


def of_run(values: Any, stored: Baselines = NOTHING) -> Page:
    return page_of([RunDocument(json.loads(json.dumps(values)))], stored)


def test_what_needs_a_person_comes_first_each_with_its_reason(page: Page) -> None:
    told = [(verdict, [one.name for one in cases]) for verdict, cases in page.for_a_person]
    assert told == [
        ("regressed", ["llama-3.2-1b-bf16-sdpa-mbs7-gpus1"]),
        ("improved", ["llama-3.2-1b-bf16-sdpa-mbs14-gpus1"]),
    ]
    assert "(-10.7 %)" in page.for_a_person[0][1][0].reason
    assert [one.verdict for one in page.cases][:3] == ["regressed", "improved", "pass"]
    assert page.verdicts == (("regressed", 1), ("improved", 1), ("pass", 9))


def test_the_ladder_stands_beside_its_baseline_and_what_was_published(page: Page) -> None:
    rows = ladder(page)
    assert rows["15.6 bf16-sdpa-mbs7"] == ("32,740", "36,669", "24,446", "50.0 GiB", "50.0 GiB", "39.3 GiB")
    (table,) = (table for _, table in section(page, "ladder").tables)
    assert (len(table.bars), max(table.bars)) == (len(rows), 1)


def test_rungs_of_one_number_are_told_apart_by_their_gpus(page: Page) -> None:
    assert [*ladder(page)][-3:] == [f"15.10 bf16-sdpa-liger-mbs37 {gpus} GPUs" for gpus in (2, 4, 8)]


def test_where_speed_is_no_gate_the_page_says_so_and_not_what_it_would_detect(golden: Golden) -> None:
    values: Any = json.loads(json.dumps(ladder_run()))
    for result in values["results"]:
        rate = result["metrics"]["tokens_per_second_per_gpu"]
        rate["limit"], rate["detectable"], rate["times_slower"] = rate["baseline"] / 4, 0.987, 4.0
    wide = of_run(values)
    (remark,) = wide.remarks
    golden(remark)
    assert "4 times slower" in remark
    for result in values["results"]:  # its launches scatter: the limit is beyond the tolerance
        result["metrics"]["tokens_per_second_per_gpu"]["limit"] /= 1.5
    assert "6 times slower" in of_run(values).remarks[0]
    assert "detectable" not in wide.columns
    assert "98.7 %" not in str(wide)
    for result in values["results"]:  # as wide by its noise alone, which is told
        del result["metrics"]["tokens_per_second_per_gpu"]["times_slower"]
    for gate in (of_run(ladder_run()), of_run(values)):
        assert gate.remarks == ()
        assert "detectable" in gate.columns


def test_time_of_launches_side_by_side_counts_once_by_the_clock() -> None:
    """Two at once, a gap, and one that begins behind the end of the one before."""
    values: Any = json.loads(json.dumps(ladder_run([result_of(*LADDER[name]) for name in list(LADDER)[:4]])))
    values["spent"] = {"launches": 4, "seconds": 38.0, "phases": {"start": 6.0, "model": 2.0, "steps": 30.0}}
    ran = [("00:00:02", 2.0, 10.0), ("00:00:02", 2.0, 10.0), ("00:00:21", 1.0, 10.0), ("00:00:29", 1.0, 8.0)]
    for result, (began, start, seconds) in zip(values["results"], ran, strict=True):
        for launch in result["launches"]:
            launch |= {"started_at": f"2026-01-05T{began}Z", "wall_seconds": seconds, "phases": {"start": start}}
    ((title, table),) = section(of_run(values), "time").tables
    assert (title.partition(": ")[2], table.rows) == (
        "26 s in cases by the clock",
        (("training", "30 s"), ("start-up", "8 s")),
    )
    assert [round(bar, 3) for bar in table.bars] == [1, 0.267]


def test_a_users_own_ladder_has_its_name_and_its_order() -> None:
    """A chapter's rung may be its first, and is none of the chapter's there."""
    chapter = [result_of(*LADDER[name]) for name in list(LADDER)[:3]]
    own = [replace(one, rung=f"On 1B: fast: {number}") for number, one in zip((10, 9, 2), chapter, strict=True)]
    rows = ladder(page_of([RunDocument(ladder_run(own))], stored_figures()), "On 1B: fast")
    assert [name.split()[0] for name in rows] == ["2", "9", "10"]


def test_of_a_rung_without_a_rate_the_verdict_is_told() -> None:
    rung, rate = LADDER["llama-3.2-1b-bf16-sdpa-liger-mbs14-gpus1"]
    bare = replace(result_of(rung, rate), verdict="invalid", checks=())
    others = [result_of(*LADDER[name]) for name in list(LADDER)[:2]]
    rows = ladder(page_of([RunDocument(ladder_run([bare, *others]))], stored_figures()))
    assert rows["15.8 bf16-sdpa-liger-mbs14"][0] == "invalid"


def test_the_interval_that_decided_is_told(page: Page) -> None:
    figures = dict(case(page, "sdpa-mbs7").tables)["Figures"]
    (row,) = [row for row in figures.rows if row[0] == "tokens/s/GPU"]
    assert row[4] == "-10.7 %"
    assert " % to -" in row[5]
    (steps,) = case(page, "sdpa-mbs7").charts
    assert [line.role for line in steps.lines] == ["baseline"] * 3 + ["now"] * 2
    assert "-10.7 %" in steps.says


def test_a_case_tells_what_moved_in_its_trace(page: Page) -> None:
    moved = dict(case(page, "sdpa-mbs7").tables)["What a step does more or less often"]
    assert moved.rows == (("elementwise and others", "elementwise_add", "+40 (new)", "+40.0 ms"),)


def again(one: Case) -> str:
    return dict(one.commands)["Run it again"]


def test_a_row_opens_to_its_launches_differences_and_command(page: Page) -> None:
    one = case(page, "sdpa-mbs7")
    assert dict(one.commands)["Run it again"] == f"pytest 'perf_tests/test_ladder.py::test_rung[{one.name}]' --gpus 8"
    assert ("Different from the baseline's environment", ("torch: 2.11.0 -> 2.12.0",)) in one.lists
    assert len(dict(one.tables)["Launches"].rows) == 2


def test_every_chart_has_a_sentence_and_every_table_rows_as_long_as_its_headings(page: Page) -> None:
    assert page.charts
    assert all(one.says for one in page.charts)
    of_cases = [table for one in page.cases for _, table in one.tables]
    for table in (*of_cases, *(table for one in page.sections for _, table in one.tables)):
        assert {len(row) for row in table.rows} == {len(table.headings)}


def test_a_document_that_does_not_say_how_it_was_run_offers_what_its_ids_tell() -> None:
    values = ladder_run()
    del values["rerun"]
    assert again(case(of_run(values), "gpus4")).endswith("gpus4]' --gpus 4")
    values["machine"] = {"kind": "cpu-x", "gpus": []}
    assert again(case(of_run(values), "gpus4")).endswith(" --gpus 0")


def test_a_run_that_was_ended_says_so_first(golden: Golden) -> None:
    told = of_run(ladder_run() | {"unfinished": "SIGTERM", "troubles": ["gpus-8.json: missing"]}).warnings
    golden(told[0])
    assert told[1] == "gpus-8.json: missing"


def test_runs_of_two_machines_are_kept_apart() -> None:
    here, there = ladder_run(), ladder_run() | {"machine": {"kind": "other", "gpus": []}}
    page = page_of([RunDocument(here, "a.json"), RunDocument(there, "b.json")], stored_figures())
    assert page.columns[0] == "run"
    assert len(page.cases) == 2 * len(here["results"])
    titles = [title for title, _ in section(page, "ladder").tables]
    assert titles == ["llama-3.2-1b on nvidia-h200-140gib", "llama-3.2-1b on other"]
    assert [dict(facts)["run"] for facts in page.runs] == ["a.json", "b.json"]


def test_of_two_runs_of_one_machine_ladders_show_the_last() -> None:
    first = ladder_run()
    last = json.loads(json.dumps(first))
    for result in last["results"]:
        result["metrics"]["tokens_per_second_per_gpu"]["value"] = 7.0
    page = page_of([RunDocument(first, "a"), RunDocument(last, "b")], NOTHING)
    assert {row[0] for row in ladder(page).values()} == {"7"}


def test_a_night_of_several_files_is_of_their_machine_kind() -> None:
    values = ladder_run()
    machines = {"gpus-1.json": values["machine"], "gpus-8.json": {**values["machine"], "cores": 3}}
    run = RunDocument({**values, "machine": {}, "machines": machines})
    assert (run.machine, len(run.gpus)) == (MACHINE, 8)


def test_an_empty_run_is_a_page_too() -> None:
    page = of_run({"schema": 1, "machine": {}, "results": []})
    assert (page.cases, page.sections, page.for_a_person, page.verdicts) == ((), (), (), ())


def test_a_case_without_figures_or_launches_is_a_row() -> None:
    bare = CaseResult(id="x", digest="", nodeid="t.py::t", machine="m", verdict="invalid", reason="it broke")
    (one,) = of_run(document({}, [bare])).cases
    assert (one.name, one.reason, again(one)) == ("x", "it broke", "pytest t.py::t --gpus 0")
    assert one.cells == ()
    values = ladder_run()
    values["results"].append({"id": "y", "nodeid": "t.py::y", "verdict": "pass"})
    assert {cell.text for cell in case(of_run(values), "y").cells} == {"-", "0"}


def test_a_figure_that_is_no_number_in_an_old_file_is_absent() -> None:
    text = json.dumps(ladder_run()).replace('"loss": 6.0', '"loss": NaN')
    values = json.loads(text)
    metric = values["results"][0]["metrics"]["tokens_per_second_per_gpu"]
    metric |= {"value": math.nan, "change": math.inf, "interval": [math.nan, 1]}
    values["results"][0]["launches"][0]["losses"] = [None, math.nan]
    page = page_of([RunDocument(values)], stored_figures())
    one = case(page, values["results"][0]["id"])
    assert one.cells[0].text == "-"
    assert ladder(page)["15.1 fp32-eager-mbs6"][0] == "-"  # it passed, which is no rate
    assert len(dict(one.tables)["Launches"].rows) == 2  # whatever their losses are
    assert "nan" not in repr(page).lower()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, "soon"])
def test_a_launch_whose_times_are_none_is_not_drawn(seconds: object, golden: Golden) -> None:
    values = json.loads(json.dumps(ladder_run()))
    first = values["results"][0]["launches"]
    first[0]["ranks"][0]["step_seconds"][3] = seconds
    first[1]["phases"]["steps"] = seconds
    page = page_of([RunDocument(values)], stored_figures())
    one = case(page, values["results"][0]["id"])
    assert one.charts == ()
    golden(page.warnings)


def test_an_older_document_shows_what_it_has(golden: Golden) -> None:
    values = json.loads(json.dumps(ladder_run()))
    for name in ("spent", "rerun", "exit_code", "schema"):
        del values[name]
    for result in values["results"]:
        for name in ("rung", "reference", "notes", "differences"):
            result.pop(name, None)
        for metric in result["metrics"].values():
            metric.pop("interval", None)
        for launch in result["launches"]:
            launch.pop("phases")
            launch.pop("trace")
        result["launches"][0]["a_field_of_later"] = 1
    page = page_of([RunDocument(values)], NOTHING)
    assert page.sections == ()
    golden(page.warnings[0])
    golden(page.warnings[1])


_ANY = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@examples(25)
@given(st.data())
def test_whatever_stands_in_a_document_its_page_is_made(data: st.DataObject) -> None:
    values: Any = json.loads(json.dumps(ladder_run([result_of(*LADDER[name]) for name in list(LADDER)[:2]])))
    for _ in range(data.draw(st.integers(1, 4))):
        place: Any = values
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
                break
            place = place[key]
        place[key] = data.draw(_ANY)
    page = page_of([RunDocument(values)], stored_figures())
    assert len(page.cases) == len(RunDocument(values).results)
    for one in page.charts:
        json.dumps(specification(one), allow_nan=False)


_RATES = st.floats(allow_nan=True, allow_infinity=True) | st.integers() | st.none()


@examples(25)
@example([(-1e-7, None, None), (1e-7, None, 0.0), (None, 0.0, None)])  # phases whose sum is 0
@given(st.lists(st.tuples(_RATES, _RATES, _RATES), min_size=3, max_size=3))
def test_whatever_its_figures_are_all_that_is_drawn_is_finite(figures: list[tuple[Any, Any, Any]]) -> None:
    values = json.loads(json.dumps(ladder_run([result_of(*WIDTHS[name]) for name in WIDTHS])))
    for result, (value, baseline, change) in zip(values["results"], figures, strict=True):
        for metric in result["metrics"].values():
            metric |= {"value": value, "baseline": baseline, "limit": baseline, "change": change}
            metric |= {"interval": [change, value]}
        result |= {"rung": "15.1", "reference": {"tokens_per_second_per_gpu": baseline, "peak_reserved_bytes": change}}
    values["spent"]["phases"] = {"start": figures[0][0], "steps": figures[1][0]}
    for one in page_of([RunDocument(values)], NOTHING).charts:
        json.dumps(specification(one), allow_nan=False)


def test_a_stored_file_that_cannot_serve_is_a_line_and_no_more(tmp_path: Path) -> None:
    rung, rate = next(iter(LADDER.values()))
    keep(tmp_path, stored_at(rung.spec, rate))
    (tmp_path / MACHINE / "llama-3.2-1b" / "broken.json").write_text("{", encoding="utf-8")
    run = ladder_run([result_of(rung, rate)])
    assert write_page(tmp_path / "page.html", [RunDocument(run)], tmp_path, None) == ("", [])
    page = (tmp_path / "page.html").read_text()
    assert page.count("broken.json: not JSON") == 1
    assert "baseline" in page
    broken = list[str]()
    store = BaselineStore(tmp_path)
    assert [len(store.baselines(name, broken)) for name in (MACHINE, "../..", "")] == [1, 0, 0]
    assert len(broken) == 1


def test_what_this_run_has_recorded_is_not_its_own_baseline(golden: Golden) -> None:
    rung, rate = LADDER["llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus1"]
    result = replace(result_of(rung, rate), updated="recorded")
    stored = stored_at(rung.spec, rate)
    with_it = replace(stored, launches=(*stored.launches, *result.launches))
    page = page_of([RunDocument(ladder_run([result]))], {(MACHINE, stored.digest): with_it})
    (steps,) = page.cases[0].charts
    assert [line.role for line in steps.lines] == ["baseline"] * 3 + ["now"] * 2
    golden(page.cases[0].reason)


def test_where_two_sides_took_turns_the_other_side_is_what_it_is_held_against() -> None:
    rung, rate = LADDER["llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus1"]
    result = replace(result_of(rung, rate), launches_before=launches_at(rung.spec, rate, 1))
    (steps,) = page_of([RunDocument(ladder_run([result]))], stored_figures()).cases[0].charts
    assert [line.name for line in steps.lines] == ["the other side", "this run", "this run"]


@pytest.mark.parametrize("rung", [*chapter15.LLAMA, *chapter15.OPT, *chapter15.LLAMA_WIDTHS])
def test_an_id_tells_its_model_and_its_gpus(rung: Any) -> None:
    model, settings, gpus = parts_of_name(rung.spec.id)
    assert (model, gpus) == (rung.spec.model, rung.spec.gpus)
    assert f"{model}-{settings}-gpus{gpus}" == rung.spec.id


@given(st.text())
def test_whatever_an_id_is_its_name_is_found(text: str) -> None:
    assert parts_of_name(text)[2] >= 0


def test_the_head_names_project_commit_host_and_command() -> None:
    facts = {"project": "github.com/acme/train", "revision": {"commit": "0123", "changed": 2}, "command": "pytest p"}
    told = dict(of_run(ladder_run() | facts).runs[0])
    assert (told["project"], told["commit"], told["command"]) == ("train", "0123 + 2 changed", "pytest p")
    assert told["host"]


def test_a_run_without_launches_has_the_versions_of_its_document() -> None:
    values = {"schema": 1, "machine": {"kind": "static"}, "results": [], "versions": {"torch": "2.13.0"}}
    assert dict(of_run(values).runs[0])["versions"] == "torch 2.13.0"


@pytest.mark.parametrize(
    ("verdict", "flags"),
    [
        ("regressed", ' --update-baselines --perf-reason "why"'),
        ("improved", " --update-baselines"),
        ("new", " --update-baselines=new"),
    ],
)
def test_a_case_offers_to_be_accepted(verdict: str, flags: str) -> None:
    values = ladder_run()
    values["results"][0]["verdict"] = verdict
    one = case(of_run(values), values["results"][0]["id"])
    assert dict(one.commands)["Accept it"] == again(one) + flags


def test_a_case_that_holds_has_nothing_to_accept() -> None:
    values = ladder_run()
    values["results"][0] |= {"verdict": "pass", "changed": []}
    assert len(case(of_run(values), values["results"][0]["id"]).commands) == 1


def test_exact_counts_are_a_table_of_their_own() -> None:
    values = ladder_run()
    values["results"][0]["metrics"]["copies_per_step"] = {"value": 7, "unit": "1", "baseline": 4, "limit": 4}
    tables = dict(case(of_run(values), values["results"][0]["id"]).tables)
    assert tables["Exact counts"].rows == (("copies a step", "4", "7", "4"),)
