"""`llmperf merge`: the --perf-json files of one night as one document, and as a page for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.part import Part
from pytest_llmperf.report import formats
from pytest_llmperf.report.table import Column
from pytest_llmperf.report.tables import escaped, markdown
from pytest_llmperf.result import VERDICTS

_RATE, _MEMORY = "tokens_per_second_per_gpu", "peak_reserved_bytes"


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
        for result in sorted(found, key=lambda result: (_rank(result), result["id"])):
            unique.setdefault((result["nodeid"], result["digest"]), result)
        return list(unique.values())

    @property
    def headline(self) -> str:
        """One line: how it went."""
        counts = Counter(result["verdict"] for result in self.results)
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]) or "no case"
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
                    Column("why", [_why(result) for result in results], right=False),
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
            parts.append(Part.read(path))
        except (OSError, ValueError) as error:
            troubles.append(f"{path}: not a --perf-json file ({' '.join(str(error).split())})")
    missing = [name for name in expected if not any((folder / name).exists() for folder in folders)]
    troubles += [f"{name}: missing, its job wrote no results; look at its log" for name in missing]
    if not parts and not troubles:
        troubles.append(f"no gpus-*.json in {', '.join(map(str, named))}; name a results folder or --perf-json files")
    return Night(tuple(parts), (*troubles, *filter(None, (part.trouble for part in parts))))


def _rank(result: Mapping[str, Any]) -> int:
    return VERDICTS.index(result["verdict"])


_MOST_CHANGES = 3


def _why(result: Mapping[str, Any]) -> str:
    """The reason, and what is exact and not as in the baseline: that is told of a ``pass`` too."""
    changed = result.get("changed", [])
    more = f" and {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
    told = f"changed since the baseline: {', '.join(changed[:_MOST_CHANGES])}{more}" if changed else ""
    return "; ".join(filter(None, [str(result.get("reason", "")), told]))


def _value(result: Mapping[str, Any], metric: str, field: str) -> float | None:
    value: float | None = result["metrics"].get(metric, {}).get(field)
    return value
