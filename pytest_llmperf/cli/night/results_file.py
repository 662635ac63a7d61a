"""One --perf-json file of a night."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.records.result import FAILING
from pytest_llmperf.records.results_document import ResultsFile

# What a night's script leaves of a width besides its results: pytest's exit code, and the log with its words.


# Of pytest: a line of its own about what it cannot do, else the closing one.
# By its file, or as Python 3.14 calls a module: python -m pytest.
_REFUSED = re.compile(r"^(?:\S+ -m )?\S+: error: (.+)$")
_ERROR = re.compile(r"^(?:ERROR:? |INTERNALERROR> |E   +|!+ _pytest\.outcomes\.Exit: )(.+?)(?: !+)?$")
_CLOSING = re.compile(r"^(?:=+ )?((?:[0-9]+ \w+(?:, )?|no tests ran)+) in [0-9.]+s.*$")
# pytest names the file, and the reason stands above.
_UNCOLLECTED = re.compile(r"^ERROR (\S+)$")
# What ended Python itself.
_TRACEBACK = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)(?:: .+)?)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Ended:
    """How pytest ended at one width."""

    exit_code: int
    log: Path | None
    line: str
    """Pytest's own; empty where the log does not tell."""

    @property
    def told(self) -> str:
        """For people."""
        line = f": {self.line}" if self.line else ""
        return f"pytest ended with exit code {self.exit_code}{line}{f'; log: {self.log}' if self.log else ''}"


def ended(results: Path) -> Ended | None:
    """Beside the results file of a width; ``None`` where the script did not come to write it."""
    note = results.with_suffix(".exit")
    width = results.stem.rpartition("-")[2]
    try:
        code, _, log = note.read_text(encoding="utf-8", errors="replace").strip().partition("\n")
        number = int(code)
    except (OSError, ValueError):
        return None
    path = Path(log) if log and Path(log).is_file() else None  # a pipe, or a terminal
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path is not None else ""
    except OSError:
        text = ""
    return Ended(number, path, pytest_line(text, width))


def pytest_line(log: str, width: str) -> str:
    """What pytest said last of what it could not do at ``width``, of a log that may have several."""
    _, began, text = log.rpartition(f"llmperf: {width} GPU(s): begins\n")
    return last_word(text.partition(f"llmperf: {width} GPU(s): exit code")[0] if began else "")


def last_word(text: str) -> str:
    """Of all that one pytest printed: what it could not do, else how it closed; empty where it says neither."""
    lines = [line.rstrip() for line in _COLOUR.sub("", text).splitlines()]
    for pattern in (_REFUSED, _ERROR, _CLOSING, _TRACEBACK):
        found = [match[1].strip() for match in map(pattern.match, lines) if match]
        if found:
            return _with_reason(found, lines) if pattern is _ERROR else found[-1]
    return ""


def _with_reason(found: list[str], lines: list[str]) -> str:
    """The last word; of a file that could not be collected with the error in it."""
    files = [match[1] for match in map(_UNCOLLECTED.match, lines) if match]
    reasons = [word for word in found if word not in files and not word.startswith(("collecting ", "Interrupted: "))]
    return f"{files[-1]}: {reasons[-1]}" if files and reasons else found[-1]


# Pytest's own, of which the cases tell.
_TESTS_FAILED = 1

# What ended a run, as SLURM sends it: the nightly script asks for USR1 before the time limit.
_ENDED_BY = {
    "SIGUSR1": "the time limit was near",
    "SIGTERM": "ended from outside: scancel or preemption",
}


@dataclass(frozen=True)
class Part(ResultsFile):
    """One file."""

    @property
    def width(self) -> int | None:
        """Of its tests, where it says; a plan's are of all."""
        return self.document.suite.perf_width if self.document.suite else None

    @property
    def trouble(self) -> str:
        """Why the night is not green for this part; empty where it is."""
        unfinished, code = self.document.unfinished, self.document.exit_code
        if unfinished:
            return f"{self.path.name}: unfinished ({_ENDED_BY.get(unfinished, unfinished)})"
        if code is None:  # of a version that did not say: its verdicts do
            code = int(any(result.verdict in FAILING for result in self.document.results))
        how = ended(self.path)
        last = how.exit_code if how is not None else code  # pytest may have died after its results
        if how is not None and last not in (0, _TESTS_FAILED):
            return f"{self.path.name}: {how.told}"
        if last or code:
            return f"{self.path.name}: pytest ended with exit code {last or code}"
        # Each file is of a width that somebody asked for.
        return "" if self.document.results else f"{self.path.name}: no case was measured, all were skipped"
