"""History: what runs before this one have measured, in a store or ``--perf-json`` files, and what this run adds."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.judge.case_histories import CaseHistory, Scattering, Segment, histories
from pytest_llmperf.judge.policy import StoredOfKind
from pytest_llmperf.records.result import OBSERVED, PastResult
from pytest_llmperf.records.results_document import NoResultsError, ResultsError, read_values
from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.report.text import Column, one_line
from pytest_llmperf.run.history_store import HistoryError, HistoryStore, observed_result, past_results
from pytest_llmperf.support import formats

_SQLITE = b"SQLite format 3\0"

# As runs name the kinds of CPUs.
_CPU = re.compile(r"^cpu-|-cpu(-limit-|$)")


@dataclass(frozen=True)
class History:
    """In the order of time, each measurement once."""

    results: tuple[PastResult, ...]
    troubles: tuple[str, ...] = ()
    """A line for each file that cannot serve."""

    @classmethod
    def read(cls, paths: Sequence[Path]) -> History:
        """Read stores, ``--perf-json`` files, and folders in which there are some of either."""
        found, troubles = list[PastResult](), list[str]()
        for path in paths:
            several = (file for file in path.rglob("*") if file.suffix in (".json", ".sqlite") and file.is_file())
            for file in sorted(several) if path.is_dir() else [path]:
                try:
                    found += _read(file)
                except (HistoryError, ResultsError) as error:
                    # Of a folder everything is looked at, and much of it is something else.
                    if file == path or not isinstance(error, NoResultsError):
                        troubles.append(str(error))
                except OSError as error:
                    troubles.append(f"{file}: {error.strerror or error}; expected a store or a file of --perf-json")
        return cls.of(found, troubles)

    @classmethod
    def of(cls, results: Iterable[PastResult], troubles: Sequence[str] = ()) -> History:
        """Sort ``results``; a night's files and what ``llmperf merge`` made of them may lie side by side."""
        found: dict[tuple[object, ...], PastResult] = {}
        for result in results:
            known = found.get(result.measurement)
            # What was merged does not say of which revision each part of it is.
            if known is None or not known.revision:
                found[result.measurement] = result
        return cls(tuple(sorted(found.values(), key=lambda result: (result.began, result.run))), tuple(troubles))


def of_project(results: Sequence[PastResult], project: str) -> Sequence[PastResult]:
    """Those of ``project``, with the older ones that do not say; all of them, told apart, where it has none."""
    return [replace(result, project="") for result in results if result.project in ("", project)] or results


def _read(path: Path) -> list[PastResult]:
    if path.name.startswith(f"{OBSERVED}-"):
        return [observed_result(path.read_text(encoding="utf-8"), str(path))]
    with path.open("rb") as file:
        is_store = file.read(len(_SQLITE)) == _SQLITE
    if is_store or path.suffix == ".sqlite":
        return HistoryStore(path).read()
    return past_results(RunDocument(read_values(path)), str(path))


def keep(path: Path, document: Mapping[str, Any]) -> str:
    """Add what ``document``, as ``--perf-json`` has it, tells to the store at ``path``; a line where that failed."""
    try:
        if results := past_results(RunDocument(document), "this run"):
            HistoryStore(path).append(results)
    except HistoryError as error:
        return f"--perf-history {error}; this run is not in it"
    except Exception as error:  # noqa: BLE001 - whatever it is, the run has been judged
        return f"--perf-history {path}: this run is not in it ({one_line(f'{type(error).__name__}: {error}')})"
    return ""


def scattering(machines: Iterable[str], baselines: Path) -> dict[str, Scattering]:
    """How launches of each machine kind scatter, as far as its baselines tell; else what is usual."""
    found = {}
    for machine in sorted(set(machines)):
        is_cpu = bool(_CPU.search(machine))
        noise = StoredOfKind(BaselineStore(baselines), machine, on_cpu=is_cpu).experience.noise
        found[machine] = Scattering(noise, are_gpus=not is_cpu)
    return found


def histories_of(
    runs: Sequence[RunDocument], store: Path | None, baselines: Path
) -> tuple[list[CaseHistory], list[str]]:
    """The histories of the cases of ``runs`` in ``store``, for their page: those that two runs measured at least; and a
    line for whatever goes wrong, as a page can do without."""
    try:
        own = list(chain.from_iterable(past_results(run, f"{i} {run.source}") for i, run in enumerate(runs)))
        asked = {(result.machine, result.digest) for result in own}
        machines = {machine for machine, _ in asked}
        stored = History.read([store] if store is not None and store.exists() else [])
        results = [result for result in stored.results if result.machine in machines]
        project = next((result.project for result in own if result.project), "")
        both = of_project(History.of([*results, *own]).results, project)
        found = histories(both, scattering(machines, baselines), asked)
        return [one for one in found if len(one.results) > 1], [*stored.troubles]
    except Exception as error:  # noqa: BLE001 - a page without its history is a page
        return [], [one_line(f"its history is not shown: {type(error).__name__}: {error}")]


def level_columns(segments: Sequence[Segment]) -> list[Column]:
    """Of each level of a case what it took, and with what."""

    def rates(one: Segment, *seconds: float) -> str:
        return " to ".join(formats.tokens_per_second(one.rate(each)) for each in seconds)

    newest = [one.results[-1] for one in segments]
    return [
        Column("from", [one.results[0].began[:10] for one in segments], right=False),
        Column("to", [one.began[:10] for one in newest], right=False),
        Column("runs", [str(len(one.results)) for one in segments]),
        Column("tokens/s/GPU", [rates(one, one.step_seconds) for one in segments]),
        # The longest step is the lowest rate.
        Column("95 of 100 in", [rates(one, one.high, one.low) for one in segments], right=False),
        Column("step", [formats.seconds(one.step_seconds) for one in segments]),
        Column("change", [formats.percent(one.change.rate if one.change else None) for one in segments]),
        Column("peak memory", [formats.memory(one.peak_reserved_bytes) for one in newest]),
        Column("torch", [one_line(one.versions.get("torch", formats.ABSENT)) for one in newest], right=False),
        Column("revision", [one_line(one.revision or formats.ABSENT) for one in newest], right=False),
    ]


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
        return {"revision": {"commit": self.commit, "changed": len(self.changed)}} if self.commit else {}


def project_of(root: Path) -> str:
    """Tell a project from others in a history: by its remote, without credentials, else the folder of its git."""
    url = _git(root, "config", "--get", "remote.origin.url").strip()
    if url and not url.startswith("."):
        found = _REMOTE.match(url)
        return found[1].replace(":", "/", 1) if found else ""
    if not (common := _git(root, "rev-parse", "--git-common-dir").strip()):
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
    """Whether ``name`` is a revision of the project at ``root``."""
    return bool(_git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"))


def _untracked(root: Path, baselines: Path) -> list[str]:
    """Sources and configuration under ``root`` that git neither tracks nor ignores, by their names from there."""
    paths = list(map(Path, _git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")))
    # An environment inside of the tree is told by the versions of its packages.
    environments = {path.parent for path in paths if path.name == "pyvenv.cfg"}

    def decides(path: Path) -> bool:  # most JSON is what a run has written
        is_source = path.suffix in _SOURCES or (path.suffix == ".json" and "config" in path.stem)
        is_others = "site-packages" in path.parts or not environments.isdisjoint(path.parents)
        return is_source and not is_others and not (root / path).resolve().is_relative_to(baselines.resolve())

    return [str(path) for path in paths if decides(path)]


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
