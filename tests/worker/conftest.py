"""Shared by the tests that train."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from tests.worker import launching


@pytest.fixture(autouse=True, scope="session")
def own_leases(tmp_path_factory: pytest.TempPathFactory) -> object:
    """They run one after the other; whoever else trains on this host must not keep them waiting."""
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
