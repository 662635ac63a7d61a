"""Shared by the tests that train."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from pytest_llmperf import TrainSpec
from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from tests.worker import launching

# Of tiny models a second thread only waits, at full speed: libraries read it while they are loaded, so it is set here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files that share what takes long to start: a cold launch of two ranks, a fork server.
_TOGETHER = {
    "test_launches": "cold pair",
    "test_warm_launches": "cold pair",
    "test_changes": "patchable",
    "test_settings": "patchable",
    "test_traces": "patchable",
}
# In two processes at once these begin first, and short ones fill what is left.
_LONGEST = ("test_plan", "test_warm_launches", "test_settings", "test_node_servers")


class Together(LoadFileScheduling):
    """``--dist loadfile``, and a file in the process of those that it shares with.

    ``loadgroup`` would do, but with pytest 9.2 xdist 3.8 keeps no group together.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return _TOGETHER.get(Path(path).stem, path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together | None:
    return Together(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Whatever order others have made, the longest files first."""
    yield
    longest = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: longest.get(item.path.stem, len(longest)))


@pytest.fixture(autouse=True, scope="session")
def own_leases(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Of each process: whoever else trains on this host, one of these tests in another too, keeps nobody waiting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMPERF_LEASE_DIR", str(tmp_path_factory.mktemp("leases")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _fork_servers() -> Iterator[None]:
    yield
    launching.close()


@dataclass(frozen=True)
class ColdPair:
    """A cold launch of two ranks, and what was seen of it."""

    spec: TrainSpec
    record: Launch
    folder: Path
    seen: tuple[Progress, ...]
    began: float


@pytest.fixture(scope="session")
def cold_pair(tmp_path_factory: pytest.TempPathFactory) -> ColdPair:
    """Started once: torchrun and both ranks import everything."""
    spec = TrainSpec(
        model="llama-tiny",
        gpus=2,
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        sequence_length=32,
        model_precision="fp32",
        mixed_precision="bf16",
        steps=6,
        warmup_steps=2,
    )
    folder, seen, began = tmp_path_factory.mktemp("cold") / "run folder", list[Progress](), time.time()
    record = launching.launch(spec, folder, seen.append, start="cold")
    assert isinstance(record, Launch), record
    return ColdPair(spec, record, folder, tuple(seen), began)
