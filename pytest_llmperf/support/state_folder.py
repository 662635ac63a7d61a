"""The user's state: what runs leave that nothing could make again."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """As the XDG base directories have it, and no cache, which people empty; ``LLMPERF_CACHE_DIR`` names both."""
    named, state_home = os.environ.get("LLMPERF_CACHE_DIR"), os.environ.get("XDG_STATE_HOME")
    if named:
        return Path(named).absolute()
    # Unlike Path's, this one raises nothing where nobody has a home.
    home = state_home or os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path(home).absolute() / "pytest-llmperf"
