"""Data: what a training reads, and how a text becomes rows; weights: what it begins from.

A text is parquet in the layout of ``Salesforce/wikitext`` (a folder of ``train-00000-of-00001.parquet`` and its like,
with a column ``text``), a single file, or a folder of ``.txt`` files; or the one that ships with this package."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EILSEQ
from functools import cache, cached_property, lru_cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from pytest_llmperf.settings.models import slugged, why_not_found
from pytest_llmperf.settings.setting import Evidence, Package, Setting, SpecError, TrainSpec, at_default, claimed, equal
from pytest_llmperf.support import files as fingerprint
from pytest_llmperf.support.formats import first_n
from pytest_llmperf.support.user_input import from_here

COLUMN = "text"
_FORMATS = (".parquet", ".txt")
_SPLITS = ("train", "validation", "test")
_BOUND = r"(-?\d+|-?(?:\d\d?|100)%)?"
# Letters that are read at a time.
_PART = 2**22
_SLICE = re.compile(rf"(\w+)(?:\[{_BOUND}:{_BOUND}\])?", re.ASCII)


@dataclass(frozen=True)
class Split:
    """Which rows of which files, in the words of ``datasets``: ``train[:10%]``."""

    words: str

    def __post_init__(self) -> None:
        if not _SLICE.fullmatch(self.words):
            raise ValueError(
                f"split={self.words!r} is none; expected a split, or a slice of one as datasets has them: train, "
                "train[:10%], train[100:200], test[-5%:]; at most 100%"
            )

    @property
    def name(self) -> str:
        """``train``, ``validation``, ``test`` or another."""
        return self.words.partition("[")[0]

    @property
    def slug(self) -> str:
        """For an id, where neither brackets nor a percent sign can be selected by ``-k``: ``train-to10pct``."""
        text = self.words.replace("-", "minus").replace("%", "pct").replace(":", "to")
        return text.replace("[", "-").replace("]", "")

    def of(self, rows: int) -> range:
        """Which of so many ``rows`` are meant."""

        def place(bound: str | None) -> int | None:
            if bound is None or not bound.endswith("%"):
                return None if bound is None else int(bound)
            return round(int(bound[:-1]) * rows / 100)

        found = _SLICE.fullmatch(self.words)
        first, last = (found[2], found[3]) if found else (None, None)
        return range(rows)[place(first) : place(last)]


@dataclass(frozen=True)
class TextFiles:
    name: str
    """Of the folder or file, for an id; empty of the text that ships here."""
    split: Split
    files: tuple[Path, ...]

    @property
    def is_parquet(self) -> bool:
        return self.files[0].suffix == _FORMATS[0]

    @cached_property
    def fingerprint(self) -> str:
        """Of what the files of the split hold, in their order; an ``OSError`` where one cannot be read."""
        return fingerprint.of_files(("parquet" if self.is_parquet else "text", path) for path in self.files)

    @property
    def row_bytes(self) -> Sequence[int] | None:
        """Of each row; an ``OSError`` where one is no UTF-8. ``None`` of parquet, whose package may be missing."""
        if self.is_parquet:
            return None
        found = _row_bytes(*((path.absolute(), path.stat().st_mtime_ns) for path in self.files))
        meant = self.split.of(len(found))
        return found[meant.start : meant.stop]

    @property
    def slug(self) -> str:
        """Two folders may share a name: what they say keeps ids apart."""
        return f"{self.name}-{self.fingerprint[:6]}" if self.name else ""


def paragraphs(path: Path) -> Iterator[str]:
    """The rows of a ``.txt`` file, of which only a part is held; an ``OSError`` where it is no UTF-8."""
    held, edge = list[str](), ""  # of the row that goes on, and its last letter: none is searched twice
    with path.open("rb") as source, TextIOWrapper(source, encoding="utf-8") as file:
        try:
            while part := file.read(_PART):
                first, *rows = (edge + part).split("\n\n")
                held.append(first)
                if rows:
                    yield from filter(None, ["".join(held), *rows[:-1]])
                    held = rows[-1:]
                edge, held[-1] = held[-1][-1:], held[-1][:-1]
        except UnicodeDecodeError as error:
            at = source.tell() - len(error.object) + error.start
            raise OSError(EILSEQ, f"from byte {at} on it is no UTF-8; save it as that", str(path)) from None
    yield from filter(None, ["".join(held) + edge])


@lru_cache(maxsize=256)
def _row_bytes(*files: tuple[Path, int]) -> Sequence[int]:
    """Of files, each with its time: read once, as for its fingerprint. Each spec of a search asks for all rows."""
    return array("Q", (len(row.encode()) for path, _ in files for row in paragraphs(path)))


def resolve_text(text: str | None, split: str) -> TextFiles:
    """The files that ``text`` and ``split`` name; a ``ValueError`` of one line where there are none."""
    if text is None:
        return _shipped(split)
    try:
        where = Path(text).expanduser()
        if where.is_dir():
            return TextFiles(slugged(where.absolute().name, "text"), Split(split), _of_folder(where, split))
        if not where.is_file():
            raise ValueError(
                f"text={text!r}: no such file or folder; expected parquet, .txt, or a folder of either, as "
                "`hf download --repo-type dataset` names it"
            )
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be read, ~ of no user
        raise ValueError(f"text={text!r}: cannot be looked up ({why_not_found(error)})") from None
    if where.suffix not in _FORMATS:
        raise ValueError(f"text={text!r}: neither .parquet nor .txt, expected one of them or a folder of them")
    if Split(split).name != "train":
        raise ValueError(f"text={text!r}: one file is one split, train, and {split!r} is of another")
    return TextFiles(slugged(where.stem, "text"), Split(split), (where,))


@cache
def _shipped(split: str) -> TextFiles:
    return TextFiles("", Split(split), _of_folder(Path(__file__).parent / "text", split))


def _of_folder(folder: Path, split: str) -> tuple[Path, ...]:
    """Of the first place and format that has some: here, in ``data/``, in folders named after splits."""
    wanted, by_split = Split(split).name, dict[str, list[Path]]()
    places = [folder], [folder / "data"], [folder / name for name in {wanted, *_SPLITS}]
    listed = (sorted(path for each in some for path in each.glob(f"*{kind}")) for kind in _FORMATS for some in places)
    for path in next(filter(None, listed), []):
        # The split that a file's name begins with, or its folder's; empty where neither says.
        words = (re.split(r"[-_.]", path.stem)[0].lower(), path.relative_to(folder).parent.name)
        by_split.setdefault(next((word for word in words if word in {wanted, *_SPLITS}), ""), []).append(path)
    known = sorted(name for name in by_split if name)
    if wanted in known or (not known and wanted == "train" and by_split):  # files that say nothing of splits are one
        return tuple(by_split[wanted if known else ""])
    if by_split:
        raise ValueError(f"{folder}: no split {wanted!r}, expected one of: {first_n(known or ['train'], 8)}")
    inside = sorted({path.parent.name for path in folder.glob("*/*.parquet")})
    why = "the folder holds neither .parquet nor .txt files"
    if inside:
        example = f"e.g. text='{folder / inside[0]}'"
        why = f"its data lies in folders, expected one of them: {first_n(inside, 8)}, {example}"
    raise ValueError(f"text='{folder}': {why}")


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


DATA = ("random", "text")
#: How a text becomes rows of ``sequence_length``: one stream cut into ``packed`` ones, of which a token sees all before
#: it, or, ``packed_apart``, its own document alone; or a document a row, ``padded`` with what counts in no loss, or, as
#: many a course has it, with padding that counts like any other token; ``padding_free``: a batch's documents in one.
ROWS = ("packed", "packed_apart", "padded", "padded_in_loss", "padding_free")
PADDED, _APART = ("padded", "padded_in_loss"), ("packed_apart", "padding_free")
#: The fields that say which text, and how it is read.
OF_A_TEXT = ("text", "split", "tokenizer", "rows")

_FIELDS = ("data", *OF_A_TEXT)


def _problems(spec: TrainSpec) -> Iterator[str]:
    if spec.data == "text":
        try:
            _ = spec.text_files.fingerprint, spec.text_files.row_bytes, spec.tokenizer_files.fingerprint
        except OSError as error:
            yield f"TrainSpec: {error.filename}: cannot be read ({error.strerror})"
    elif spec.data in DATA:
        # Where no text is asked for, what says which one changes nothing, and would look as if it did.
        for name in OF_A_TEXT:
            if getattr(spec, name) != getattr(type(spec), name):
                why = f"TrainSpec: {name}={getattr(spec, name)!r} without data='text' changes nothing"
                raise SpecError(why, is_clash=True)


def is_apart(spec: TrainSpec) -> bool:
    """Whether positions begin anew with each document, of which no token sees another one."""
    return spec.data == "text" and spec.rows in _APART


def is_uneven(spec: TrainSpec) -> bool:
    """Whether a step has as many tokens as its documents."""
    return spec.data == "text" and spec.rows == "padding_free"


def has_document_a_row(spec: TrainSpec) -> bool:
    return spec.has_padding or is_uneven(spec)


def lacks_rows(spec: TrainSpec) -> str:
    """Why a text is too small for one step, as far as neither a tokenizer of its own nor a package has to say so."""
    found = spec.text_files.row_bytes if spec.data == "text" else None
    if found is None or (spec.tokenizer and not has_document_a_row(spec)):
        return ""
    # Each byte is a token, and each text's end.
    rows = len(found) if has_document_a_row(spec) else (sum(found) + len(found)) // spec.sequence_length
    return too_few(spec, rows, f"{sum(found)} bytes in {len(found)} texts")


def too_few(spec: TrainSpec, rows: int, of: str) -> str:
    """Why so many ``rows`` are too few: a step whose samples are not all different is none of an epoch."""
    if rows >= spec.sequences_per_step:
        return ""
    batch = f"{spec.micro_batch_size} x {spec.gradient_accumulation_steps} accumulated x {spec.gpus} ranks"
    return (
        f"the text gives {rows} rows of {spec.sequence_length} tokens (it has {of}), and a step takes "
        f"{spec.sequences_per_step} ({batch}); expected enough for one step: take more of the text, shorter rows or a "
        "smaller batch"
    )


_PYARROW = Package("pyarrow", "pyarrow, which reads parquet", "'pytest-llmperf[text]'", preload="text")


@dataclass(frozen=True)
class DataEvidence:
    data: Mapping[str, Any] | None = None
    """Of a text what it says and how it was cut; random tokens tell nothing."""
    epochs: float | None = None
    tokenised_by: str | None = None
    """Nobody while it trained; some older records have others."""
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


SETTING = Setting(
    name="data",
    fields=_FIELDS,
    values={"data": DATA, "rows": ROWS},
    in_id={
        "data": "{}",
        "text": lambda spec: "" if spec.text is None else spec.text_files.slug,
        "split": lambda spec: "" if spec.split == type(spec).split else spec.text_files.split.slug,
        "tokenizer": lambda spec: "" if spec.tokenizer is None else spec.tokenizer_files.slug,
        "rows": "{}",
    },
    problems=_problems,
    needs=lambda spec: _PYARROW if spec.data == "text" and spec.text_files.is_parquet else None,
    small=at_default(*_FIELDS),
    evidence=DataEvidence,
    checks={"data": _data},
)


# Weights: what a training begins from.

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
        here = from_here(Path(spec.weights or "."))
        yield f"TrainSpec: weights={spec.weights!r} names no folder{here}, expected one as save_pretrained writes it"


WEIGHTS = Setting(
    name="weights",
    fields=("weights", "seed"),
    in_id={"weights": "pretrained", "seed": "seed{}"},
    problems=_weights_problems,
    clash=lambda spec: None if 0 <= spec.seed < _SEEDS else f"seed={spec.seed} must be at least 0 and below 2**32",
    small=lambda spec: {"weights": None, "seed": min(spec.seed, _LAST_SMALL_SEED)},
)
