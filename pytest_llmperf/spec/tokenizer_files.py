"""The files of a tokenizer: a folder as ``save_pretrained`` leaves it, a ``tokenizer.json``; or none, for bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pytest_llmperf.support import fingerprint

#: Of the tokenizer that needs no file: bytes, end-of-text and padding (``worker/data/byte_tokenizer.py``).
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


def resolve(name: str | None) -> TokenizerFiles:
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
