"""The user's own folders, as the XDG base directories have them; and baselines above a folder, in a git work tree."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import chain
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder ``name`` of the cache, which is kept between runs; ``LLMPERF_CACHE_DIR`` names another cache."""
    return _of_the_user("XDG_CACHE_HOME", "~/.cache") / name


def state_folder() -> Path:
    """Where runs leave what nothing could make again, unlike in a cache; ``LLMPERF_CACHE_DIR`` names both."""
    return _of_the_user("XDG_STATE_HOME", "~/.local/state")


def _of_the_user(variable: str, otherwise: str) -> Path:
    if named := os.environ.get("LLMPERF_CACHE_DIR"):
        return Path(named).absolute()
    # Unlike Path's, this expanduser raises nothing where nobody has a home.
    home = os.environ.get(variable) or os.path.expanduser(otherwise)  # noqa: PTH111
    return Path(home).absolute() / "pytest-llmperf"


def baselines_above(root: Path) -> Path | None:
    """The baselines that a folder above has under the name of ``root``, up to the top of the git work tree.

    ``None`` where ``root`` holds some itself, and outside of a work tree.
    """
    if _holds_baselines(root):
        return None
    found: list[Path] = []
    for each in (root.parent.resolve(), *root.parent.resolve().parents):
        found.append(each / root.name)
        if (each / ".git").exists():  # a folder, or a file where the work tree is a linked one or a submodule
            return next(filter(_holds_baselines, found[1:]), None)
    return None


def _holds_baselines(root: Path) -> bool:
    for path in chain(root.glob("*/*/*.json"), root.glob("*/*/*/*.json")):
        # Others may have folders of this name: in each file of ours stands which test recorded it.
        with suppress(OSError):
            if path.is_file() and '"recorded_by"' in path.read_text(encoding="utf-8", errors="replace"):
                return True
    return False
