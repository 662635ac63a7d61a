"""The commit of the tree that runs, and what in it is not committed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 20


@dataclass(frozen=True)
class Revision:
    """``commit`` is empty outside of version control."""

    commit: str
    changed: tuple[str, ...]
    """Tracked files that differ from the commit; baselines apart, since recording changes them."""


def find_revision(root: Path, baselines: Path) -> Revision:
    """The revision of ``root``; none where it is no git checkout or git is absent."""
    commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
    if not commit:
        return Revision("", ())
    listed = _git(root, "status", "--porcelain", "--untracked-files=no", "-z")
    home = Path(_git(root, "rev-parse", "--show-toplevel").strip() or root)
    # A rename's second entry is its old name, without the three characters of a state.
    names = [entry[3:] for entry in listed.split("\0") if entry[2:3] == " "]
    changed = [name for name in names if not (home / name).resolve().is_relative_to(baselines.resolve())]
    return Revision(commit, tuple(changed))


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
