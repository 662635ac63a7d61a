"""Shared by the tests that train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from tests.worker.import_patch import PATCHABLE_PATH
from tests.worker.user import REPOSITORY

# Of tiny models a second thread only waits, at full speed: libraries read it while they are loaded, so it is set here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What torch.compile makes for a CPU's vectors is torch's to test, and to try each of its kinds out takes ten seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Files that share what takes long to start: a cold launch of two ranks, a fork server.
_TOGETHER = {
    "test_launches": "cold pair",
    "test_node_servers": "cold pair",
    "test_warm_launches": "cold pair",
    "test_arithmetic": "ligered",
    "test_parts": "ligered",
    "test_changes": "patchable",
    "test_input_pipeline": "patchable",
    "test_learning": "patchable",
    "test_parity": "patchable",
    "test_settings": "patchable",
    "test_traces": "patchable",
}
# In two processes at once these begin first, and short ones fill what is left.
_LONGEST = ("test_warm_launches", "test_settings", "test_script_ends", "test_script_loops", "test_plan")


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
    """Of each process: whoever else trains on this host, one of these tests in another too, keeps nobody waiting.

    Tokens of texts are no user's either.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Launches that change something in their ranks and those that do not are forked from one server.
        patch.setenv("PYTHONPATH", PATCHABLE_PATH)
        patch.setenv("LLMPERF_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
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
    seconds: float
    """By a stopwatch."""


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
    start = time.monotonic()
    record = launching.launch(spec, folder, seen.append, start="cold")
    seconds = time.monotonic() - start
    assert isinstance(record, Launch), record
    return ColdPair(spec, record, folder, tuple(seen), began, seconds)


@pytest.fixture(scope="session")
def ligered() -> dict[str, list[Any]]:
    """What ``tests.worker.ligered`` tells, by name."""
    pytest.importorskip("liger_kernel")
    words = [sys.executable, "-W", "ignore", "-m", "tests.worker.ligered"]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("["))
    return {name: told for name, *told in lines}
