"""The files of a text that is trained on: where they are, of which split, and what they say; nothing asks a network.

A text is parquet in the layout of ``Salesforce/wikitext`` (a folder of ``train-00000-of-00001.parquet`` and its
like, with a column ``text``), a single file, or a folder of ``.txt`` files; by a local path, by the name of a
dataset that the Hugging Face cache holds, or the one that ships with this package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from pytest_llmperf.settings.models import slugged, why_not_found
from pytest_llmperf.support import files as fingerprint
from pytest_llmperf.support.user_input import first_few

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
