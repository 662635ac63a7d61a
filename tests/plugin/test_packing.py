"""Several cases at once on a node of eight faked GPUs (pytest -n 4): each on its own by lease, wide ones too."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

pytest.importorskip("xdist")

# A launch keeps its GPUs for as long as a test can see, and writes down which and when.
_CONFTEST = """
import json
import os
import time
from pathlib import Path
from unittest import mock

from pytest_llmperf.launch import machine
from pytest_llmperf.launch import machine
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.machine import Machine
from pytest_llmperf.launch import local
from tests import fakes

fakes.install()
GPUS = tuple(Gpu(index=i, uuid=f"GPU-{i}", name="Fake H200", memory_bytes=140 * 2**30) for i in range(8))
mock.patch.object(machine, "find_machine", return_value=Machine(gpus=GPUS, cpu_name="Fake CPU", cores=8)).start()
mock.patch.object(machine, "_POLL_SECONDS", 0.02).start()

class TimedLauncher(fakes.FakeLauncher):
    def launch(self, request, watch):
        start = time.monotonic()
        time.sleep(0.25)
        result = super().launch(request, watch)
        use = [request.spec.gpus, [gpu.index for gpu in request.gpus], start, time.monotonic()]
        Path(f"use-{os.getpid()}-{start}.json").write_text(json.dumps(use))
        return result

mock.patch.object(local, "LocalLauncher", TimedLauncher).start()
"""

_CASES = """
import pytest

from pytest_llmperf import TrainSpec

@pytest.mark.parametrize("sequence_length", [16, 32, 64, 128])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_case(perf, gpus, sequence_length):
    perf.check(TrainSpec(model="llama-tiny", gpus=gpus, sequence_length=sequence_length, attention="sdpa"))
"""


class Use(NamedTuple):
    """One launch: how many GPUs it asked for, which it had, from when until when."""

    asked: int
    gpus: list[int]
    start: float
    end: float

    def meets(self, other: Use) -> bool:
        return self.start < other.end and other.start < self.end


@pytest.fixture
def node(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A node of eight GPUs, and cases of 1, 2 and 8."""
    monkeypatch.setenv("LLMPERF_LEASE_DIR", str(project.path / "leases"))
    project.pytester.makeconftest(_CONFTEST)
    project.pytester.makepyfile(test_mine=_CASES)
    return project


def uses(node: Project) -> list[Use]:
    """What ran since the last time."""
    paths = [*node.path.glob("use-*.json")]
    found = [Use(*json.loads(path.read_text())) for path in paths]
    for path in paths:
        path.unlink()
    assert found
    assert all(len(set(use.gpus)) == use.asked for use in found)
    for one, other in combinations(found, 2):
        assert not (one.meets(other) and set(one.gpus) & set(other.gpus)), f"a GPU of two launches: {one} {other}"
    return found


def most_at_once(found: list[Use]) -> int:
    """GPUs in use at the busiest moment."""
    return max(sum(other.asked for other in found if other.start <= use.start < other.end) for use in found)


def verdicts(node: Project, *options: str) -> dict[str, Any]:
    node.run("--perf-json", "out.json", *options, gpus="8")
    results = json.loads((node.path / "out.json").read_text())["results"]
    return {result["id"]: (result["verdict"], result["reason"]) for result in results}


def test_packed_cases_have_gpus_of_their_own_and_wide_ones_wait_for_all(node: Project) -> None:
    result = node.run("-n", "4", "--update-baselines=new", gpus="8")
    assert result.ret == 0, result.stdout.str()
    result.stdout.no_fnmatch_line("*at a time*")
    found = uses(node)
    assert Counter(use.asked for use in found) == {1: 4, 2: 4, 8: 4}
    assert any(one.meets(other) for one, other in combinations(found, 2)), "nothing was packed"
    for wide in (use for use in found if use.asked == 8):
        assert not any(wide.meets(other) for other in found if other is not wide)


def test_packing_changes_no_verdict(node: Project) -> None:
    node.fake()
    assert node.run("--update-baselines=new", gpus="8").ret == 0
    node.fake(by={"seq32": {"step_seconds": 0.2}, "seq64": {"reserved_bytes": 2**31}})
    alone, packed = verdicts(node), verdicts(node, "-n", "4")
    assert packed == alone
    assert Counter(verdict for verdict, _ in alone.values()) == {"pass": 6, "regressed": 6}


def test_a_parallel_run_uses_no_more_than_it_may(node: Project) -> None:
    result = node.run("-n", "4", "--update-baselines=new", gpus="2")
    result.stdout.fnmatch_lines(["*: 2 at a time;*"])
    found = uses(node)
    assert Counter(use.asked for use in found) == {1: 4, 2: 4}
    assert most_at_once(found) == 2
    assert len({gpu for use in found for gpu in use.gpus}) == 2


def test_two_parallel_runs_share_a_node(node: Project) -> None:
    (node.path / "other").mkdir()
    words = ("-p", "no:randomly", "-n", "2", "--gpus", "8", "--update-baselines=new")
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        first = node.pytester.popen([*node.pytester._getpytestargs(), *words], stdout=nowhere, stderr=nowhere)
    second = node.run("-n", "2", "--update-baselines=new", "--perf-baselines=other", gpus="8")
    assert (second.ret, first.wait(60)) == (0, 0)
    assert len(uses(node)) == 24


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("fake-h200-140gib", "*1 launch(es), 0.02 GPU-hours, *"),
        ("fake-h200-140gib", "--gpus 8: only 0 GPU(s) visible here; 8 assumed, with the times of fake-h200-140gib"),
        ("", "--gpus 8: only 0 *no baseline tells how long *; say which do with *=KIND (fake-h200-140gib)"),
        ("", "1 case(s), 1 launch(es); none has a baseline that tells how long it takes"),
        ("typo", "*no baseline tells how long *; there are none of typo; say which *(fake-h200-140gib)"),
    ],
)
def test_where_the_gpus_are_not_a_dry_run_says_on_what_it_rests(node: Project, kind: str, said: str) -> None:
    assert node.run("-k", "8-16", "--update-baselines=new", gpus="8").ret == 0
    node.pytester.makeconftest("from tests.fakes import install\n\ninstall()\n")
    options = ["-o", f"perf_machine={kind}"] if kind else []
    result = node.run("-k", "8-16", "--perf-dry-run", *options, gpus="8")
    result.stdout.fnmatch_lines([said])
    assert result.ret == 0
    assert node.run("-k", "8-16", gpus="8").ret == pytest.ExitCode.USAGE_ERROR


def test_of_some_of_its_gpus_a_dry_run_knows_the_others(node: Project, golden: Golden) -> None:
    assert node.run("-k", "8-16", "--update-baselines=new", gpus="8").ret == 0
    conftest = node.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("range(8)", "range(2)"))
    result = node.run("-k", "8-16", "--perf-dry-run", gpus="8")
    result.stdout.fnmatch_lines(["1 case(s), 1 launch(es), 0.02 GPU-hours, *"])
    golden.lines(result.stdout, "; 6 assumed,")
    assert result.ret == 0
