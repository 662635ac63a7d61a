"""``llmperf history``."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.run.history_store import HistoryStore, past_results
from tests.golden import Golden
from tests.history import nights, with_versions
from tests.runs import ladder_run, written
from tests.shelf import Run


@pytest.fixture
def llmperf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """With nothing stored, and no state of the user's."""
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(command: str, *arguments: object) -> tuple[int, str, str]:
        code = main([*command.split(), *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def store(tmp_path: Path) -> HistoryStore:
    """Where runs add their own."""
    return HistoryStore(tmp_path / "state" / "history.sqlite")


def test_cases_are_listed_worst_first(llmperf: Run, store: HistoryStore, golden: Golden) -> None:
    store.append(nights(40, 5, slower={1: (20, 0.03), 3: (25, 0.06), 4: (20, -0.05)}))
    code, output, errors = llmperf("history")
    assert (code, errors) == (0, "")
    first, heading, *rows = output.splitlines()
    golden(first)
    assert "latest change" in heading
    assert [row.split()[0].removesuffix("-gpus1") for row in rows] == [
        f"llama-case{number}" for number in (3, 1, 4, 0, 2)
    ]
    assert "2026-01-26" in rows[0]


def test_a_case_is_told_by_its_levels_and_what_else_changed(llmperf: Run, store: HistoryStore, golden: Golden) -> None:
    results = with_versions(nights(40, 1, lambda _: 0, slower={0: (20, 0.05)}), 20, torch="2.12")
    store.append(results)
    code, output, _ = llmperf("history", "llama-case0-gpus1")
    assert code == 0
    lines = output.splitlines()
    golden(lines[0])
    (row,) = [line for line in lines if line.startswith("2026-01-21")]
    assert row.split()[1:3] == ["2026-02-09", "20"]
    assert "  torch: 2.11 -> 2.12" in lines
    assert any(line.startswith("change 1, 2026-01-21: -") for line in lines)


def test_what_came_with_another_host_is_told_on_both_pages(llmperf: Run, store: HistoryStore, golden: Golden) -> None:
    results = nights(28, 5, lambda night: night // 14, slower=dict.fromkeys(range(5), (14, 0.05)), seed=3)
    store.append(with_versions(results, 14, driver="590"))
    _, output, _ = llmperf("history")
    told = "2026-01-15  the host changed with it: cannot be told apart"
    first, _, *rows = output.splitlines()
    golden(first)
    assert [row.endswith(told) for row in rows] == [True] * 5
    _, output, _ = llmperf("history", "llama-case0-gpus1")
    place = output.splitlines().index(next(line for line in output.splitlines() if line.startswith("2026-01-15: -")))
    line, *different = output.splitlines()[place : place + 3]
    golden(line)
    assert [each.strip().partition(":")[0] for each in different] == ["driver", "host"]
    (step,) = json.loads(llmperf("history", "llama-case0-gpus1", "--json")[1])["cases"][0]["with_another_host"]
    assert (step["at"][:10], step["different"][0]) == ("2026-01-15", "driver: 580 -> 590")


@pytest.mark.parametrize("number", [20, 2])
def test_a_change_that_counts_alone_tell_is_in_the_column_of_changes(
    llmperf: Run, store: HistoryStore, number: int
) -> None:
    results, half = [replace(one, machine="cpu-x-2c") for one in nights(number)], number // 2
    store.append([*results[:half], *(replace(one, counts={"kernels_per_step": 270.0}) for one in results[half:])])
    _, output, _ = llmperf("history")
    first, _, row = output.splitlines()
    assert (" 1 of them" in first, "other work" in row) == (True, True), output
    _, output, _ = llmperf("history", results[0].id)
    assert ("not do what" in output, "too few runs" in output) == (True, False), output


@pytest.mark.parametrize("word", ["case1-", "*case1-gpus?", "llama-case1-gpus1", "0000000000000001"])
def test_a_case_is_named_by_its_id_a_part_a_pattern_or_its_digest(llmperf: Run, store: HistoryStore, word: str) -> None:
    store.append(nights(6, 3))
    _, output, _ = llmperf("history", word)
    assert output.startswith("llama-case1-gpus1 on ")


def test_a_name_of_several_cases_lists_them(llmperf: Run, store: HistoryStore, golden: Golden) -> None:
    store.append(nights(6, 12))
    _, output, _ = llmperf("history", "case1*")
    golden(output)  # 1, 10 and 11


def test_a_name_of_no_case_tells_the_nearest(llmperf: Run, store: HistoryStore, golden: Golden) -> None:
    store.append(nights(6, 2))
    code, output, errors = llmperf("history", "lamma-case1")
    assert (code, output) == (1, "")
    golden(errors)
    assert len(errors.splitlines()) == 1


def test_no_history_tells_where_it_comes_from(llmperf: Run, golden: Golden) -> None:
    code, output, errors = llmperf("history")
    assert (code, output) == (1, "")
    golden(errors)
    assert len(errors.splitlines()) == 1


def test_a_store_that_cannot_serve_is_told_and_not_called_empty(
    llmperf: Run, store: HistoryStore, golden: Golden
) -> None:
    store.append(nights(2, 1))
    store.path.write_bytes(store.path.read_bytes()[:5000])
    code, output, errors = llmperf("history")
    assert (code, output) == (1, "")
    (line,) = errors.splitlines()
    golden(line)


def test_two_machines_are_kept_apart(llmperf: Run, store: HistoryStore, golden: Golden) -> None:
    here = nights(10, 1, lambda _: 0)
    there = [replace(one, machine="cpu-x-2c", launches=tuple(_times(each, 9) for each in one.launches)) for one in here]
    store.append(here)
    store.append(there)
    _, output, _ = llmperf("history")
    assert sorted(line for line in output.splitlines() if line.endswith("with a change point")) == [
        "cpu-x-2c: 1 case, none of them with a change point",
        "nvidia-h200-140gib: 1 case, none of them with a change point",
    ]
    _, output, _ = llmperf("history", "case0", "--machine", "cpu-x-2c")
    assert output.count(" runs, ") == 1
    _, output, _ = llmperf("history", "case0")
    assert output.count(" runs, ") == 2
    code, _, errors = llmperf("history", "--machine", "h100")
    assert code == 1
    golden(errors)


def _times(launch: Any, times: float) -> Any:
    return replace(launch, step_seconds=launch.step_seconds * times)


def test_other_settings_of_the_same_name_are_another_case(llmperf: Run, store: HistoryStore, golden: Golden) -> None:
    then = nights(10, 1, lambda _: 0)
    now = [replace(one, digest="f" * 16, launches=tuple(_times(each, 2) for each in one.launches)) for one in then]
    store.append(then)
    store.append(now)
    _, output, _ = llmperf("history")
    golden(output)


def test_only_runs_since_a_day_count(llmperf: Run, store: HistoryStore, golden: Golden) -> None:
    store.append(nights(40))
    _, output, _ = llmperf("history", "case0", "--since", "2026-02-01")
    assert ": 9 runs, 2026-02-01 to 2026-02-09" in output
    code, _, errors = llmperf("history", "--since", "2027-01-01")
    assert code == 1
    golden(errors)


@pytest.mark.parametrize(
    ("day", "told"),
    [
        ("yesterday", "expected a day, e.g. 2026-10-31, or how long ago"),
        ("2026-02-30", "'2026-02-30': no such day"),
    ],
)
def test_a_day_that_is_none_is_a_usage_error(
    llmperf: Run, capsys: pytest.CaptureFixture[str], day: str, told: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        llmperf("history", "--since", day)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_programs_get_the_same(llmperf: Run, store: HistoryStore) -> None:
    store.append(nights(40, 2, lambda _: 0, slower={1: (20, 0.05)}))
    _, output, _ = llmperf("history", "--json")
    cases = {case["id"]: case for case in json.loads(output)["cases"]}
    assert len(cases["llama-case0-gpus1"]["segments"]) == 1
    before, after = cases["llama-case1-gpus1"]["segments"]
    assert (before["change"], before["runs"], after["runs"]) == (None, 20, 20)
    assert after["change"]["rate"] == pytest.approx(math.expm1(-0.05), abs=0.005)


def night_file(folder: Path, day: int, times: float = 1.0, **more: Any) -> Path:
    """What ``--perf-json`` wrote of a night of the ladder, all of whose steps took so many times as long."""
    values = json.loads(json.dumps(ladder_run()))
    for result in values["results"]:
        result["launches"] = result["launches"][:1]
        for launch in result["launches"]:
            launch["started_at"] = f"2026-03-{day:02d}T00:00:00Z"
            for rank in launch["ranks"]:
                rank["step_seconds"] = [each * times for each in rank["step_seconds"]]
    return written(folder / f"night-{day:02d}.json", {**values, **more})


def test_results_of_runs_are_a_history_too(llmperf: Run, tmp_path: Path, golden: Golden) -> None:
    for day in range(1, 21):
        night_file(tmp_path, day, 1.2 if day > 10 else 1.0)
    (tmp_path / "other.json").write_text("[1, 2]")
    code, output, errors = llmperf("history", "--from", tmp_path)
    assert (code, errors) == (0, "")
    golden(output)
    assert output.count("2026-03-11") == 11


def test_a_file_that_cannot_serve_is_told_and_the_others_are_drawn(
    llmperf: Run, tmp_path: Path, golden: Golden
) -> None:
    night_file(tmp_path, 1)
    newer = written(tmp_path / "newer.json", {"schema": 9, "results": []})
    cut = tmp_path / "cut.json"
    cut.write_text('{"schema": 1, "results": [')
    code, output, errors = llmperf("history", "--from", tmp_path, tmp_path / "none.json")
    assert code == 1
    assert "11 cases" in output
    told = errors.splitlines()
    assert len(told) == 3
    assert f"{newer}: schema 9 is newer" in errors
    assert f"{cut}: not JSON" in errors
    golden(errors)


@pytest.mark.parametrize("name", ["a-merged.json", "z-merged.json"])
def test_a_night_and_what_merged_it_count_once(llmperf: Run, tmp_path: Path, name: str) -> None:
    night_file(tmp_path, 1, revision={"commit": "abc", "changed": 1})
    night_file(tmp_path, 1).rename(tmp_path / name)
    night_file(tmp_path, 1, revision={"commit": "abc", "changed": 1})
    _, output, _ = llmperf("history", "--from", tmp_path, "--json")
    cases = json.loads(output)["cases"]
    assert {len(case["runs"]) for case in cases} == {1}
    assert {run["revision"] for case in cases for run in case["runs"]} == {"abc+"}


def test_results_of_an_older_schema_are_read_as_far_as_they_go(llmperf: Run, tmp_path: Path) -> None:
    path = night_file(tmp_path, 1)
    values = json.loads(path.read_text())
    for result in values["results"]:
        for launch in result["launches"]:
            launch["a_field_of_then"] = launch.pop("health")
    path.write_text(json.dumps({**values, "schema": 0}))
    code, output, _ = llmperf("history", "--from", path, "--json")
    assert code == 0
    found = json.loads(output)["cases"]
    assert len(found) == 11
    assert all(run["rate"] > 0 and run["versions"] for case in found for run in case["runs"])


def test_an_aborted_run_counts_with_what_it_had(llmperf: Run, tmp_path: Path) -> None:
    path = night_file(tmp_path, 1, unfinished="SIGTERM")
    values = json.loads(path.read_text())
    values["results"][0]["launches"] = []
    path.write_text(json.dumps(values))
    _, output, _ = llmperf("history", "--from", path)
    assert output.startswith("nvidia-h200-140gib: 10 cases")


def test_nan_in_an_old_file_leaves_out_what_it_spoils_alone(llmperf: Run, tmp_path: Path) -> None:
    path = night_file(tmp_path, 1)
    values = json.loads(path.read_text())
    for case in (0, 1):
        steps = values["results"][case]["launches"][0]["ranks"][0]["step_seconds"]
        steps[7 * case :] = [math.nan] * len(steps[7 * case :])  # of the first case all
    values["results"][2]["metrics"]["peak_reserved_bytes"]["value"] = math.nan
    path.write_text(json.dumps(values))
    code, output, errors = llmperf("history", "--from", path, "--json")
    assert (code, errors) == (0, "")
    cases = {case["id"]: case["runs"][0] for case in json.loads(output)["cases"]}
    ids = [result["id"] for result in values["results"]]
    assert set(cases) == set(ids[1:])
    assert all(run["rate"] > 0 for run in cases.values())
    assert cases[ids[2]]["peak_reserved_bytes"] is None


def test_a_launch_that_misbehaved_on_purpose_is_no_history() -> None:
    values = json.loads(json.dumps(ladder_run()))
    assert len(past_results(RunDocument(values), "x")) == 11
    for result in values["results"]:
        result["launches"][0]["environment"]["variables"]["LLMPERF_INJECT"] = "slow=1"
    assert past_results(RunDocument(values), "x") == []


def test_what_is_told_twice_or_took_turns_is_left_out() -> None:
    values = json.loads(json.dumps(ladder_run()))
    values["results"][0]["shares"] = "t.py::other"
    values["results"][1]["launches_before"] = values["results"][1]["launches"]
    assert len(past_results(RunDocument(values), "x")) == 9


def test_ids_that_are_no_text_move_no_cursor(llmperf: Run, store: HistoryStore) -> None:
    store.append([replace(one, id="a\x1b[31m\nb", versions={"torch": "\x1b[0m"}) for one in nights(5)])
    for arguments in ((), ("a",)):
        _, output, _ = llmperf("history", *arguments)
        assert "\x1b" not in output


@pytest.mark.slow
@pytest.mark.wide
def test_ten_thousand_cases_take_ten_times_what_a_thousand_take(llmperf: Run, store: HistoryStore) -> None:
    def listed(cases: int) -> tuple[float, str]:
        for night in range(10):
            store.append(nights(1, cases, seed=night, first=night))
        began = time.process_time()
        _, output, _ = llmperf("history")
        return time.process_time() - began, output

    # By itself, not by a clock: one computer takes three times what another takes.
    few, _ = listed(1_000)
    many, output = listed(10_000)
    assert many < 20 * few
    assert output.startswith("nvidia-h200-140gib: 10000 cases")
    assert len(output.splitlines()) < 600


def test_projects_do_not_mix_and_older_rows_are_read(
    llmperf: Run, store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, mine, others = nights(30, 1)[:10], nights(30, 1)[10:20], nights(40, 1)[20:]
    here = tmp_path / "mine" / "tests"
    here.mkdir(parents=True)
    store.append([replace(one, run=f"old {one.run}") for one in old])
    store.append([replace(one, project=str(here.parent)) for one in mine])
    store.append([replace(one, project="github.com/others/theirs") for one in others])
    monkeypatch.chdir(here)
    assert ": 20 runs," in llmperf("history", "case0")[1]
    code, output, _ = llmperf("history", "--from", store.path)
    assert (code, output.count("llama-case0"), "github.com/others/theirs" in output) == (0, 3, True)
    assert not output.startswith("no runs of")


def test_a_project_without_runs_is_told_so_before_those_of_others(
    llmperf: Run, store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append([replace(one, project="github.com/others/theirs") for one in nights(3, 1)])
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    first, *others = llmperf("history")[1].splitlines()
    assert first == f"no runs of {tmp_path / 'new'} yet; of all projects:"
    assert any("github.com/others/theirs" in line for line in others)


def test_of_a_merged_night_of_unlike_machines_each_is_apart(llmperf: Run, tmp_path: Path) -> None:
    """What ``merge`` writes names the machines by file: whose a case is, its launches tell."""
    runs: list[Any] = [json.loads(json.dumps(ladder_run())) for _ in range(2)]
    for values, name in zip(runs, ("Xeon", "EPYC"), strict=True):
        for launch in values["results"][0]["launches"]:
            launch["environment"] |= {"gpu": name, "driver": ""}
    cases, machines = [values["results"][0] for values in runs], {"a": {"kind": "cpu-xeon-2c"}, "b": {"kind": "named"}}
    merged = {**runs[0], "machine": {}, "machines": machines, "results": cases}
    code, output, errors = llmperf("history", cases[0]["id"], "--from", written(tmp_path / "merged.json", merged))
    assert (code, errors) == (0, "")
    assert [line.split(": ")[0].split(" on ")[1] for line in output.splitlines() if " on cpu-" in line] == [
        "cpu-xeon-2c",
        "cpu-EPYC",
    ]
