"""One thread for linear algebra: several take up to a hundred times as long where a training has the cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any


@contextmanager
def one_thread() -> Iterator[None]:
    """NumPy's products and inverses inside are computed by one thread; as before after it."""
    with _controller().limit(limits=1, user_api="blas"):
        yield


@lru_cache(maxsize=1)
def _controller() -> Any:
    import numpy  # noqa: ICN001, PLC0415, F401 - what is not loaded by then is not found
    from threadpoolctl import ThreadpoolController  # noqa: PLC0415

    return ThreadpoolController()
