"""Shared by the tests that train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
