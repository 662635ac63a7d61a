"""The false alarms of exact counts: every traced launch held against every other of the same spec and versions.

    python tools/trace_counts.py RESULTS.json...

Files of --perf-json and of tools/launch_parity.py. For each spec it tells its launches, the GPUs
and hosts that they ran on, and of all ordered pairs of them how many would have alarmed had one been the other's
baseline, and in how many the names differed; for those, what the gate said.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pytest_llmperf.judge.exact import StoredTrace, count_checks
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.support import codec


def launches_of(path: Path) -> Iterator[Launch]:
    """Those of a file that have a trace."""
    for values in _records(json.loads(path.read_text(encoding="utf-8"))):
        launch = codec.read(Launch, values)
        if launch.trace:
            yield launch


def _records(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for result in values.get("results", ()):
        for side in ("launches", "reference_launches", "before_launches"):
            yield from result.get(side, ())
    if "compared" in values:
        for pair in values["launches"]:
            yield from pair.values()


def versions_of(launch: Launch) -> str:
    """What counts are exact with, in one word."""
    return json.dumps(sorted(launch.environment.versions.items()))


def main(words: Sequence[str]) -> None:
    """See above."""
    groups: dict[tuple[str, str], list[Launch]] = defaultdict(list)
    for word in words:
        for launch in launches_of(Path(word)):
            groups[launch.spec_id, versions_of(launch)].append(launch)
    table = Table("spec", "launches", "GPUs", "hosts", "pairs", "alarms", "other names")
    said: list[str] = []
    sums = [0, 0, 0, 0]
    for (spec, _), launches in sorted(groups.items()):
        gpus = {rank.device for launch in launches for rank in launch.ranks}
        hosts = {rank.boot for launch in launches for rank in launch.ranks}
        pairs = [*permutations(launches, 2)]
        alarms = unlike = 0
        for stored, launch in pairs:
            kept = StoredTrace.of([stored])
            checks = [check for check in count_checks([launch], kept) if check.verdict not in (None, "pass")]
            alarms += bool(checks)
            unlike += stored.trace.counts != launch.trace.counts
            said += [f"{spec}: {check.metric} {check.baseline:g} -> {check.value:g} {check.detail}" for check in checks]
        table.add_row(
            spec, *(str(number) for number in (len(launches), len(gpus), len(hosts), len(pairs), alarms, unlike))
        )
        sums = [one + more for one, more in zip(sums, (len(launches), len(pairs), alarms, unlike), strict=True)]
    console = Console(width=160)
    console.print(table)
    console.print(f"{sums[0]} launches, {sums[1]} pairs: {sums[2]} alarms, {sums[3]} with other names")
    for line in dict.fromkeys(said):
        console.print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
