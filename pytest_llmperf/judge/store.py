"""Stores of baselines: a file for each case, ``<root>/<machine>/…/<id>.json``. The only I/O of this room.

Four kinds of file share it: launches and largest micro-batches by machine kind and model, loss curves and the static
figures of cases without launches in a folder each, which stands in the place of a machine kind.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from filelock import FileLock

from pytest_llmperf.judge import baseline_file
from pytest_llmperf.judge.baseline import Baseline, CapacityBaseline, StepBaseline
from pytest_llmperf.judge.baseline_file import WHAT_TO_DO, BaselineError, Document
from pytest_llmperf.judge.loss_curves import CurveBaseline
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.spec import Spec, read_spec
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.folders import private_folder

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

T = TypeVar("T", bound=Document)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of the store, for finding unused ones."""

    path: Path
    id: str
    digest: str
    recorded_by: str
    copy_of: Path | None = None
    """The file that counts, where this is a copy of its case that somebody left."""


class Store(Generic[T]):
    """The files of one kind under one folder."""

    def __init__(self, root: Path, kind: type[T]) -> None:
        self.root, self._kind = root, kind

    def path(self, machine: str, spec: Spec) -> Path:
        """Where the file of ``spec`` on ``machine`` is, or would be."""
        folder = self.root / machine
        if self._kind in (Baseline, CapacityBaseline):
            folder /= file_name(spec.slug)
        folder /= CAPACITY if self._kind is CapacityBaseline else ""
        return folder / f"{file_name(self._case(spec)[0])}.json"

    def load(self, machine: str, spec: Spec) -> T | None:
        """What is stored, or ``None`` where there is no file; BaselineError: a file that is there and cannot serve."""
        path, (case, digest) = self.path(machine, spec), self._case(spec)
        stored = read(path, self._kind)
        if stored is not None:
            for what, found, expected in (("machine", stored.machine, machine), ("digest", stored.digest, digest)):
                if found != expected:
                    apart = "; two scripts of one id are told apart by name=" if spec.is_script else ""
                    raise BaselineError(
                        f"{path}: it is of {what} {found}, expected {expected} for {case}; move it where it belongs, "
                        f"or delete it and record anew with --update-baselines=new{apart}"
                    )
        return stored

    def _case(self, spec: Spec) -> tuple[str, str]:
        """By what its file is named and known."""
        return (spec.capacity_id, spec.capacity_digest) if self._kind is CapacityBaseline else (spec.id, spec.digest)

    def check_writable(self, machine: str, spec: Spec) -> None:
        """Find out before a launch whether its figures could be recorded; BaselineError: the folder, or the one of the
        locks, cannot be made or written."""
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

    def update(self, machine: str, spec: Spec, change: Callable[[T | None], T]) -> tuple[T | None, T]:
        """Replace what is stored by ``change`` of it, locked against other processes; returns the old and the new.

        The old one is read inside the lock, and the file changes as a whole or not at all.

        Raises:
            BaselineError: as ``load``, whatever ``change`` raises, or the file cannot be written.
        """
        path = self.path(machine, spec)
        try:
            with _locked(path):
                old = self.load(machine, spec)
                new = change(old)
                write_text(path, baseline_file.text_of(new))
        except OSError as error:
            raise BaselineError(f"{path}: not recorded, nothing was changed ({error.strerror or error})") from error
        return old, new

    def replace(self, spec: Spec, judged: T | None, new: T) -> Path:
        """Keep ``new`` in the place of what it was ``judged`` against; the file; BaselineError: another run changed
        what is there, or it cannot be written."""
        path = self.path(new.machine, spec)

        def change(old: T | None) -> T:
            if old != judged:
                raise BaselineError(f"{spec.id}: another run changed {path} meanwhile; run again to be held against it")
            return new

        self.update(new.machine, spec, change)
        return path


class BaselineStore(Store[Baseline]):
    """The baselines under one folder, with the largest micro-batches beside them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, Baseline)
        self.capacities = Store(root, CapacityBaseline)

    def machines(self) -> list[str]:
        """The machine kinds that have baselines, sorted."""
        found = (path for pattern in ("*/*/*.json", f"*/*/{CAPACITY}/*.json") for path in self.root.glob(pattern))
        return sorted({path.relative_to(self.root).parts[0] for path in found})

    def baselines(self, machine: str) -> list[Baseline]:
        """Every readable baseline of ``machine``, once; another is told of where it is used."""
        found: dict[Path, Baseline] = {}
        for path in sorted((self.root / machine).glob("*/*.json")):
            with suppress(BaselineError):
                baseline = read(path, Baseline)
                if baseline is not None:
                    found[path] = baseline
        copies = self.copies(found)
        return [baseline for path, baseline in found.items() if path not in copies]

    def launches(self, machine: str) -> list[tuple[Launch, ...]]:
        """The launches of each."""
        return [baseline.launches for baseline in self.baselines(machine)]

    def entries(self, machine: str) -> list[Entry]:
        """Every baseline of ``machine``, sorted by path; BaselineError: a file that cannot be read."""
        found: dict[Path, Baseline | CapacityBaseline] = {}
        for path in sorted((self.root / machine).rglob("*.json")):
            kind: type[Baseline | CapacityBaseline] = CapacityBaseline if path.parent.name == CAPACITY else Baseline
            baseline = read(path, kind)
            if baseline is not None:
                found[path] = baseline
        copies = self.copies(found)
        return [_entry(path, one, copies.get(path)) for path, one in found.items()]

    def copies(self, found: Mapping[Path, Baseline | CapacityBaseline]) -> dict[Path, Path]:
        """Of several files of one case all but the one that its case looks for, each with that one."""
        cases: dict[tuple[str, str], list[Path]] = {}
        for path, baseline in found.items():
            cases.setdefault((baseline.machine, baseline.digest), []).append(path)
        copies: dict[Path, Path] = {}
        for paths in (paths for paths in cases.values() if len(paths) > 1):
            for path in paths:
                baseline, right = found[path], [each for each in paths if each.stem == file_name(found[path].id)]
                with suppress(ValueError):  # the settings, or the model's own file, may be none of today's
                    store = self.capacities if isinstance(baseline, CapacityBaseline) else self
                    right.insert(0, store.path(baseline.machine, read_spec(baseline.spec)))
                counts = next((each for each in right if each in paths), paths[0])
                copies |= {} if counts == path else {path: counts}
        return copies


def entries_of_run(root: Path, machine: str, *, on_cpu: bool, is_static: bool = False) -> list[Entry]:
    """Every file that a run on ``machine`` may ask for: of the machine kind, and of none where its cases are for the
    CPU or for GPUs as the run's are. ``is_static``: of a run without launches, which asks for static figures alone.

    Raises:
        BaselineError: a file that cannot be read.
    """
    found = [] if is_static else BaselineStore(root).entries(machine)
    kinds: list[type[StepBaseline | CurveBaseline]] = [StepBaseline] if is_static else [StepBaseline, CurveBaseline]
    for kind in kinds:
        for path in sorted((root / kind.machine).glob("*.json")):
            one = read(path, kind)
            found += [_entry(path, one)] if one is not None and one.on_cpu == on_cpu else []
    return found


def _entry(path: Path, one: Document, copy_of: Path | None = None) -> Entry:
    return Entry(path=path, id=one.id, digest=one.digest, recorded_by=one.recorded_by, copy_of=copy_of)


def read(path: Path, kind: type[T]) -> T | None:
    """What is in the file, or ``None`` where there is none; BaselineError: it cannot be read, or is no file of this
    ``kind``."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise BaselineError(f"{path}: cannot be read (it is not text in UTF-8); {WHAT_TO_DO}") from error
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read ({error.strerror or error})") from error
    return baseline_file.read(kind, text, str(path))


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
