"""BaselineStore: baselines as files, ``<root>/<machine>/<model>/<spec id>.json``. The only I/O of this room."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from filelock import FileLock

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import WHAT_TO_DO, BaselineError
from pytest_llmperf.judge.batch_size_baseline import CapacityBaseline
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.guarded_paths import private_folder

# Not beside the baselines: a lock file is litter in version control. Not under TMPDIR, which schedulers set for each
# job: all processes of a host must meet in one place. Not on the file system of the baselines: a cluster's may be
# mounted without locks. One folder for each user: in a folder like /tmp, Linux lets nobody open another user's file
# for writing. So two hosts, or two users, do not share this lock; the atomic replace still leaves one whole file.
_LOCKS = f"/tmp/pytest-llmperf-baselines-{os.getuid()}"  # noqa: S108 - shared on purpose; it holds empty files

# Whoever holds the lock reads and writes one small file.
_LOCK_SECONDS = 60.0

# File systems allow 255 bytes, and a hash and ``.json`` follow.
_LONGEST_NAME = 200


# Beside a model's other baselines, in a folder that no search of theirs looks into.
CAPACITY = "capacity"


class _Document(Protocol):
    def to_json(self) -> str: ...


_Read = TypeVar("_Read")
_Written = TypeVar("_Written", bound=_Document)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of the store, for finding unused ones."""

    path: Path
    id: str
    digest: str
    recorded_by: str
    copy_of: Path | None = None
    """The file that counts, where this is a copy of its case that somebody left."""


class BaselineStore:
    """The baselines under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, machine: str, spec: TrainSpec) -> Path:
        """Where the baseline of ``spec`` on ``machine`` is, or would be."""
        return self.root / machine / file_name(spec.architecture.slug) / f"{file_name(spec.id)}.json"

    def load(self, machine: str, spec: TrainSpec) -> Baseline | None:
        """The baseline, or ``None`` where there is no file.

        Raises:
            BaselineError: a file that is there and cannot serve.
        """
        path = self.path(machine, spec)
        baseline = read(path, Baseline.from_json)
        if baseline is not None:
            _refuse_stray(path, spec.id, (baseline.machine, machine), (baseline.digest, spec.digest))
        return baseline

    def capacity_path(self, machine: str, spec: TrainSpec) -> Path:
        """Where the largest micro-batch of ``spec`` on ``machine`` is, or would be."""
        return self.path(machine, spec).parent / CAPACITY / f"{file_name(spec.capacity_id)}.json"

    def load_capacity(self, machine: str, spec: TrainSpec) -> CapacityBaseline | None:
        """The largest micro-batch, or ``None`` where there is no file.

        Raises:
            BaselineError: a file that is there and cannot serve.
        """
        path = self.capacity_path(machine, spec)
        baseline = read(path, CapacityBaseline.from_json)
        if baseline is not None:
            _refuse_stray(path, spec.capacity_id, (baseline.machine, machine), (baseline.digest, spec.capacity_digest))
        return baseline

    def check_writable(self, machine: str, spec: TrainSpec) -> None:
        """Find out before a launch whether its figures could be recorded.

        Raises:
            BaselineError: the folder, or the one of the locks, cannot be made or written.
        """
        path = self.path(machine, spec)
        folder = path.parent
        _lock_folder(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise BaselineError(
                f"{folder}: baselines cannot be recorded here ({error.strerror}); "
                "name a folder that can be written with --perf-baselines"
            ) from error

    def update(
        self, machine: str, spec: TrainSpec, change: Callable[[Baseline | None], Baseline]
    ) -> tuple[Baseline | None, Baseline]:
        """Replace the baseline by ``change`` of it, locked against other processes; returns the old and the new.

        The old one is read inside the lock, and the file changes as a whole or not at all.

        Raises:
            BaselineError: as ``load``, whatever ``change`` raises, or the file cannot be written.
        """
        return replace_whole(self.path(machine, spec), lambda: self.load(machine, spec), change)

    def update_capacity(
        self, machine: str, spec: TrainSpec, change: Callable[[CapacityBaseline | None], CapacityBaseline]
    ) -> tuple[CapacityBaseline | None, CapacityBaseline]:
        """The same for the largest micro-batch.

        Raises:
            BaselineError: as ``update``.
        """
        return replace_whole(self.capacity_path(machine, spec), lambda: self.load_capacity(machine, spec), change)

    def machines(self) -> list[str]:
        """The machine kinds that have baselines, sorted."""
        found = (path for pattern in ("*/*/*.json", f"*/*/{CAPACITY}/*.json") for path in self.root.glob(pattern))
        return sorted({path.relative_to(self.root).parts[0] for path in found})

    def baselines(self, machine: str) -> list[Baseline]:
        """Every readable baseline of ``machine``, once; another is told of where it is used."""
        found: dict[Path, Baseline] = {}
        for path in sorted((self.root / machine).glob("*/*.json")):
            with suppress(BaselineError):
                baseline = read(path, Baseline.from_json)
                if baseline is not None:
                    found[path] = baseline
        copies = self.copies(found)
        return [baseline for path, baseline in found.items() if path not in copies]

    def launches(self, machine: str) -> list[tuple[Launch, ...]]:
        """The launches of each."""
        return [baseline.launches for baseline in self.baselines(machine)]

    def entries(self, machine: str) -> list[Entry]:
        """Every baseline of ``machine``, sorted by path.

        Raises:
            BaselineError: a file that cannot be read.
        """
        found: dict[Path, Baseline | CapacityBaseline] = {}
        for path in sorted((self.root / machine).rglob("*.json")):
            is_capacity = path.parent.name == CAPACITY
            baseline = read(path, CapacityBaseline.from_json) if is_capacity else read(path, Baseline.from_json)
            if baseline is not None:
                found[path] = baseline
        copies = self.copies(found)
        return [
            Entry(path=path, id=one.id, digest=one.digest, recorded_by=one.recorded_by, copy_of=copies.get(path))
            for path, one in found.items()
        ]

    def copies(self, found: Mapping[Path, Baseline | CapacityBaseline]) -> dict[Path, Path]:
        """Of several files of one case all but the one that its case looks for, each with that one."""
        cases: dict[tuple[str, str], list[Path]] = {}
        for path, baseline in found.items():
            cases.setdefault((baseline.machine, baseline.digest), []).append(path)
        counts = {path: self._that_counts(paths, found[path]) for paths in cases.values() for path in paths}
        return {path: right for path, right in counts.items() if path != right}

    def _that_counts(self, paths: Sequence[Path], baseline: Baseline | CapacityBaseline) -> Path:
        if len(paths) == 1:
            return paths[0]
        named = [path for path in paths if path.stem == file_name(baseline.id)]
        with suppress(ValueError):  # the settings, or the model's own file, may be none of today's
            find = self.capacity_path if isinstance(baseline, CapacityBaseline) else self.path
            named.insert(0, find(baseline.machine, TrainSpec.from_dict(baseline.spec)))
        return next((path for path in named if path in paths), paths[0])


def read(path: Path, parsed: Callable[[str, str], _Read]) -> _Read | None:
    """What is ``parsed`` of the file, or ``None`` where there is none.

    Raises:
        BaselineError: it cannot be read, or whatever ``parsed`` raises.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise BaselineError(f"{path}: cannot be read (it is not text in UTF-8); {WHAT_TO_DO}") from error
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read ({error.strerror or error})") from error
    return parsed(text, str(path))


def _refuse_stray(path: Path, case: str, machine: tuple[str, str], digest: tuple[str, str]) -> None:
    for what, (found, expected) in (("machine", machine), ("digest", digest)):
        if found != expected:
            raise BaselineError(
                f"{path}: it is of {what} {found}, expected {expected} for {case}; "
                "move it where it belongs, or delete it and record anew with --update-baselines=new"
            )


def replace_whole(
    path: Path, load: Callable[[], _Written | None], change: Callable[[_Written | None], _Written]
) -> tuple[_Written | None, _Written]:
    """Replace what ``load`` finds at ``path`` by ``change`` of it, locked against other processes; old and new.

    Raises:
        BaselineError: whatever the two raise, or the file cannot be written.
    """
    try:
        with _locked(path):
            old = load()
            new = change(old)
            write_text(path, new.to_json())
    except OSError as error:
        raise BaselineError(f"{path}: not recorded, nothing was changed ({error.strerror or error})") from error
    return old, new


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with FileLock(_lock_folder(path) / f"{name}.lock", timeout=_LOCK_SECONDS):  # a Timeout is an OSError
        yield


def _lock_folder(path: Path) -> Path:
    try:
        return private_folder(Path(_LOCKS))
    except OSError as error:
        raise BaselineError(
            f"{path}: cannot be locked for recording, the lock folder {_LOCKS} cannot be used ({error.strerror}); "
            "remove what is there, or ask its owner to"
        ) from error


def file_name(name: str) -> str:
    """``name``, or as much of it as a file system takes, and a hash that keeps two long ones apart."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
