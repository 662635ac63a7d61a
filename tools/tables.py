"""Made tables: printed in Markdown and, with ``--write``, kept as the data files that the documentation shows.

A page of docs/explanation/ shows such a file by Sphinx's ``csv-table`` and names the command that wrote it.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "data" / "tables"


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--write``."""
    parser.add_argument("--write", action="store_true", help="also write docs/data/tables/, which the pages show")


def table(rows: Iterable[tuple[str, ...]], name: str = "") -> None:
    """Print ``rows`` in Markdown, the first as the header; ``name``: and write them as that data file."""
    kept: list[tuple[str, ...]] = []
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
        if not kept:
            print("|" + "---|" * len(row))
        kept.append(row)
    if name:
        with (FOLDER / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(kept)


def cells(line: str) -> tuple[str, ...]:
    """The cells of a row in Markdown."""
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
