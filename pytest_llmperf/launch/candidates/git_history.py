"""GitHistory: revisions of a git project, each in a clone of its own; the user's checkout is only read."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_llmperf.launch.candidates.errors import HistoryError, NotMadeError
from pytest_llmperf.launch.candidates.history import Span
from pytest_llmperf.launch.candidates.place import made, probed, run, script
from pytest_llmperf.records.candidate import Candidate

_SECONDS = 120.0
_FIELDS = "%H%x00%P%x00%an%x00%as%x00%s"
_LINE = 5
# Whether PYTHONSAFEPATH is heeded.
_HAS_SAFE_PATH = sys.version_info >= (3, 11)


@dataclass(frozen=True)
class GitHistory:
    """Of the project that ``folder`` is in."""

    folder: Path
    paths: Sequence[str] = ()
    """Folders of the project that are put on the path; its own, and ``src`` where there is one, if none is given."""
    build: str = ""
    """A shell's line that is run in each checkout before it is used."""
    first_parent: bool = False
    """Whether a merge counts as one change."""
    _root: list[Path] = field(default_factory=list, compare=False, repr=False)

    @property
    def root(self) -> Path:
        """The top of its work tree.

        Raises:
            HistoryError: there is none.
        """
        if not self._root:
            found = self._git("rev-parse", "--show-toplevel")
            if not found:
                raise HistoryError(
                    f"{self.folder} is in no git repository: expected a project's checkout, by --project DIR, or "
                    "versions, by --package NAME or --python COMMAND"
                )
            self._root.append(Path(found.strip()))
        return self._root[0]

    @property
    def key(self) -> tuple[str, ...]:
        """Whose commits, and how they are made."""
        return ("git", "safe path", str(self.root), self.build, *self.paths)

    def span(self, good: str, bad: str) -> Span:
        """See ``History``."""
        if not _HAS_SAFE_PATH and Path.cwd().resolve().is_relative_to(self.root.resolve()):
            raise HistoryError(
                f"in {self.root} Python before 3.11 would import the checkout in place of each revision: run it in "
                f"another folder, with --project {shlex.quote(str(self.root))}, or with Python 3.11 or newer"
            )
        first, last = self._commit("--good", good), self._commit("--bad", bad)
        if first == last:
            raise HistoryError(f"--good {good} and --bad {bad} are the same commit, {first[:12]}")
        if self._git("merge-base", "--is-ancestor", first, last) is None:
            if self._git("merge-base", "--is-ancestor", last, first) is not None:
                raise HistoryError(f"--good {good} comes after --bad {bad}: exchange them, good is where it began")
            base = (self._git("merge-base", first, last) or "").strip()[:12]
            hint = f"; both have {base}, which may serve as --good" if base else ""
            raise HistoryError(f"--good {good} is no ancestor of --bad {bad}{hint}")
        candidates = self._listed(f"{first}..{last}")
        (begin,) = self._listed("-1", first)
        return Span(Candidate(begin.name, (), begin.subject, begin.author, begin.date, True), candidates, self._notes())

    def python(self, candidate: Candidate) -> str:
        """See ``History``."""

        def make(folder: Path) -> None:
            tree = folder / "tree"
            # Its own index and HEAD, and the objects of the user's repository, in which nothing is written.
            run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(self.root), str(tree)], environment=_env())
            checkout = ["git", "-C", str(tree), "checkout", "--quiet", "--detach", candidate.name]
            run(checkout, environment=_env())
            if self.build:
                run(["sh", "-c", self.build], cwd=tree, environment=_env())
            paths = [tree / path for path in self.paths] or [tree, *(path for path in [tree / "src"] if path.is_dir())]
            missing = next((path for path in paths if not path.is_dir()), None)
            if missing is not None:
                raise NotMadeError(f"there is no folder {missing.relative_to(tree)} in it")
            joined = os.pathsep.join(map(str, paths))
            # What a launch put first is this package itself, which is today's in every candidate.
            lines = [
                'first=${PYTHONPATH%%:*} rest=${PYTHONPATH#"${PYTHONPATH%%:*}"}',
                f"PYTHONPATH=${{first:+$first:}}{shlex.quote(joined)}$rest",
                # Started in the project itself, -m would put the checkout before all of that.
                "PYTHONSAFEPATH=1",
                "export PYTHONPATH PYTHONSAFEPATH",
                f'exec {shlex.quote(sys.executable)} "$@"',
            ]
            script(folder / "python", lines)

        return probed(str(made("git", (*self.key, candidate.name, sys.executable), make) / "python"))

    def further(self, candidate: Candidate) -> str:
        """See ``History``."""
        return shlex.join(["git", "-C", str(self.root), "show", candidate.shown])

    def _commit(self, option: str, name: str) -> str:
        found = self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if not found:
            raise HistoryError(f"{option} {name}: no such revision in {self.root}")
        return found.split()[-1]

    def _listed(self, *what: str) -> tuple[Candidate, ...]:
        first = ["--first-parent"] if self.first_parent else []
        said = self._git("log", "--reverse", "--topo-order", *first, f"--format={_FIELDS}", *what, "--") or ""
        found = []
        for line in said.split("\n"):  # a subject may have what else Python takes for a line's end
            values = line.split("\0")
            if len(values) == _LINE:
                name, parents, author, date, subject = values
                known = tuple(parents.split()[:1] if self.first_parent else parents.split())
                found.append(Candidate(name, known, subject, author, date, is_commit=True))
        return tuple(found)

    def _notes(self) -> tuple[str, ...]:
        changed = (self._git("status", "--porcelain") or "").splitlines()
        if not changed:
            return ()
        return (f"{len(changed)} files of {self.root} are not as committed; commits alone are compared",)

    def _git(self, *arguments: str) -> str | None:
        """What git prints; ``None`` where it fails."""
        folder = self._root[0] if self._root else self.folder
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                env=_env(),
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HistoryError(f"git cannot be asked ({error})") from error
        return done.stdout if done.returncode == 0 else None


def _env() -> dict[str, str]:
    """Without what a hook of git tells of the repository that runs it."""
    ours = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"}
    return {name: value for name, value in os.environ.items() if name not in ours} | {"LC_ALL": "C"}
