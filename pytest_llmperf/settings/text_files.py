"""The files of a text that is trained on: where they are, of which split, and what they say.

A text is parquet in the layout of ``Salesforce/wikitext`` (a folder of ``train-00000-of-00001.parquet`` and its like,
with a column ``text``), a single file, or a folder of ``.txt`` files; by a local path, by the name of a dataset that
the Hugging Face cache holds, or the one that ships with this package. Nothing here reads more than bytes, and nothing
asks a network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pytest_llmperf.support import files as fingerprint

# A split of a text, and the slice of it that is read, in the words of ``datasets``: ``train[:10%]``. Pure.


_WORDS = re.compile(r"(?P<name>\w+)(?:\[(?P<first>-?\d+%?)?:(?P<last>-?\d+%?)?\])?", re.ASCII)

_EXPECTED = "expected a split, or a slice of one as datasets has them: train, train[:10%], train[100:200], test[-5%:]"
_WHOLE = 100


@dataclass(frozen=True)
class Split:
    """Which rows of which files."""

    name: str
    """``train``, ``validation``, ``test`` or another."""
    words: str
    """All of it, as ``datasets`` reads it."""

    @classmethod
    def parse(cls, words: str) -> Split:
        """What ``words`` say.

        Raises:
            ValueError: they are no split, or of a slice that is empty whatever the text holds; in one line.
        """
        found = _WORDS.fullmatch(words)
        if found is None:
            raise ValueError(f"split={words!r} is none; {_EXPECTED}")
        bounds = [bound for bound in (found["first"], found["last"]) if bound is not None]
        for bound in bounds:
            if bound.endswith("%") and abs(int(bound[:-1])) > _WHOLE:
                raise ValueError(f"split={words!r} goes beyond 100 %; {_EXPECTED}")
        if _is_empty(found["first"] or "0", found["last"]):
            raise ValueError(f"split={words!r} is empty; {_EXPECTED}")
        return cls(found["name"], words)

    @property
    def slug(self) -> str:
        """For an id, where neither brackets nor a percent sign can be selected by ``-k``: ``train-to10pct``."""
        text = self.words.replace("-", "minus").replace("%", "pct").replace(":", "to")
        return text.replace("[", "-").replace("]", "")


def _is_empty(first: str, last: str | None) -> bool:
    """As far as that can be told without the number of rows: bounds that count from one end, in one unit."""
    if last is None:
        return False
    if int(last.rstrip("%")) == 0:
        return True
    like = first.endswith("%") == last.endswith("%") or first == "0"
    a, b = (int(bound.rstrip("%")) for bound in (first, last))
    return like and (a < 0) == (b < 0) and a >= b


#: The column that is read.
COLUMN = "text"

_SHIPPED = Path(__file__).parent / "text"
_FORMATS = (".parquet", ".txt")
_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<folder>[\w./-]+))?", re.ASCII)

# What the hub calls the splits in file names.
_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "dev"), "validation"
)


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
        """Of what the files of the split hold, in their order.

        Raises:
            OSError: one cannot be read.
        """
        return fingerprint.of_files((self.format, path) for path in self.files)

    @property
    def slug(self) -> str:
        """Two folders may share a name: what they say keeps ids apart."""
        return f"{self.name}-{self.fingerprint[:6]}" if self.name else ""


def resolve_text(text: str | None, split: str) -> TextFiles:
    """The files that ``text`` and ``split`` name.

    Raises:
        ValueError: there are none, in one line.
    """
    wanted = Split.parse(split)
    try:
        where = _SHIPPED if text is None else _path(text)
        name = "" if text is None else _name(text, where)
        if where.is_file():
            return TextFiles(name, wanted, _of_one_file(where, wanted))
        files = _listed(where)
        if not files:
            raise ValueError(f"text={text!r}: {_why_empty(where)}")
        return TextFiles(name, wanted, _of_split(files, wanted, where))
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be read, ~ of no user
        raise ValueError(f"text={text!r}: cannot be looked up ({getattr(error, 'strerror', None) or error})") from None


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
    return _cached_on_hub(text, hub["repository"], hub["folder"])


def _cached_on_hub(text: str, repository: str, folder: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only hub names pay for this import

    try:
        snapshot = Path(snapshot_download(repository, repo_type="dataset", local_files_only=True))
    except (OSError, ValueError):  # not there, or a name that no dataset can have
        snapshot = None
    path = snapshot and (snapshot / folder if folder else snapshot)
    if path is None or not path.exists():
        part = f" --include '{folder}/*'" if folder else ""
        raise ValueError(
            f"text={text!r}: no such path, and not in the Hugging Face cache; "
            f"fetch it first with: hf download --repo-type dataset {repository}{part}"
        )
    return path


def _name(text: str, path: Path) -> str:
    # The hub's cache names folders by commit.
    own = text.rstrip("/").rpartition("/")[2] if "snapshots" in path.parts else path.absolute().name
    own = own.removesuffix(path.suffix) if path.is_file() else own
    return re.sub(r"[^a-z0-9.]+", "-", own.lower()).strip("-") or "text"


def _of_one_file(path: Path, split: Split) -> tuple[Path, ...]:
    if path.suffix not in _FORMATS:
        raise ValueError(f"text={str(path)!r}: neither .parquet nor .txt, expected one of them or a folder of them")
    if split.name != "train":
        raise ValueError(f"text={str(path)!r}: one file is one split, train, and {split.words!r} is of another")
    return (path,)


def _listed(folder: Path) -> list[Path]:
    """All files of the first place and format that has some: here, in ``data/``, in folders named after splits."""
    for suffix in _FORMATS:
        split_folders = [each for each in folder.iterdir() if each.is_dir() and each.name in _SPLITS]
        for places in ([folder], [folder / "data"], split_folders):
            found = sorted(path for place in places for path in place.glob(f"*{suffix}") if path.is_file())
            if found:
                return found
    return []


def _why_empty(folder: Path) -> str:
    inside = sorted({path.parent.name for path in folder.glob("*/*.parquet")})
    if inside:
        return f"its data lies in folders, expected one of them: {_some(inside)}, e.g. text='{folder / inside[0]}'"
    return "the folder holds neither .parquet nor .txt files"


def _of_split(files: Sequence[Path], split: Split, folder: Path) -> tuple[Path, ...]:
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path, folder, split.name), []).append(path)
    named = {name for name in by_split if name}
    if split.name in named:
        return tuple(by_split[split.name])
    if not named and split.name == "train":  # files that say nothing of splits are one
        return tuple(files)
    raise ValueError(f"{folder}: no split {split.name!r}, expected one of: {_some(sorted(named) or ['train'])}")


def _split_of(path: Path, folder: Path, wanted: str) -> str:
    """The split that a file's name begins with, or its folder's; empty where neither says."""
    for word in (re.split(r"[-_.]", path.stem)[0].lower(), path.parent.name if path.parent != folder else ""):
        if word == wanted:
            return wanted
        if word in _SPLITS:
            return _SPLITS[word]
    return ""


def _some(names: Iterable[str]) -> str:
    known = list(names)
    most = 8
    return ", ".join(known[:most]) + (f", … ({len(known)} in all)" if len(known) > most else "")


# The files of a tokenizer: a folder as ``save_pretrained`` leaves it, a ``tokenizer.json``; or none, for bytes.


#: Of the tokenizer that needs no file: bytes, end-of-text and padding (``worker/recipes/huggingface/text.py``).
BYTES = "bytes-258"

# What tokenizers of the families say of themselves; of other files in the folder none has a say.
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
        """Of all that it says.

        Raises:
            OSError: a file cannot be read.
        """
        return fingerprint.of_files((path.name, path) for path in self.files) if self.files else BYTES

    @property
    def slug(self) -> str:
        if self.path is None:
            return "bytes"
        own = self.path.absolute().parent.name if self.path.is_file() else self.path.absolute().name
        words = re.sub(r"[^a-z0-9.]+", "-", own.lower()).strip("-") or "tokenizer"
        return f"{words}-{self.fingerprint[:6]}"


def resolve_tokenizer(name: str | None) -> TokenizerFiles:
    """The tokenizer at the path ``name``, or the bytes' own.

    Raises:
        ValueError: there is none, in one line.
    """
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
        raise ValueError(
            f"tokenizer={name!r}: cannot be looked up ({getattr(error, 'strerror', None) or error})"
        ) from None
    if not _ENOUGH & {file.name for file in files}:
        raise ValueError(f"tokenizer={name!r}: the folder holds no tokenizer, {expected}")
    return TokenizerFiles(path, files)
