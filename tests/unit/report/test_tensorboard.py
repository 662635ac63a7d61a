"""Points for TensorBoard, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.cli import main
from pytest_llmperf.cli.export import event_files
from pytest_llmperf.report.consumers.exported_run import ExportedRun
from pytest_llmperf.report.consumers.tensorboard import EventPoint, event_points

NIGHTS = ("2026-11-20T01:00:00+00:00", "2026-11-21T01:00:00+00:00")
RATE = {"value": 100.0, "unit": "tokens/s", "baseline": 110.0, "limit": 108.0, "change": -0.0909}


def result(name: str = "case", started: str | None = NIGHTS[0], **others: Any) -> dict[str, Any]:
    launches = [{"started_at": started}] if started else []
    values = {"id": name, "digest": "d", "nodeid": f"t.py::test[{name}]", "verdict": "pass", "reason": "why"}
    return {**values, "metrics": {"tokens_per_second_per_gpu": RATE}, "launches": launches, **others}


def document(*results: dict[str, Any], kind: str = "gpu") -> dict[str, Any]:
    return {"schema": 1, "machine": {"kind": kind}, "results": list(results), "exit_code": 0}


def points(*results: dict[str, Any]) -> list[EventPoint]:
    return list(event_points(ExportedRun.read([document(*results)])))


def export(folder: Path, *results: dict[str, Any]) -> int:
    path = folder / "run.json"
    path.write_text(json.dumps(document(*results)))
    return main(["export", str(path), "--format", "tensorboard", "--output", str(folder / "log")])


def shown(folder: Path) -> Any:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


class TestPoints:
    def test_a_point_has_what_was_measured_and_what_it_is_held_against(self) -> None:
        (point,) = points(result())
        assert point.scalars == {
            "tokens_per_second_per_gpu/measured": 100.0,
            "tokens_per_second_per_gpu/baseline": 110.0,
            "tokens_per_second_per_gpu/limit": 108.0,
        }
        assert (str(point.folder), point.verdict) == ("gpu/case", "pass: why")
        assert point.seconds == datetime.fromisoformat(NIGHTS[0]).timestamp()

    @pytest.mark.parametrize("change", [{"verdict": "invalid"}, {"launches": []}, {"metrics": {}}])
    def test_what_has_no_time_or_cannot_be_trusted_is_no_point(self, change: dict[str, Any]) -> None:
        assert not points({**result(), **change})

    @given(st.lists(st.text(max_size=200), unique=True, max_size=5))
    def test_every_case_has_a_folder_of_its_own_below_the_machines(self, names: list[str]) -> None:
        found = points(*(result(name, digest=str(number)) for number, name in enumerate(names)))
        folders = {str(point.folder) for point in found}
        assert len(folders) == len(names)
        for point in found:
            machine, name = point.folder.parts
            assert machine == "gpu"
            assert name not in (".", "..")
            assert 0 < len(name.encode()) <= 200


class TestFiles:
    def test_nights_are_one_line_and_a_night_that_is_written_twice_is_one_point(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboardX")
        for night in (*NIGHTS, NIGHTS[1]):
            assert export(tmp_path, result(started=night)) == 0
        seen = shown(tmp_path / "log" / "gpu" / "case")
        rates = seen.Scalars("tokens_per_second_per_gpu/measured")
        assert [rate.value for rate in rates] == [100.0, 100.0]
        assert [rate.step for rate in rates] == [int(rate.wall_time) for rate in rates]
        assert rates[1].step - rates[0].step == 24 * 3600
        assert len(seen.Tensors("verdict/text_summary")) == 2

    def test_what_is_left_out_is_told(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("tensorboardX")
        assert export(tmp_path, result("a"), result("b", None)) == 1
        told = capsys.readouterr()
        assert "1 case(s), tensorboard" in told.out
        assert "1 case(s) left out: no launch, or no figure that can be trusted" in told.err

    def test_a_file_stands_in_the_folders_place(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "log").write_text("mine")
        with pytest.raises(SystemExit):
            export(tmp_path, result())
        assert "name it with --output FOLDER" in capsys.readouterr().err
        assert (tmp_path / "log").read_text() == "mine"

    def test_without_the_package_a_line_says_what_installs_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(event_files, "find_spec", lambda _name: None)
        with pytest.raises(SystemExit):
            export(tmp_path, result())
        assert "pip install 'pytest-llmperf[tensorboard]'" in capsys.readouterr().err
        assert not (tmp_path / "log").exists()
