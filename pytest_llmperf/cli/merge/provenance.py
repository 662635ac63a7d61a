"""What a night judged, and where: the revision, the jobs, their starts and the nodes that failed meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_llmperf.cli.merge.results_file import Part
from pytest_llmperf.records.results_document import ResultsDocument
from pytest_llmperf.support.formats import counted

# As the run tells it, of several with commas between, and as SLURM does where it gives a node up.
_FAILED = re.compile(r"\bnode ((?:[\w.-]+, )*[\w.-]+)(?: and \d+ more)? failed|\bNode failure on ([\w.-]+)")


def judged(parts: Sequence[Part], folders: Sequence[Path]) -> str:
    """One line; empty where no file says."""
    revisions = list(dict.fromkeys(filter(None, (_revision(part.document) for part in parts))))
    jobs = [part.document.slurm for part in parts if part.document.slurm]
    names, starts = sorted({job.job for job in jobs}), max((job.starts for job in jobs), default=1)
    failed = sorted({node for name in names for node in _failed(folders, name)})
    nodes = f" ({', '.join(failed)} failed)" if failed else ""
    told = [
        " and ".join(revisions),
        f"{counted(starts, 'start')}{nodes}" if starts > 1 or failed else "",
        f"SLURM {' '.join(names)}" if names else "",
    ]
    said = "; ".join(filter(None, told))
    return f"judged: {said}" if said else ""


def differences(parts: Sequence[Part]) -> list[str]:
    """A line where the widths did not judge the same sources, or not against the same baselines."""
    revisions = {part.path.name: _revision(part.document) for part in parts}
    stored = {part.path.name: part.document.suite.baselines_digest if part.document.suite else "" for part in parts}
    return [
        *_differing("the revision differs between widths", revisions),
        *_differing("the stored baselines differ between widths", stored),
    ]


def _differing(what: str, values: Mapping[str, str]) -> list[str]:
    known = {name: value for name, value in values.items() if value}
    return (
        []
        if len({*known.values()}) <= 1
        else [f"{what}: {', '.join(f'{name} {value}' for name, value in known.items())}"]
    )


def _revision(document: ResultsDocument) -> str:
    found = document.revision
    if found is None:
        return ""
    return f"{found.commit} + {found.changed} changed" if found.changed else found.commit


def _failed(folders: Iterable[Path], job: str) -> set[str]:
    found: set[str] = set()
    for log in (path for folder in folders for path in folder.glob(f"*-{job}.log")):
        try:
            told = _FAILED.findall(log.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        found |= {node for names, name in told for node in (names or name).split(", ")}
    return found
