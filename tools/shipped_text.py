"""Makes the small text that the package ships for tests and demos: this project's own documentation, as WikiText is.

    python tools/shipped_text.py                 # writes pytest_llmperf/settings/text/
    python tools/shipped_text.py --commit HEAD   # of another commit than COMMIT

Prose alone: headings and paragraphs of README.md and docs/, without tables, code and links' targets. Its licence is
that of the project, Apache-2.0. It is a snapshot: baselines of it hold as long as it does, so documentation may change
and it does not. A new snapshot is a change of all that was measured with it.

The rows are laid out as those of ``wikitext-2-raw-v1``: one for each heading (`` = Heading = ``) and paragraph, and an
empty one around headings. Of every ten pages the ninth is in the split ``validation``, the tenth in ``test``, and all
others are in ``train``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "pytest_llmperf" / "settings" / "text"

#: Whose documentation the shipped files hold.
COMMIT = "9231ead"

_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_HEADING = re.compile(r"(#+)\s+(.*)")
_ITEM = re.compile(r"\A\s*(?:[-*]|\d+\.)\s+")
_EMPHASIS = re.compile(r"(?s)(\*{1,3})(?=[^\s*])(.*?[^\s*])\1(?!\*)")
_NO_PROSE = ("    ", "<", "[!")


def rows_of(markdown: str) -> Iterator[str]:
    """The prose of a page, a heading or paragraph a row."""
    without = re.sub(r"(?m)^\s*\|.*$", "", re.sub(r"(?ms)^```.*?^```\s*?$", "\n", markdown))
    for block in re.split(r"\n\s*\n", without):
        heading = _HEADING.fullmatch(block.splitlines()[0]) if block.strip() else None
        if heading:
            marks = " ".join("=" * len(heading[1]))
            yield from ("", f" {marks} {_plain(heading[2])} {marks} \n", "")
        rest = "\n".join(block.splitlines()[1:]) if heading else block
        for paragraph in re.split(r"\n(?=\s*(?:[-*]|\d+\.)\s)", rest):
            if paragraph.strip() and not paragraph.startswith(_NO_PROSE):
                yield f" {_plain(_ITEM.sub('', paragraph, count=1))} \n"


def _plain(text: str) -> str:
    return " ".join(_EMPHASIS.sub(r"\2", _LINK.sub(r"\1", text)).replace("`", "").split())


def pages(commit: str) -> dict[str, str]:
    """README.md and docs/ as ``commit`` has them, by their paths in order."""
    listed = _git("ls-tree", "-r", "--name-only", commit, "README.md", "docs").splitlines()
    return {path: _git("show", f"{commit}:{path}") for path in sorted(listed) if path.endswith(".md")}


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout


def splits(documents: dict[str, str]) -> dict[str, list[str]]:
    """Rows by split; a document is in one of them as a whole."""
    found: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for number, markdown in enumerate(documents.values()):
        split = {8: "validation", 9: "test"}.get(number % 10, "train")
        found[split] += rows_of(markdown)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--commit", default=COMMIT)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()

    import pyarrow as pa  # noqa: PLC0415 - the rest needs no package
    from pyarrow import parquet  # noqa: PLC0415

    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits(pages(arguments.commit)).items():
        path = arguments.folder / f"{split}-00000-of-00001.parquet"
        table = pa.table({"text": pa.array(rows, pa.string())})
        parquet.write_table(table, path, compression="zstd", compression_level=19)
        print(f"{path}: {len(rows)} rows, {sum(map(len, rows))} characters, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
