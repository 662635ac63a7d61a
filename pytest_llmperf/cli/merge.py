"""`llmperf merge`: the --perf-json files of one night as one document, and as a page for people."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llmperf.report import formats
from pytest_llmperf.report.table import Column
from pytest_llmperf.report.tables import escaped, markdown
from pytest_llmperf.result import VERDICTS

_TEXTS = ("id", "digest", "nodeid", "verdict")

_RATE, _MEMORY = "tokens_per_second_per_gpu", "peak_reserved_bytes"


@dataclass(frozen=True)
class Part:
    """One file."""

    path: Path
    document: Mapping[str, Any]

    @property
    def trouble(self) -> str:
        """Why the night is not green for this part; empty where it is."""
        unfinished, code = self.document.get("unfinished"), self.document.get("exit_code")
        if unfinished:
            return f"{self.path.name}: unfinished ({unfinished})"
        if code is None:  # of a version that did not say: its verdicts do
            code = int(any(result["verdict"] in {"invalid", "regressed", "new"} for result in self.document["results"]))
        return f"{self.path.name}: pytest ended with exit code {code}" if code else ""


@dataclass(frozen=True)
class Night:
    """All parts, and what is missing."""

    parts: tuple[Part, ...]
    troubles: tuple[str, ...]

    @property
    def results(self) -> list[Mapping[str, Any]]:
        """Every case once, by its worst verdict; the worst first."""
        found = [result for part in self.parts for result in part.document["results"]]
        unique: dict[tuple[str, str], Mapping[str, Any]] = {}
        for result in sorted(found, key=lambda result: (_rank(result["verdict"]), result["id"])):
            unique.setdefault((result["nodeid"], result["digest"]), result)
        return list(unique.values())

    @property
    def headline(self) -> str:
        """One line: how it went."""
        counts = Counter(str(result["verdict"]) for result in self.results)
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts, key=_rank)) or "no case"
        return f"{'red' if self.troubles else 'green'}: {told}"

    def document(self) -> dict[str, Any]:
        """As one run's --perf-json, with the parts' machines side by side."""
        machines = [part.document["machine"] for part in self.parts]
        return {
            "schema": 1,
            "machine": machines[0] if machines and all(each == machines[0] for each in machines) else {},
            "machines": {part.path.name: part.document["machine"] for part in self.parts},
            "troubles": list(self.troubles),
            "results": self.results,
        }

    def page(self) -> list[str]:
        """Markdown: the headline, what is missing, and a line for each case."""
        lines = [f"# {self.headline}", ""]
        lines += [f"- {escaped(trouble)}" for trouble in self.troubles]
        lines += [""] if self.troubles else []
        results = self.results
        if results:
            lines += markdown(
                [
                    Column("case", [str(result["id"]) for result in results], right=False),
                    Column("verdict", [str(result["verdict"]) for result in results], right=False),
                    Column(
                        "tokens/s/GPU",
                        [formats.tokens_per_second(_value(result, _RATE, "value")) for result in results],
                    ),
                    Column("change", [formats.percent(_value(result, _RATE, "change")) for result in results]),
                    Column("memory", [formats.memory(_value(result, _MEMORY, "value")) for result in results]),
                    Column("change", [formats.percent(_value(result, _MEMORY, "change")) for result in results]),
                    Column("why", [str(result.get("reason", "")) for result in results], right=False),
                ]
            )
        return lines


def gather(named: Sequence[Path], expected: Sequence[str]) -> Night:
    """The files named, those of folders that are, and what is wrong with them; ``expected`` names files of a folder."""
    paths = [path for one in named for path in (sorted(one.glob("gpus-*.json")) if one.is_dir() else [one])]
    folders = [one for one in named if one.is_dir()]
    parts, troubles = [], []
    for path in dict.fromkeys(paths):
        try:
            parts.append(Part(path, _read(path)))
        except (OSError, ValueError) as error:
            troubles.append(f"{path}: not a --perf-json file ({' '.join(str(error).split())})")
    missing = [name for name in expected if not any((folder / name).exists() for folder in folders)]
    troubles += [f"{name}: missing, its job wrote no results; look at its log" for name in missing]
    if not parts and not troubles:
        troubles.append(f"no gpus-*.json in {', '.join(map(str, named))}; name a results folder or --perf-json files")
    return Night(tuple(parts), (*troubles, *filter(None, (part.trouble for part in parts))))


def _read(path: Path) -> Mapping[str, Any]:
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or values.get("schema") != 1 or not isinstance(values.get("results"), list):
        raise ValueError("expected schema 1 and results")
    for result in values["results"]:
        if not isinstance(result, dict) or not all(isinstance(result.get(name), str) for name in _TEXTS):
            raise ValueError(f"a result whose {', '.join(_TEXTS)} are not all there as text")
        metrics = result.get("metrics")
        if not isinstance(metrics, dict) or not all(isinstance(metric, dict) for metric in metrics.values()):
            raise ValueError(f"{result['id']} has no metrics by name")
    return {"machine": {}, **values}


def _rank(verdict: str) -> int:
    return VERDICTS.index(verdict) if verdict in VERDICTS else -1


def _value(result: Mapping[str, Any], metric: str, field: str) -> float | None:
    value = result["metrics"].get(metric, {}).get(field)
    return value if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max else None
