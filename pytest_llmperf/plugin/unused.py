"""Which baselines no test asked for. Pure, but for asking whether a test file still exists."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

from pytest_llmperf.judge.store import Entry


def unused_baselines(
    entries: Iterable[Entry], digests: AbstractSet[str], collected_files: AbstractSet[str], root: Path
) -> list[Path]:
    """Baselines whose digest no test asked for, though the file that recorded them ran in full or is gone.

    A baseline that another test file recorded is left alone: a run of one file says nothing about the others.
    """
    unused = []
    for entry in entries:
        file = entry.recorded_by.partition("::")[0]
        judged = file in collected_files or not (root / file).exists()
        if judged and entry.digest not in digests:
            unused.append(entry.path)
    return sorted(unused)
