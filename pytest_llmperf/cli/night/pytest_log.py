"""What a night's script leaves of a width besides its results: pytest's exit code, and the log with its words."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    told: str
    """For people."""


def ended(results: Path) -> Ended | None:
    """Beside the results file of a width; ``None`` where the script did not come to write it."""
    try:
        note = results.with_suffix(".exit").read_text(encoding="utf-8", errors="replace")
        code, _, log = note.strip().partition("\n")
        number = int(code)
    except (OSError, ValueError):
        return None
    is_file, text = bool(log) and Path(log).is_file(), ""  # else a pipe, or a terminal
    with suppress(OSError):
        text = Path(log).read_text(encoding="utf-8", errors="replace") if is_file else ""
    line = pytest_line(text, results.stem.rpartition("-")[2])
    told = f"pytest ended with exit code {number}" + (f": {line}" if line else "")
    return Ended(number, told + (f"; log: {Path(log)}" if is_file else ""))


def pytest_line(log: str, width: str) -> str:
    """What pytest said last of what it could not do at ``width``, of a log that may have several."""
    _, began, text = log.rpartition(f"llmperf: {width} GPU(s): begins\n")
    return last_word(text.partition(f"llmperf: {width} GPU(s): exit code")[0] if began else "")


def last_word(text: str) -> str:
    """Of all that one pytest printed: what it could not do, else how it closed; empty where it says neither.

    Of a file that could not be collected, with the error in it.
    """
    lines = [line.rstrip() for line in _COLOUR.sub("", text).splitlines()]
    for pattern in (_REFUSED, _ERROR, _CLOSING, _TRACEBACK):
        found = [match[1].strip() for match in map(pattern.match, lines) if match]
        files = [match[1] for match in map(_UNCOLLECTED.match, lines) if match] if pattern is _ERROR else []
        started = ("collecting ", "Interrupted: ")
        reasons = [word for word in found if word not in files and not word.startswith(started)] if files else []
        if found:
            return f"{files[-1]}: {reasons[-1]}" if reasons else found[-1]
    return ""
