"""A plan of commands for a GPU host: what is run within its time, and what comes back."""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path

import pytest

from tools import visit

PLAN = """
[[lane]]
gpus = "0,1"
steps = [
    { name = "too-long", seconds = 0.3, run = "sleep 60" },
    { name = "told", seconds = 20, run = "bash -c 'echo gpus $CUDA_VISIBLE_DEVICES $W'", env = { W = 5 } },
    { name = "stores", seconds = 20, run = "touch {baselines}/new.json" },
    { name = "no-time-left", seconds = 9000, run = "false" },
]

[[lane]]
gpus = 2
steps = [
    { name = "not-there", seconds = 20, run = "no-such-program" },
    { name = "fails", seconds = 20, run = "false" },
]
"""


def test_steps_run_within_their_time_and_all_they_leave_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(PLAN)
    assert visit.main([str(plan), "--out", str(out), "--seconds", "60"]) == 1
    codes = {row["name"]: row["code"] for row in json.loads((out / "visit.json").read_text())}
    assert codes == {"too-long": -2, "told": 0, "stores": 0, "no-time-left": None, "not-there": 127, "fails": 1}
    assert (out / "told.log").read_text() == "gpus 0,1 5\n"
    with tarfile.open(out / "visit.tgz") as packed:
        assert {"told.log", "visit.json", "lane-0/baselines/new.json"} <= {*packed.getnames()}


def test_a_second_plan_has_the_gpus_after_those_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    lanes = visit.read_plans([tmp_path / "plan.toml"] * 2)
    assert [lane["gpus"] for lane in lanes] == [[0, 1], [2], [3, 4], [5]]


def test_a_step_to_begin_with_is_one_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    with pytest.raises(SystemExit):
        visit.main([str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out"), "--seconds", "60", "--from", "told2"])
    assert "--from told2: no step of" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "plan", sorted((visit.REPOSITORY / "tools" / "visits").glob("*.toml")), ids=lambda path: path.stem
)
def test_a_plan_of_ours_fits_a_call_and_names_each_step_once(plan: Path) -> None:
    for lane in visit.read_plans([plan]):
        names = [step["name"] for step in lane["steps"]]
        assert len({*names}) == len(names)
        assert all(step["seconds"] <= 600 for step in lane["steps"])


def test_a_host_whose_pytest_lacks_the_plugin_is_left_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(visit, "entry_points", lambda **_: [])
    (tmp_path / "plan.toml").write_text(PLAN)
    with pytest.raises(SystemExit):
        visit.main([str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out"), "--seconds", "60"])
    assert "entry point llmperf" in capsys.readouterr().err
