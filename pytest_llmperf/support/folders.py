"""The user's cache: what is kept between runs, whatever they are of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Its folder ``name``, as the XDG base directories have it; ``LLMPERF_CACHE_DIR`` names another cache."""
    named, cache_home = os.environ.get("LLMPERF_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named).absolute() / name
    # Unlike Path's, this one raises nothing where nobody has a home.
    home = cache_home or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(home).absolute() / "pytest-llmperf" / name


# The user's state: what runs leave that nothing could make again.


def state_folder() -> Path:
    """As the XDG base directories have it, and no cache, which people empty; ``LLMPERF_CACHE_DIR`` names both."""
    named, state_home = os.environ.get("LLMPERF_CACHE_DIR"), os.environ.get("XDG_STATE_HOME")
    if named:
        return Path(named).absolute()
    # Unlike Path's, this one raises nothing where nobody has a home.
    home = state_home or os.path.expanduser("~/.local/state")  # noqa: PTH111
    return Path(home).absolute() / "pytest-llmperf"


# What lies above a folder in the git work tree that it is in. Light: every run of pytest may ask.


def above(folder: Path) -> Iterator[Path]:
    """The folders above ``folder``, the nearest first, up to the work tree's own; none outside of one."""
    found: list[Path] = []
    for each in (folder.resolve(), *folder.resolve().parents):
        found.append(each)
        if (each / ".git").exists():  # a folder, or a file where the work tree is a linked one or a submodule
            return iter(found[1:])
    return iter(())


def baselines_above(root: Path) -> Path | None:
    """The baselines that a folder above has under the name of ``root``, where ``root`` holds none itself."""
    if _holds_baselines(root):
        return None
    return next((each / root.name for each in above(root.parent) if _holds_baselines(each / root.name)), None)


def _holds_baselines(root: Path) -> bool:
    return any(map(_is_a_baseline, _files(root)))


def _is_a_baseline(path: Path) -> bool:
    # Others may have folders of this name: in each file of ours stands which test recorded it.
    try:
        return '"recorded_by"' in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _files(root: Path) -> Iterator[Path]:
    for pattern in ("*/*/*.json", "*/*/*/*.json"):
        yield from (path for path in root.glob(pattern) if path.is_file())
