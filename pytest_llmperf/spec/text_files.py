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

from pytest_llmperf.spec.text_split import Split
from pytest_llmperf.support import fingerprint

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


def resolve(text: str | None, split: str) -> TextFiles:
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
