"""Launches that overlap, under the real torchrun: one begins while the one before ends, and shares nothing timed."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch import machine, process
from pytest_llmperf.launch import watch as watching
from pytest_llmperf.launch.local import LocalSite
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.launch.site import SlurmOptions, Wanted
from pytest_llmperf.records.failure import END
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.steady_state import MOST_GROWTH
from tests.waiting import until
from tests.worker import launching, user
from tests.worker.import_patch import LIGHT_TOO, after_import
from tests.worker.user import LIGHT_PATH, REPOSITORY

pytest.importorskip("torch")

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

SPEC = TrainSpec(model="llama-tiny", micro_batch_size=2, sequence_length=32, steps=5, min_steps=5, warmup_steps=1)


class Turns:
    """A run that launches on the CPU, one launch after the other."""

    def __init__(self, folder: Path, *, overlap: bool = True) -> None:
        self.folder, self.said, self._count = folder, list[str](), 0
        wanted = Wanted(
            gpus=0,
            start="warm",
            overlap=overlap,
            slurm=SlurmOptions(),
            folder=lambda: folder,
        )
        self.site = LocalSite(wanted)

    def launch(self, spec: TrainSpec = SPEC, watch: Any = lambda _: None) -> Any:
        self._count += 1
        with self.site.lease(spec.gpus, (), self.said.append, shared=False, wait=lambda _: None):
            return self.site.launch(self.request(spec), watch, self.said.append)

    def request(self, spec: TrainSpec) -> LaunchRequest:
        warm = self.site.warm_start(self.said.append)
        return LaunchRequest(spec=spec, folder=self.run, gpus=(), timeout_seconds=240, warm=warm)

    @property
    def run(self) -> Path:
        """The folder of the last launch."""
        return self.folder / f"run-{self._count}"

    def reached(self, number: int) -> dict[str, float]:
        """When the launch of this number came to its phases."""
        return dict(json.loads((self.folder / f"run-{number}" / "progress.json").read_text())["reached"])


def ranks(folder: Path) -> list[psutil.Process]:
    """Those of a launch that there still are."""
    found = []
    for path in folder.glob("rank-*.pid"):
        try:
            found.append(psutil.Process(int(path.read_text())))
        except psutil.Error:
            continue
    return [one for one in found if process.is_alive(one)]


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    """Whose ranks train a small network with plain PyTorch."""
    monkeypatch.setenv("PYTHONPATH", LIGHT_PATH)
    found = Turns(tmp_path)
    yield found
    found.site.close()
    assert all(ranks(folder) == [] for folder in tmp_path.glob("run-*"))


# A rank that has done everything and does not end, or not well.
_LINGERS = """import atexit, os, time
    own = module.main
    def main(folder):
        own(folder)
        {then}
    module.main = main"""


def lingering(folder: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    patch = after_import("pytest_llmperf.worker.__main__", _LINGERS.format(then=then))
    (folder / "sitecustomize.py").write_text(LIGHT_TOO + patch)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{REPOSITORY}")


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_overlapped_launches_are_as_those_that_are_not(tmp_path: Path, gpus: int) -> None:
    spec, found = replace(SPEC, gpus=gpus), dict[bool, list[Launch]]()
    for overlap in (True, False):
        turns = Turns(tmp_path / str(overlap), overlap=overlap)
        turns.site._servers = launching.shared_pool()[0]
        found[overlap] = [turns.launch(spec) for _ in range(3)]
        turns.site._former.gone()
        assert turns.said == []
        reached = [turns.reached(number) for number in (1, 2, 3)]
        assert ["yielding" in each for each in reached] == [False, overlap, overlap]
    one, other = found[True][-1], found[False][-1]
    assert one.losses == other.losses
    held = zip(one.ranks[0].allocated_bytes, other.ranks[0].allocated_bytes, strict=True)
    assert all(abs(a - b) < MOST_GROWTH for a, b in held)  # of a CPU, whose malloc's count is never the same
    counts = [[(row.kind, row.name, row.count) for row in each.trace.rows] for each in (one, other)]
    assert counts[0] == counts[1] != []
    assert one.evidence == other.evidence
    assert one.learning == other.learning
    for launch in found[True]:
        assert sum(launch.phases.values()) == pytest.approx(launch.wall_seconds, abs=0.01)


def test_what_is_timed_begins_after_the_former_processes_are_gone(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    lingering(turns.folder, monkeypatch, "time.sleep(1.5); (folder / 'ended').write_text(str(time.time()))")
    begun = time.monotonic()
    first = turns.launch()
    assert isinstance(first, Launch)
    assert not (turns.run / "ended").exists()  # nobody waits for it
    second = turns.launch()
    assert sum([*first.phases.values(), *second.phases.values()]) < time.monotonic() - begun, "no second counts twice"
    ended, reached = float((turns.folder / "run-1" / "ended").read_text()), turns.reached(2)
    assert reached["importing"] < ended < reached["preparing"] < reached["training"]
    assert second.phases[END] > reached["preparing"] - reached["yielding"]
    assert turns.said == []


@pytest.mark.parametrize(
    ("then", "said", "is_error"),
    [
        ("time.sleep(1000)", "did not end within 1 s, and was killed", False),
        ("time.sleep(0.5); os.kill(os.getpid(), 9)", "ended with 1", True),
        ("time.sleep(0.5); os._exit(3)", "ended with 1", True),
    ],
)
def test_an_end_that_is_not_well_is_told_and_costs_no_figure(
    turns: Turns, monkeypatch: pytest.MonkeyPatch, then: str, said: str, is_error: bool
) -> None:
    monkeypatch.setattr(watching, "_LEAVE_SECONDS", 1.0)
    lingering(turns.folder, monkeypatch, f"'run-1' in str(folder) and ({then.replace('; ', ', ')})")
    launches = [turns.launch(), turns.launch()]
    assert all(isinstance(each, Launch) for each in launches), launches
    (line,) = turns.said
    assert said in line
    assert [each.startswith(line) for each in turns.site.bad_ends()] == [True] * is_error
    assert ranks(turns.folder / "run-1") == []


_CASE = """
from pytest_llmperf import TrainSpec

def test_it(perf):
    perf.check(TrainSpec(model="llama-tiny", sequence_length=32, steps=5, min_steps=5, warmup_steps=1))
"""


def test_an_error_after_the_last_record_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering(tmp_path, monkeypatch, "time.sleep(0.5); os._exit(3)")
    with user.start(user.make(tmp_path, _CASE), "--update-baselines=new", path=f"{tmp_path}:{REPOSITORY}") as run:
        run.wait(240)
    document, log = json.loads((tmp_path / user.RESULTS).read_text()), (tmp_path / "log").read_text()
    assert (run.returncode, document["exit_code"]) == (1, 1), log
    assert [result["verdict"] for result in document["results"]] == ["new"]
    assert "after its record" in log


def test_a_former_launch_whose_server_is_replaced_ends_by_itself(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering(turns.folder, monkeypatch, "time.sleep(1.5); (folder / 'ended').touch()")
    turns.launch()
    with (turns.folder / "sitecustomize.py").open("a") as source:
        source.write("# changed\n")
    assert isinstance(turns.launch(), Launch)
    assert (turns.folder / "run-1" / "ended").exists()
    assert turns.said == []


def test_ctrl_c_in_the_overlap_leaves_nothing(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering(turns.folder, monkeypatch, "time.sleep(3)")
    turns.launch()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what began in the background ignores it
    interrupt = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            turns.launch()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ranks(turns.run) == []
    turns.site.close()
    assert ranks(turns.folder / "run-1") == []


def test_its_lease_is_held_until_it_is_gone(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering(turns.folder, monkeypatch, "time.sleep(1.5)")
    turns.launch()
    with machine._folder() as folder:
        assert not machine._Lock(folder, "cpu").is_acquired()
        until(lambda: not ranks(turns.run))
        lock = machine._Lock(folder, "cpu")
        until(lock.is_acquired)
        lock.release()


# A file system without locks, to the rank that comes to its turn.
_UNLOCKED = """import types
    def flock(*_):
        raise OSError(37, "No locks available")
    module.fcntl = types.SimpleNamespace(flock=flock, LOCK_SH=module.fcntl.LOCK_SH)"""


def test_where_files_cannot_be_locked_launches_do_not_overlap(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = after_import("pytest_llmperf.records.ranks", _UNLOCKED)
    (turns.folder / "sitecustomize.py").write_text(LIGHT_TOO + patch)
    monkeypatch.setenv("PYTHONPATH", f"{turns.folder}:{REPOSITORY}")
    monkeypatch.setattr(process, "locked", lambda path: nullcontext(path.touch() or False))
    launches = [turns.launch(), turns.launch()]
    assert all(isinstance(each, Launch) for each in launches), launches
    assert "yielding" not in turns.reached(2)


def test_who_waits_for_the_hardware_is_not_passed_over(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering(turns.folder, monkeypatch, "time.sleep(1.5)")
    turns.launch()
    monkeypatch.setattr(machine, "is_awaited", lambda _: True)
    turns.launch()
    assert "yielding" not in turns.reached(2)
