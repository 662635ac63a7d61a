"""Data: what a training reads, how a text becomes rows, and who fetches them; weights: what it begins from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pytest_llmperf.settings.models import slugged, why_not_found
from pytest_llmperf.settings.setting import Evidence, Package, Setting, TrainSpec, at_default, claimed, equal
from pytest_llmperf.support import files as fingerprint
from pytest_llmperf.support.user_input import first_few

DATA = ("random", "text")
#: How a text becomes rows of ``sequence_length``: one stream cut into ``packed`` ones, of which a token sees all before
#: it, or, ``packed_apart``, its own document alone; or a document a row, ``padded`` with what counts in no loss, or, as
#: many a course has it, with padding that counts like any other token; ``padding_free``: a batch's documents in one.
ROWS = ("packed", "packed_apart", "padded", "padded_in_loss", "padding_free")
PADDED, _APART = ("padded", "padded_in_loss"), ("packed_apart", "padding_free")
#: The fields that say which text, and how it is read.
OF_A_TEXT = ("text", "split", "tokenizer", "rows")

_FIELDS = ("data", *OF_A_TEXT, "tokenise", "data_workers", "data_prefetch", "data_pinned")


def _problems(spec: TrainSpec) -> Iterator[str]:
    if spec.data == "text":
        try:
            _ = spec.text_files.fingerprint, spec.tokenizer_files.fingerprint
        except OSError as error:
            yield f"TrainSpec: {error.filename}: cannot be read ({error.strerror})"
    elif spec.data in DATA:
        # Where no text is asked for, what says which one changes nothing, and would look as if it did.
        for name in (*OF_A_TEXT, "tokenise"):
            if getattr(spec, name) != getattr(type(spec), name):
                yield f"TrainSpec: {name}={getattr(spec, name)!r} without data='text' changes nothing"


def is_apart(spec: TrainSpec) -> bool:
    """Whether positions begin anew with each document, of which no token sees another one."""
    return spec.data == "text" and spec.rows in _APART


def is_uneven(spec: TrainSpec) -> bool:
    """Whether a step has as many tokens as its documents."""
    return spec.data == "text" and spec.rows == "padding_free"


def has_document_a_row(spec: TrainSpec) -> bool:
    return spec.has_padding or is_uneven(spec)


def _clash(spec: TrainSpec) -> str | None:
    if spec.data_prefetch is not None and not spec.data_workers:
        return f"data_prefetch={spec.data_prefetch} without data_workers changes nothing: only workers fetch ahead"
    if spec.tokenise == "on_the_fly" and not has_document_a_row(spec):
        return (
            "packed rows are cut from the tokens of all documents, so none can be made on the fly; use rows='padded', "
            "'padded_in_loss' or 'padding_free', or tokenise='ahead'"
        )
    return None


_PINNED = "batches are pinned for copies to a GPU, and a CPU makes none"
_DATASETS = Package("datasets", "datasets, which reads texts", "'pytest-llmperf[text]'", preload="text")


@dataclass(frozen=True)
class DataEvidence:
    """What was read, and who fetched it."""

    data: Mapping[str, Any] | None = None
    """Of a text what it says and how it was cut; random tokens tell nothing."""
    epochs: float | None = None
    tokenised_by: str | None = None
    """``rank`` or ``workers``: on the fly by these. Records that do not tell had all tokens ahead."""
    data_workers: int = 0
    data_prefetch: int | None = field(default=None, metadata={"null": 0})
    data_pinned: bool = True
    documents: str | None = None
    """Of rows whose documents should not see one another: ``apart``, ``mixed``, or ``unknown``: it was not tried."""


def _data(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = evidence.data.data
    if spec.data == "random":
        return None if seen is None else f"asked for random tokens, the run read the text {seen.get('text')}"
    asked = {
        "text": spec.text_files.fingerprint,
        "split": spec.split,
        "tokenizer": spec.tokenizer_files.fingerprint,
        "rows": spec.rows,
    }
    read = claimed(seen, "data")
    if is_apart(spec) and claimed(evidence.data.documents, "documents") == "mixed":
        return f"asked for rows {spec.rows}, and tokens saw those of other documents"
    return next((line for name in asked if (line := equal(f"the data's {name}", asked[name], read.get(name)))), None)


def _data_workers(spec: TrainSpec, evidence: Evidence) -> str | None:
    line = equal("data workers", spec.data_workers, evidence.data.data_workers)
    if line or spec.data_prefetch is None:
        return line
    return equal("a prefetch of", spec.data_prefetch, evidence.data.data_prefetch or None)


def _tokenised(spec: TrainSpec, evidence: Evidence) -> str | None:
    """By the process that fetches, and by no other."""
    by = evidence.data.tokenised_by or ""
    fetching = "workers" if spec.data_workers else "rank"
    if spec.tokenise == "on_the_fly":
        return None if by == fetching else f"asked for tokens on the fly by the {fetching}, made by {by or 'nobody'}"
    makers = {"rank", "workers"} & {*by.split()}
    return f"asked for tokens ahead, made on the fly by the {by}" if makers else None


SETTING = Setting(
    name="data",
    fields=_FIELDS,
    # A text is made tokens before anything is timed, or each row as it is fetched.
    values={"data": DATA, "rows": ROWS, "tokenise": ("ahead", "on_the_fly")},
    least={"data_workers": 0, "data_prefetch": 1},
    in_id={
        "data": "{}",
        "text": lambda spec: "" if spec.text is None else spec.text_files.slug,
        "split": lambda spec: "" if spec.split == type(spec).split else spec.text_files.split.slug,
        "tokenizer": lambda spec: "" if spec.tokenizer is None else spec.tokenizer_files.slug,
        "rows": "{}",
        "tokenise": "{}",
        "data_workers": "workers{}",
        "data_prefetch": "prefetch{}",
        "data_pinned": "unpinned",
    },
    problems=_problems,
    clash=_clash,
    why_not_on_cpu=lambda spec: None if spec.data_pinned else _PINNED,
    needs=lambda spec: _DATASETS if spec.data == "text" else None,
    small=at_default(*_FIELDS),
    evidence=DataEvidence,
    checks={"data": _data, "data_workers": _data_workers, "data_pinned": "pinned batches", "tokenise": _tokenised},
    moot_on_cpu=frozenset({"data_pinned"}),
)


# Weights: what a training begins from, and whether it saves what it came to.

# numpy, which the Trainer seeds too, takes no larger one.
_SEEDS = 2**32
# Of a small spec the next ones are taken too.
_LAST_SMALL_SEED = _SEEDS - 64


def _weights_problems(spec: TrainSpec) -> Iterator[str]:
    try:
        is_folder = spec.weights is None or bool(spec.weights and Path(spec.weights).is_dir())
    except OSError:  # too long a name, or a parent that may not be read
        is_folder = False
    if not is_folder:
        yield f"TrainSpec: weights={spec.weights!r} names no folder, expected one as save_pretrained writes it"


@dataclass(frozen=True)
class WeightsEvidence:
    """What was saved."""

    checkpoint_bytes: int | None = None
    """Of the checkpoint that the Trainer wrote; records of launches that wrote none do not tell."""


def _saved(spec: TrainSpec, evidence: Evidence) -> str | None:
    return equal("save_checkpoint", spec.save_checkpoint, bool(evidence.weights.checkpoint_bytes))


WEIGHTS = Setting(
    name="weights",
    fields=("weights", "seed", "save_checkpoint"),
    in_id={"weights": "pretrained", "seed": "seed{}", "save_checkpoint": "saves"},
    problems=_weights_problems,
    clash=lambda spec: None if 0 <= spec.seed < _SEEDS else f"seed={spec.seed} must be at least 0 and below 2**32",
    small=lambda spec: {"weights": None, "save_checkpoint": False, "seed": min(spec.seed, _LAST_SMALL_SEED)},
    evidence=WeightsEvidence,
    checks={"save_checkpoint": _saved},
)


# A text is parquet in the layout of ``Salesforce/wikitext`` (a folder of ``train-00000-of-00001.parquet`` and its
# like, with a column ``text``), a single file, or a folder of ``.txt`` files; by a local path, by the name of a
# dataset that the Hugging Face cache holds, or the one that ships with this package. Nothing asks a network.

COLUMN = "text"

_FORMATS = (".parquet", ".txt")
_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<folder>[\w./-]+))?", re.ASCII)

# What the hub calls the splits in file names.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}

_SLICE = re.compile(r"(?P<name>\w+)(?:\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?", re.ASCII)
_WHOLE = 100


@dataclass(frozen=True)
class Split:
    """Which rows of which files, in the words of ``datasets``: ``train[:10%]``."""

    name: str
    """``train``, ``validation``, ``test`` or another."""
    words: str
    """All of it, as ``datasets`` reads it."""

    @classmethod
    def parse(cls, words: str) -> Split:
        """What ``words`` say; a ``ValueError`` of one line where that is no split, or empty whatever the text holds."""
        found = _SLICE.fullmatch(words)
        bounds = [bound for bound in (found["first"], found["last"]) if bound is not None] if found else []
        problem = ""
        if found is None:
            problem = "is none"
        elif any(bound.endswith("%") and abs(int(bound[:-1])) > _WHOLE for bound in bounds):
            problem = "goes beyond 100 %"
        elif found["last"] is not None:
            # As far as that can be told without the number of rows: bounds that count from one end, in one unit.
            first, last = found["first"] or "0", found["last"]
            a, b = (int(bound.rstrip("%")) for bound in (first, last))
            like = first.endswith("%") == last.endswith("%") or first == "0"
            problem = "is empty" if b == 0 or (like and (a < 0) == (b < 0) and a >= b) else ""
        if found is None or problem:
            raise ValueError(
                f"split={words!r} {problem}; expected a split, or a slice of one as datasets has them: train, "
                "train[:10%], train[100:200], test[-5%:]"
            )
        return cls(found["name"], words)

    @property
    def slug(self) -> str:
        """For an id, where neither brackets nor a percent sign can be selected by ``-k``: ``train-to10pct``."""
        text = self.words.replace("-", "minus").replace("%", "pct").replace(":", "to")
        return text.replace("[", "-").replace("]", "")


@dataclass(frozen=True)
class TextFiles:
    """Files of one split of one text."""

    name: str
    """Of the folder or file, for an id; empty of the text that ships here."""
    split: Split
    files: tuple[Path, ...]

    @property
    def format(self) -> str:
        """``parquet`` or ``text``, as ``datasets`` calls its readers."""
        return "text" if self.files[0].suffix == ".txt" else "parquet"

    @cached_property
    def fingerprint(self) -> str:
        """Of what the files of the split hold, in their order; an ``OSError`` where one cannot be read."""
        return fingerprint.of_files((self.format, path) for path in self.files)

    @property
    def slug(self) -> str:
        """Two folders may share a name: what they say keeps ids apart."""
        return f"{self.name}-{self.fingerprint[:6]}" if self.name else ""


def resolve_text(text: str | None, split: str) -> TextFiles:
    """The files that ``text`` and ``split`` name; a ``ValueError`` of one line where there are none."""
    if text is None:
        return _shipped(split)
    wanted = Split.parse(split)
    try:
        where = _path(text)
        # The hub's cache names folders by commit.
        own = text.rstrip("/").rpartition("/")[2] if "snapshots" in where.parts else where.absolute().name
        name = slugged(own.removesuffix(where.suffix) if where.is_file() else own, "text")
        if not where.is_file():
            return TextFiles(name, wanted, _of_folder(where, wanted, text))
        if where.suffix not in _FORMATS:
            raise ValueError(
                f"text={str(where)!r}: neither .parquet nor .txt, expected one of them or a folder of them"
            )
        if wanted.name != "train":
            raise ValueError(f"text={str(where)!r}: one file is one split, train, and {split!r} is of another")
        return TextFiles(name, wanted, (where,))
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be read, ~ of no user
        raise ValueError(f"text={text!r}: cannot be looked up ({why_not_found(error)})") from None


@cache
def _shipped(split: str) -> TextFiles:
    wanted = Split.parse(split)
    return TextFiles("", wanted, _of_folder(Path(__file__).parent / "text", wanted, ""))


def _path(text: str) -> Path:
    path = Path(text).expanduser()
    if path.exists():
        return path
    hub = _HUB_NAME.fullmatch(text)
    if not hub or path.suffix in _FORMATS or text.startswith("."):
        raise ValueError(
            f"text={text!r}: no such file or folder; expected parquet, .txt, a folder of either, or the name of a "
            "dataset that is cached, e.g. Salesforce/wikitext/wikitext-2-raw-v1"
        )
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only hub names pay for this import

    try:
        snapshot = Path(snapshot_download(hub["repository"], repo_type="dataset", local_files_only=True))
    except (OSError, ValueError):  # not there, or a name that no dataset can have
        snapshot = None
    cached = snapshot and snapshot / (hub["folder"] or "")
    if cached is None or not cached.exists():
        part = f" --include '{hub['folder']}/*'" if hub["folder"] else ""
        raise ValueError(
            f"text={text!r}: no such path, and not in the Hugging Face cache; "
            f"fetch it first with: hf download --repo-type dataset {hub['repository']}{part}"
        )
    return cached


def _of_folder(folder: Path, split: Split, text: str) -> tuple[Path, ...]:
    by_split: dict[str, list[Path]] = {}
    for path in _listed(folder):
        # The split that a file's name begins with, or its folder's; empty where neither says.
        words = (re.split(r"[-_.]", path.stem)[0].lower(), path.parent.name if path.parent != folder else "")
        named = next((word for word in words if word == split.name or word in _SPLITS), "")
        by_split.setdefault(named if named in (split.name, "") else _SPLITS[named], []).append(path)
    if not by_split:
        inside = sorted({path.parent.name for path in folder.glob("*/*.parquet")})
        why = "the folder holds neither .parquet nor .txt files"
        if inside:
            example = f"e.g. text='{folder / inside[0]}'"
            why = f"its data lies in folders, expected one of them: {first_few(inside)}, {example}"
        raise ValueError(f"text={text!r}: {why}")
    known = sorted(name for name in by_split if name)
    if split.name in known:
        return tuple(by_split[split.name])
    if not known and split.name == "train":  # files that say nothing of splits are one
        return tuple(by_split[""])
    raise ValueError(f"{folder}: no split {split.name!r}, expected one of: {first_few(known or ['train'])}")


def _listed(folder: Path) -> Sequence[Path]:
    """All files of the first place and format that has some: here, in ``data/``, in folders named after splits."""
    for suffix in _FORMATS:
        split_folders = [each for each in folder.iterdir() if each.is_dir() and each.name in _SPLITS]
        for places in ([folder], [folder / "data"], split_folders):
            found = sorted(path for place in places for path in place.glob(f"*{suffix}") if path.is_file())
            if found:
                return found
    return ()


# The files of a tokenizer: a folder as ``save_pretrained`` leaves it, a ``tokenizer.json``; or none, for bytes.

# Of the tokenizer that needs no file: bytes, end-of-text and padding (``worker/recipes/huggingface/data.py``).
_BYTES = "bytes-258"

# What tokenizers of the families say of themselves, in the order of fingerprints; other files have no say.
_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "tokenizer.model spiece.model"
).split()
_ENOUGH = frozenset({"tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model"})


@dataclass(frozen=True)
class TokenizerFiles:
    """Where a tokenizer is, and what it says."""

    path: Path | None
    """The folder or file; ``None``: bytes."""
    files: tuple[Path, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """Of all that it says; an ``OSError`` where a file cannot be read."""
        return fingerprint.of_files((path.name, path) for path in self.files) if self.files else _BYTES

    @property
    def slug(self) -> str:
        if self.path is None:
            return "bytes"
        folder = self.path.absolute().parent if self.path.is_file() else self.path.absolute()
        return f"{slugged(folder.name, 'tokenizer')}-{self.fingerprint[:6]}"


def resolve_tokenizer(name: str | None) -> TokenizerFiles:
    """The tokenizer at the path ``name``, or the bytes' own; a ``ValueError`` of one line where there is none."""
    if name is None:
        return TokenizerFiles(None)
    expected = "expected a folder as save_pretrained writes it, or a tokenizer.json"
    try:
        path = Path(name).expanduser()
        if path.is_file():
            if path.suffix != ".json":
                raise ValueError(f"tokenizer={name!r} is no .json file, {expected}")
            return TokenizerFiles(path, (path,))
        if not path.is_dir():
            raise ValueError(f"tokenizer={name!r}: no such file or folder, {expected}")
        files = tuple(path / each for each in _FILES if (path / each).is_file())
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be read, ~ of no user
        raise ValueError(f"tokenizer={name!r}: cannot be looked up ({why_not_found(error)})") from None
    if not _ENOUGH & {file.name for file in files}:
        raise ValueError(f"tokenizer={name!r}: the folder holds no tokenizer, {expected}")
    return TokenizerFiles(path, files)
