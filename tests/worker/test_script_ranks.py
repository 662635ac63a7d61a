"""Scripts of two ranks, launched as a user launches them: their shares are one record."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from pytest_llmperf import ScriptSpec
from pytest_llmperf.analysis.step_difference import last_rank, points_to, step_difference
from pytest_llmperf.records.launch import Launch
from tests.worker.launching import launched
from tests.worker.scripts import FOLDER
from tests.worker.user import QUICK

pytestmark = pytest.mark.torchrun


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 ranks.py"
#: Seconds between a step's end by the script's clock and by ours, where nothing holds the rank up.
AT_ONCE = 0.002
Trained: TypeAlias = tuple[Launch, list[list[list[float]]]]


def trained(words: str, folder: Path, env: dict[str, str] | None = None, **fields: Any) -> Trained:
    """The record, and each rank's own: when its steps ended, their losses, and their tokens.

    A busy host may hold a rank up between its clock and ours: then twice again at most. Steps that were taken for
    others are off each time.
    """
    found = once(words, folder, env or {}, **fields)
    for place in (folder / "again", folder / "once-more"):
        if any(sorted(apart)[1] >= AT_ONCE for apart in clocks_apart(*found)):
            found = once(words, place, env or {}, **fields)
    return found


def once(words: str, folder: Path, env: dict[str, str], **fields: Any) -> Trained:
    home = folder / "home"
    shutil.copytree(FOLDER, home)
    command = f"python {words}"
    variables = {"OWN_CLOCK": str(folder / "clock"), "OMP_NUM_THREADS": "1", **env}
    variables |= {"PYTHONPATH": str(QUICK)}  # nothing is compiled, and only who says SHARDS shards
    given = {"gpus": 2, "steps": 10, "warmup_steps": 2, **fields}
    spec = ScriptSpec(command=command, env=variables, cwd=str(home), **given)
    record = launched(spec, folder / "launch", start="cold")
    own = [path.read_text(encoding="utf-8").splitlines() for path in sorted(folder.glob("clock-*"))]
    return record, [[json.loads(line) for line in lines] for lines in own]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """By FSDP2, with a rank that might sleep and does not."""
    return trained(f"{TORCHRUN} late", tmp_path_factory.mktemp("sharded"), {"SHARDS": "1", "SLEEP": "0"})


@pytest.mark.parametrize("kind", ["no_sync", "sharded"])
def test_two_ranks_of_torchrun_are_one_record(tmp_path: Path, kind: str, sharded: Trained) -> None:
    record, own = sharded if kind == "sharded" else trained(f"{TORCHRUN} {kind}", tmp_path)
    assert_is(record, own)
    collectives = {row.name for row in record.trace.rows if row.name.startswith("c10d::")}
    wanted = {"no_sync": "c10d::allreduce_", "sharded": "c10d::_reduce_scatter_base_"}
    assert wanted[kind] in collectives
    exchanges = {row.name: row.count for row in record.trace.rows if row.kind == "exchange"}
    payload = {row.name: row.count for row in record.trace.rows if row.kind == "payload"}
    # FSDP2 gathers two blocks twice and the rest once: that stays whole until it goes back.
    assert exchanges.get("all_gather", 0) == {"no_sync": 0, "sharded": 5}[kind]
    assert payload.keys() == exchanges.keys()
    places = record.trace.places["exchange"]
    assert sum(places.values()) == sum(exchanges.values())
    assert any(place.endswith("].backward()" if kind == "no_sync" else "loss.backward()") for place in places)
    if kind == "no_sync":
        assert payload["all_reduce"] == 4 * record.parameters


def test_a_rank_that_sleeps_in_its_backward_pass_is_the_one_that_others_wait_for(
    tmp_path: Path, sharded: Trained
) -> None:
    late = trained(f"{TORCHRUN} late", tmp_path, {"SHARDS": "1", "SLEEP": "0.2"}, steps=6)[0].trace
    usual = sharded[0].trace
    found = last_rank(usual, late)
    told = re.match(r"the others wait for rank 1, (\S+) ms a step in exchanges \(.* of it\): its host takes ", found)
    assert told is not None
    assert 100 < float(told[1]) < 400
    assert found in points_to(step_difference(usual, late))


def test_ranks_that_the_script_spawns_are_one_record(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    assert_is(*trained("ranks.py spawn", tmp_path, {"PORT": str(port)}, seed=7, workdir="own"))
    assert [(tmp_path / "home" / f"seed-{rank}").read_text() for rank in range(2)] == ["7", "8"]


def clocks_apart(record: Launch, own: list[list[list[float]]]) -> list[list[float]]:
    """Of each rank by how many seconds its timed steps are apart by its clock and by ours."""
    return [
        [
            abs(end[0] - begin[0] - seen)
            for begin, end, seen in zip(lines[1:], lines[2:], rank.step_seconds[2:], strict=False)
        ]
        for rank, lines in zip(record.ranks, own, strict=True)
    ]


def assert_is(record: Launch, own: list[list[list[float]]]) -> None:
    assert [rank.rank for rank in record.ranks] == [0, 1]
    for rank, lines, apart in zip(record.ranks, own, clocks_apart(record, own), strict=True):
        assert len(rank.step_seconds) == 10
        assert rank.tokens_per_step == lines[2][2]
        assert sorted(apart)[1] < AT_ONCE, apart
    assert record.tokens_per_step == sum(int(lines[2][2]) for lines in own)
    assert record.losses == pytest.approx([line[1] for line in own[0][:10]], abs=1e-6)
    assert record.trace.steps == 3, record.trace.none
    assert record.evidence["tokens"] == "counted"
