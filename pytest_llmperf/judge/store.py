"""Store: a file for each case, ``<root>/<machine>/…/<id>.json``; JSON that shows in a diff, and who accepted what. The
only I/O of this room. Three kinds of document share it: launches and largest micro-batches by machine kind and model,
static figures in a folder, which stands in the place of a machine kind."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from filelock import FileLock

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.settings.setting import SpecError
from pytest_llmperf.settings.spec import Spec, read_spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import file_name, hashed, private_folder, write_text
from pytest_llmperf.support.formats import first_n

SCHEMA, _MOST_FILES = 1, 3
T = TypeVar("T", bound="Document")


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a file holds beside its schema."""

    id: str
    digest: str
    machine: str
    spec: Mapping[str, Any]
    recorded_by: str
    """The test that recorded it; for people and for finding unused files, never an identity."""

    noun: ClassVar[str]
    by_model: ClassVar[bool] = False
    """Whether its file is in a folder of its model."""
    folder: ClassVar[str] = ""
    """Beside a model's other documents, where no search of theirs looks."""

    @staticmethod
    def case_of(spec: Spec) -> tuple[str, str]:
        """By what its file is named and known."""
        return spec.id, spec.digest

    def check(self) -> None:
        """That its parts, which somebody may have edited, belong together; ValueError: they do not."""


class BaselineError(Exception):
    """A baseline that cannot be read, written or accepted: one line with the file, what is wrong and what to do."""


def not_in_git(what: str, changed: Sequence[str]) -> BaselineError:
    """``what`` is not recorded, as these files are in no commit."""
    files = f"the working tree has uncommitted changes ({first_n(changed, _MOST_FILES)})"
    return BaselineError(f"{what}{files}; commit them, or say why with --perf-reason")


class BaselineChangedError(BaselineError):
    """Another run changed the baseline that a case was held against: to replace or to join it could hide a loss."""

    def __init__(self, name: str, now: Any) -> None:
        self.now = now
        """What is there by now, if anything: of the kind that was judged against."""
        told = f"there is one of {now.history[-1].recorded_at} ({now.recorded_by})" if now else "it is gone"
        super().__init__(f"{name}: another run changed the baseline meanwhile, {told}; run again to be held against it")


@codec.sparse()
@dataclass(frozen=True, kw_only=True)
class Accepted:
    recorded_at: str
    """UTC, ISO 8601."""
    reason: str
    launches: int
    metrics: Mapping[str, float]
    revision: str = ""
    """Commit of the tree that ran; empty where there is none."""
    uncommitted: bool = False
    """Whether something in that tree was in no commit, so that the commit alone does not make it again."""
    replaces: tuple[str, ...] = ()
    """Digests of the cases that its test had before, where a first acceptance took their place."""

    def to_plain(self) -> dict[str, Any]:
        # Bytes are whole numbers: as such none of their digits is rounded away.
        metrics = {
            name: int(value) if name.endswith(("_bytes", "_size")) and float(value).is_integer() else value
            for name, value in self.metrics.items()
        }
        return {**codec.plain_fields(self), "metrics": metrics}


def since_reason(history: Sequence[Accepted]) -> Sequence[Accepted]:
    """The acceptances from the last one on that has a reason; all of them without one."""
    return history[max((number for number, entry in enumerate(history) if entry.reason), default=0) :]


WHAT_TO_DO = "restore it from version control, or delete it and record anew with --update-baselines=new"

# No line of ours begins so.
_CONFLICT = re.compile(r"^(<<<<<<< |>>>>>>> )", re.MULTILINE)


def _refuse(constant: str) -> float:
    # Python reads NaN and Infinity; a limit made from one would let everything pass.
    raise ValueError(f"{constant} is no figure")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)  # 1e999 is infinity too


def parse(kind: type[T], text: str, source: str) -> T:
    """The document in ``text``, ``source`` in errors; BaselineError: empty, cut, of a newer schema or another kind."""
    if not text.strip():
        raise BaselineError(f"{source}: the file is empty, expected a baseline; {WHAT_TO_DO}")
    if _CONFLICT.search(text):
        raise BaselineError(f"{source}: in a merge conflict; take one side, or {WHAT_TO_DO}")
    try:
        document = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{source}: not JSON, perhaps truncated ({error}); {WHAT_TO_DO}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise BaselineError(f'{source}: not a baseline, it has no "schema"; {WHAT_TO_DO}')
    schema = document.pop("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise BaselineError(
            f"{source}: schema {schema} is newer than this version understands ({SCHEMA}); upgrade pytest-llmperf"
        )
    if schema != SCHEMA:
        raise BaselineError(f"{source}: unknown schema {schema!r}, expected {SCHEMA}; {WHAT_TO_DO}")
    try:
        found = codec.read(kind, document, "it")
        found.check()
        return found
    except ValueError as error:
        said = " ".join(str(error).split())  # it may quote the file
        raise BaselineError(f"{source}: not {kind.noun} of schema {SCHEMA} ({said}); {WHAT_TO_DO}") from error


def shared(values: Mapping[str, Any], kept: dict[str, Any]) -> str:
    """The key under which ``values``, which many launches have in common, stand once in ``kept``."""
    key = hashed(json.dumps(_rounded(dict(values)), sort_keys=True))[:8]
    kept[key] = values
    return key


def text_of(document: Document) -> str:
    """The text of its file; BaselineError: a figure that is not finite, which no reader would take back."""
    try:
        return dump({"schema": SCHEMA, **codec.plain(document)})
    except ValueError as error:
        raise BaselineError(f"{document.id}: a figure is not finite ({error}); nothing was recorded") from error


def dump(values: Mapping[str, Any]) -> str:
    """Sorted and stable; arrays of numbers on one line; ValueError: a figure that is not finite."""
    text = json.dumps(_rounded(values), indent=1, sort_keys=True, allow_nan=False)
    return _NUMBERS.sub(lambda match: "[" + re.sub(r"\s+", "", match[1]).replace(",", ", ") + "]", text) + "\n"


# A tenth of what a step's clock resolves. Of losses, which are exact, as many as tell all values of float32 apart.
_DIGITS, _DIGITS_OF = 6, {"losses": 9}


def _rounded(value: Any, digits: int = _DIGITS) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _rounded(item, _DIGITS_OF.get(key, digits)) for key, item in value.items()}
    return [_rounded(item, digits) for item in value] if isinstance(value, (list, tuple)) else value


# The line break after the bracket keeps strings as they are: "test[1,2]" is a node id, and no JSON string holds one.
_NUMBERS = re.compile(r"\[\n\s*((?:[\d.eE+-]+,\s*)*[\d.eE+-]+)\s*\]")

# Agreement: whether the parts of a file, which somebody may have edited, still belong together.

# A file keeps six digits, of both sides.
_ROUNDED = 2e-5


def same_settings(values: Mapping[str, Any], digest: str) -> None:
    """ValueError: the ``digest`` is of another spec than these ``values``; a user's own file may be gone or changed."""
    try:
        spec = read_spec(values)
    except SpecError:
        return
    # What a file of the user's says enters the digest, and may be gone.
    files = isinstance(spec, TrainSpec) and (spec.text or spec.tokenizer or spec.hub_kernels or "/" in spec.model)
    if not files and spec.digest != digest:
        raise ValueError(f"its spec ({spec.id}) is of other settings than its digest")


def same_anchor(anchor: Accepted, history: Sequence[Accepted]) -> None:
    """That the anchor is the first acceptance, else ValueError."""
    first = history[0]
    apart = sorted(
        name
        for name in {*anchor.metrics, *first.metrics}
        if not _is_near(anchor.metrics.get(name, math.nan), first.metrics.get(name, math.nan))
    )
    apart += [name for name in ("recorded_at", "launches") if getattr(anchor, name) != getattr(first, name)]
    if apart:
        raise ValueError(f"its anchor is not the first of its history: {apart[0]} differs")


def same_figures(launches: Sequence[Launch], history: Sequence[Accepted]) -> None:
    """ValueError: what was accepted is not what its launches hold, or figures do not follow from one another. What only
    a version's own statistic gives (how a steady state is found) is held against what any could have given."""
    tokens, ranks = launches[0].tokens_per_step, len(launches[0].ranks)
    for entry in history if not launches[0].is_uneven else ():  # its tokens may be others in each launch
        for line in _apart(entry.metrics, tokens, ranks):
            raise ValueError(f"{line} of {entry.recorded_at[:10]} do not belong together")
    rest = list(launches)
    for entry in reversed(history):
        if not 0 < entry.launches <= len(rest):
            return  # of older ones, some or all are gone
        rest, own = rest[: -entry.launches], rest[-entry.launches :]
        # Wherever steady states are seen. Of unequal steps it is a mean, and near any of them there may be none.
        steps = [second for one in own for second in one.step_seconds[one.warmup_steps :]]
        low, high = min(steps) * (1 - _ROUNDED), max(steps) * (1 + _ROUNDED)
        is_among = low <= entry.metrics.get("step_seconds", low) <= high or any(one.step_tokens for one in own)
        missing = [] if is_among else ["step_seconds"]
        for name, row in METRICS.items():
            if row.is_raw and name in entry.metrics and not _is_near(entry.metrics[name], row.read(own)):
                missing.append(name)
        if missing:
            day = entry.recorded_at[:10]
            raise ValueError(f"its launches do not hold the {missing[0]} that was accepted on {day}")


def _apart(metrics: Mapping[str, float], tokens: int, ranks: int) -> Iterator[str]:
    """Rates and times, of which each follows from the others."""
    whole, each, step = map(metrics.get, ("tokens_per_second", "tokens_per_second_per_gpu", "step_seconds"))
    if whole is not None and step is not None and not _is_near(whole * step, float(tokens)):
        yield f"tokens_per_second {whole:g} and step_seconds {step:g}"
    if whole is not None and each is not None and not _is_near(each * ranks, whole):
        yield f"tokens_per_second_per_gpu {each:g} and tokens_per_second {whole:g}"


def _is_near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_ROUNDED)


# Files: each read and written as a whole.

# Not beside the baselines: a lock file is litter in version control. Not under TMPDIR, which schedulers set for each
# job: all processes of a host must meet in one place. Not on the file system of the baselines: a cluster's may be
# mounted without locks. One folder for each user: in a folder like /tmp, Linux lets nobody open another user's file
# for writing. So two hosts, or two users, do not share this lock; the atomic replace still leaves one whole file.
_LOCKS = f"/tmp/pytest-llmperf-baselines-{os.getuid()}"  # noqa: S108 - shared on purpose; it holds empty files
# Whoever holds the lock reads and writes one small file.
_LOCK_SECONDS = 60.0


class Store(Generic[T]):
    """The files of one kind under one folder."""

    def __init__(self, root: Path, kind: type[T]) -> None:
        self.root, self._kind = root, kind

    def path(self, machine: str, spec: Spec) -> Path:
        """Where the file of ``spec`` on ``machine`` is, or would be."""
        of_model = file_name(spec.slug) if self._kind.by_model else ""
        return self.root / machine / of_model / self._kind.folder / f"{file_name(self._kind.case_of(spec)[0])}.json"

    def load(self, machine: str, spec: Spec) -> T | None:
        """What is stored, or ``None`` where there is no file; BaselineError: a file that is there and cannot serve."""
        path, (case, digest) = self.path(machine, spec), self._kind.case_of(spec)
        if (stored := read(path, self._kind)) is not None:
            for what, found, expected in (("machine", stored.machine, machine), ("digest", stored.digest, digest)):
                if found != expected:
                    apart = "; two scripts of one id are told apart by name=" if spec.is_script else ""
                    raise BaselineError(
                        f"{path}: it is of {what} {found}, expected {expected} for {case}; move it where it belongs, "
                        f"or delete it and record anew with --update-baselines=new{apart}"
                    )
        return stored

    def check_writable(self, machine: str, spec: Spec) -> None:
        """Before a launch: BaselineError where its folder, or the one of the locks, cannot be made or written."""
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
        """Replace what is stored by ``change`` of it, locked against other processes; the old and the new. The file
        changes as a whole or not at all; raises as ``load`` and ``change``, or BaselineError: not written."""
        path = self.path(machine, spec)
        try:
            with _locked(path):
                old = self.load(machine, spec)
                new = change(old)
                write_text(path, text_of(new))
        except OSError as error:
            raise BaselineError(f"{path}: not recorded, nothing was changed ({error.strerror or error})") from error
        return old, new

    def replace(self, spec: Spec, judged: T | None, new: T) -> Path:
        """Keep ``new`` in the place of ``judged``; the file; BaselineError: another run changed it, or not written."""
        path = self.path(new.machine, spec)

        def change(old: T | None) -> T:
            if old != judged:
                raise BaselineError(f"{spec.id}: another run changed {path} meanwhile; run again to be held against it")
            return new

        self.update(new.machine, spec, change)
        return path


def read(path: Path, kind: type[T]) -> T | None:
    """What is in the file; ``None``: there is none; BaselineError: it cannot be read, or is of another ``kind``."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise BaselineError(f"{path}: cannot be read (it is not text in UTF-8); {WHAT_TO_DO}") from error
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse(kind, text, str(path))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    name = hashed(str(path.resolve()))
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
