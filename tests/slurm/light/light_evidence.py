"""In the place of ``pytest_llmperf.worker.evidence``: what rank 0 says is what all say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def merged(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return dict(by_rank[0])
