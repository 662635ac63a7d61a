"""The commit of the tree that runs, and what in it is not committed."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SECONDS = 20

# ``https://user:token@host/a/b.git`` and ``git@host:a/b`` are one.
_REMOTE = re.compile(r"(?:\w+://)?(?:[^/]*@)?([^?#]*?)(?:\.git)?/?(?:[?#].*)?$")

_SOURCES = frozenset({".py", ".pyx", ".c", ".cpp", ".cu", ".cuh", ".h", ".toml", ".cfg"})


@dataclass(frozen=True)
class Revision:
    """``commit`` is empty outside of version control."""

    commit: str
    changed: tuple[str, ...]
    """Files that differ from the commit, or that could decide what runs and are in none; baselines apart."""

    def document(self) -> dict[str, Any]:
        """Return what ``--perf-json`` says of it; nothing outside of version control."""
        return {"revision": {"commit": self.commit, "changed": len(self.changed)}} if self.commit else {}


def project_of(root: Path) -> str:
    """Tell a project from others in a history: by its remote, without credentials, else the folder of its git."""
    url = _git(root, "config", "--get", "remote.origin.url").strip()
    if url and not url.startswith("."):
        found = _REMOTE.match(url)
        return found[1].replace(":", "/", 1) if found else ""
    common = _git(root, "rev-parse", "--git-common-dir").strip()
    if not common:
        return str(root.resolve())
    home = (root / common).resolve()
    return str(home.parent if home.name == ".git" else home)


def find_revision(root: Path, baselines: Path) -> Revision:
    """None where ``root`` is no git checkout or git is absent."""
    commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
    if not commit:  # before the first one, nothing is committed; outside of version control nothing can be
        return Revision("", tuple(_untracked(root, baselines)))
    listed = _git(root, "status", "--porcelain", "--untracked-files=no", "-z")
    home = Path(_git(root, "rev-parse", "--show-toplevel").strip() or root)
    # Recording changes baselines. A rename's second entry is its old name, without the three characters of a state.
    names = [entry[3:] for entry in listed.split("\0") if entry[2:3] == " "]
    changed = [name for name in names if not (home / name).resolve().is_relative_to(baselines.resolve())]
    return Revision(commit, (*changed, *_untracked(root, baselines)))


def has_commit(root: Path, name: str) -> bool:
    """Whether ``name`` is a revision of the project at ``root``; none is where that is no git checkout."""
    return bool(_git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"))


def _untracked(root: Path, baselines: Path) -> list[str]:
    """Sources and configuration under ``root`` that git neither tracks nor ignores, by their names from there."""
    names = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    paths = [Path(name) for name in names]
    # An environment inside of the tree is told by the versions of its packages.
    environments = {path.parent for path in paths if path.name == "pyvenv.cfg"}
    return [
        str(path)
        for path in paths
        if _decides(path)
        and environments.isdisjoint(path.parents)
        and not (root / path).resolve().is_relative_to(baselines.resolve())
    ]


def _decides(path: Path) -> bool:
    # Most JSON is what a run has written.
    is_source = path.suffix in _SOURCES or (path.suffix == ".json" and "config" in path.stem)
    return is_source and "site-packages" not in path.parts


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
