"""Waiting for what another process does, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(seen: Callable[[], object], seconds: float = 60.0, otherwise: Callable[[], object] = lambda: "") -> None:
    """Until ``seen`` is true; after ``seconds`` the test fails with ``otherwise`` to read."""
    deadline = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < deadline, otherwise() or f"waited {seconds:g} s in vain"
        time.sleep(0.1)
