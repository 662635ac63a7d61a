"""One --perf-json file of a night: whoever wrote it, all that is read of it is what it should be."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from pytest_llmperf.records.result import FAILING, VERDICTS
from pytest_llmperf.run.coverage import SAID
from pytest_llmperf.run.findings import Elsewhere

# What is read of a ``--perf-json`` file is what it should be, whoever wrote it.


_TEXTS = ("id", "digest", "nodeid", "verdict")
_FIGURES = ("value", "baseline", "limit", "change", "detectable")

_SKIPPED = {"id": str, "reason": str}
_PLANNED = {"id": str, "nodeid": str, "width": int}
_OF_A_TEST = {"nodeid": str, "width": int}
_TEST = {"nodeid": str, "outcome": str}
_ELSEWHERE = get_args(Elsewhere)
_SUITE = {"rootdir": str, "baselines": str, "digests": list, "coverage": dict}

# A record has about ten levels; where Python cannot write any deeper depends on who calls.
_DEEPEST = 100


def check(values: object) -> None:
    """Refuse what no ``--perf-json`` has.

    Raises:
        ValueError: what is not as it should be, in one line.
    """
    if not isinstance(values, dict) or not _is_whole(values.get("schema")) or values["schema"] != 1:
        raise ValueError("expected schema 1")
    if _is_deep(values):
        raise ValueError("nested too deeply")
    if not isinstance(values.get("results"), list) or not isinstance(values.get("machine", {}), dict):
        raise ValueError("expected results in a list, and the machine by name")
    if not isinstance(values.get("unfinished", ""), str) or not _is_whole(values.get("exit_code", 0)):
        raise ValueError("expected exit_code as a whole number, and unfinished as text")
    for result in values["results"]:
        _check_result(result)
    tests = values.get("tests", [])
    if not isinstance(tests, list) or not all(_has(test, _TEST) for test in tests):
        raise ValueError(f"expected tests in a list, each with {', '.join(_TEST)}")
    _check_whole_run(values)
    _check_suite(values)
    for name, fields in (("revision", {"commit": str, "changed": int}), ("slurm", {"job": str, "starts": int})):
        if name in values and not _has(values[name], fields):
            raise ValueError(f"expected {name} with {', '.join(fields)}")


def _check_result(result: object) -> None:
    if not isinstance(result, dict) or not all(isinstance(result.get(name), str) for name in _TEXTS):
        raise ValueError(f"a result whose {', '.join(_TEXTS)} are not all there as text")
    if result["verdict"] not in VERDICTS:
        raise ValueError(f"{result['id']}: verdict {result['verdict']!r}, expected one of {', '.join(VERDICTS)}")
    launches = result.get("launches", [])
    if not isinstance(launches, list) or not all(isinstance(launch, dict) for launch in launches):
        raise ValueError(f"{result['id']}: expected its launches in a list")
    if not isinstance(result.get("reason", ""), str):
        raise ValueError(f"{result['id']}: expected the reason as text")
    for name in ("changed", "differences"):
        lines = result.get(name, [])
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"{result['id']}: expected its {name} in a list of lines")
    metrics = result.get("metrics")
    if not isinstance(metrics, dict) or not all(isinstance(metric, dict) for metric in metrics.values()):
        raise ValueError(f"{result['id']} has no metrics by name")
    for name, metric in metrics.items():
        if not all(_is_figure(metric.get(figure)) for figure in _FIGURES):
            raise ValueError(f"{result['id']}: {name} has a figure that is no number")


def _check_whole_run(values: dict[str, Any]) -> None:
    """What a run says of all its cases together, where it does."""
    common = values.get("all_cases", {"verdict": "pass"})
    if not isinstance(common, dict) or common.get("verdict") not in VERDICTS:
        raise ValueError(f"expected all_cases with a verdict, one of {', '.join(VERDICTS)}")
    if not isinstance(common.get("told", ""), str) or not isinstance(values.get("unjudged", ""), str):
        raise ValueError("expected what is told of all cases, and why they are unjudged, as text")


def _check_suite(values: dict[str, Any]) -> None:
    """What a run says of its tests, where it does."""
    for name, fields in (("skipped", _SKIPPED), ("planned", _PLANNED)):
        cases = values.get(name, [])
        if not isinstance(cases, list) or not all(_has(case, fields) for case in cases):
            raise ValueError(f"expected {name} cases in a list, each with {', '.join(fields)}")
    for case in values.get("skipped", []):
        if "nodeid" in case and not (_has(case, _OF_A_TEST) and case.get("elsewhere", "") in _ELSEWHERE):
            raise ValueError(f"{case['id']}: expected a skipped case with {', '.join(_OF_A_TEST)}")
    if "suite" not in values:
        return
    suite = values["suite"]
    if not _has(suite, _SUITE) or not all(isinstance(digest, str) for digest in suite["digests"]):
        raise ValueError(f"expected a suite with {', '.join(_SUITE)}")
    if not isinstance(suite.get("strict"), bool) or not (
        suite.get("perf_width") is None or _is_whole(suite["perf_width"])
    ):
        raise ValueError("expected the suite's width as a whole number, and strict as yes or no")
    coverage = suite["coverage"]
    names = [coverage.get(name) for name in ("nodes", "parts", "gaps")]
    if not all(isinstance(each, list) and all(isinstance(name, str) for name in each) for each in names):
        raise ValueError("expected the suite's coverage as lists of names")
    said = coverage.get("said")
    if not isinstance(said, dict) or not all(word in SAID for word in said.values()):
        raise ValueError(f"expected what each test said, one of {', '.join(SAID)}")


def _has(value: object, fields: Mapping[str, type]) -> bool:
    if not isinstance(value, dict):
        return False
    return all(
        isinstance(value.get(name), type_) and not isinstance(value[name], bool) for name, type_ in fields.items()
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_figure(value: object) -> bool:
    return value is None or isinstance(value, float) or _is_whole(value)


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
        if not level:
            return False
    return True


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
