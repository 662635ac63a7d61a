"""The rows of a text, read by ``datasets`` from local files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from pytest_llmperf.spec.text_files import COLUMN, TextFiles
from pytest_llmperf.worker.refusal import RefusedError

_NO_ROWS = "no rows there; expected some, {}: name another text or split"

# How datasets says that, of parquet and of an empty .txt.
_SAID_OF_NO_ROWS = ("corresponds to no data", "at least one example")


def read(text: TextFiles) -> list[str]:
    """Every row of the slice, empty ones too; of ``.txt`` files a row is a paragraph.

    Raises:
        RefusedError: what is there is no text, or no row of it, in one line.
    """
    try:
        import datasets  # noqa: PLC0415 - only texts need the package
    except ImportError as error:
        raise RefusedError(
            f"data='text' is read by datasets, which cannot be imported ({error}): pip install 'pytest-llmperf[text]'"
        ) from None
    name = _name(text)
    no_rows = _NO_ROWS.format("paragraphs" if text.format == "text" else f"in a column {COLUMN!r}")
    # A file without rows gives a reader of parquet no size of its own to read by.
    words = {"sample_by": "paragraph"} if text.format == "text" else {"batch_size": 10_000}
    try:
        datasets.disable_progress_bars()
        # Its own copies are of no use to anybody else: what comes of them, tokens, is kept.
        with tempfile.TemporaryDirectory(prefix="llmperf-text-") as folder:
            found = datasets.load_dataset(
                text.format,
                data_files={text.split.name: [str(path) for path in text.files]},
                split=text.split.words,
                cache_dir=folder,
                **words,
            )
            rows = _column(found, name)
    except RefusedError:
        raise
    except Exception as error:  # noqa: BLE001 - readers of many formats raise as many errors, in words of their own
        raise RefusedError(f"{name}: {_why(error, no_rows)}") from None
    if not rows:
        raise RefusedError(f"{name}: {no_rows}")
    if not any(map(str.strip, rows)):
        raise RefusedError(f"{name}: {len(rows)} rows, and nothing stands in any of them: name another text or split")
    return rows


def _column(found: Any, name: str) -> list[str]:
    if COLUMN not in found.column_names:
        there = ", ".join(map(repr, found.column_names)) or "none"
        raise RefusedError(
            f"{name}: no column {COLUMN!r}, expected one of that name; there: {there}; rename it, or name another text"
        )
    rows = ["" if row is None else row for row in found[COLUMN]]
    odd = next((row for row in rows if not isinstance(row, str)), None)
    if odd is not None:
        raise RefusedError(f"{name}: its column {COLUMN!r} holds {type(odd).__name__}, expected text")
    return rows


def _name(text: TextFiles) -> str:
    more = f" and {len(text.files) - 1} more" if len(text.files) > 1 else ""
    return f"text {text.files[0]}{more} ({text.split.words})"


def _why(error: BaseException, no_rows: str) -> str:
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, UnicodeDecodeError):
            where = f"no UTF-8 at byte {cause.start} ({cause.reason})"
            return f"{where}; expected text in UTF-8: convert it, or name another text"
    if any(words in str(cause) for cause in causes for words in _SAID_OF_NO_ROWS):
        return no_rows
    told = next((cause for cause in reversed(causes) if str(cause).strip()), error)
    return f"cannot be read ({' '.join(str(told).split())[:200]})"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
