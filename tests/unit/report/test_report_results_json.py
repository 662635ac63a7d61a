"""``--perf-json``."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Check, Reference, Spent
from pytest_llmperf.report.results_json import document, write_json
from pytest_llmperf.support import codec
from tests.unit.report.test_report_failure import REGRESSED, RESULTS, launch_of


def test_the_document_has_the_designs_schema() -> None:
    values = document({"kind": "h200"}, [replace(REGRESSED, differences=())])
    assert set(values) == {"schema", "machine", "results"}
    assert (values["schema"], values["machine"]) == (1, {"kind": "h200"})
    (result,) = values["results"]
    assert set(result) == {"id", "digest", "nodeid", "verdict", "reason", "metrics", "launches"}
    assert result["metrics"]["tokens_per_second_per_gpu"] == {
        "value": 67310.4,
        "unit": "tokens/s",
        "baseline": 71783.2,
        "limit": 70347.5,
        "change": -0.0623,
        "detectable": 0.011,
    }
    assert len(result["launches"]) == 2


def test_only_what_is_wide_by_its_tolerance_tells_how_many_times_slower_passes() -> None:
    rate, *others = REGRESSED.checks
    told = []
    for tolerance in (3.0, 0.3):
        wide = replace(rate, limit=(rate.baseline or 0.0) / 4, tolerance=tolerance)
        (result,) = document({}, [replace(REGRESSED, checks=(wide, *others))])["results"]
        told.append(result["metrics"][rate.metric].get("times_slower"))
    assert told == [4.0, None]


def test_what_else_a_case_has_is_there_too() -> None:
    reference = Reference(source="book", tokens_per_second_per_gpu=None)
    full = replace(REGRESSED, rung="15.9", reference=reference, updated="x", notes=("n",))
    full = replace(full, launches_before=REGRESSED.launches[:1])
    (result,) = document({}, [full])["results"]
    assert result["launches_before"] == result["launches"][:1]
    assert result["notes"] == ["n"]
    assert result["rung"] == "15.9"
    assert result["reference"] == {"source": "book", "tokens_per_second_per_gpu": None, "peak_reserved_bytes": None}
    assert result["differences"] == list(REGRESSED.differences)
    assert result["updated"] == "x"
    assert codec.read(CaseResult, codec.plain(full)) == full


def test_what_all_launches_took_is_there_where_there_were_any() -> None:
    spent = Spent(launches=3, phases={"start": 1.00049, "failed_launches": 2.0}, gpu_seconds=7.0)
    assert document({}, [], spent)["spent"] == {
        "launches": 3,
        "seconds": 3.0,
        "phases": {"start": 1.0, "failed_launches": 2.0},
    }
    assert "spent" not in document({}, [], Spent(phases={"waiting_for_hardware": 1.0}))


def test_launches_can_be_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "out.json", document({}, [REGRESSED]))
    values = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert codec.read(Launch, values["results"][0]["launches"][0]) == REGRESSED.launches[0]


def test_what_json_cannot_hold_is_null_or_its_text() -> None:
    evidence = {"loss": math.nan, "kinds": {"b", "a"}, "at": Path("x"), "deep": [{3: (math.inf,)}]}
    launch = replace(launch_of(), evidence=evidence)
    check = Check(metric="mfu", value=math.nan, unit="1", change=-math.inf)
    (result,) = document({}, [replace(REGRESSED, checks=(check,), launches=(launch,))])["results"]
    assert result["metrics"]["mfu"]["value"] is None
    assert result["metrics"]["mfu"]["change"] is None
    assert result["launches"][0]["evidence"] == {"loss": None, "kinds": ["a", "b"], "at": "x", "deep": [{"3": [None]}]}


@given(st.lists(RESULTS, max_size=2))
def test_every_document_is_strict_json(results: list[CaseResult]) -> None:
    values = document({}, results)
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_writing_replaces_the_file_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 2}
    assert list(path.parent.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path, {})


def test_a_device_is_written_and_not_replaced() -> None:
    write_json(Path(os.devnull), {})
    assert not Path(os.devnull).is_file()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("real.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text(encoding="utf-8")) == {"a": 1}
