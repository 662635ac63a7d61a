"""What lies above a folder in the git work tree that it is in. Light: every run of pytest may ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


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
