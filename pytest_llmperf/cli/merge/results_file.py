"""One --perf-json file of a night: whoever wrote it, all that is read of it is what it should be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pytest_llmperf.cli.merge.job_log import ended
from pytest_llmperf.cli.merge.results_checks import check
from pytest_llmperf.records.result import FAILING

# Pytest's own, of which the cases tell.
_TESTS_FAILED = 1

# What ended a run, as SLURM sends it: the nightly script asks for USR1 before the time limit.
_ENDED_BY = {
    "SIGUSR1": "the time limit was near",
    "SIGTERM": "ended from outside: scancel or preemption",
}


@dataclass(frozen=True)
class Part:
    """One file."""

    path: Path
    document: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Part:
        """The file at ``path``.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not what ``--perf-json`` writes.
        """
        try:
            values = json.loads(
                path.read_text(encoding="utf-8"),
                parse_float=lambda text: _in_range(text, float(text)),
                parse_int=lambda text: _in_range(text, int(text)),
                parse_constant=_no_number,
            )
        except RecursionError:
            raise ValueError("nested too deeply") from None
        check(values)
        return cls(path, {"machine": {}, **values})

    @property
    def width(self) -> int | None:
        """Of its tests, where it says; a plan's are of all."""
        width = self.document.get("suite", {}).get("perf_width")
        return None if width is None else int(width)

    @property
    def trouble(self) -> str:
        """Why the night is not green for this part; empty where it is."""
        unfinished, code = self.document.get("unfinished"), self.document.get("exit_code")
        if unfinished:
            return f"{self.path.name}: unfinished ({_ENDED_BY.get(unfinished, unfinished)})"
        if code is None:  # of a version that did not say: its verdicts do
            code = int(any(result["verdict"] in FAILING for result in self.document["results"]))
        how = ended(self.path)
        last = how.exit_code if how is not None else code  # pytest may have died after its results
        if how is not None and last not in (0, _TESTS_FAILED):
            return f"{self.path.name}: {how.told}"
        if last or code:
            return f"{self.path.name}: pytest ended with exit code {last or code}"
        # Each file is of a width that somebody asked for.
        return "" if self.document["results"] else f"{self.path.name}: no case was measured, all were skipped"


def _in_range(text: str, value: float) -> float:
    # One that only a Python int could hold ends whoever counts with it.
    return value if math.isfinite(float(text)) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is no finite number")
