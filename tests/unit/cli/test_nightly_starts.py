"""The nightly script's starts: when one goes on in another, and what the last one does. SLURM's are scripts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pytest_llmperf.cli.sbatch import signal_seconds
from tests.golden import Golden
from tests.unit.cli.test_cli_submit import headers, script_of

# Like a pytest that lost a node: what needs two has to wait, what needs one does not.
_PYTHON = """#!/bin/sh
case "$*" in *gpus-2.json*) exit ${WIDE_ENDS} ;; esac
exit 0
"""
_WAITING = """#!/bin/bash
trap 'echo "pytest got USR1"; exit 75' USR1
trap 'echo "pytest got TERM"; exit 75' TERM
kill -USR1 $PPID
for _ in {1..100}; do sleep 0.1; done
"""
_SCONTROL = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *"show job"*) echo "JobId=7 Name=x Restarts=$SLURM_RESTART_COUNT BatchFlag=1" ;; esac
"""


@pytest.fixture
def night(tmp_path: Path) -> Night:
    return Night(tmp_path)


class Night:
    """One start of a packed night of two widths on two nodes."""

    def __init__(self, home: Path) -> None:
        self._home = home
        for name, text in (("python", _PYTHON), ("scontrol", _SCONTROL)):
            (home / name).write_text(text)
            (home / name).chmod(0o755)
        (home / "checkout").mkdir()

    def start(self, *, restarts: int, wide_ends: int) -> tuple[int, list[str], str]:
        """Its exit code, what it said of each width, and what it asked of SLURM."""
        text = "[cluster]\ngpus_per_node = 1\n[suite]\ngpus = 1 2\nmax_restarts = 1\n"
        variables = {
            "PATH": f"{self._home}:{os.environ['PATH']}",
            "CALLS": str(self._home / "calls"),
            "WIDE_ENDS": str(wide_ends),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_RESTART_COUNT": str(restarts),
            "LLMPERF_CHECKOUT": str(self._home / "checkout"),
            "LLMPERF_PYTHON": "python",
        }
        script = script_of(self._home, text).replace("sleep 60", ":")
        done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)
        words = ("exit code", "requeued", "pytest got")
        said = [line for line in done.stdout.splitlines() if any(word in line for word in words)]
        return done.returncode, said, (self._home / "calls").read_text()


def test_the_time_limits_signal_reaches_pytest_as_what_it_is(night: Night, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(_WAITING)
    code, said, asked = night.start(restarts=0, wide_ends=0)
    assert code == 75
    assert "pytest got TERM" not in said
    assert "requeue 7" in asked


def test_a_start_that_can_go_on_in_another_stops_where_it_was(night: Night, golden: Golden) -> None:
    code, said, asked = night.start(restarts=0, wide_ends=75)
    assert code == 75
    golden(said)
    assert "requeue 7" in asked


def test_the_last_start_runs_what_is_narrower_and_gives_no_node_back(night: Night, golden: Golden) -> None:
    code, said, asked = night.start(restarts=1, wide_ends=75)
    assert code == 75
    golden(said)
    assert "requeue" not in asked
    assert "NumNodes" not in asked, "SLURM might keep the one that is lost"


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_width_that_fails_stops_nothing(night: Night, restarts: int, golden: Golden) -> None:
    code, said, asked = night.start(restarts=restarts, wide_ends=1)
    assert code == 1
    golden(said)
    assert "NumNodes=1" in asked


@pytest.mark.parametrize(("time", "seconds"), [("1", 7), ("2", 15), ("8", 60), ("02:00:00", 60)])
def test_a_short_job_is_not_told_to_stop_when_it_has_just_begun(tmp_path: Path, time: str, seconds: int) -> None:
    text = f"[cluster]\ngpus_per_node = 4\n[suite]\ngpus = 1\n[sbatch]\ntime = {time}\n"
    assert f"--signal=B:USR1@{seconds}" in headers(script_of(tmp_path, text))


def test_a_job_of_seconds_is_told_all_the_same() -> None:
    assert signal_seconds(1 / 3600) == 1
