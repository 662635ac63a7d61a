"""Real scripts on cores that busy loops use, or nobody: what was slow by itself is told from what waited."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.verdict import Judgement, judge
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.spec import ScriptSpec
from tests.shelf import accept
from tests.worker.scripted import launch, loop
from tests.worker.user import QUICK

pytest.importorskip("torch")

from pytest_llmperf.observe import measurement

pytestmark = [pytest.mark.torchrun]

STEPS: dict[str, Any] = {"steps": 12, "warmup_steps": 2}
COMPUTES = "loss = loss + sum((torch.randn(256, 1024) @ torch.randn(1024, 1024)).mean() for _ in range(2))"
# Until the script has imported all that it needs they wait: it would share its cores with them for that, too.
WAITS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
while True:
    pass
"""
BEGINS = "pathlib.Path({begun!r}).touch(); time.sleep(0.2)"


@contextmanager
def busy_loops(number: int, begun: Path) -> Iterator[None]:
    """While the file is there."""
    loops = [subprocess.Popen([sys.executable, "-c", WAITS, str(begun)]) for _ in range(number)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def launched(folder: Path, each: str) -> Launch:
    found = launch(loop(folder, before=BEGINS.format(begun=str(folder / "begun")), each=each), **STEPS)
    assert isinstance(found, Launch), found
    return found


def beside_a_faster_one(run: Launch) -> Judgement:
    """Two launches as ``run``, held against one of which each step took a third as long, on whatever cores."""
    spec = ScriptSpec(command="python train.py", **STEPS)
    ranks = tuple(
        replace(rank, step_seconds=tuple(each / 3 for each in rank.step_seconds), core_seconds=()) for rank in run.ranks
    )
    stored, policy = replace(run, ranks=ranks), Policy.for_cpu().merged({"tokens_per_second_per_gpu": 0.5})
    checks = judge([stored], None, policy).checks
    how: dict[str, Any] = {"judged": None, "spec": spec, "machine": "m", "verdict": "new", "checks": checks}
    how |= {"reason": "", "recorded_at": "2026-01-01T00:00:00Z", "recorded_by": "t.py::t"}
    return judge([run, run], accept(None, launches=[stored], **how), policy)


@pytest.mark.skipif(not measurement.Clock().cores(), reason="nobody tells of cores here, or a container has a quota")
def test_busy_loops_are_told_from_a_slow_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(QUICK))  # nothing is compiled
    with busy_loops(2 * len(os.sched_getaffinity(0)), tmp_path / "busy" / "begun"):
        busy = launched(tmp_path / "busy", COMPUTES)
    slow = launched(tmp_path / "slow", "time.sleep(0.05)")
    assert beside_a_faster_one(busy).verdict == "inconclusive"
    assert beside_a_faster_one(slow).verdict == "regressed"


@pytest.mark.parametrize(
    ("file", "told", "counted"),
    [
        ("cpu.max", "max 100000\n", 3),
        ("cpu.max", "200000 100000\n", 0),
        ("cpu/cpu.cfs_quota_us", "-1\n", 3),
        ("cpu/cpu.cfs_quota_us", "200000\n", 0),
    ],
)
def test_what_waits_for_a_quota_is_not_said_to_wait_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, told: str, counted: int
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(told, encoding="ascii")
    monkeypatch.setattr(measurement, "_CGROUP", tmp_path)
    assert len(measurement.Clock().cores()) == counted
