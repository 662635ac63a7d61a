"""The user's cache: what is kept between runs, whatever they are of."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Its folder ``name``, as the XDG base directories have it; ``LLMPERF_CACHE_DIR`` names another cache."""
    named, cache_home = os.environ.get("LLMPERF_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named).absolute() / name
    # Unlike Path's, this one raises nothing where nobody has a home.
    home = cache_home or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(home).absolute() / "pytest-llmperf" / name
